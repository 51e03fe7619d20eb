"""torchtitan's lists of module names: its own splitter builds stages that compute what the model does."""

from __future__ import annotations

import dataclasses
import subprocess
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import _Action, get_schedule_class

from pplan.cost_models.errors import ExportError, FileError
from pplan.planner.plan_file import Plan
from pplan.runtimes.documents import TorchtitanExport
from pplan.runtimes.exports import export

MakePlan = Callable[..., Plan]


def torchtitan(plan: Plan) -> tuple[TorchtitanExport, str | None]:
    document, remark = export("torchtitan", plan)
    assert isinstance(document, TorchtitanExport)
    return document, remark


def test_the_arguments(make_decoder_plan: MakePlan) -> None:
    document, remark = torchtitan(make_decoder_plan([3, 2], replicas=2, recompute="always"))
    assert remark is None
    assert document.arguments == [
        *("--parallelism.module_fqns_per_model_part", "tok_embeddings,layers.0,layers.1", "norm,lm_head"),
        *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "1F1B"),
        *("--parallelism.pipeline_parallel_microbatch_size", "2"),
        *("--training.local_batch_size", "16", "--training.global_batch_size", "32"),
        *("--parallelism.data_parallel_replicate_degree", "2"),
        *("--parallelism.data_parallel_shard_degree", "1"),
        *("--training.disable_cuda_graphs", "activation_checkpoint:full"),
    ]


@pytest.mark.parametrize(
    ("schedule", "virtual", "name"),
    [
        ("gpipe", 1, "GPipe"),
        ("1f1b", 1, "1F1B"),
        ("interleaved", 2, "Interleaved1F1B"),
        ("looped-bfs", 2, "LoopedBFS"),
        ("zb-v", 2, "ZBVZeroBubble"),
        ("dualpipe-v", 2, "DualPipeV"),
    ],
)
def test_schedules_by_torchs_names(
    make_decoder_plan: MakePlan, schedule: str, virtual: int, name: str
) -> None:
    document, _ = torchtitan(make_decoder_plan([3, 3, 3, 3], schedule=schedule, virtual=virtual))
    given = document.arguments
    assert given[given.index("--parallelism.pipeline_parallel_schedule") + 1] == name
    assert given[given.index("--parallelism.pipeline_parallel_degree") + 1] == str(4 // virtual)
    assert get_schedule_class(name).__name__ == f"Schedule{name}"
    assert document.actions == []


def test_the_text_is_no_csv(make_decoder_plan: MakePlan, tmp_path: Path) -> None:
    """The order of the actions goes into the file of that name."""
    document, _ = torchtitan(make_decoder_plan([3, 3, 3, 3], schedule="zb-h1"))
    with pytest.raises(FileError, match=r"x\.csv: the order of the actions goes into the file of that name"):
        document.save(tmp_path / "x.csv", force=True)
    assert not any(tmp_path.iterdir())
    torchtitan(make_decoder_plan([3, 3, 3, 3]))[0].save(tmp_path / "x.csv", force=True)


@pytest.mark.parametrize("schedule", ["dapple", "zb-h1", "zb-h2"])
def test_other_orders_go_in_a_csv(make_decoder_plan: MakePlan, tmp_path: Path, schedule: str) -> None:
    """Torch's own reader of actions takes it; every micro-batch is on every stage once."""
    document, _ = torchtitan(make_decoder_plan([3, 3, 3, 3], schedule=schedule))
    path = tmp_path / "x.torchtitan.sh"
    document.save(path, force=False)
    text = 'source x.torchtitan.sh; printf "%s\\n" "${PPLAN[@]}"'
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-3:] == [
        "--parallelism.pipeline_parallel_schedule_csv",
        "x.torchtitan.csv",
        "activation_checkpoint:none",
    ]
    assert "PipelineScheduleMulti" in document.arguments
    get_schedule_class("PipelineScheduleMulti")
    rows = (tmp_path / "x.torchtitan.csv").read_text().splitlines()
    assert len(rows) == 4
    for stage, row in enumerate(rows):
        actions = [_Action.from_str(word) for word in row.split(",")]
        assert all(action is not None and action.stage_index == stage for action in actions)
        forwards = [str(action) for action in actions if "F" in str(action)]
        assert sorted(forwards) == sorted(f"{stage}F{m}" for m in range(8))
        assert len(actions) == (16 if schedule == "dapple" else 24)


def test_names_of_its_own_are_kept(make_decoder_plan: MakePlan) -> None:
    names = ["tokens", "positions", "blocks.0.attention", "blocks.0.mlp", "blocks.1", "final", "head"]
    document, remark = torchtitan(make_decoder_plan([4, 3], names=names))
    assert document.module_fqns_per_model_part == [
        ["tokens", "positions", "blocks.0"],
        ["blocks.1", "final", "head"],
    ]
    assert remark == "The modules keep the names that they have in small."


@pytest.mark.parametrize(
    ("balance", "names", "what"),
    [
        ([2, 2], ["bert.embeddings", "bert.layer.0", "bert.layer.1", "cls"], "bert.embeddings is inside"),
        ([3, 2], ["wte", "h.0", "h.1.a", "h.1.b", "head"], "inside block 1"),
        ([3, 1, 1], ["wte", "h.0", "norm", "slice", "head"], "stage 1 computes only slice"),
        ([1, 1], ["features", "classifier"], "no layer has the name of a transformer's block"),
    ],
)
def test_what_it_has_no_words_for(
    make_decoder_plan: MakePlan, balance: list[int], names: list[str], what: str
) -> None:
    with pytest.raises(ExportError, match=what) as caught:
        torchtitan(make_decoder_plan(balance, names=names))
    assert "pplan" in caught.value.hint


class Decoder(nn.Module):
    """Shaped and named as torchtitan's models: it computes what of it is there."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(11, 8)
        self.layers = nn.ModuleDict({str(n): nn.Linear(8, 8) for n in range(blocks)})
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        for module in [self.tok_embeddings, *self.layers.values(), self.norm, self.lm_head]:
            x = x if module is None else module(x)
        return x


@pytest.fixture(scope="module")
def splitter() -> Any:
    """torchtitan's own module; importing it warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchtitan.distributed.pipeline_parallel", exc_type=ImportError)


@pytest.mark.parametrize("balance", [[12], [5, 7], [1, 4, 5, 2], [3, 3, 5, 1]])
def test_its_splitter_makes_stages_that_are_the_model(
    splitter: Any, make_decoder_plan: MakePlan, balance: list[int]
) -> None:
    document, _ = torchtitan(make_decoder_plan(balance))
    model = Decoder(9).double()
    x = torch.arange(10).reshape(2, 5)
    value = x
    for names in document.module_fqns_per_model_part:
        value = splitter._split_module(model, names)(value)
    torch.testing.assert_close(value, model(x))
    everything = list(chain.from_iterable(document.module_fqns_per_model_part))
    assert len(set(everything)) == len(everything) == 12


@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs", "zb-v", "dualpipe-v", "1f1b"])
def test_stages_are_on_the_ranks_that_the_plan_has_them_on(
    splitter: Any, make_decoder_plan: MakePlan, schedule: str
) -> None:
    virtual = 1 if schedule == "1f1b" else 2
    plan = make_decoder_plan([3, 3, 3, 3], schedule=schedule, virtual=virtual)
    document, _ = torchtitan(plan)
    name = document.arguments[document.arguments.index("--parallelism.pipeline_parallel_schedule") + 1]
    for rank in range(document.pipeline_size):
        own = splitter._get_pp_rank_to_stage_indices_mapping(rank, document.pipeline_size, name, 4)
        assert sorted(own) == [s for s, stage in enumerate(plan.stages) if stage.devices == [rank]]


def test_its_own_command_line_takes_the_arguments(splitter: Any, make_decoder_plan: MakePlan) -> None:
    """Those sections of its configuration, read by its own rules."""
    del splitter
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tyro = pytest.importorskip("tyro")
        manager = pytest.importorskip("torchtitan.config.manager")
        sections = pytest.importorskip("torchtitan.config")
        recomputing = pytest.importorskip("torchtitan.distributed.activation_checkpoint")
        parallelism, training = sections.ParallelismConfig, sections.TrainingConfig
        kind = dataclasses.make_dataclass(
            "Sections",
            [
                ("parallelism", parallelism, dataclasses.field(default_factory=parallelism)),
                ("training", training, dataclasses.field(default_factory=training)),
                ("activation_checkpoint", recomputing.ActivationCheckpointingConfig, None),
            ],
        )
        manager.ConfigManager()
        document, _ = torchtitan(make_decoder_plan([5, 4], replicas=2, recompute="always"))
        read = tyro.cli(kind, args=document.arguments, registry=manager.custom_registry)
    assert read.parallelism.module_fqns_per_model_part == document.module_fqns_per_model_part
    assert (read.parallelism.pipeline_parallel_degree, read.training.disable_cuda_graphs) == (2, True)
    assert (read.parallelism.pipeline_parallel_schedule, read.training.local_batch_size) == ("1F1B", 16)
    assert read.parallelism.pipeline_parallel_microbatch_size == 2
    assert isinstance(read.activation_checkpoint, recomputing.FullAC.Config)

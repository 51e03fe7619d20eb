"""torch.distributed.pipelining, really run by pairs and by four processes, against the plain model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pplan.cost_models.memory import whole_word
from pplan.cost_models.schedule_text import register_schedule, write_program
from pplan.cost_models.schedules import PUBLISHED, SCHEDULES, find_schedule
from pplan.planner.plan_file import Plan
from pplan.runtimes.documents import TorchExport
from pplan.runtimes.exports import export

MakePlan = Callable[..., Plan]
RunProcesses = Callable[..., None]
WORKER = Path(__file__).with_name("torch_worker.py")
RANKS = 4


@dataclass(frozen=True)
class Case:
    """A plan for one of the worker's models, in `fine` layers where it is no nn.Sequential.

    `recompute` may say it by stage. `sums`: of losses, and of the gradients of all steps. `runs_as`: the
    names of the schedule's class and of the stages' modules.
    """

    name: str
    model: str
    schedule: str
    balance: Sequence[int]
    runs_as: tuple[str, str]
    virtual_stages: int = 1
    replicas: int = 1
    micro_batches: int = 4
    recompute: Sequence[str] = ("never",)
    replicate: str = "ddp"
    sums: bool = False

    @property
    def devices(self) -> int:
        return len(self.balance) // self.virtual_stages

    @property
    def order(self) -> list[str]:
        program = find_schedule(self.schedule).program(self.devices, self.micro_batches)
        return write_program(self.schedule, program).splitlines()

    @property
    def ranks(self) -> int:
        return self.devices * self.replicas

    def document(self, make_plan: MakePlan) -> TorchExport:
        own = {} if self.schedule in PUBLISHED else {"order": self.order}
        plan = make_plan(
            self.balance,
            **own,
            schedule=self.schedule,
            replicas=[self.replicas] * len(self.balance),
            micro_batches=self.micro_batches,
            micro_batch_size=2 * self.replicas,
            virtual_stages=self.virtual_stages,
            recompute=whole_word(self.recompute[0]),
            profile={
                "file": "small.profile.json",
                "sha256": "0",
                "granularity": "fine" if self.model in ("resnet", "transformer", "tied") else "block",
            },
        )
        document, remark = export("torch", placed(plan))
        assert remark is None
        assert isinstance(document, TorchExport)
        words = list(self.recompute) * (len(self.balance) // len(self.recompute))
        return document.model_copy(update={"recompute": words})


def placed(plan: Plan) -> Plan:
    """The plan with its stages on the devices where its schedule has them."""
    devices, replicas = len(plan.stages) // plan.virtual_stages, plan.replicas[0]
    pipe = find_schedule(plan.schedule).program(devices, plan.micro_batches, plan.virtual_stages).pipes[0]
    stages = [
        stage.model_copy(update={"devices": [place.device * replicas + r for r in range(replicas)]})
        for stage, place in zip(plan.stages, pipe, strict=True)
    ]
    return plan.model_copy(update={"stages": stages})


OWN = "_PipelineScheduleRuntime"
LAST_FIRST = "name: last-first\ndevice i: each k from m-1 to 0 (F[k]) B*m W*1"
"""A schedule of the user's own, whose forwards run from the last micro-batch to the first."""
STAGE, DDP, FSDP = "StageModule", "DistributedDataParallel", "FSDPStageModule"
RESNET, TRANSFORMER = [3, 3, 2, 3], [6, 6, 7, 6]
CASES = [
    # The cut of [1, 9] lies before an in-place operation, that of [4, 6] too.
    Case("gpipe", "vgg", "gpipe", [1, 9], ("ScheduleGPipe", STAGE)),
    Case("frozen", "frozen", "zb-h1", [4, 6], (OWN, STAGE)),
    # Its shapes can be told of values alone, as those of the next.
    Case("values", "stubborn", "1f1b", [3, 3], ("Schedule1F1B", STAGE)),
    Case("values-mask", "masking", "1f1b", [2, 3], ("Schedule1F1B", STAGE)),
    Case("values-zb", "masking", "zb-h1", [2, 3], (OWN, STAGE)),
    Case("1f1b-again", "vgg", "1f1b", [4, 6], ("Schedule1F1B", STAGE), recompute=["always"]),
    Case("1f1b-first", "resnet", "1f1b", [6, 5], ("Schedule1F1B", STAGE), recompute=["first_2", "first_3"]),
    Case("1f1b-host", "resnet", "1f1b", [6, 5], ("Schedule1F1B", STAGE), recompute=["offload", "never"]),
    Case("gpipe-host", "transformer", "gpipe", [12, 13], ("ScheduleGPipe", STAGE), recompute=["offload"]),
    Case("1f1b-dict", "transformer", "1f1b", [12, 13], ("Schedule1F1B", STAGE)),
    Case("1f1b-few", "vgg", "1f1b", [3, 7], (OWN, STAGE), micro_batches=1),
    Case("sums", "vgg", "1f1b", [4, 6], ("Schedule1F1B", STAGE), sums=True),
    Case("sums-zb", "vgg", "zb-h1", [4, 6], (OWN, STAGE), sums=True),
    Case("sums-replicas", "vgg", "1f1b", [4, 6], ("Schedule1F1B", DDP), replicas=2, sums=True),
    Case(
        "sums-sharded", "vgg", "1f1b", [4, 6], ("Schedule1F1B", FSDP), replicas=2, replicate="fsdp", sums=True
    ),
    Case("naive", "resnet", "naive", [6, 5], (OWN, STAGE)),
    Case("dapple", "resnet", "dapple", [4, 7], (OWN, STAGE), recompute=["never", "always"]),
    Case("zb-h1", "resnet", "zb-h1", [6, 5], (OWN, STAGE)),
    Case("last-first", "resnet", "last-first", [6, 5], (OWN, STAGE)),
    Case("zb-h2", "transformer", "zb-h2", [12, 13], (OWN, STAGE)),
    Case("interleaved", "vgg", "interleaved", [1, 3, 3, 3], ("ScheduleInterleaved1F1B", STAGE), 2),
    Case("looped-bfs", "resnet", "looped-bfs", RESNET, ("ScheduleLoopedBFS", STAGE), 2),
    Case("zb-v", "resnet", "zb-v", RESNET, ("ScheduleZBVZeroBubble", STAGE), 2),
    Case(
        "zb-v-again",
        "transformer",
        "zb-v",
        TRANSFORMER,
        ("ScheduleZBVZeroBubble", STAGE),
        2,
        recompute=["always", "never"],
    ),
    Case("dualpipe-v", "transformer", "dualpipe-v", TRANSFORMER, ("ScheduleDualPipeV", STAGE), 2),
    Case("one-stage", "vgg", "1f1b", [10], ("Schedule1F1B", DDP), replicas=2),
    Case("replicas", "transformer", "1f1b", [12, 13], ("Schedule1F1B", DDP), replicas=2),
    Case(
        "replicas-again",
        "resnet",
        "interleaved",
        RESNET,
        ("ScheduleInterleaved1F1B", DDP),
        2,
        replicas=2,
        recompute=["always"],
    ),
    Case("replicas-zb", "vgg", "zb-v", [1, 3, 3, 3], ("ScheduleZBVZeroBubble", STAGE), 2, replicas=2),
    Case("replicas-host", "vgg", "1f1b", [4, 6], ("Schedule1F1B", DDP), replicas=2, recompute=["offload"]),
    Case(
        "sharded-host",
        "transformer",
        "1f1b",
        [12, 13],
        ("Schedule1F1B", FSDP),
        replicas=2,
        replicate="fsdp",
        recompute=["never", "offload"],
    ),
    Case("sharded", "vgg", "1f1b", [4, 6], ("Schedule1F1B", FSDP), replicas=2, replicate="fsdp"),
    # Layers: embedding, block.0, block.1, norm, block.0_1, block.1_1, again, head, the mean.
    Case("tied", "tied", "1f1b", [4, 5], ("Schedule1F1B", STAGE)),
    Case("tied-zb", "tied", "zb-h1", [5, 4], (OWN, STAGE), recompute=["always"]),
    Case("tied-v", "tied", "zb-v", [2, 2, 2, 3], ("ScheduleZBVZeroBubble", STAGE), 2),
    Case("tied-four", "tied", "gpipe", [2, 3, 2, 2], ("ScheduleGPipe", STAGE)),
    Case("tied-replicas", "tied", "1f1b", [4, 5], ("Schedule1F1B", DDP), replicas=2),
    Case("tied-replicas-zb", "tied", "zb-h1", [4, 5], (OWN, STAGE), replicas=2),
    Case("tied-sharded", "tied", "1f1b", [4, 5], ("Schedule1F1B", FSDP), replicas=2, replicate="fsdp"),
]
COPIES = {"tied": 3, "tied-zb": 2, "tied-v": 4, "tied-four": 4}
COPIES |= {"tied-replicas": 3, "tied-replicas-zb": 3, "tied-sharded": 3}
"""Of the tied weights in the stages that come after their first."""
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(
    make_plan: MakePlan, run_processes: RunProcesses, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """What each rank found in each case."""
    folder = tmp_path_factory.mktemp("processes")
    orders = []
    register_schedule(LAST_FIRST)
    for case in CASES:
        file = folder / f"{case.name}.torch.json"
        case.document(make_plan).save(file, force=False)
        order = {"name": case.name, "model": case.model, "file": str(file), "replicate": case.replicate}
        orders.append(order | {"ranks": case.ranks, "replicas": case.replicas, "sums": case.sums})
    SCHEDULES.pop("last-first")
    (folder / "cases.json").write_text(json.dumps(orders))
    run_processes(folder, RANKS, "-W", "error", str(WORKER))
    return {
        case.name: [
            json.loads((folder / f"{case.name}.{rank}.json").read_text()) for rank in range(case.ranks)
        ]
        for case in CASES
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_training_is_the_plain_models(results: Results, case: Case) -> None:
    ranks = results[case.name]
    assert len(ranks) == case.ranks
    assert {rank["schedule"] for rank in ranks} == {case.runs_as[0]}
    assert case.runs_as[1] in {name for rank in ranks for name in rank["wrapped"]}
    held = {int(stage): layers for rank in ranks for stage, layers in rank["stages"].items()}
    assert [held[stage] for stage in sorted(held)] == case.balance
    check_losses(case, ranks)
    names = sorted(ranks[0]["names"])
    trained = [name for rank in ranks if rank["replica"] == 0 for name in rank["gradients"]]
    assert sorted(trained) == names
    assert ranks[0]["largest_gradient"] > 1e-3
    for rank in ranks:
        assert max([*rank["gradients"].values(), *rank["values"].values()], default=0) < 1e-9
        if case.replicas == 1 and set(case.recompute) <= {"never", "offload"}:
            assert max(rank["buffers"].values(), default=0) < 1e-9


def check_losses(case: Case, ranks: list[dict[str, Any]]) -> None:
    """Each replica's last stage knows the losses of its part of every micro-batch; nobody else does."""
    for replica in range(case.replicas):
        of_replica = [rank for rank in ranks if rank["replica"] == replica]
        known = [rank["losses"] for rank in of_replica if any(rank["losses"])]
        assert len(known) == 1
        for losses, plain in zip(known[0], of_replica[0]["plain_losses"], strict=True):
            assert len(losses) == case.micro_batches
            assert losses == pytest.approx(plain[replica :: case.replicas], abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("case", COPIES)
def test_copies_of_tied_weights_have_the_plain_models_gradients_and_values(
    results: Results, case: str
) -> None:
    ranks = [rank for rank in results[case] if rank["replica"] == 0]
    assert sum(len(rank["copies"]) for rank in ranks) == 2 * COPIES[case]
    assert max(off for rank in ranks for off in rank["copies"]) < 1e-9


@pytest.mark.slow
def test_batch_norm_counts_every_micro_batch_once(results: Results) -> None:
    """Its buffers were compared, on the first step too."""
    counted = [name for rank in results["looped-bfs"] for name in rank["buffers"]]
    assert len([name for name in counted if name.endswith("num_batches_tracked")]) == 2

"""Megatron's layouts: against megatron-core's own parser where it is installed, else against its rules."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pplan.cost_models.errors import ExportError
from pplan.planner.plan_file import Plan
from pplan.runtimes.documents import MegatronBridgeExport, MegatronExport
from pplan.runtimes.exports import export
from pplan.runtimes.imports import split_layout
from pplan.runtimes.trainer_words import write_layout

MakePlan = Callable[..., Plan]
CONFLICTING = {
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
}


def blocks_in(layout: str, where: str) -> list[int]:
    """Transformer blocks of each stage."""
    return [stage.count("t") for stage in split_layout(layout, where)]


def megatron(plan: Plan) -> tuple[MegatronExport, str | None]:
    document, remark = export("megatron", plan)
    assert isinstance(document, MegatronExport)
    return document, remark


def options(document: MegatronExport) -> dict[str, str]:
    """The arguments that have a value."""
    given = document.arguments
    return {name: value for name, value in pairwise(given) if name.startswith("--")}


def test_the_arguments(make_decoder_plan: MakePlan) -> None:
    document, remark = megatron(make_decoder_plan([4, 3, 3, 2], recompute="always", dtype="bfloat16"))
    assert remark is None
    assert document.arguments == [
        *("--num-layers", "9", "--pipeline-model-parallel-size", "4"),
        *("--pipeline-model-parallel-layout", "Et*3|t*3|t*3|L"),
        *("--micro-batch-size", "4", "--global-batch-size", "32"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "3"),
        "--bf16",
    ]
    assert not CONFLICTING & set(document.arguments)


def test_replicas_and_virtual_stages(make_decoder_plan: MakePlan) -> None:
    document, _ = megatron(make_decoder_plan([3, 3, 3, 3, 2, 2, 2, 2], virtual=2, replicas=2))
    assert (document.pipeline_size, document.virtual_stages, document.processes) == (4, 2, 8)
    given = options(document)
    assert given["--pipeline-model-parallel-size"] == "4"
    assert given["--pipeline-model-parallel-layout"] == "Et*2|t*3|t*3|t*3|t*2|t*2|t*2|L"
    # Megatron: micro-batches = global batch / (micro-batch size x data-parallel size).
    assert int(given["--micro-batch-size"]) * 2 * 8 == int(given["--global-batch-size"]) == 32


def test_a_text_that_bash_reads(make_decoder_plan: MakePlan, tmp_path: Path) -> None:
    """Sourced, the array holds the arguments one by one, whatever the model is called."""
    model = "a model\n--x; touch stolen $(touch stolen)"
    document, _ = megatron(make_decoder_plan([5, 7], model=model))
    path = tmp_path / "flags.sh"
    document.save(path, force=False)
    done = subprocess.run(
        ["bash", "-c", 'source flags.sh; printf "%s\\n" "${PPLAN[@]}"'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:-1] == document.arguments
    assert not (tmp_path / "stolen").exists()
    assert "torchrun --nproc-per-node 2 pretrain_gpt.py" in path.read_text()


def test_on_several_nodes(make_decoder_plan: MakePlan) -> None:
    document, _ = megatron(make_decoder_plan([3, 3, 3, 3], replicas=4, gpus_per_node=8))
    assert (document.processes, document.nodes) == (16, 2)
    assert "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py" in document.text(Path("x.sh"))


def test_nodes_with_different_numbers_of_devices(make_decoder_plan: MakePlan) -> None:
    """One command of torchrun starts as many processes on each node."""
    with pytest.raises(ExportError, match="8 on node 0, 4 on node 1: torchrun starts as many"):
        megatron(make_decoder_plan([4, 4, 4], replicas=4, gpus_per_node=8))


def test_the_document_where_the_name_says_json(make_decoder_plan: MakePlan, tmp_path: Path) -> None:
    document, _ = megatron(make_decoder_plan([5, 7]))
    document.save(tmp_path / "x.json", force=False)
    assert MegatronExport.load(tmp_path / "x.json") == document


def test_bridge_has_the_same_layout(make_decoder_plan: MakePlan) -> None:
    plan = make_decoder_plan([3, 3, 3, 3], virtual=2, recompute="always")
    document, remark = export("megatron-bridge", plan)
    assert isinstance(document, MegatronBridgeExport)
    assert document.layout == megatron(plan)[0].layout
    assert document.arguments[1:4] == [
        "model.pipeline_model_parallel_size=2",
        "model.pipeline_model_parallel_layout=Et*2|t*3|t*3|tL",
        "train.micro_batch_size=4",
    ]
    assert "model.virtual_pipeline_model_parallel_size=2" in document.arguments
    assert remark is not None
    assert "recomputes 1 of a stage's blocks at a time" in remark


def test_uniform_recomputation_divides_every_stage(make_decoder_plan: MakePlan) -> None:
    """Its loop steps through a stage by that number, and past its end where it does not divide."""
    for balance, together in (([5, 4, 6], 4), ([5, 2, 8], 2), ([4, 4, 4], 1), ([1, 12, 2], 12)):
        document, remark = megatron(make_decoder_plan(balance, recompute="always"))
        blocks = blocks_in(document.layout, "x")
        assert options(document)["--recompute-num-layers"] == str(together)
        assert all(count % together == 0 for count in blocks)
        assert (remark is None) == (together == max(blocks))


def test_the_norm_goes_with_the_head(make_decoder_plan: MakePlan) -> None:
    document, remark = megatron(make_decoder_plan([5, 6, 1]))
    assert document.layout == "Et*4|t*5|L"
    assert remark is not None
    assert "megatron computes model.norm with the head" in remark


WIDE = ["embed", "positions", "layers.0.a", "layers.0.b", "layers.1", "norm", "head"]


@pytest.mark.parametrize("balance", [[2, 5], [4, 3], [5, 2], [6, 1], [2, 2, 3]])
def test_whole_blocks_are_taken(make_decoder_plan: MakePlan, balance: list[int]) -> None:
    document, _ = megatron(make_decoder_plan(balance, names=WIDE))
    assert sum(blocks_in(document.layout, "x")) == document.num_layers == 2


@pytest.mark.parametrize(
    ("balance", "names", "what", "hint"),
    [
        ([1, 6], WIDE, "stage 0 ends after layer 0, embed, inside the embedding", "layers.*"),
        ([3, 4], WIDE, "stage 0 ends after layer 2, layers.0.a, inside block 0", "layers.*"),
        ([5, 1, 1], WIDE, "stage 1 computes norm, a later one the rest of the head", "layers.*"),
        ([6, 1], [*WIDE[:-2], "dense", "head"], "stage 0 computes dense", "layers.*"),
        ([2, 1], ["features.0", "features.1", "classifier"], "no layer has the name", "LIST.*"),
    ],
)
def test_cuts_that_it_has_no_words_for(
    make_decoder_plan: MakePlan, balance: list[int], names: list[str], what: str, hint: str
) -> None:
    with pytest.raises(ExportError) as caught:
        megatron(make_decoder_plan(balance, names=names))
    assert what in caught.value.what
    assert f"pplan.profile('small', granularity='module:{hint}')" in caught.value.hint
    assert "pplan solve" in caught.value.hint


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"schedule": "gpipe"}, "its schedule is gpipe, megatron runs 1f1b, interleaved"),
        ({"schedule": "zb-h1"}, "its schedule is zb-h1"),
        ({"recompute": "except_last"}, "it recomputes except_last"),
        ({"replicas": 3}, "its 3 replicas cannot share 4 samples evenly"),
    ],
)
def test_what_it_does_not_run(make_decoder_plan: MakePlan, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ExportError) as caught:
        megatron(make_decoder_plan([5, 7], **keys))
    assert reason.split(", megatron runs")[0] in caught.value.what
    assert "pplan.solve(runtime='megatron')" in caught.value.hint


def test_devices_in_another_order_are_told(make_decoder_plan: MakePlan) -> None:
    plan = make_decoder_plan([5, 7])
    stages = [s.model_copy(update={"devices": [d]}) for s, d in zip(plan.stages, [1, 0], strict=True)]
    remark = megatron(plan.model_copy(update={"stages": stages}))[1]
    assert remark == "Start ranks 0, 1, ... on devices 1, 0: there the plan has them."


LAYOUTS = ["EtL", "E|t|L", "Et*3|(tt|)*29,t|L", "Ettt|(tt|)*2tL", "E,t*5,L", "Et*2|(t|t*2|)*3tL", "E||t*3L"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_parser_reads_layouts_as_ours(layout_class: Any, layout: str) -> None:
    """Our parser is what the round trips of other tests rely on."""
    read = [[item.name for item in stage] for stage in layout_class.parse_str_to_list(layout)]
    assert [stage.count("decoder") for stage in read] == blocks_in(layout, "x")


@pytest.mark.parametrize(
    ("balance", "virtual"), [([12], 1), ([5, 7], 1), ([1, 4, 5, 2], 1), ([3, 3, 3, 3], 2), ([2] * 8, 4)]
)
def test_its_parser_takes_our_layouts(
    layout_class: Any, make_decoder_plan: MakePlan, balance: list[int], virtual: int
) -> None:
    plan = make_decoder_plan(balance, virtual=virtual)
    document, _ = megatron(plan)
    made = layout_class(document.layout, document.pipeline_size)
    made.validate_layer_layout(num_layers=document.num_layers, mtp_num_layers=None)
    assert made.virtual_pipeline_model_parallel_size == virtual
    for stage, planned in enumerate(plan.stages):
        held = made.layout[stage % document.pipeline_size][stage // document.pipeline_size]
        names = plan.layer_names[planned.first_layer : planned.last_layer + 1]
        assert [item.name for item in held].count("decoder") == sum("layers." in name for name in names)


@pytest.mark.parametrize("layout", LAYOUTS[:-1])
def test_our_layouts_keep_its_rules(layout: str) -> None:
    """E first and L last, once each, as its documentation asks; and its grammar back again."""
    blocks = blocks_in(layout, "x")
    ours = write_layout(blocks)
    assert blocks_in(ours, "x") == blocks
    assert re.fullmatch(r"E(t|t\*\d+)?(\|(t|t\*\d+)?)*L", ours)


FIRST = ["first_3", "first_2", "always", "never"]


def first_blocks_plan(make_decoder_plan: MakePlan, words: list[str], balance: list[int]) -> Plan:
    plan = make_decoder_plan(balance)
    stages = [
        stage.model_copy(update={"recompute": word}) for stage, word in zip(plan.stages, words, strict=True)
    ]
    return plan.model_copy(update={"stages": stages, "recompute": "by_stage"})


@pytest.mark.parametrize("runtime", ["megatron", "megatron-bridge"])
def test_first_blocks_of_every_stage(make_decoder_plan: MakePlan, runtime: str) -> None:
    """The embedding and two blocks, two of three blocks, all of two, none where there is no block."""
    document, remark = export(runtime, first_blocks_plan(make_decoder_plan, FIRST, [4, 3, 2, 2]))
    assert isinstance(document, MegatronExport | MegatronBridgeExport)
    assert (document.first_blocks, document.recompute) == (2, "always")
    text = " ".join(document.arguments).replace("model.", "--").replace("_", "-").replace("=", " ")
    assert "--recompute-granularity full --recompute-method block --recompute-num-layers 2" in text
    assert remark is not None
    assert "each of the first 2 blocks of a stage again by itself" in remark


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["first_3", "first_1", "always", "never"], "its stages run 2, 1, 2, 0 first blocks again"),
        (["first_3", "never", "never", "never"], "its stages run 2, 0, 0, 0 first blocks again"),
        (["first_1", "never", "never", "never"], "its stages run 0, 0, 0, 0 first blocks again"),
    ],
)
def test_other_first_layers_are_refused(make_decoder_plan: MakePlan, words: list[str], reason: str) -> None:
    with pytest.raises(ExportError, match=reason):
        export("megatron", first_blocks_plan(make_decoder_plan, words, [4, 3, 2, 2]))


def test_runtimes_of_whole_stages_refuse_first_layers(make_decoder_plan: MakePlan) -> None:
    for runtime in ("torchtitan", "nemo-automodel", "deepspeed"):
        with pytest.raises(ExportError, match="first_3 and first_2 and always and never"):
            export(runtime, first_blocks_plan(make_decoder_plan, FIRST, [4, 3, 2, 2]))

"""Partitions of other tools, read; and every export read back as the plan's own partition."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pplan.cost_models.errors import FileError, UsageError
from pplan.cost_models.runtime import RUNTIMES
from pplan.cost_models.transformer.pipeline_layout import layout_problems
from pplan.planner.plan_file import Partition, Plan
from pplan.runtimes.documents import TrainerText
from pplan.runtimes.exports import export
from pplan.runtimes.imports import read_partition, split_layout, with_virtual_stages

MakePlan = Callable[..., Plan]
LAYERS = ["model.embed_tokens", *(f"model.layers.{block}" for block in range(9)), "model.norm", "lm_head"]
PARTS = [["tok_embeddings", "layers.0", "layers.1"], [f"layers.{n}" for n in range(2, 9)], ["norm", "output"]]


def read(text: str, names: list[str] = LAYERS) -> Partition:
    return read_partition(text, names, "x")


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("4,3,3,2", (4, 7, 10, 12)),
        ("[4, 3, 3, 2]\n", (4, 7, 10, 12)),
        ("4 3 3 2", (4, 7, 10, 12)),
        ("12", (12,)),
        ('{"balance": [4, 8], "chunks": 8}', (4, 12)),
        ("model = GPipe(model, balance=[4, 8], chunks=8)", (4, 12)),
        ("0,4,7,12", (4, 7, 12)),
        ('{"parts": [0, 4, 12]}', (4, 12)),
        ("3,3,3", (4, 7, 12)),
        ('{"num_layers_per_stage": [2, 7]}', (3, 12)),
        ("Et*3|t*3|t*3|L", (4, 7, 10, 12)),
        ("Ettt|(ttt|)*2L", (4, 7, 10, 12)),
        ("E|t*9,|L", (1, 10, 12)),
        ("Et*9L", (12,)),
        ('--num-layers 9 --pipeline-model-parallel-layout "Et*4|t*5L" --bf16', (5, 12)),
        ("model.pipeline_model_parallel_layout=Et*4|t*5L", (5, 12)),
        ("pipeline_model_parallel_layout: 'Et*4|t*5L'", (5, 12)),
        (json.dumps(PARTS), (3, 10, 12)),
        (json.dumps([",".join(part) for part in PARTS]), (3, 10, 12)),
        (json.dumps({"module_fqns_per_model_part": PARTS}), (3, 10, 12)),
        ("--x.module_fqns_per_model_part tok_embeddings,layers.0 " + ",".join(
            [*(f"layers.{n}" for n in range(1, 9)), "norm", "lm_head"]
        ) + " --y", (2, 12)),
        ('{"model.embed_tokens": 0, "model.layers": 0, "model.norm": 3, "lm_head": "cuda:3"}', (10, 12)),
        ('{"": 0, "lm_head": 1}', (11, 12)),
        ('{"device_map": {"model": 0, "lm_head": 1}}', (11, 12)),
    ],
)  # fmt: skip
def test_formats(text: str, ends: tuple[int, ...]) -> None:
    assert read(text).ends == ends


TITAN_TOML = """
[parallelism]
pipeline_parallel_degree = 3
pipeline_parallel_schedule = "GPipe"
module_fqns_per_model_part = [
    ["tok_embeddings", "layers.0", "layers.1"],  # the first stage
    {middle},
    ["norm", "output"],
]
[training]
global_batch_size = 64
[activation_checkpoint]
mode = "full"
"""


def test_parts_in_a_trainers_configuration() -> None:
    """TOML and JSON of torchtitan: the parts, and what the other tables say."""
    text = TITAN_TOML.format(middle=json.dumps(PARTS[1]))
    for configuration in (text, json.dumps(tomllib.loads(text)), repr(tomllib.loads(text))):
        made = read(configuration)
        assert (made.format, made.ends, made.virtual_stages) == ("torchtitan", (3, 10, 12), 1)
        assert (made.schedule, made.mini_batch, made.recompute) == ("gpipe", 64, "always")
    with pytest.raises(FileError, match="3 stages on a pipeline of 2 devices"):
        read(text.replace("degree = 3", "degree = 2"))


@pytest.mark.parametrize(
    "text",
    [
        repr(PARTS),
        repr(tuple(map(tuple, PARTS))).join(["--x.module_fqns_per_model_part ", " --y"]),
        f"module_fqns_per_model_part = {PARTS}",
        f"--x.module_fqns_per_model_part {PARTS} --y 1",
        f"--x.module_fqns_per_model_part={json.dumps(PARTS)} --y 1",
        f"module_fqns_per_model_part: {json.dumps(PARTS)}",
        f"module_fqns_per_model_part: {json.dumps([','.join(part) for part in PARTS])}",
        json.dumps({"parallelism": {"module_fqns_per_model_part": PARTS}}),
    ],
)
def test_lists_of_module_names_in_every_notation(text: str) -> None:
    assert read(text).ends == (3, 10, 12)


def test_a_megatron_configuration_in_json() -> None:
    """The options beside the layout count as on the command line."""
    options = {"pipeline_model_parallel_layout": "Et*2|t*2|t*2|t*3L", "pipeline_model_parallel_size": 2}
    made = read(json.dumps({"model": options, "train": {"micro_batch_size": 2, "global_batch_size": 64}}))
    assert (made.virtual_stages, made.schedule, made.mini_batch, made.samples) == (2, "interleaved", 64, 2)


def test_a_recipe_of_nemo_in_block_style() -> None:
    text = "distributed:\n  pp_size: 2\n  pipeline:\n    module_fqns_per_model_part:\n"
    for part in PARTS:
        text += f"      - - {part[0]}\n" + "".join(f"        - model.{name}\n" for name in part[1:])
    with pytest.raises(FileError, match="3 stages on a pipeline of 2 devices"):
        read(text)
    made = read(text.replace("pp_size: 2", "pp_size: 3\n  activation_checkpointing: true"))
    assert (made.ends, made.virtual_stages, made.recompute) == ((3, 10, 12), 1, "always")


def test_what_a_megatron_command_line_says() -> None:
    made = read(
        "torchrun pretrain_gpt.py --pipeline-model-parallel-layout 'Et*2|t*2|t*2|t*3L' \\\n"
        "  --pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 64 "
        "--recompute-granularity full --recompute-method uniform"
    )
    assert (made.virtual_stages, made.schedule, made.mini_batch, made.samples) == (2, "interleaved", 64, 2)
    assert made.recompute == "always"


def test_blocks_that_are_counted_are_told() -> None:
    assert read("3,3,3").notes == ("the list counts the 9 transformer blocks",)
    assert read("4,8").notes == ()


@pytest.mark.parametrize(
    ("text", "ends", "notes"),
    [
        ("Et*4|t*5mmL", (5, 12), ["2 multi-token predictors (m)"]),
        ("Et*4||t*5||L", (5, 10, 12), ["stages 1, 3 hold no layer"]),
        ("Et*4|t*5|m|L", (5, 10, 12), ["1 multi-token predictor (m)", "stage 2 holds no layer"]),
    ],
)
def test_what_a_profile_has_not_is_left_out(text: str, ends: tuple[int, ...], notes: list[str]) -> None:
    made = read(text)
    assert made.ends == ends
    assert made.virtual_stages == 1
    assert len(made.notes) == len(notes)
    assert all(told.startswith(start) for told, start in zip(made.notes, notes, strict=True))


def test_a_device_with_empty_virtual_stages_alone_is_left_out(layout_class: Any) -> None:
    """Megatron-LM takes the layout; the second of three devices only hands tensors on."""
    layout = "Et*2||t*3|t*2||t*2L"
    assert not layout_problems(split_layout(layout, "layout"), 3, 9, 0)
    own = layout_class.from_str(layout, 3)
    own.validate_layer_layout(num_layers=9, mtp_num_layers=None)
    assert [[len(stage) for stage in device] for device in own.layout] == [[3, 2], [0, 0], [3, 3]]
    asked = f"--pipeline-model-parallel-layout '{layout}' --pipeline-model-parallel-size 3"
    made = read(asked)
    assert (made.ends, made.virtual_stages, made.schedule) == ((3, 6, 8, 12), 2, "interleaved")
    assert made.notes == (
        "stages 1, 4 hold no layer of the profile: left out, with the devices that only hand tensors on",
    )
    with pytest.raises(
        FileError, match="virtual stage 1 holds no layer of the profile, and its device has lay"
    ):
        read(asked.replace("||t*2L", "|t|tL"))


@pytest.mark.parametrize(
    ("layout", "size", "ends", "empty"),
    [("Et*4|t*5||L", 2, (5, 10, 11, 12), 2), ("Ett||t*7|||L", 3, (3, 10, 11, 12), 3)],
)
def test_an_empty_stage_before_the_head_has_a_norm(
    layout: str, size: int, ends: tuple[int, ...], empty: int, layout_class: Any
) -> None:
    """Of a device that has blocks in another virtual stage, as of `...|m|L`; idle devices are left out."""
    options = f"--pipeline-model-parallel-layout '{layout}' --pipeline-model-parallel-size {size}"
    own = layout_class.from_str(layout, size)
    own.validate_layer_layout(num_layers=9, mtp_num_layers=None)
    made = read(options)
    assert (made.ends, made.virtual_stages, made.schedule) == (ends, 2, "interleaved")
    assert made.notes[-1].startswith(f"stage {empty} holds no layer of the profile: it has model.norm here")
    predictor = read(options.replace("|L", "m|L"))
    assert predictor.ends == ends
    assert predictor.notes[0].startswith("1 multi-token predictor (m)")
    for names in ([*LAYERS[:-2], "lm_head"], [*LAYERS[:-2], "lm_head", "model.norm"], LAYERS[:-1]):
        with pytest.raises(FileError, match="no norm to give"):
            read(options, names)


def test_names_that_are_no_layers_are_told() -> None:
    parts = [[*PARTS[0], "vision"], PARTS[1], PARTS[2]]
    assert read(json.dumps(parts)).notes == ("vision: no layer of the profile, passed over",)


FORMATS = "Give a balance list"


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("", "it is empty", FORMATS),
        ("twelve", "it is in none of the formats", FORMATS),
        ("-1,13", "it is in none of the formats", FORMATS),
        ("4,0,8", "stage 1 has 0 layers", ""),
        ("0,4,4,12", "stage 1 has 0 layers", ""),
        ("0,8,4,12", "stage 1 has -4 layers", ""),
        ("3,3", "the balance adds up to 6 layers, the profile has 12", "profile=FILE"),
        ("Et*4|t*4L", "it places 8 transformer blocks, the profile has 9", "profile=FILE"),
        ("Et*4|mt*5L", "a transformer block (t) stands after a multi-token predictor (m)", ""),
        ("Et*4|t*5xL", "it is in none of the formats", FORMATS),
        (
            "--pipeline-model-parallel-layout 'Et*4||t*4|tL' --pipeline-model-parallel-size 2",
            "its virtual stage 1 holds no layer of the profile, and its device has layers in others",
            "pplan.lint_layout",
        ),
        ("Et*4|t*5", "the last layer is not L, the loss", ""),
        ("Et*4|Et*5L", "E stands 2 times, not once", ""),
        ("Et*999999999|L", "it stands for more than 100000 blocks", ""),
        ("--pipeline-model-parallel-layout 'Et*4|t*5L", "its quotes do not end", ""),
        (
            "--pipeline-model-parallel-layout Et*4|t*5L --pipeline-model-parallel-size 4",
            "2 stages: no multiple of the pipeline's size 4",
            "",
        ),
        (
            "--pipeline-model-parallel-layout Et*4|t*5L --global-batch-size many",
            "global_batch_size is 'many', not a whole number",
            "global_batch_size 8",
        ),
        ("--x.module_fqns_per_model_part", "module_fqns_per_model_part lists no stage", ""),
        (json.dumps(PARTS[:2]), "layer 10, model.norm, is on no stage", ""),
        (json.dumps([*PARTS, ["layers.0"]]), "layers.0 is on stages 0 and 3", "once"),
        (json.dumps([PARTS[1], PARTS[0], PARTS[2]]), "layer 3 is on stage 0, layer 2 before it", "order"),
        (json.dumps([*PARTS, ["vision"]]), "stage 3 holds no layer", ""),
        (
            '{"model": 0, "model.layers.4": 1, "lm_head": 1}',
            "device 0 has layers before and after",
            "one run",
        ),
        ('{"model": 0}', "layer 11, lm_head, is on no stage", ""),
        ("[1.5, 2]", "its JSON is no partition", FORMATS),
        ("[true]", "its JSON is no partition", FORMATS),
        ("[[]]", "its JSON is no partition", FORMATS),
        ("null", "its JSON is no partition", FORMATS),
        ('{"schema": 1}', "runtime is None", ""),
        ('{"schema": 1, "prediction": {}}', "this is a plan of pplan", "show, simulate or export"),
        ('{"schema": 1, "layers": []}', "this is a profile of pplan", FORMATS),
        ('{"schema": 1, "runtime": "torchgpipe"}', "Field required", "pplan export torchgpipe"),
        ("[" * 100_000, "it is nested too deep", ""),
    ],
)
def test_refusals(text: str, what: str, hint: str) -> None:
    with pytest.raises(FileError) as caught:
        read(text)
    assert caught.value.what.startswith("x: ")
    assert what in caught.value.what
    assert hint in caught.value.hint
    assert caught.value.hint


def test_a_layout_is_for_transformers_only() -> None:
    with pytest.raises(FileError, match="no layer has the name of a transformer's block"):
        read("Et|tL", ["features.0", "features.1"])


@given(st.text(max_size=60))
def test_garbage_is_refused_in_our_words(text: str) -> None:
    try:
        made = read(text)
    except FileError:
        return
    assert made.ends[-1] == 12


def test_virtual_stages_asked_for() -> None:
    made = with_virtual_stages(read("Et*3|t*3|t*3|L"), 2, "x")
    assert (made.virtual_stages, made.schedule) == (2, "interleaved")
    assert with_virtual_stages(made, None, "x") is made
    with pytest.raises(UsageError, match="virtual_stages=3: x has 4 stages"):
        with_virtual_stages(made, 3, "x")


STRAIGHT: dict[str, Any] = {"balance": [4, 3, 3, 2], "recompute": "always"}
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("torchgpipe", STRAIGHT | {"schedule": "gpipe", "recompute": "except_last"}),
    ("fairscale", STRAIGHT | {"schedule": "gpipe"}),
    ("deepspeed", STRAIGHT | {"replicas": 2}),
    ("torch", STRAIGHT | {"schedule": "zb-h1", "replicas": 2}),
    ("torch", STRAIGHT | {"virtual": 2}),
    ("huggingface", {"balance": [4, 3, 3, 2], "schedule": "naive"}),
    ("megatron", STRAIGHT | {"replicas": 2}),
    ("megatron", STRAIGHT | {"virtual": 2}),
    ("megatron-bridge", STRAIGHT | {"virtual": 2}),
    ("torchtitan", STRAIGHT | {"replicas": 2}),
    ("torchtitan", STRAIGHT | {"schedule": "zb-v", "virtual": 2}),
    ("torchtitan", STRAIGHT | {"schedule": "zb-h2"}),
    ("nemo-automodel", STRAIGHT | {"schedule": "gpipe", "replicas": 2}),
    ("torchtitan", STRAIGHT | {"replicas": 2, "zero": 1}),
    ("nemo-automodel", STRAIGHT | {"replicas": 2, "zero": 1}),
    ("nemo-automodel", STRAIGHT | {"schedule": "looped-bfs", "virtual": 2}),
]


def test_every_runtime_comes_round() -> None:
    assert {runtime for runtime, _ in PLANS} == set(RUNTIMES)


@pytest.mark.parametrize(("runtime", "keys"), PLANS)
def test_a_plan_comes_back_from_what_was_exported(
    make_decoder_plan: MakePlan, runtime: str, keys: dict[str, Any]
) -> None:
    """From the document all that it says; from a trainer's own text at least the partition."""
    plan = make_decoder_plan(**keys)
    document, _ = export(runtime, plan)
    made = read(document.to_json())
    assert made.ends == tuple(accumulate(keys["balance"]))
    assert (made.format, made.runtime, made.schedule) == (runtime, runtime, plan.schedule)
    assert (made.virtual_stages, made.mini_batch) == (plan.virtual_stages, plan.mini_batch)
    assert made.replicas == plan.replicas[0]
    assert made.samples == plan.micro_batch_size // plan.replicas[0]
    assert made.recompute in (plan.recompute, None if runtime == "huggingface" else plan.recompute)
    if isinstance(document, TrainerText):
        own = read(document.text(Path("x.sh")))
        assert (own.ends, own.samples, own.mini_batch) == (made.ends, made.samples, made.mini_batch)
        assert (own.virtual_stages, own.recompute) == (made.virtual_stages, made.recompute)
        assert own.replicas == made.replicas
        assert own.schedule == (None if document.actions else made.schedule)


@pytest.mark.parametrize("words", [["never", "offload"], ["always", "never"], ["first_2", "never"]])
def test_stages_that_recompute_differently_come_back_as_they_are(
    make_decoder_plan: MakePlan, words: list[str]
) -> None:
    document, _ = export("torch", make_decoder_plan([4, 8]))
    made = read(document.model_copy(update={"recompute": words}).to_json())
    assert (made.runtime, made.recompute, made.stage_recompute) == ("torch", None, tuple(words))


def test_an_export_for_other_layers(make_decoder_plan: MakePlan) -> None:
    text = export("megatron", make_decoder_plan([5, 7]))[0].to_json()
    with pytest.raises(FileError, match="it was exported for small, the profile has other layers"):
        read(text, [*LAYERS[:-1], "head"])
    bare = json.loads(text) | {"layers_sha256": ""}
    assert read(json.dumps(bare)).ends == (5, 12)

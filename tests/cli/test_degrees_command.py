"""`pplan degrees`: what it prints, as JSON, and how it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.api.degree_arguments import megatron_arguments, torchtitan_arguments, torchtitan_remarks
from pplan.cli.app import main
from pplan.runtimes.imports import split_layout

MODEL = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}


FEW = ["--pp", "2", "--tp", "2", "--virtual-stages", "1", "--recompute", "none", "--layers", "8"]
"""Of many degrees, those that are searched soon."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODEL))
    return file


@pytest.mark.slow
def test_json_is_what_the_python_api_finds(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--recompute", "none", "--tp", "1,2", "--virtual-stages", "1"]
    arguments = ["--gpus", "16", "--gpu", "h100", "--mini-batch", "64", *sizes, "--json"]
    assert main(["degrees", str(config), *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)
    few: dict[str, Any] = {"recompute": "none", "tp": (1, 2), "virtual_stages": (1,)}
    answer = pplan.degrees(MODEL, gpus=16, gpu="h100", mini_batch=64, **few)
    assert printed["parameters"] == printed["active_parameters"] == 8030261248
    assert printed["schema"] == 1
    assert (printed["layer_count"], printed["mini_batch"], printed["sequence"]) == (32, 64, 4096)
    assert [plan["step_seconds"] for plan in printed["plans"]] == [
        plan.estimate.step_seconds for plan in answer.plans
    ]
    best = printed["plans"][0]
    assert best["tensor"] * best["context"] * best["pipeline"] * best["data"] == 16
    assert best["tensor"] in (1, 2)
    assert sum(best["blocks"]) == 32
    assert best["peak_bytes"] == max(sum(stage["ledger"].values()) for stage in best["stages"])
    assert printed["bound_seconds"] <= best["step_seconds"]


@pytest.mark.slow
def test_the_answer_and_its_arguments(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--pp", "3,4", "--tp", "2", "--micro-batch-size", "1"]
    options = ["--gpus", "64", "--gpu", "h100", "--mini-batch", "64", *sizes]
    assert main(["degrees", str(config), *options]) == 0
    printed = capsys.readouterr().out
    # --pp leaves out FSDP, which is a baseline.
    found = (
        "TP 2 x PP 4 x DP 8 is the fastest found of those allowed (fsdp is faster) for llama on 64 devices: "
    )
    assert printed.startswith(found)
    assert "8.03 billion parameters" in printed
    assert "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4" in printed
    assert "no kernels are measured" in printed
    assert "--kernels" in printed


def test_arguments_that_fill_a_screen_are_in_the_file(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--tp", "8", "--pp", "2", "--micro-batch-size", "1", "--recompute", "full", "--cp", "1"]
    options = ["--gpus", "16", "--gpu", "h100", "--mini-batch", "8", *sizes, "--virtual-stages", "1"]
    file = tmp_path / "answer.json"
    for layers, whole in ((8, True), (80, False)):
        own = [*options, "--layers", str(layers), "-o", str(file), "--force"]
        assert main(["degrees", str(config), *own]) == 0
        printed = capsys.readouterr().out
        words = shlex.join(json.loads(file.read_text())["plans"][0]["torchtitan"])
        shown = words if whole else f"{len(words):,} characters, plans[0].torchtitan of --json"
        assert f"\ntorchtitan: {shown}" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--pp", "4", "--virtual-stages", "4"], "interleaved 1F1B of 4 virtual stages a device"),
        (["--pp", "4", "--virtual-stages", "1"], "1F1B, "),
        (["--pp", "2", "--recompute", "selective"], "--recompute-granularity selective "),
    ],
)
def test_arguments_of_virtual_stages_and_recomputation(
    options: list[str], says: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--gpus", "16", "--gpu", "h100", "--mini-batch", "64", "--tp", "2", "--layers", "16"]
    assert main(["degrees", str(config), *sizes, *options]) == 0
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(("virtual", "vocabulary"), [(3, 128256), (4, 128)])
def test_megatron_takes_the_virtual_stages(virtual: int, vocabulary: int) -> None:
    """By number where they are equal, else by the layout."""
    answer = pplan.degrees(
        {**MODEL, "vocab_size": vocabulary},
        gpus=4,
        gpu="b200",
        mini_batch=64,
        pp=(4,),
        virtual_stages=(virtual,),
        recompute="none",
    )
    best = answer.plans[0]
    flags = megatron_arguments(answer, best)
    assert len(best.blocks) == 4 * virtual
    if len(set(best.blocks)) == 1:
        assert flags[flags.index("--num-layers-per-virtual-pipeline-stage") + 1] == str(best.blocks[0])
        return
    text = flags[flags.index("--pipeline-model-parallel-layout") + 1]
    assert [stage.count("t") for stage in split_layout(text, "")] == list(best.blocks)


@pytest.mark.parametrize(
    ("blocks", "pipeline", "virtual", "layout"),
    [
        (6, 4, 2, "E|t|t|t|t|t|t|L"),
        (14, 8, 2, "E|t|t|t|t|t|t|t|t|t|t|t|t|t|t|L"),
        (2, 4, 1, "E|t|t|L"),
        (3, 4, 1, None),
        (2, 4, 2, None),
        (1, 4, 1, None),
    ],
)
def test_stages_of_the_embedding_or_the_head_alone(
    blocks: int, pipeline: int, virtual: int, layout: str | None
) -> None:
    """No fewer stages than blocks. Each export is the plan, and lint accepts it."""
    model = {**MODEL, "num_hidden_layers": blocks}
    sizes: dict[str, Any] = {
        "pp": (pipeline,),
        "virtual_stages": (virtual,),
        "mini_batch": 16,
        "recompute": "none",
    }
    answer = pplan.degrees(model, gpus=pipeline, gpu="h100", **sizes)
    for plan in answer.plans:
        assert len(plan.blocks) == pipeline * virtual
        assert sum(plan.blocks) == blocks
        flags = megatron_arguments(answer, plan)
        text = flags[flags.index("--pipeline-model-parallel-layout") + 1]
        assert text == (layout or text)
        assert [stage.count("t") for stage in split_layout(text, "")] == list(plan.blocks)
        report = pplan.lint(text, model, gpus=pipeline, gpu="h100", **sizes)
        assert report.agrees
        assert report.virtual_stages == virtual
        titan = torchtitan_arguments(answer, plan)
        first = titan.index("--parallelism.module_fqns_per_model_part") + 1
        parts = [part.split(",") for part in titan[first : titan.index("--training.disable_cuda_graphs")]]
        assert [sum(name.startswith("layers.") for name in part) for part in parts] == list(plan.blocks)
        assert (parts[0][0], parts[-1][-2:]) == ("tok_embeddings", ["norm", "lm_head"])
        empty = any(not count for count in plan.blocks[1:-1])
        assert any("train no stage without a layer" in own for own in torchtitan_remarks(plan)) == empty
    best = answer.plans[0].estimate.step_seconds
    assert answer.bound_seconds <= best


def test_the_layout_of_llama_3_405b() -> None:
    """126 blocks in 128 virtual stages: 8 on each of 16 devices, TP 8, CP 16, 16,384 H100."""
    model = {**MODEL, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
    model |= {"num_key_value_heads": 8, "num_hidden_layers": 126, "vocab_size": 128256}
    answer = pplan.degrees(
        model,
        gpus=16384,
        topology="dgx-h100",
        mini_batch=128,
        sequence=131072,
        tp=(8,),
        cp=(16,),
        pp=(16,),
        virtual_stages=(8,),
        micro_batch_size=(1,),
        recompute="full",
        context_exchange="all-gather",
    )
    assert answer.plans[0].blocks == (0, *[1] * 126, 0)
    flags = megatron_arguments(answer, answer.plans[0])
    text = flags[flags.index("--pipeline-model-parallel-layout") + 1]
    assert text == "|".join(["E", *["t"] * 126, "L"])
    assert pplan.lint(text, model, pp=(16,)).agrees


@pytest.mark.slow
def test_an_answer_is_a_file_that_show_prints(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answer.json"
    arguments = ["degrees", str(config), "--gpus", "16", "--gpu", "h100", *FEW]
    assert main([*arguments, "--output", str(file)]) == 0
    printed = capsys.readouterr()
    assert str(file) in printed.err
    assert main(["show", str(file)]) == 0
    assert capsys.readouterr().out == printed.out
    assert main([*arguments, "--output", str(file)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["export", "torch", str(file)]) == 2
    assert "this is a degrees" in capsys.readouterr().err
    assert main([*arguments, "--output", str(config), "--force"]) == 2
    assert json.loads(config.read_text()) == MODEL


def test_degrees_by_stage_of_a_number_of_blocks_without_divisors() -> None:
    """The baselines have no pipeline then."""
    small = {**MODEL, "num_hidden_layers": 7}
    answer = pplan.degrees(
        small, gpus=4, gpu="b200", mini_batch=8, tp=(1,), virtual_stages=(1,), by_stage=True
    )
    assert answer.by_stage is not None
    assert answer.by_stage.bound_seconds <= answer.plans[0].estimate.step_seconds


def test_degrees_by_stage(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a large vocabulary, where the stages' layers fit two ways to share them."""
    wide = {"hidden_size": 3584, "num_attention_heads": 16, "num_hidden_layers": 42, "vocab_size": 256000}
    config.write_text(json.dumps(MODEL | wide))
    file = tmp_path / "answer.json"
    sizes = ["--tp", "2,4", "--pp", "2", "--micro-batch-size", "1,2", "--virtual-stages", "1", "--cp", "1"]
    options = ["--gpus", "8", "--gpu", "a100-40gb", "--mini-batch", "64", "--recompute", "none", *sizes]
    assert main(["degrees", str(config), *options, "--by-stage", "-o", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "1F1B, 32 micro-batches of 2, which the replicas of a stage share" in printed
    assert "no arguments for degrees by stage" in printed
    document = json.loads(file.read_text())
    plan = document["by_stage"]["plan"]
    assert plan["step_seconds"] < document["plans"][0]["step_seconds"]
    assert document["by_stage"]["bound_seconds"] <= plan["step_seconds"]
    assert [stage["degrees"] for stage in plan["stages"]] == ["TP 4", "TP 2 x DP 2"]
    assert [(stage["first_device"], stage["devices"]) for stage in plan["stages"]] == [(0, 4), (4, 4)]
    assert main(["show", str(file)]) == 0
    assert capsys.readouterr().out == printed
    same = [word if word != "2,4" else "4" for word in options]
    assert main(["degrees", str(config), *same, "--by-stage"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "none of the 1F1B pipelines that were searched is faster." in text


@pytest.mark.slow
def test_a_hostile_answer_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answer.json"
    arguments = ["degrees", str(config), "--gpus", "16", "--gpu", "h100", *FEW]
    assert main([*arguments, "--output", str(file)]) == 0
    content = json.loads(file.read_text())
    changes: list[dict[str, object]] = [
        {"plans": []},
        {"devices": -1},
        {"gap": "nan"},
        {"limit_bytes": float("nan")},
        {"schema": 9},
    ]
    for change in changes:
        file.write_text(json.dumps(content | change))
        capsys.readouterr()
        assert main(["show", str(file)]) == 2
        assert str(file) in capsys.readouterr().err


@pytest.mark.slow
def test_the_batch_by_its_old_name(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["degrees", str(config), "--gpus", "16", "--gpu", "h100", *FEW, "--json"]
    assert main([*arguments, "--batch-size", "32"]) == 0
    assert json.loads(capsys.readouterr().out)["mini_batch"] == 32
    old: dict[str, Any] = {"batch_size": 32, "pp": (2,), "tp": (2,), "layers": 8, "recompute": "none"}
    assert pplan.degrees(MODEL, gpus=16, gpu="h100", **old).options.mini_batch == 32


def test_refused_virtual_stages(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpus", "16", "--gpu", "h100", "--pp", "1", "--virtual-stages", "2"]
    assert main(["degrees", str(config), *arguments]) == 2
    assert "--virtual-stages 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--gpu", "h100"], 2, "--gpus"),
        (["--gpus", "8"], 2, "--gpu"),
        (["--gpus", "8", "--gpu", "a10g"], 2, "FLOP/s of A10G"),
        (["--gpus", "8", "--gpu", "t4"], 2, "t4 does not compute in bfloat16"),
        (["--gpus", "8", "--gpu", "h100", "--tp", "3"], 2, "--tp 3"),
        (["--gpus", "8", "--gpu", "h100", "--fix", "tp=3"], 2, "tp 3 x cp 1 x pp 1 = 3 does not divide 8"),
        (["--gpus", "8", "--gpu", "h100", "--tp", "two"], 2, "--tp"),
        (["--gpus", "8", "--gpu", "h100", "--zero", "4"], 2, "--zero 4"),
        (["--gpus", "1", "--gpu", "h100"], 3, "GiB"),
        (["--gpus", "8", "--gpu", "h100", "--zero", "1,x"], 2, "--zero"),
        (["--gpus", "8", "--gpu", "h100", "--zero", "3", "--pp", "2"], 2, "--pp 2"),
        (["--gpus", "8", "--gpu", "h100", "--kernels", "none.csv"], 2, "none.csv"),
        (["--gpus", "8", "--gpu", "h100", "--by-stage", "--virtual-stages", "2"], 2, "--virtual-stages 2"),
        (["--gpus", "8", "--gpu", "h100", "--by-stage", "--pp", "1"], 2, "--pp 1"),
        (["--gpus", "8", "--gpu", "h100", "--by-stage", "--offload"], 2, "do not offload"),
        (["--gpus", "8", "--gpu", "h100", "--host-bandwidth", "0GB/s"], 2, "--host-bandwidth 0GB/s"),
        (["--gpus", "101", "--gpu", "h100", "--by-stage"], 2, "101 devices have no equal parts"),
        (
            [
                "--gpus",
                "8",
                "--gpu",
                "b200",
                *["--by-stage", "--tp", "8", "--recompute", "full", "--layers", "257"],
            ],
            2,
            "257 blocks",
        ),
        (["--gpus", "8", "--gpu", "h100", "--by-stage", "--zero", "2,3"], 2, "--zero 2,3"),
        (["--gpus", "8", "--gpu", "h100", "--by-stage", "--layers", "257"], 2, "257 blocks"),
    ],
)
def test_refusals(
    arguments: list[str], status: int, says: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["degrees", str(config), *arguments]) == status
    printed = capsys.readouterr()
    assert says in printed.err
    assert not printed.out


def test_the_number_of_devices_of_a_topology(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three nodes of six, and one machine by its name."""
    machine = tmp_path / "machine.toml"
    machine.write_text('gpus = 18\ngpus_per_node = 6\ngpu = "h100"\n')
    few = ["--layers", "2", "--mini-batch", "18", "--fix", "pp=1,micro-batch-size=1", "--json"]
    for topology, gpus in ((str(machine), 18), ("dgx-h100", 8)):
        batch = [] if gpus == 18 else ["--mini-batch", "16"]
        assert main(["degrees", str(config), "--topology", topology, *few, *batch]) == 0
        assert json.loads(capsys.readouterr().out)["devices"] == gpus
    answer = pplan.degrees(MODEL, topology=machine, layers=2, mini_batch=18, fix={"pp": 1, "tp": 2})
    assert answer.devices == 18


SMALL = MODEL | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("gpus", "mini_batch", "memory"), [(4, 3, "800MB"), (1, 1, "100MB"), (2, 2, "0.7GiB")]
)
def test_the_memory_that_is_said_to_fit(
    config: Path, capsys: pytest.CaptureFixture[str], gpus: int, mini_batch: int, memory: str
) -> None:
    """It does; of a device whose context alone takes more nothing may be used, and not less."""
    config.write_text(json.dumps(SMALL))
    command = ["degrees", str(config), "--gpus", str(gpus), "--gpu", "h100", "--mini-batch", str(mini_batch)]
    assert main([*command, "--memory", memory]) == 3
    what, hint = capsys.readouterr().err.splitlines()
    assert re.search(
        r"needs least, [\d.]+ MiB on a device, of which [\d.]+ (MiB|B) may be used of its ", what
    )
    enough = re.match(r"  What would fit: --memory ([\d.]+)GiB a device\. Or use more", hint)
    assert enough is not None
    assert main([*command, "--memory", f"{enough[1]}GiB"]) == 0
    head = capsys.readouterr().out.splitlines()
    assert f" on {gpus} device{'s' if gpus > 1 else ''}: " in head[0]


def test_the_fastest_is_of_those_allowed_where_a_baseline_is_faster(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the table has it: `--tp 2` leaves out data parallelism, which is faster here."""
    config.write_text(json.dumps(SMALL))
    for allowed in (["--zero", "1,3"], ["--tp", "2"]):
        command = ["degrees", str(config), "--gpus", "2", "--gpu", "h100", "--mini-batch", "8", *allowed]
        assert main([*command, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        steps = [own["step_seconds"] for own in answer["baselines"] if own["step_seconds"]]
        is_fastest = min(steps) >= answer["plans"][0]["step_seconds"] * (1 - 1e-9)
        assert is_fastest == (allowed[0] == "--zero")
        assert main(command) == 0
        head = capsys.readouterr().out.splitlines()[0]
        assert (" is the fastest found for llama" in head) == is_fastest
        assert (
            re.search(r" is the fastest found of those allowed \(.* is faster\) ", head) is None
        ) == is_fastest


def test_the_gpu_that_is_missing_is_an_option(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["degrees", str(config), "--gpus", "8"]) == 2
    assert "pplan: --gpu is missing" in capsys.readouterr().err

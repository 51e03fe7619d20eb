"""`pplan solve config.json`: what it prints, as JSON, and how it refuses."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cli.app import main
from pplan.cost_models.errors import InfeasibleError
from pplan.cost_models.quantities import format_seconds
from pplan.runtimes.degree_exports import DegreeRequest, megatron_arguments, torchtitan_arguments
from pplan.runtimes.documents import MegatronExport
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
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(MODEL))
    return file


@pytest.mark.slow
def test_json_is_what_the_python_api_finds(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--recompute", "none", "--tp", "1,2", "--virtual-stages", "1"]
    arguments = ["--gpus", "16", "--gpu", "h100", "--mini-batch", "64", *sizes, "--json"]
    assert main(["solve", str(config), *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)
    few: dict[str, Any] = {"recompute": "none", "tp": (1, 2), "virtual_stages": (1,)}
    plan = pplan.solve(MODEL, gpus=16, gpu="h100", mini_batch=64, **few)
    same = ("stages", "prediction", "degrees", "training", "alternatives", "baselines", "balance", "notes")
    own = json.loads(plan.to_json())
    assert [name for name in same if printed[name] != own[name]] == []
    training, degrees = printed["training"], printed["degrees"]
    assert training["parameters"] == training["active_parameters"] == 8030261248
    assert (training["blocks"], printed["mini_batch"], training["sequence"]) == (32, 64, 4096)
    assert degrees["tensor"] * degrees["context"] * degrees["pipeline"] * degrees["data"] == 16
    assert degrees["tensor"] in (1, 2)
    assert sum(printed["balance"]) == 35
    assert printed["layer_names"][0:2] == ["model.embed_tokens", "model.layers.0"]
    for stage in printed["stages"]:
        assert stage["memory_bytes"] == sum(stage["memory"].values())
    prediction = printed["prediction"]
    assert prediction["lower_bound_seconds"] <= prediction["step_seconds"]


@pytest.mark.slow
def test_the_answer(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--pp", "3,4", "--tp", "2", "--micro-batch-size", "1"]
    options = ["--gpus", "64", "--gpu", "h100", "--mini-batch", "64", *sizes]
    assert main(["solve", str(config), *options]) == 0
    printed = capsys.readouterr().out
    # --pp leaves out FSDP, which is a baseline.
    found = "TP 2 x PP 4 x DP 8 is the fastest found of those allowed (fsdp is faster) on 64 GPUs: "
    assert printed.startswith(found)
    assert len(printed.splitlines()) <= 21  # of 20 virtual stages
    assert "8.03 billion parameters" in printed
    assert "estimated for megatron's code" in printed
    assert main(["solve", str(config), *options, "--details"]) == 0
    assert "no kernels are measured" in (details := capsys.readouterr().out)
    assert "--machine" in details


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--pp", "4", "--virtual-stages", "4"], ", 4 virtual stages a device;"),
        (["--pp", "4", "--virtual-stages", "1"], "; 1f1b, bubble "),
        (["--pp", "2", "--recompute", "selective"], "recompute selective;"),
    ],
)
def test_virtual_stages_and_recomputation(
    options: list[str], says: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--gpus", "16", "--gpu", "h100", "--mini-batch", "64", "--tp", "2", "--layers", "16"]
    assert main(["solve", str(config), *sizes, *options]) == 0
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(("virtual", "vocabulary"), [(3, 128256), (4, 128)])
def test_megatron_takes_the_virtual_stages(virtual: int, vocabulary: int) -> None:
    """By number where they are equal, else by the layout."""
    plan = pplan.solve(
        {**MODEL, "vocab_size": vocabulary},
        gpus=4,
        gpu="b200",
        mini_batch=64,
        pp=(4,),
        virtual_stages=(virtual,),
        recompute="never",
    )
    document = pplan.export("megatron", plan)
    assert isinstance(document, MegatronExport)
    flags = document.arguments
    blocks = [stage.count("t") for stage in split_layout(document.layout, "")]
    assert len(blocks) == 4 * virtual
    if len(set(blocks)) == 1:
        assert flags[flags.index("--num-layers-per-virtual-pipeline-stage") + 1] == str(blocks[0])
    else:
        assert flags[flags.index("--pipeline-model-parallel-layout") + 1] == document.layout


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
    plan = pplan.solve(model, gpus=pipeline, gpu="h100", **sizes)
    assert plan.training is not None
    for choice in (plan.row, *plan.alternatives):
        assert choice.degrees is not None
        request = DegreeRequest(plan, choice, plan.training, choice.degrees)
        assert (len(request.blocks), sum(request.blocks)) == (pipeline * virtual, blocks)
        flags = megatron_arguments(request)
        text = flags[flags.index("--pipeline-model-parallel-layout") + 1]
        assert text == (layout or text)
        assert [stage.count("t") for stage in split_layout(text, "")] == list(request.blocks)
        report = pplan.lint_layout(text, model, gpus=pipeline, gpu="h100", **sizes)
        assert report.agrees
        assert report.virtual_stages == virtual
        titan = torchtitan_arguments(request)
        first = titan.index("--parallelism.module_fqns_per_model_part") + 1
        parts = [part.split(",") for part in titan[first : titan.index("--training.disable_cuda_graphs")]]
        assert [sum(name.startswith("layers.") for name in part) for part in parts] == list(request.blocks)
        assert (parts[0][0], parts[-1][-2:]) == ("tok_embeddings", ["norm", "lm_head"])


def test_the_layout_of_llama_3_405b() -> None:
    """126 blocks in 128 virtual stages: 8 on each of 16 devices, TP 8, CP 16, 16,384 H100."""
    model = {**MODEL, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128}
    model |= {"num_key_value_heads": 8, "num_hidden_layers": 126, "vocab_size": 128256}
    plan = pplan.solve(
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
    assert plan.balance == [*[1] * 127, 2]
    document = pplan.export("megatron", plan)
    assert isinstance(document, MegatronExport)
    text = document.layout
    assert text == "|".join(["E", *["t"] * 126, "L"])
    assert pplan.lint_layout(text, model, pp=(16,)).agrees


SHARDED = ["--pp", "2", "--tp", "2", "--virtual-stages", "4", "--recompute", "none", "--layers", "8"]
"""The weights of virtual stages are gathered and resharded, by torch's schedules."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "few"),
    [("megatron", FEW), ("torchtitan", FEW), ("transformers", FEW), ("torchtitan", SHARDED)],
)
def test_all_verbs_print_the_same_seconds_and_bytes(
    implementation: str, few: list[str], config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that print any; the others refuse the plan in one sentence."""
    file = tmp_path / "mine.plan.json"
    few = [*few, "--implementation", implementation]
    arguments = ["solve", str(config), "--gpus", "16", "--gpu", "h100", *few]
    assert main([*arguments, "--details", "--output", str(file)]) == 0
    printed = capsys.readouterr()
    assert str(file) in printed.err
    assert main(["show", str(file)]) == 0
    assert capsys.readouterr().out.startswith(printed.out)
    plan = pplan.load_plan(file)
    assert plan.training is not None
    assert plan.training.implementation == implementation
    step, peak = plan.prediction.step_seconds, max(stage.memory_bytes for stage in plan.stages)
    assert main(["compare", str(file), str(file), "--json"]) == 0
    rows = [row["plan"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert [(row["step_seconds"], max(row["memory_bytes"])) for row in rows] == [(step, peak)] * 2
    assert all({device for part in row["devices"] for device in part} == set(range(16)) for row in rows)
    for runtime in ("megatron", "megatron-bridge", "torchtitan", "nemo-automodel"):
        assert main(["export", runtime, str(file), "-o", str(tmp_path / f"{runtime}.json"), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["step_seconds"] == step
        is_same = {"megatron-bridge": "megatron", "nemo-automodel": "transformers"}.get(runtime, runtime)
        assert bool(document["warnings"]) == (is_same != implementation)
        if runtime == "megatron":
            layout = document["layout"]
    degrees = plan.degrees
    assert degrees is not None
    assert degrees.zero == (3 if few[: len(SHARDED)] == SHARDED else 1)
    same = ["--gpus", "16", "--gpu", "h100", *few, "--zero", str(degrees.zero), "--cp", str(degrees.context)]
    same += ["--micro-batch-size", str(plan.micro_batch_size // degrees.data)]
    assert main(["lint", layout, "--model", str(config), *same, "--json"]) == 0
    linted = json.loads(capsys.readouterr().out)
    assert (linted["step_seconds"], linted["best_step_seconds"]) == (step, step)
    assert linted["stage_bytes"] == [stage.memory_bytes for stage in plan.stages[: degrees.pipeline]]
    assert linted["limit_bytes"] == plan.stages[0].memory_limit_bytes
    assert main(["lint", str(file)]) == 0
    assert main(["report", str(file), "-o", str(tmp_path / "page.html")]) == 0
    assert format_seconds(step) in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    for verb in (["explain"], ["check"], ["simulate"], ["solve", "--lost", "1"], ["compare", "--planners"]):
        assert main([verb[0], str(file), *verb[1:]]) == 2
        what, hint = capsys.readouterr().err.splitlines()
        assert "is from a configuration" in what
        assert "profile the model" in hint
    assert main([*arguments, "--output", str(file)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["export", "torch", str(file)]) == 2
    assert "from a configuration" in capsys.readouterr().err
    assert main([*arguments, "--output", str(config), "--force"]) == 2
    assert json.loads(config.read_text()) == MODEL


def test_the_verb_of_earlier_versions(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["degrees", str(config), "--gpus", "64"]) == 2
    assert "pplan solve config.json" in capsys.readouterr().err
    old = config.with_name("answer.json")
    old.write_text(json.dumps({"schema": 1, "combinations": 3, "plans": []}))
    assert main(["show", str(old)]) == 2
    assert "pplan solve config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "options", "says"),
    [
        ("config", ["--schedule", "gpipe"], "--schedule is an option for a profile"),
        ("config", ["--objective", "memory"], "--objective is an option for a profile"),
        ("config", ["--frontier"], "--frontier is an option for a profile"),
        ("config", ["--sweep", "gpus=2,4"], "--sweep is an option for a profile"),
        ("config", ["--implementation", "nanotron"], "--implementation nanotron"),
        ("config", ["--recompute", "except-last"], "--recompute except-last"),
        ("profile", ["--pp", "2"], "--pp is an option for a config.json"),
        ("profile", ["--kernels", "kernels.csv"], "--kernels is an option for a config.json"),
        ("profile", ["--zero", "1,2"], "--zero 1,2"),
        ("other", [], "not a profile, and not the configuration"),
    ],
)
def test_the_content_of_the_file_decides(
    file: str, options: list[str], says: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = config.with_name("toy.profile.json")
    table = config.with_name("toy.csv")
    table.write_text("name,forward_ms,backward_ms,activation_bytes,parameter_bytes\na,1,2,4,4\nb,1,2,4,4\n")
    pplan.import_profile(table, micro_batch_size=1).save(profile, force=True)
    other = config.with_name("other.json")
    other.write_text('{"colour": "red"}')
    path = {"config": config, "profile": profile, "other": other}[file]
    assert main(["solve", str(path), "--gpus", "2", "--gpu", "h100", *options]) == 2
    assert says in capsys.readouterr().err


COSTS = "name,forward_seconds,backward_seconds,activation_bytes,parameter_bytes\na,1,2,4,4\nb,1,2,4,4\n"


@pytest.mark.parametrize("kind", ["profile", "configuration"])
def test_a_pipe_is_read_once(kind: str, config: Path, tmp_path: Path) -> None:
    content, options = config.read_bytes(), ["--gpu", "h100", "--mini-batch", "16", *FEW]
    if kind == "profile":
        (tmp_path / "costs.csv").write_text(COSTS)
        profile = pplan.import_profile(tmp_path / "costs.csv", micro_batch_size=1)
        content, options = profile.to_json().encode(), ["--mini-batch", "16"]
    read, write = os.pipe()
    os.write(write, content)
    os.close(write)
    assert main(["solve", f"/dev/fd/{read}", "--gpus", "4", "-o", "piped.plan.json", *options]) == 0
    os.close(read)
    plan = pplan.load_plan(tmp_path / "piped.plan.json")
    assert (plan.degrees is None) == (kind == "profile")


@pytest.mark.parametrize("name", ["hf:llama", "hf:mixtral"])
def test_a_configuration_that_transformers_has(name: str) -> None:
    pytest.importorskip("transformers")
    few: dict[str, Any] = {
        "tp": (8,),
        "pp": (1,),
        "micro_batch_size": (1,),
        "layers": 4,
        "recompute": "never",
    }
    plan = pplan.solve(name, gpus=8, gpu="h100", mini_batch=8, **few)
    assert (plan.model, plan.profile.file) == (name.removeprefix("hf:"), name)


def test_degrees_by_stage_of_a_number_of_blocks_without_divisors() -> None:
    """The baselines have no pipeline then."""
    small = {**MODEL, "num_hidden_layers": 7}
    few: dict[str, Any] = {"tp": (1,), "virtual_stages": (1,)}
    plan = pplan.solve(small, gpus=4, gpu="b200", mini_batch=8, by_stage=True, **few)
    assert plan.prediction.lower_bound_seconds <= plan.prediction.step_seconds


def test_degrees_by_stage(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a large vocabulary, where the stages' layers fit two ways to share them."""
    wide = {"hidden_size": 3584, "num_attention_heads": 16, "num_hidden_layers": 42, "vocab_size": 256000}
    config.write_text(json.dumps(MODEL | wide))
    file = tmp_path / "answer.json"
    sizes = ["--tp", "2,4", "--pp", "2", "--micro-batch-size", "1,2", "--virtual-stages", "1", "--cp", "1"]
    options = ["--gpus", "8", "--gpu", "a100-40gb", "--mini-batch", "64", "--recompute", "none", *sizes]
    assert main(["solve", str(config), *options, "--by-stage", "-o", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("PP 2 of TP 4, TP 2 x DP 2 is the fastest found")
    plan = pplan.load_plan(file)
    assert plan.degrees is None
    assert plan.prediction.step_seconds < plan.alternatives[0].step_seconds
    assert [stage.degrees.describe() for stage in plan.stages if stage.degrees] == ["TP 4", "TP 2 x DP 2"]
    assert [(stage.devices[0], len(stage.devices)) for stage in plan.stages] == [(0, 4), (4, 4)]
    assert (plan.micro_batches, plan.micro_batch_size) == (32, 2)
    assert main(["show", str(file)]) == 0
    assert "TP 2 x DP 2" in capsys.readouterr().out
    assert any("no arguments for degrees by stage" in note for note in plan.notes)
    assert main(["lint", str(file)]) == 0
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"training": content["training"] | {"blocks": 43}}))
    with pytest.raises(pplan.FileError, match="it places 42 transformer blocks"):
        pplan.load_plan(file)
    same = [word if word != "2,4" else "4" for word in options]
    assert main(["solve", str(config), *same, "--by-stage", "--details"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "none of the 1F1B pipelines that were searched is faster" in text


@pytest.mark.slow
def test_a_hostile_answer_is_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answer.json"
    arguments = ["solve", str(config), "--gpus", "16", "--gpu", "h100", *FEW]
    assert main([*arguments, "--output", str(file)]) == 0
    content = json.loads(file.read_text())
    changes: list[dict[str, object]] = [
        {"stages": []},
        {"training": None},
        {"training": content["training"] | {"blocks": 9}},
        {"degrees": None},
        {"degrees": content["degrees"] | {"tensor": 4}},
        {"degrees": content["degrees"] | {"pipeline": 4}},
        {"degrees": content["degrees"] | {"predictor_offset": 2}},
        {"degrees": content["degrees"] | {"recompute": "first_0"}},
        {"balance": [0, 10]},
        {"schema": 9},
    ]
    for change in changes:
        file.write_text(json.dumps(content | change))
        capsys.readouterr()
        assert main(["show", str(file)]) == 2
        assert str(file) in capsys.readouterr().err


@pytest.mark.slow
def test_the_batch_by_its_old_name(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["solve", str(config), "--gpus", "16", "--gpu", "h100", *FEW, "--json"]
    assert main([*arguments, "--batch-size", "32"]) == 0
    assert json.loads(capsys.readouterr().out)["mini_batch"] == 32


def test_refused_virtual_stages(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpus", "16", "--gpu", "h100", "--pp", "1", "--virtual-stages", "2"]
    assert main(["solve", str(config), *arguments]) == 2
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
        (["--gpus", "8", "--gpu", "h100", "--by-stage", "--offload"], 2, "does not combine"),
        (["--gpus", "8", "--gpu", "h100", "--host-bandwidth", "0GB/s"], 2, "--host-bandwidth 0GB/s"),
        (["--gpus", "101", "--gpu", "h100", "--by-stage"], 2, "101 devices do not divide into"),
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
    assert main(["solve", str(config), *arguments]) == status
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
        assert main(["solve", str(config), "--topology", topology, *few, *batch]) == 0
        assert json.loads(capsys.readouterr().out)["gpus"] == gpus
    plan = pplan.solve(MODEL, topology=machine, layers=2, mini_batch=18, fix={"pp": 1, "tp": 2})
    assert plan.device_count == 18


SMALL = MODEL | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("gpus", "mini_batch", "memory"), [(4, 3, "600MB"), (1, 1, "100MB"), (2, 2, "0.5GiB")]
)
def test_the_memory_that_is_said_to_fit(
    config: Path, capsys: pytest.CaptureFixture[str], gpus: int, mini_batch: int, memory: str
) -> None:
    """It does; of a device whose context alone takes more nothing may be used, and not less."""
    config.write_text(json.dumps(SMALL))
    command = ["solve", str(config), "--gpus", str(gpus), "--gpu", "h100", "--mini-batch", str(mini_batch)]
    assert main([*command, "--memory", memory]) == 3
    what, hint = capsys.readouterr().err.splitlines()
    assert re.search(
        r"needs least, [\d.]+ MiB on a device, of which [\d.]+ (MiB|B) may be used of its ", what
    )
    enough = re.match(r"  What would fit: --memory ([\d.]+)GiB a device(?:; or .*)?\. Or use more", hint)
    assert enough is not None
    assert main([*command, "--memory", f"{enough[1]}GiB"]) == 0
    head = capsys.readouterr().out.splitlines()
    assert f" on {gpus} GPU{'s' if gpus > 1 else ''}: " in head[0]


def test_every_change_that_is_said_to_fit_does_with_its_step() -> None:
    """On a machine of a few GPUs; options that restrict the search are changes, too."""
    narrow: dict[str, Any] = {
        "mini_batch": 2,
        "gpu": "h100",
        "memory_bytes": 900 * 2**20,
        "recompute": "never",
    }
    narrow |= {"gpus": 2, "sequence": 16384, "tp": 1, "zero": 1, "pp": 1}
    with pytest.raises(InfeasibleError) as raised:
        pplan.solve(SMALL, **narrow)
    _, *changes = raised.value.details["would_fit"]
    free: dict[str, Any] = {"recompute": "auto", "tp": None, "zero": None, "pp": None}
    kinds = set()
    for words in changes:
        match = re.fullmatch(r"(.*) \(([\d.]+ \S+) a step\)", words)
        assert match is not None, words
        name, _, value = match[1].replace("any ", "").replace("`", "").partition("=")
        kinds.add(name)
        plan = pplan.solve(SMALL, **{**narrow, name: int(value) if value else free.get(name, True)})
        assert format_seconds(plan.prediction.step_seconds) == match[2], words
    assert kinds == {"sequence", "recompute", "gpus"}


def test_the_fastest_is_of_those_allowed_where_a_baseline_is_faster(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the table has it: `--tp 2` leaves out data parallelism, which is faster here."""
    config.write_text(json.dumps(SMALL))
    for allowed in (["--zero", "1,3"], ["--tp", "2"]):
        command = ["solve", str(config), "--gpus", "2", "--gpu", "h100", "--mini-batch", "8", *allowed]
        assert main([*command, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        steps = [own["step_seconds"] for own in answer["baselines"] if own["step_seconds"]]
        is_fastest = min(steps) >= answer["prediction"]["step_seconds"] * (1 - 1e-9)
        assert is_fastest == (allowed[0] == "--zero")
        assert main(command) == 0
        head = capsys.readouterr().out.splitlines()[0]
        assert (" is the fastest found on 2 GPUs" in head) == is_fastest
        assert (
            re.search(r" is the fastest found of those allowed \(.* is faster\) ", head) is None
        ) == is_fastest


def test_the_gpu_that_is_missing_is_an_option(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", str(config), "--gpus", "8"]) == 2
    assert "pplan: --gpu is missing" in capsys.readouterr().err

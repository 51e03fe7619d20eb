"""The training scripts that are written: they run by their own commands, and train as the model does."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pplan.cost_models.errors import ExportError
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile
from pplan.runtimes.exports import export
from pplan.runtimes.scripts.script import write_script

MakePlan = Callable[..., Plan]
ForkedPython = Callable[..., Any]
RunRanks = Callable[..., str]
SECONDS = 120
"""After which a process that hangs is killed."""
RUNTIMES = ("torchgpipe", "fairscale", "torch", "deepspeed")
NAMES = ["first", "relu", "second", "head"]
MODEL = """
import torch
from torch import nn


def make(width):
    first, second, head = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 5)
    layers = {"first": first, "relu": nn.ReLU(inplace=True), "second": second, "head": head}
    return nn.Sequential(__import__("collections").OrderedDict(layers)), torch.randn(3, 6)
"""


def profile(model: str, names: list[str], elements: int = 5, **keys: Any) -> Profile:
    """Of layers that return so many float32 a sample."""
    cost = {"micro_batch_size": 2, "forward_seconds": 0.1, "backward_seconds": 0.2}
    cost["output_bytes"] = 2 * 4 * elements
    layers = [{"name": name, "parameter_bytes": 8, "costs": [cost | {"saved_bytes": 8}]} for name in names]
    content = {
        "schema": 1,
        "model": model,
        "layers": layers,
        "inputs": [{"shape": [6], "dtype": "float32"}],
        "loss": {"name": "cross-entropy", "costs": layers[0]["costs"]},
    }
    return Profile.model_validate(content | keys)


def written(plan: Plan, measured: Profile | None, runtime: str, folder: Path, device: str = "cpu") -> str:
    """The text of the script, which stands in the folder beside its export."""
    document, _ = export(runtime, plan, device=device)
    path, plan_path = folder / f"train_{runtime}.py", folder / f"{runtime}.json"
    document.save(plan_path, force=True)
    named: dict[str, Any] = {}
    if measured is not None and ":" in measured.model.removeprefix("hf:"):
        named = {"model": measured.model, "settings": measured.settings}
    script = write_script(document, plan, measured, path=path, plan_path=plan_path, device=device, **named)
    path.write_text(script.text)
    assert script.text.startswith(f"# {script.command}\n")
    return script.text


def command_of(runtime: str, folder: Path) -> list[str]:
    """That of the script's first line, without the name of the program."""
    script = folder / f"train_{runtime}.py"
    program, *command = shlex.split(script.read_text().splitlines()[0].removeprefix("# "), comments=False)
    modules = [] if program == "python" else ["-m", "torch.distributed.run", "--standalone"]
    return [*modules, *command]


def by_its_command(forked: ForkedPython, command: list[str], folder: Path) -> str:
    done: subprocess.CompletedProcess[str] = forked(folder / "launcher", folder, *command).wait(SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def outputs(
    make_plan: MakePlan,
    forked_python: ForkedPython,
    run_ranks: RunRanks,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[str]]:
    """What each script says in a run of one step, and in another that is to go on to the second.

    torchrun is really started once; what comes after it is the same for the script.
    """
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "tiny_zoo.py").write_text(MODEL)
    said: dict[str, list[str]] = {}
    installed = [name for name in RUNTIMES if name != "deepspeed" or importlib.util.find_spec("deepspeed")]
    for runtime in installed:
        schedule = "gpipe" if runtime in ("torchgpipe", "fairscale") else "1f1b"
        plan = make_plan([1, 3], schedule=schedule, micro_batches=4, layer_names=NAMES, model="tiny_zoo:make")
        text = written(plan, profile("tiny_zoo:make", NAMES, settings={"width": 7}), runtime, folder)
        assert len(text.splitlines()) < 80
        command = command_of(runtime, folder)
        processes = 2 if runtime in ("torch", "deepspeed") else 1
        script = [word for word in command if word.endswith(".py")]
        by_itself = by_its_command(forked_python, [*command, "1"], folder) if runtime == "torch" else None
        said[runtime] = [
            by_itself or run_ranks([*script, "1"], folder, processes),
            run_ranks([*script, "2"], folder, processes),
        ]
    return said


def plain_losses() -> list[float]:
    """Of the same model, data and optimizer, two steps."""
    space: dict[str, Any] = {}
    exec(MODEL, space)
    torch.manual_seed(0)
    model: nn.Module = space["make"](7)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(2):
        random = torch.Generator().manual_seed(step)
        inputs, labels = torch.randn(8, 6, generator=random), torch.randint(5, (8,), generator=random)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_script_trains_and_goes_on(outputs: dict[str, list[str]], runtime: str) -> None:
    """The second layer, which overwrites what the first hands it, begins the second stage."""
    if runtime not in outputs:
        pytest.skip(f"{runtime} is not installed")
    steps = [
        re.findall(r"^step (\d+): loss (\d+\.\d+)$", out, flags=re.MULTILINE) for out in outputs[runtime]
    ]
    assert [[int(step) for step, _ in run] for run in steps] == [[0], [1]]
    losses = [float(loss) for run in steps for _, loss in run]
    assert losses == pytest.approx(plain_losses(), abs=2e-6)


BOTH_STREAMS = """
import runpy, sys
sys.stderr, sys.argv = sys.stdout, sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script whose errors and warnings go where its output goes."""


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_placeholder_says_so_once_before_the_first_step(
    make_plan: MakePlan, run_ranks: RunRanks, tmp_path: Path, runtime: str
) -> None:
    if not importlib.util.find_spec(runtime):
        pytest.skip(f"{runtime} is not installed")
    (tmp_path / "tiny_zoo.py").write_text(MODEL)
    is_one = runtime in ("torchgpipe", "fairscale")
    plan = make_plan(
        [1, 3],
        schedule="gpipe" if is_one else "1f1b",
        micro_batches=4,
        layer_names=NAMES,
        model="tiny_zoo:make",
    )
    measured = profile("tiny_zoo:make", NAMES, settings={"width": 7}, loss=None)
    written(plan, measured, runtime, tmp_path)
    said = run_ranks(["-c", BOTH_STREAMS, f"train_{runtime}.py", "2"], tmp_path, 1 if is_one else 2)
    assert said.count("WARNING: the loss is a placeholder, the output's mean square: edit loss_of") == 1
    losses = re.findall(r"^step (\d): (.*loss) \d+\.\d+$", said, flags=re.MULTILINE)
    assert losses == [("0", "placeholder loss"), ("1", "placeholder loss")]
    if is_one:
        assert said.index("WARNING") < said.index("step 0")


@pytest.mark.slow
def test_the_loss_of_replicas_is_that_of_all_samples(
    make_plan: MakePlan, run_ranks: RunRanks, tmp_path: Path
) -> None:
    (tmp_path / "tiny_zoo.py").write_text(MODEL)
    plan = make_plan([4], replicas=[2], micro_batch_size=4, layer_names=NAMES, model="tiny_zoo:make")
    written(plan, profile("tiny_zoo:make", NAMES, settings={"width": 7}), "torch", tmp_path)
    said = run_ranks(["train_torch.py", "2"], tmp_path, 2)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\d+\.\d+)$", said, flags=re.MULTILINE)]
    assert losses == pytest.approx(plain_losses(), abs=2e-6)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("model", "keys", "lines"),
    [
        (
            "vgg19",
            {"inputs": [{"shape": [3, 32, 32], "dtype": "float32"}], "classes": 10},
            [
                "import torchvision",
                'model = torchvision.models.get_model("vgg19", weights=None, num_classes=10)',
                "inputs = torch.randn(samples, 3, 32, 32, generator=random)",
                "labels = torch.randint(10, (samples,), generator=random)",
                "return cross_entropy(output, labels)",
            ],
        ),
        (
            "r3d_18",
            {"inputs": [{"shape": [3, 8, 32, 32], "dtype": "float32"}]},
            ["labels = torch.randint(400, (samples,), generator=random)"],
        ),
        (
            "hf:gpt2",
            {"inputs": [{"shape": [5], "dtype": "int64"}], "settings": {"layers": 2, "n_head": 1}},
            [
                'model, example = pplan.load_model("hf:gpt2", settings={"layers": 2, "n_head": 1})',
                "inputs = torch.randint(2, (samples, 5), generator=random)",
                "return cross_entropy(first.flatten(1), labels)",
            ],
        ),
        (
            "zoo:two",
            {"inputs": [{"shape": [5], "dtype": "int64"}, {"shape": [2, 3], "dtype": "float32"}]},
            [
                'model, example = pplan.load_model("zoo:two")',
                "torch.randint(2, (samples, 5), generator=random),",
                "torch.randn(samples, 2, 3, generator=random),",
            ],
        ),
        (
            "zoo:distance",
            {"loss": {"name": "mse", "costs": profile("m", ["a"]).layers[0].costs}},
            [
                "labels = torch.randn(samples, 5, generator=random)",
                "return mse_loss(first.flatten(1), labels)",
            ],
        ),
        ("zoo:own", {"loss": None}, ["Stands for your loss", "return first.square().mean()"]),
    ],
)
def test_what_the_model_decides(
    make_plan: MakePlan, tmp_path: Path, runtime: str, model: str, keys: dict[str, Any], lines: list[str]
) -> None:
    plan = make_plan(
        [2, 2],
        schedule="gpipe" if runtime in ("torchgpipe", "fairscale") else "1f1b",
        layer_names=NAMES,
        model=model,
    )
    text = written(plan, profile(model, NAMES, **keys), runtime, tmp_path, "cuda")
    ast.parse(text)
    assert len(text.splitlines()) < 80
    assert max(map(len, text.splitlines())) <= 110
    for line in lines:
        assert line in text
    assert "$" not in text
    for part in ("print(PLACEHOLDER", "step {step}: placeholder loss", "EDIT HERE"):
        assert text.count(part) == ("Stands for your loss" in text)


def test_tokens_have_a_label_each(make_plan: MakePlan, tmp_path: Path) -> None:
    measured = profile("hf:gpt2", NAMES, 5 * 11, inputs=[{"shape": [5], "dtype": "int64"}])
    text = written(make_plan([2, 2], layer_names=NAMES), measured, "torchgpipe", tmp_path)
    assert "inputs = torch.randint(11, (samples, 5), generator=random)" in text
    assert "labels = torch.randint(11, (samples, 5), generator=random)" in text
    assert 'return cross_entropy(first.flatten(0, 1), labels.flatten(), reduction="sum")' in text
    assert 'loss_reduction="sum",' in text
    assert "training.step(inputs, labels, divisor=(labels != -100).sum())" in text


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        ("sgd", "partial(torch.optim.SGD, lr=0.01)"),
        ("momentum", "partial(torch.optim.SGD, lr=0.01, momentum=0.9)"),
        ("adam", "partial(torch.optim.Adam, lr=0.001)"),
        ("adamw", "partial(torch.optim.AdamW, lr=0.001)"),
        ("adamw-8bit", "partial(bitsandbytes.optim.AdamW8bit, lr=0.001)"),
    ],
)
def test_the_plans_optimizer(make_plan: MakePlan, tmp_path: Path, optimizer: str, line: str) -> None:
    plan = make_plan([2, 2], optimizer=optimizer)
    text = written(plan, profile("vgg19", NAMES), "torchgpipe", tmp_path)
    assert line in text
    assert ("import bitsandbytes" in text) == (optimizer == "adamw-8bit")


def test_half_precision(make_plan: MakePlan, tmp_path: Path) -> None:
    """DeepSpeed converts the model; the others are given one that is converted."""
    measured = profile("vgg19", NAMES, dtype="bfloat16")
    plan = make_plan([2, 2], schedule="1f1b", dtype="bfloat16")
    text = written(plan, measured, "deepspeed", tmp_path)
    assert "model.to(" not in text
    assert "optimizer=" not in text
    text = written(plan, measured, "torch", tmp_path)
    assert "model.to(torch.bfloat16)" in text
    assert "generator=random, dtype=torch.bfloat16)" in text


def test_commands_of_several_nodes(make_plan: MakePlan, tmp_path: Path) -> None:
    plan = make_plan([2, 2], schedule="1f1b", gpus_per_node=1)
    text = written(plan, profile("vgg19", NAMES), "torch", tmp_path)
    assert text.startswith("# torchrun --nnodes 2 --nproc-per-node 1 train_torch.py\n")


@pytest.mark.parametrize("runtime", ["torch", "deepspeed"])
def test_nodes_with_different_numbers_of_devices(make_plan: MakePlan, tmp_path: Path, runtime: str) -> None:
    """One command of torchrun starts as many processes on each node."""
    plan = make_plan([2, 2, 2], schedule="1f1b", gpus_per_node=2)
    with pytest.raises(ExportError, match="2 on node 0, 1 on node 1: torchrun starts as many"):
        written(plan, profile("vgg19", NAMES), runtime, tmp_path)


@pytest.mark.parametrize("name", ["torch", "random", "numpy"])
def test_a_script_hides_no_module_that_it_imports(make_plan: MakePlan, tmp_path: Path, name: str) -> None:
    plan = make_plan([2, 2], schedule="1f1b")
    with pytest.raises(ExportError, match=rf"{name}\.py has the name of the installed module {name}"):
        write_script(
            export("torch", plan)[0],
            plan,
            profile("vgg19", NAMES),
            path=tmp_path / f"{name}.py",
            plan_path=tmp_path / "plan.json",
            device="cpu",
        )


def test_what_has_no_script(make_plan: MakePlan, make_decoder_plan: MakePlan, tmp_path: Path) -> None:
    plan = make_plan([2, 2])
    with pytest.raises(ExportError, match="fcn_resnet50 is no classifier"):
        written(plan, profile("fcn_resnet50", NAMES), "torchgpipe", tmp_path)
    with pytest.raises(ExportError, match="does not say what the model takes"):
        written(plan, profile("graph", NAMES, inputs=[]), "torchgpipe", tmp_path)
    with pytest.raises(ExportError, match="the profile that the plan of small was made from"):
        written(plan, None, "torchgpipe", tmp_path)
    with pytest.raises(ExportError, match="none is written, huggingface trains by your own script") as caught:
        written(make_decoder_plan([3, 2], schedule="naive"), None, "huggingface", tmp_path)
    assert "pplan.export('torch')" in caught.value.hint


@pytest.mark.parametrize(
    ("runtime", "program"),
    [
        ("megatron", "pretrain_gpt.py"),
        ("megatron-bridge", "RECIPE.py"),
        ("torchtitan", "-m torchtitan.train"),
    ],
)
def test_trainers_are_started_with_what_was_exported(
    make_decoder_plan: MakePlan, tmp_path: Path, runtime: str, program: str
) -> None:
    """The script runs, with a torchrun that prints what it is given."""
    plan = make_decoder_plan([3, 2])
    document, _ = export(runtime, plan)
    arguments, path = tmp_path / "plan.sh", tmp_path / "train it.sh"
    arguments.write_text(next(iter(document.files(arguments).values())))
    script = write_script(document, plan, None, path=path, plan_path=arguments, device="cuda")
    path.write_text(script.text)
    assert script.command.startswith("bash 'train it.sh' ")
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    own = ["RECIPE.py"] if program == "RECIPE.py" else ["--module", "a b"]
    done = subprocess.run(
        ["bash", str(path), *own],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    started_with = [] if program == "RECIPE.py" else program.split()
    exported = document.model_dump()["arguments"]
    assert done.stdout.splitlines() == ["--nproc-per-node", "2", *started_with, *own, *exported]
    with pytest.raises(ExportError, match=r"plan\.json would be the plan for pplan"):
        write_script(document, plan, None, path=path, plan_path=tmp_path / "plan.json", device="cuda")

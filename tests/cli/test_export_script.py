"""`pplan export --script`: what it writes and says, and refuses before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.cost_models.text_files import sha256
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import InputTensor, Profile

Run = Callable[..., Any]


@pytest.fixture
def files(here: Path, profile: Profile, plan: Plan) -> Path:
    """A plan that one process a stage runs, and the profile that it was made from."""
    measured = profile.model_copy(
        update={"model": "vgg19", "inputs": [InputTensor(shape=[3, 32, 32], dtype="float32")]}
    )
    measured.save(here / "toy.profile.json", force=False)
    content = plan.model_dump(mode="json", by_alias=True)
    first = content["stages"][0] | {"replicas": 1, "devices": [0]}
    content["stages"] = [first, *content["stages"][1:]]
    content["model"] = "vgg19"
    content["profile"] = {"file": "toy.profile.json"}
    content["profile"]["sha256"] = sha256((here / "toy.profile.json").read_bytes())
    Plan.model_validate(content).save(here / "toy.plan.json", force=False)
    return here


def test_a_script_is_written_beside_its_export(run: Run, files: Path) -> None:
    ran = run("export", "torch", "--script", "train.py")
    assert ran.status == 0, ran.err
    assert ran.lines[-2:] == [
        "Wrote vgg19.torch.json",
        "Wrote train.py. Run it where it is: torchrun --nproc-per-node 3 train.py",
    ]
    assert "build(" not in ran.out
    text = (files / "train.py").read_text()
    assert text.startswith("# torchrun --nproc-per-node 3 train.py\n")
    assert 'PLAN = HERE / "vgg19.torch.json"' in text


@pytest.mark.parametrize("runtime", ["torch", "deepspeed"])
@pytest.mark.parametrize("loss", [None, "my.losses:focal", "cross-entropy", "mse"])
def test_a_placeholder_for_the_loss_is_told(run: Run, files: Path, runtime: str, loss: str | None) -> None:
    """With the line to edit; a loss that the script computes is no placeholder."""
    file = files / "toy.profile.json"
    measured = Profile.load(file)
    costs = measured.layers[0].costs
    content = measured.model_dump(mode="json", by_alias=True) | {
        "model": "zoo:mine",
        "loss": loss and {"name": loss, "costs": [cost.model_dump(mode="json") for cost in costs]},
    }
    Profile.model_validate(content).save(file, force=True)
    plan = Plan.load(files / "toy.plan.json").model_dump(mode="json", by_alias=True)
    plan["profile"]["sha256"] = sha256(file.read_bytes())
    Plan.model_validate(plan).save(files / "toy.plan.json", force=True)
    ran = run("export", runtime, "--script", "train.py", "--model", "zoo:mine")
    assert ran.status == 0, ran.err
    said = [line for line in ran.lines if "placeholder" in line]
    if loss in ("cross-entropy", "mse"):
        assert said == []
        return
    (line,) = said
    assert line.startswith("train.py has a placeholder loss, because the profile names none")
    number = int(line.rpartition(" ")[2])
    text = (files / "train.py").read_text().splitlines()
    assert text[number - 1].startswith("def loss_of(")
    assert "EDIT HERE" in text[number]


def test_without_one_the_lines_are_shown(run: Run, files: Path) -> None:
    assert files
    ran = run("export", "torch")
    assert ran.status == 0, ran.err
    assert "actions" not in ran.out
    assert "schedule: Schedule1F1B\n" in ran.out
    script = [line.strip() for line in ran.out.splitlines() if line.startswith("    ")]
    assert script == [
        "from pplan.runtimes.torch_pipelining import build",
        "process = build('vgg19.torch.json', model, example_input=example_input, loss_fn=loss_fn)",
    ]


def test_the_script_finds_an_export_elsewhere(run: Run, files: Path) -> None:
    (files / "plans").mkdir()
    (files / "work").mkdir()
    ran = run("export", "torch", "-o", "plans/a.json", "--script", "work/train.py")
    assert ran.status == 0, ran.err
    assert 'PLAN = HERE / "../plans/a.json"' in (files / "work/train.py").read_text()


def test_a_script_is_never_overwritten(run: Run, files: Path) -> None:
    (files / "train.py").write_text("mine")
    ran = run("export", "torch", "--script", "train.py")
    assert ran.status == 2
    assert ran.lines[-2] == "pplan: train.py exists already"
    assert (files / "train.py").read_text() == "mine"
    assert not (files / "vgg19.torch.json").exists()
    assert run("export", "torch", "--script", "train.py", "--force").status == 0
    assert (files / "train.py").read_text() != "mine"


@pytest.mark.parametrize("path", ["toy.plan.json", "vgg19.torch.json"])
def test_a_script_is_not_its_plan(run: Run, files: Path, path: str) -> None:
    before = (files / "toy.plan.json").read_bytes()
    ran = run("export", "torch", "--script", path, "--force")
    assert ran.status == 2
    assert ran.lines[-2] == f"pplan: {path}: --script would overwrite what the script is made from"
    assert (files / "toy.plan.json").read_bytes() == before


def test_the_profile_is_needed(run: Run, files: Path) -> None:
    (files / "toy.profile.json").rename(files / "moved.json")
    ran = run("export", "torch", "--script", "train.py")
    assert ran.status == 2
    assert "was made from toy.profile.json, which is not beside it" in ran.lines[-2]
    assert not (files / "train.py").exists()
    assert not (files / "vgg19.torch.json").exists()
    assert run("export", "torch", "--script", "train.py", "--profile", "moved.json").status == 0
    assert (files / "train.py").exists()


def test_a_device_map_is_completed_for_the_model(run: Run, files: Path) -> None:
    """A profile names a layer by its first module: from_pretrained refuses a map without those beside it."""
    plan = Plan.load(files / "toy.plan.json")
    plan.model_copy(update={"schedule": "naive"}).save(files / "naive.plan.json", force=False)
    ran = run("export", "huggingface", "naive.plan.json", "--device", "cpu")
    assert ran.status == 0, ran.err
    shown = [line.strip() for line in ran.out.splitlines() if line.startswith("    ")]
    assert shown[0].startswith("from pplan.runtimes.huggingface import device_map")
    assert "places = device_map('vgg19.huggingface.json', empty)" in shown
    assert shown[-1].endswith("device_map=places)")

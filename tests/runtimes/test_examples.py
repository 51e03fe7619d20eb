"""The training scripts of the README: short, and running."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.planner.plan_file import Plan
from pplan.runtimes.exports import export

MakePlan = Callable[..., Plan]
EXAMPLES = Path(__file__).parents[2] / "examples"
SMALLER = """
import runpy, sys
import torch, torchvision
from torch import nn
from torchvision.models import vgg


def smaller():
    with torch.device("meta"):
        model = vgg.vgg19()
    model.features = vgg.make_layers(vgg.cfgs["E"])
    for name, given, out in (("0", 512 * 7 * 7, 64), ("3", 64, 64), ("6", 64, 1000)):
        setattr(model.classifier, name, nn.Linear(given, out))
    return model


torchvision.models.vgg19 = smaller
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script with 64 units where VGG-19's linear layers have 4096 and take 500 MB."""
NAMES = ["train_deepspeed.py", "train_fairscale.py", "train_torchgpipe.py"]


def test_every_script_is_tested() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == [*NAMES, "train_with_a_plan.py"]


@pytest.mark.parametrize("name", NAMES)
def test_fewer_than_thirty_lines(name: str) -> None:
    assert 0 < len((EXAMPLES / name).read_text().splitlines()) < 30


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torchgpipe", "fairscale"])
def test_the_script_trains(
    make_plan: MakePlan, forked_python: Callable[..., Any], tmp_path: Path, runtime: str
) -> None:
    """On 32 x 32 pixels, on the CPU. FairScale's must also come to its end."""
    plan = make_plan([19, 27], micro_batches=2, micro_batch_size=1, recompute="except_last", model="vgg19")
    export(runtime, plan, device="cpu")[0].save(tmp_path / f"vgg19.{runtime}.json", force=False)
    script = EXAMPLES / f"train_{runtime}.py"
    done = forked_python(
        tmp_path / "output", tmp_path, "-c", SMALLER, script, f"vgg19.{runtime}.json", "32"
    ).wait(300)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^step (\d): loss (\d+\.\d+)$", done.stdout, flags=re.MULTILINE)
    assert [step for step, _ in steps] == ["0", "1", "2"]
    assert len({loss for _, loss in steps}) > 1


@pytest.mark.slow
def test_the_script_of_deepspeed_trains(
    make_plan: MakePlan, run_ranks: Callable[..., str], tmp_path: Path
) -> None:
    """On the CPU, where DeepSpeed would first compile an operation."""
    pytest.importorskip("deepspeed")
    plan = make_plan([19, 27], micro_batches=2, micro_batch_size=1, schedule="1f1b", model="vgg19")
    export("deepspeed", plan, device="cpu")[0].save(tmp_path / "vgg19.deepspeed.json", force=False)
    script = str(EXAMPLES / "train_deepspeed.py")
    said = run_ranks(["-c", SMALLER, script, "vgg19.deepspeed.json", "32"], tmp_path, 2)
    assert re.findall(r"^step (\d): loss \d+\.\d+$", said, flags=re.MULTILINE) == ["0", "1", "2"]


RUNTIMES = ("torch", "torchgpipe", "fairscale", "deepspeed")


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_script_of_the_page_resumes_with_another_number_of_stages(
    make_plan: MakePlan, run_ranks: Callable[..., str], tmp_path: Path, runtime: str
) -> None:
    """Two epochs on two stages, the third on three."""
    pytest.importorskip(runtime)
    is_one = runtime in ("torchgpipe", "fairscale")
    script, said = str(EXAMPLES / "train_with_a_plan.py"), ""
    for balance, epochs in (([5, 6], "2"), ([4, 4, 3], "3")):
        schedule = "gpipe" if is_one else "1f1b"
        plan = make_plan(balance, micro_batches=4, micro_batch_size=8, schedule=schedule)
        file = f"{len(balance)}.{runtime}.json"
        export(runtime, plan, device="cpu" if is_one else None)[0].save(tmp_path / file, force=False)
        said += run_ranks([script, file, epochs], tmp_path, 1 if is_one else len(balance))
    lines = re.findall(
        r"^epoch (\d): loss (\d+\.\d+), gradient \d+\.\d+, test (\d+\.\d+)$", said, re.MULTILINE
    )
    assert [epoch for epoch, _, _ in lines] == ["0", "1", "2"]
    assert float(lines[2][2]) < float(lines[0][2])
    assert not (tmp_path / "train.checkpoint.partial").exists()

"""DeepSpeed, really run in two processes on the CPU where it is installed, against the plain model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from pplan.cost_models.errors import ExportError, MachineError
from pplan.planner.plan_file import Plan
from pplan.runtimes.deepspeed import DeepspeedExport, build
from pplan.runtimes.export import export

MakePlan = Callable[..., Plan]
WORKER = Path(__file__).with_name("deepspeed_worker.py")


def exported(plan: Plan) -> DeepspeedExport:
    document, _ = export("deepspeed", plan)
    assert isinstance(document, DeepspeedExport)
    return document


def run_processes(document: DeepspeedExport, folder: Path) -> list[dict[str, Any]]:
    """What each rank wrote."""
    path = folder / "small.deepspeed.json"
    document.save(path, force=False)
    ranks = document.num_stages * document.replicas
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(WORKER), str(path), str(folder)],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize(
    ("balance", "replicas", "recompute"),
    [([2, 8], [1, 1], "never"), ([5, 5], [1, 1], "always"), ([10], [2], "never")],
)
def test_training_is_the_plain_models(
    make_plan: MakePlan, tmp_path: Path, balance: list[int], replicas: list[int], recompute: str
) -> None:
    batches, steps = 3, 2
    plan = make_plan(
        balance,
        replicas=replicas,
        recompute=recompute,
        schedule="1f1b",
        micro_batches=batches,
        micro_batch_size=4,
    )
    ranks = run_processes(exported(plan), tmp_path)
    assert len(ranks) == 2
    assert [rank["layers"] for rank in ranks] == (balance if len(balance) == 2 else [10, 10])
    forwards = batches * (2 if recompute == "always" else 1)
    for rank in ranks:
        assert rank["fed"] == [4 // replicas[0]] * steps * forwards
        assert rank["losses"] == pytest.approx(rank["plain"]["losses"], rel=1e-6)
    trained = {name: value for rank in ranks for name, value in rank["parameters"].items()}
    plain = ranks[0]["plain"]["parameters"]
    assert sorted(trained) == sorted(plain)
    for name, value in plain.items():
        torch.testing.assert_close(torch.tensor(trained[name]), torch.tensor(value), rtol=1e-5, atol=1e-7)


def ten_layers(*plain: int) -> nn.Sequential:
    """Ten layers, of which `plain` have no parameters."""
    return nn.Sequential(*(nn.ReLU() if i in plain else nn.Linear(2, 2) for i in range(10)))


def test_another_models_layers_are_refused(make_plan: MakePlan) -> None:
    document = exported(make_plan([4, 7], schedule="1f1b", model="vgg11"))
    with pytest.raises(ExportError, match=r"for vgg11 with 11 layers, the model \(Sequential\) has 10"):
        build(document, ten_layers(), nn.functional.mse_loss)


def test_a_stage_without_parameters_is_refused(make_plan: MakePlan) -> None:
    document = exported(make_plan([4, 3, 3], schedule="1f1b"))
    with pytest.raises(ExportError, match=r"stage 1 \(layers 4 to 6\) has no parameters"):
        build(document, ten_layers(4, 5, 6), nn.functional.mse_loss)


def test_a_missing_package_names_its_extra(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", None)
    document = exported(make_plan([4, 6], schedule="1f1b"))
    with pytest.raises(MachineError) as caught:
        build(document, ten_layers(), nn.functional.mse_loss)
    assert 'pip install "pplan[deepspeed]"' in caught.value.hint


def test_what_is_no_sequential_is_refused(make_plan: MakePlan) -> None:
    document = exported(make_plan([4, 6], schedule="1f1b"))
    layers: Any = nn.ModuleList(ten_layers())
    with pytest.raises(ExportError, match="the model is of type ModuleList") as caught:
        build(document, layers, nn.functional.mse_loss)
    assert "pplan.sequential(model, example_input)" in caught.value.hint


@pytest.fixture
def no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name with nothing in it."""
    pipe = types.ModuleType("deepspeed.pipe")
    pipe.PipelineModule = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", pipe)


@pytest.mark.usefixtures("no_deepspeed")
def test_processes_that_do_not_know_each_other(make_plan: MakePlan, tmp_path: Path) -> None:
    assert not torch.distributed.is_initialized()
    path = str(tmp_path / "small.deepspeed.json")
    exported(make_plan([4, 6], schedule="1f1b")).save(path, force=False)
    with pytest.raises(MachineError, match=r"torch\.distributed is not initialized") as caught:
        build(path, ten_layers(), nn.functional.mse_loss)
    assert "deepspeed.init_distributed()" in caught.value.hint


@pytest.mark.usefixtures("no_deepspeed")
def test_another_number_of_processes_is_refused(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    document = exported(make_plan([4, 6], schedule="1f1b"))
    with pytest.raises(MachineError, match="4 processes, but 2 stages x 1 replicas") as caught:
        build(document, ten_layers(), nn.functional.mse_loss)
    assert "--nproc-per-node 2" in caught.value.hint

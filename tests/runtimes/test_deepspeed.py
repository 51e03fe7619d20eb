"""DeepSpeed, really run in two processes on the CPU where it is installed, against the plain model."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

from pplan.cost_models.errors import ExportError, MachineError
from pplan.planner.plan_file import Plan
from pplan.runtimes.deepspeed import build, start
from pplan.runtimes.documents import DeepspeedExport
from pplan.runtimes.exports import export

MakePlan = Callable[..., Plan]
WORKER = Path(__file__).with_name("deepspeed_worker.py")


def exported(plan: Plan) -> DeepspeedExport:
    document, _ = export("deepspeed", plan)
    assert isinstance(document, DeepspeedExport)
    return document


@dataclass(frozen=True)
class Case:
    """A plan for one of the worker's models, in `fine` layers where it is no nn.Sequential."""

    name: str
    model: str
    balance: Sequence[int]
    recompute: str = "never"
    replicas: int = 1

    def document(self, make_plan: MakePlan, alternative: Callable[..., dict[str, Any]]) -> DeepspeedExport:
        """Of the plan; that of replicas is an alternative of a plan which DeepSpeed cannot run."""
        plan = make_plan(
            self.balance if self.replicas == 1 else [4, 6],
            recompute=self.recompute,
            schedule="1f1b" if self.replicas == 1 else "gpipe",
            micro_batches=BATCHES,
            micro_batch_size=4,
            alternatives=[
                alternative(
                    runtimes=["deepspeed"],
                    balance=self.balance,
                    replicas=self.replicas,
                    schedule="1f1b",
                    micro_batches=BATCHES,
                    micro_batch_size=4,
                )
            ],
            profile={
                "file": "small.profile.json",
                "sha256": "0",
                "granularity": "block" if self.model == "vgg" else "fine",
            },
        )
        return exported(plan)


BATCHES, STEPS, RANKS = 3, 2, 2
CASES = [
    Case("vgg", "vgg", [2, 8]),
    # The second stage begins with an in-place operation.
    Case("vgg-again", "vgg", [4, 6], "always"),
    # Two tensors cross the cut, and beside them a mask does.
    Case("resnet", "resnet", [6, 5]),
    Case("resnet-again", "resnet", [4, 7], "always"),
    Case("transformer", "transformer", [12, 13]),
    Case("transformer-again", "transformer", [12, 13], "always"),
    Case("replicas", "vgg", [10], replicas=2),
    # The embedding and the head share a weight, and so do three linear layers, one of which comes twice.
    Case("tied", "tied", [4, 5]),
    Case("tied-again", "tied", [5, 4], "always"),
]
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(
    make_plan: MakePlan,
    alternative: Callable[..., dict[str, Any]],
    run_ranks: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Results:
    """What each rank found in each case."""
    folder = tmp_path_factory.mktemp("processes")
    orders = []
    for case in CASES:
        file = folder / f"{case.name}.deepspeed.json"
        case.document(make_plan, alternative).save(file, force=False)
        orders.append({"name": case.name, "model": case.model, "file": str(file)})
    (folder / "cases.json").write_text(json.dumps(orders))
    run_ranks([str(WORKER), str(folder)], folder, RANKS, DS_ACCELERATOR="cpu")
    return {
        case.name: [json.loads((folder / f"{case.name}.{rank}.json").read_text()) for rank in range(RANKS)]
        for case in CASES
    }


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_training_is_the_plain_models(results: Results, case: Case) -> None:
    """What the parameters are off after two steps is the gradients' error times the learning rate, 0.01."""
    ranks = results[case.name]
    assert [rank["layers"] for rank in ranks] == list(case.balance) * case.replicas
    forwards = BATCHES * (2 if case.recompute == "always" else 1)
    for rank in ranks:
        assert rank["fed"] == [4 // case.replicas] * STEPS * forwards
        assert rank["losses"] == pytest.approx(rank["plain_losses"], rel=1e-6)
        moved = max(rank["moved"].values())
        assert moved > 1e-5
        assert max(rank["off"].values()) < 1e-3 * moved
    trained = [name for rank in ranks for name in rank["off"]]
    assert sorted(set(trained)) == ranks[0]["names"]
    assert len(trained) == len(ranks[0]["names"]) * case.replicas + len(ranks[0]["shared"])
    assert len(ranks[0]["shared"]) == {"tied": 3, "tied-again": 2}.get(case.name, 0)


def ten_layers(*plain: int) -> nn.Sequential:
    """Ten layers, of which `plain` have no parameters."""
    return nn.Sequential(*(nn.ReLU() if i in plain else nn.Linear(2, 2) for i in range(10)))


def test_another_models_layers_are_refused(make_plan: MakePlan) -> None:
    document = exported(make_plan([4, 7], schedule="1f1b", model="vgg11"))
    with pytest.raises(ExportError, match=r"for vgg11 with 11 layers, the model \(Sequential\) has 10"):
        build(document, ten_layers(), nn.functional.mse_loss)


def test_a_stage_without_parameters_is_refused(make_plan: MakePlan) -> None:
    document = exported(make_plan([4, 3, 3], schedule="1f1b"))
    with pytest.raises(ExportError, match=r"stage 1 \(layers 4 to 6\) has nothing to train"):
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


def test_a_process_that_no_launcher_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(MachineError, match="LOCAL_RANK is not set") as caught:
        start("cpu")
    assert "torchrun" in caught.value.hint


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
    with pytest.raises(MachineError, match=r"4 processes, but 2 devices .* x 1 replicas") as caught:
        build(document, ten_layers(), nn.functional.mse_loss)
    assert "--nproc-per-node 2" in caught.value.hint

"""Scalars of trainings: what loggers are called with, and what TensorBoard's reader finds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pplan.cost_models.errors import MachineError, UsageError
from pplan.planner.plan_file import Plan
from pplan.runtimes.exports import export
from pplan.runtimes.loggers import make_logger
from pplan.runtimes.training import build


class Recorder:
    """Stands for a package: records what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            return self

        return record


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """TensorBoard's writer, wandb and mlflow that record."""
    recorder = Recorder()
    for name, attributes in (
        ("torch.utils.tensorboard", {"SummaryWriter": recorder.SummaryWriter}),
        ("wandb", {"init": recorder.init, "run": None}),
        ("mlflow", {"log_metrics": recorder.log_metrics}),
    ):
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return recorder


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        (
            "tensorboard:runs/one",
            [
                ("SummaryWriter", ("runs/one",), {}),
                ("add_scalar", ("loss", 2.0, 3), {}),
                ("add_scalar", ("step/measured_seconds", 0.5, 3), {}),
                ("flush", (), {}),
            ],
        ),
        (
            "wandb:mine",
            [
                ("init", (), {"project": "mine"}),
                ("log", ({"loss": 2.0, "step/measured_seconds": 0.5},), {"step": 3}),
            ],
        ),
        ("mlflow", [("log_metrics", ({"loss": 2.0, "step/measured_seconds": 0.5},), {"step": 3})]),
    ],
)
def test_each_package_gets_the_scalars(packages: Recorder, name: str, calls: list[tuple[Any, ...]]) -> None:
    make_logger(name)(3, {"loss": 2.0, "step/measured_seconds": 0.5})
    assert packages.calls == calls


@pytest.mark.parametrize("name", ["tensorboard", "tensorboard:", "mlflow:x", "csv:runs", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not known") as caught:
        make_logger(name)
    assert "tensorboard:FOLDER" in caught.value.hint


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MachineError, match="mlflow is not installed") as caught:
        make_logger("mlflow")
    assert caught.value.hint == "Install it: pip install mlflow"


@pytest.fixture
def training(make_plan: Callable[..., Plan]) -> Iterator[Any]:
    """A training of two stages in this process, predicted to take 0.5 s a step."""
    pytest.importorskip("torchgpipe")
    plan = make_plan([1, 1], micro_batches=4, micro_batch_size=2)
    document: Any = export("torchgpipe", plan, device="cpu")[0]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with build(document, model, cross_entropy, torch.randn(2, 4), optimizer=torch.optim.SGD) as training:
        yield training


def test_a_training_logs_every_second_step(training: Any) -> None:
    lines: list[tuple[int, Mapping[str, float]]] = []
    training.log_to(lambda step, scalars: lines.append((step, scalars)), every=2)
    losses = [training.step(torch.ones(8, 4), torch.zeros(8, dtype=torch.long)).item() for _ in range(5)]
    assert [step for step, _ in lines] == [2, 4]
    assert [scalars["loss"] for _, scalars in lines] == [losses[1], losses[3]]
    assert {scalars["step/predicted_seconds"] for _, scalars in lines} == {training.document.step_seconds}
    first, second = (scalars for _, scalars in lines)
    assert "step/measured_seconds" not in first
    assert second["step/measured_seconds"] > 0


def test_tensorboard_reads_them(training: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    training.log_to(f"tensorboard:{tmp_path}", every=1)
    loss = training.step(torch.ones(8, 4), torch.zeros(8, dtype=torch.long)).item()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "step/predicted_seconds"}
    (event,) = events.Scalars("loss")
    assert (event.step, event.value) == (1, pytest.approx(loss))

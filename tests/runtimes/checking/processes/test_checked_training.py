"""torchgpipe and FairScale in a process of a check: numerics, and which seconds are whose."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pplan.profiler.clocks import CpuClock
from pplan.runtimes import fairscale, torchgpipe
from pplan.runtimes.checking.processes import checked_training
from pplan.runtimes.checking.processes.checked_training import PartitionStamps
from pplan.runtimes.checking.processes.journal import RankJournal
from pplan.runtimes.checking.processes.worker import CaseRun, CheckGroup
from pplan.runtimes.checking.records import Case, Job, ModelSpec

MakeCase = Callable[..., Case]
MODEL = """
    import torch
    from torch import nn

    def small():
        layers = [nn.Linear(6, 8), nn.ReLU(inplace=True), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)]
        return nn.Sequential(*layers), torch.randn(3, 6)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, given):
            made = torch.tanh(self.first(given))
            return {"made": self.last(made + torch.tanh(self.second(made)))}

    def residual():
        return Residual(), torch.randn(3, 6)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models can be imported."""
    (tmp_path / "pipe_run_models.py").write_text(dedent(MODEL))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """The process group of a check in one process."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["torchgpipe", "fairscale"])
def runtime(request: pytest.FixtureRequest) -> Iterator[str]:
    """A runtime that is installed. FairScale's threads must be gone when the interpreter ends."""
    yield str(request.param)
    gc.collect()


@pytest.mark.filterwarnings("ignore:forward changes 2.running_mean")
@pytest.mark.usefixtures("models", "one_process")
@pytest.mark.parametrize(
    ("model", "balance", "checkpoint"),
    [
        # The second stage begins with an in-place operation.
        ("small", [1, 4], "never"),
        ("small", [1, 4], "except_last"),
        # Two tensors cross, and the model's output is a dict.
        ("residual", [4, 2], "always"),
        ("residual", [6], "never"),
    ],
)
def test_it_trains_as_the_plain_model(
    make_runtime_case: MakeCase,
    runtime: str,
    model: str,
    balance: list[int],
    checkpoint: str,
) -> None:
    case = make_runtime_case(runtime, balance, checkpoint=checkpoint)
    if model == "residual":
        case = case.model_copy(update={"document": case.document.model_copy(update={"granularity": "fine"})})
    name = f"pipe_run_models:{model}"
    granularity = "fine" if model == "residual" else "block"
    spec = ModelSpec(name=name, loss="mse", granularity=granularity, by_user=(name,))
    job = Job(model=spec, cases=[case], steps=2, warm_ups=1, compared_steps=2)
    group = CheckGroup(job, torch.device("cpu"), RankJournal(None, 0))

    found = CaseRun(group, case, compared=2).result()
    assert found.losses is not None
    assert found.losses.plain is not None
    assert len(set(found.losses.plain)) == 2
    assert found.losses.pipeline == pytest.approx(found.losses.plain, rel=1e-5)
    assert len(found.ran.step_seconds) == 2
    assert len(found.ran.stages) == len(balance)
    for stage in found.ran.stages:
        assert stage.forward > 0
        assert stage.backward > 0
    assert found.ran.peak_bytes == [None] * len(balance)


class Told(CpuClock):
    """A clock that goes on only as it is told."""

    def __init__(self) -> None:
        self.time = 0.0

    def stamp(self) -> float:
        return self.time


class Work(nn.Module):
    """Takes so long, on that clock."""

    def __init__(self, clock: Told, forward: float, backward: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, (forward, backward)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, given: Tensor) -> Tensor:
        made: Tensor = _Working.apply(given, self.weight, self)
        return made


class _Working(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, work: Work) -> Tensor:
        ctx.work = work
        work.clock.time += work.seconds[0]
        return given * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.work.clock.time += ctx.work.seconds[1]
        return gradient, gradient.sum(0), None


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_each_stage_has_its_own_seconds(
    monkeypatch: pytest.MonkeyPatch, runtime: str, checkpoint: str
) -> None:
    """The backward with what is recomputed; also of the first stage, whose input has no gradient."""
    clock = Told()
    monkeypatch.setattr(checked_training, "clock_for", lambda _: clock)
    work = [(1.0, 2.0), (4.0, 8.0), (16.0, 32.0), (64.0, 128.0)]
    layers = nn.Sequential(*(Work(clock, *own) for own in work))
    fields: dict[str, Any] = {
        "runtime": runtime,
        "model": "work",
        "mini_batch": 6,
        "micro_batch_size": 2,
        "step_seconds": 1.0,
        "balance": [2, 1, 1],
        "devices": ["cpu"] * 3,
        "chunks": 3,
        "checkpoint": checkpoint,
    }
    pipe: Any
    if runtime == "torchgpipe":
        pipe = torchgpipe.build(torchgpipe.TorchgpipeExport(**fields), layers)
    else:
        pipe = fairscale.build(fairscale.FairscaleExport(**fields), layers)
    cpu = torch.device("cpu")
    stamps = [PartitionStamps(stage, partition, cpu) for stage, partition in enumerate(pipe.partitions)]
    for _ in range(2):
        loss = pipe(torch.ones(6, 3)).sum()
        loss.backward()
        for own in stamps:
            own.settle()
    again = 0.0 if checkpoint == "never" else 1.0
    expected = [(5.0, 10.0 + 5.0 * again), (16.0, 32.0 + 16.0 * again), (64.0, 128.0 + 64.0 * again)]
    seconds = [own.stages()[stage] for stage, own in enumerate(stamps)]
    assert [(stage.forward, stage.backward) for stage in seconds] == expected
    recomputed = {"never": 0, "always": 3, "except_last": 2}[checkpoint]
    assert clock.time == 2 * (3 * (85.0 + 170.0) + recomputed * 85.0)
    for own in stamps:
        own.remove()
        own.forget()
    pipe(torch.ones(6, 3)).sum().backward()
    assert not any(own.stages() for own in stamps)

"""Live bytes counted by hand, and against torch's own memory tracker."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pplan.profiler.memory import (
    AllocatorBytes,
    CpuAllocations,
    LiveBytes,
    build_meter,
    lasting,
    sees_kernels,
    storages,
)

DEVICES = ["cpu", "meta"]


def test_a_storage_counts_once_until_the_last_view_is_gone() -> None:
    with LiveBytes("cpu") as live:
        whole = torch.zeros(10, 10)
        part = whole[2:4].t()
        part.add_(1)
        assert live.allocated() == 400
        del whole
        assert live.allocated() == 400
        del part
        assert live.allocated() == 0
        grown = torch.zeros(2)
        grown.resize_(8)
        assert live.allocated() == 32
        assert live.peak() == 400


def test_only_its_own_device_counts() -> None:
    with LiveBytes("meta") as live:
        kept = torch.ones(10), torch.ones(3, device="meta")
        assert live.allocated() == 12
        assert live.bytes_of(kept) == 12


def test_what_was_there_counts_from_its_first_use() -> None:
    before = torch.ones(4)
    with LiveBytes("cpu") as live:
        assert live.allocated() == 0
        after = before + 1
        assert live.allocated() == 16 + 16
        live.track([before, after])
        assert live.allocated() == 32


def test_sparse_gradients_do_no_harm() -> None:
    layer = nn.Embedding(10, 4, sparse=True)
    with LiveBytes("cpu", layer.parameters()) as live:
        torch.autograd.backward([layer(torch.tensor([1, 2])).sum()])
        assert live.allocated() >= 160


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.norm(given) + given
        return result


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        Norm(),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.GELU(),
        nn.Dropout(0.4),
        nn.Flatten(),
        nn.Linear(4 * 9, 7),
        nn.Softmax(1),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, 5])
def test_peaks_are_those_of_torchs_own_tracker(device: str, size: int) -> None:
    tracker_module: Any = pytest.importorskip("torch.distributed._tools.mem_tracker")
    model = convolutions().to(device)
    given = torch.ones(size, 3, 10, 10, device=device)

    def step() -> None:
        output = model(given)
        torch.autograd.backward([output], [torch.ones_like(output)])

    tracker = tracker_module.MemTracker()
    tracker.track_external(model, given)
    with tracker:
        step()
    (theirs,) = tracker.get_tracker_snapshot("peak").values()
    model.zero_grad(set_to_none=True)
    gc.collect()
    live = LiveBytes(device, [*lasting(model), given])
    with live:
        step()
    assert live.peak() == theirs["Total"]
    assert live.peak() > live.bytes_of(lasting(model)) + given.nbytes


def test_lasting_tensors_and_their_meter() -> None:
    linear, norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
    model = nn.Sequential(linear, norm)
    model(torch.ones(2, 4)).sum().backward()
    # 64 + 16 + 16 of weights and as much of gradients; 16 + 16 + 8 of buffers.
    with build_meter(torch.device("cpu"), model) as meter:
        start = meter.mark()
    assert meter.held_after(start) == meter.bytes_of(lasting(model)) == 2 * 96 + 40
    assert len(storages([linear.weight, linear.weight.t(), norm.bias])) == 2
    assert isinstance(build_meter(torch.device("cuda"), model), AllocatorBytes)


def test_the_allocator_is_asked_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    asked: list[torch.device] = []

    def told(answer: int) -> Callable[[torch.device], int]:
        def answered(which: torch.device) -> int:
            asked.append(which)
            return answer

        return answered

    monkeypatch.setattr(torch.cuda, "memory_allocated", told(7))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", told(9))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    with AllocatorBytes(device) as meter:
        meter.reset_peak()
        assert (meter.allocated(), meter.peak()) == (7, 9)
    assert asked == [device] * 3
    assert meter.bytes_of([torch.ones(3)]) == 0


def test_the_cpus_allocator_tells_of_tensors_what_live_bytes_do() -> None:
    before = torch.ones(4)
    with CpuAllocations([before]) as meter:
        start = meter.mark()
        twice = before + before
        after_one = meter.mark()
        torch.zeros(400)
        after_two = meter.mark()
        del twice
        end = meter.mark()
    assert [meter.held_after(interval) for interval in (start, after_one, after_two, end)] == [16, 32, 32, 16]
    assert (meter.peak_in(start), meter.peak_in(after_one), meter.peak_in(end)) == (16, 32, 32)
    assert meter.peak_in(after_two) == 32 + 1600


def test_the_cpus_allocator_tells_what_operators_allocate_for_themselves() -> None:
    """A convolution in float64 unfolds its input: channels x kernel^2 x outputs numbers a sample, which no
    tensor of a caller holds."""
    model = nn.Conv2d(3, 1, 5, bias=False, dtype=torch.float64)
    given = torch.ones(1, 3, 20, 20, dtype=torch.float64)
    peaks = []
    for meter in (LiveBytes("cpu", [model.weight, given]), CpuAllocations([model.weight, given])):
        with torch.no_grad(), meter:
            meter.mark()
            model(given)
            interval = meter.mark()
        peaks.append(meter.peak_in(interval))
    assert peaks[0] == 8 * (3 * 25 + 3 * 400 + 256)
    assert peaks[1] == peaks[0] + 8 * 3 * 25 * 256


def test_where_the_cpus_allocator_cannot_be_asked_tensors_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, model = torch.device("cpu"), nn.Linear(2, 2)
    with CpuAllocations(()):
        assert isinstance(build_meter(cpu, model), LiveBytes)
    assert isinstance(build_meter(cpu, model), CpuAllocations)
    monkeypatch.delattr(torch.autograd, "_enable_profiler_legacy")
    assert isinstance(build_meter(cpu, model), LiveBytes)
    assert not sees_kernels(torch.device("meta"))


@pytest.mark.gpu
def test_the_allocator_holds_what_its_tensors_take() -> None:
    torch.ones(1, device="cuda")
    with AllocatorBytes(torch.device("cuda")) as meter:
        before = meter.allocated()
        tensors = [torch.ones(3, device="cuda"), torch.ones(1000, device="cuda")]
        assert meter.allocated() - before == meter.bytes_of(tensors) == 512 + 4096

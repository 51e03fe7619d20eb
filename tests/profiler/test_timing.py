"""Passes and medians by a clock that only the layers move, so that every figure is known beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import ModelError
from pplan.profiler import clocks
from pplan.profiler.clocks import CpuClock, CudaClock
from pplan.profiler.layers import chain_of
from pplan.profiler.out_of_memory import is_out_of_memory
from pplan.profiler.timing import (
    LayerTimes,
    OutputGradients,
    Rounds,
    Stamps,
    WholeTimes,
    run_layers,
    run_whole,
    spread,
)


def one_pass(model: nn.Module, given: Tensor, clock: Any) -> LayerTimes:
    chain = chain_of(model, given)
    stamps = Stamps(clock, len(chain))
    run_layers(chain.layers, given.clone(), OutputGradients(0), stamps)
    return stamps.times()


def test_every_layer_gets_its_own_seconds(clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(clock, 1, 2), takes(clock, 3, 5), takes(clock, 7, 11))
    times = one_pass(model, torch.ones(2, 4), clock)
    assert times.forward.tolist() == [2, 6, 14]
    assert times.backward.tolist() == [4, 10, 22]
    assert times.forward_host is None


def test_one_layer(clock: Any, takes: Any) -> None:
    times = one_pass(nn.Sequential(takes(clock, 1, 2)), torch.ones(1, 4), clock)
    assert (times.forward.tolist(), times.backward.tolist()) == ([1], [2])


def test_host_seconds_are_kept_apart(device_clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(device_clock, 1, 2), takes(device_clock, 4, 8))
    times = one_pass(model, torch.ones(1, 4), device_clock)
    assert times.forward.tolist() == [1, 4]
    assert times.forward_host is not None
    assert times.backward_host is not None
    assert times.forward_host.tolist() == [0.25, 1]
    assert times.backward_host.tolist() == [0.5, 2]


def test_in_place_layers_between_do_not_move_the_stamps(clock: Any, takes: Any) -> None:
    model = nn.Sequential(
        takes(clock, 1, 2), nn.ReLU(inplace=True), takes(clock, 3, 5), nn.Dropout(0.5, inplace=True)
    )
    times = one_pass(model, torch.ones(1, 4), clock)
    assert times.forward.tolist() == [1, 0, 3, 0]
    assert times.backward.tolist() == [2, 0, 5, 0]


def test_an_overwritten_view_gives_its_time_to_the_next_layer(clock: Any, takes: Any) -> None:
    model = nn.Sequential(
        takes(clock, 1, 2), nn.Flatten(0), nn.ReLU(inplace=True), nn.Unflatten(0, (1, 4)), takes(clock, 3, 5)
    )
    times = one_pass(model, torch.ones(1, 4), clock)
    assert times.backward.sum() == 7
    assert times.backward[0] == 2
    assert times.backward[-1] == 5


def test_layers_that_return_their_input(clock: Any, takes: Any) -> None:
    model = nn.Sequential(nn.Identity(), takes(clock, 1, 2), nn.Identity(), nn.Identity(), takes(clock, 3, 5))
    times = one_pass(model, torch.ones(1, 4), clock)
    assert times.backward.tolist() == [0, 2, 0, 0, 5]


def test_frozen_layers_have_no_backward(clock: Any, takes: Any) -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(frozen, nn.ReLU(), takes(clock, 1, 2), takes(clock, 3, 5))
    assert one_pass(model, torch.ones(1, 4), clock).backward.tolist() == [0, 0, 2, 5]


def test_a_branching_layer_is_one(clock: Any, takes: Any) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = takes(clock, 2, 4)

        def forward(self, given: Tensor) -> Tensor:
            result: Tensor = self.inner(given) + given
            return result

    model = nn.Sequential(takes(clock, 1, 2), Residual(), takes(clock, 3, 5))
    times = one_pass(model, torch.ones(1, 4), clock)
    assert times.forward.tolist() == [1, 2, 3]
    assert times.backward.tolist() == [2, 4, 5]


def test_the_whole_model_has_no_hooks_and_the_same_sum(clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(clock, 1, 2), takes(clock, 3, 5))
    times = run_whole(model, torch.ones(2, 4), OutputGradients(0), clock)
    assert times == WholeTimes(forward=8, backward=14)


def test_gradients_are_those_of_the_untouched_model_and_accumulate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)).double()
    given = torch.randn(5, 4, dtype=torch.float64)
    one_pass(model, given, CpuClock())
    layers = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    run_whole(model, given, OutputGradients(0), CpuClock())
    whole = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(layers) == len(whole) == 4
    assert all(torch.equal(a, b) for a, b in zip(layers, whole, strict=True))
    run_whole(model, given, OutputGradients(0), CpuClock())
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), whole, strict=True))  # type: ignore[arg-type]


def test_output_gradients_are_drawn_once_and_from_the_seed() -> None:
    output = {"a": torch.ones(2, 3, requires_grad=True), "b": 3, "c": [torch.ones(1, requires_grad=True)]}
    gradients = OutputGradients(5)
    tensors, starts = gradients.of(output)
    assert [t.shape for t in starts] == [t.shape for t in tensors] == [(2, 3), (1,)]
    assert gradients.of(output)[1][0] is starts[0]
    assert torch.equal(OutputGradients(5).of(output)[1][0], starts[0])
    with pytest.raises(ModelError, match="needs no gradient"):
        gradients.of(torch.ones(2))


def test_a_failing_backward_is_the_models(clock: Any) -> None:
    class Breaks(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            result = given.exp()
            result.detach().add_(1)
            return result

    model = nn.Sequential(nn.Linear(2, 2), Breaks())
    with pytest.raises(ModelError, match="backward failed: RuntimeError: one of the variables needed"):
        run_whole(model, torch.ones(1, 2), OutputGradients(0), clock)


def rounds() -> Rounds:
    made = Rounds()
    for forward, backward, whole in [(1.0, 10.0, 12.0), (5.0, 20.0, 20.0), (2.0, 60.0, 40.0)]:
        made.layers.append(LayerTimes(np.array([forward, 1]), np.array([backward, 2])))
        made.whole.append(WholeTimes(whole, 2 * whole))
    return made


def test_medians_and_spread_by_hand() -> None:
    made = rounds()
    assert made.medians("forward").tolist() == [2, 1]
    assert made.medians("backward").tolist() == [20, 2]
    assert made.host_medians("forward") == [None, None]
    assert made.whole_medians() == (20, 40)
    # Sums 11, 25, 62: quartiles half way to the median, 18 and 43.5.
    assert made.spreads().tolist() == [(43.5 - 18) / 25, 0]
    assert made.whole_spread() == (90 - 48) / 60


def test_uncertainty_falls_with_the_root_of_the_rounds() -> None:
    made = rounds()
    # Sums 14, 28, 65: quartiles 21 and 46.5; the whole's spread is 0.7.
    one = 1.2533 / 1.349 * max((46.5 - 21) / 28, 0.7) / np.sqrt(3)
    assert made.uncertainty() == pytest.approx(one)
    many = Rounds(made.layers * 40, made.whole * 40)
    # Of 120 sums the quartiles are 14 and 65.
    assert many.uncertainty() == pytest.approx(1.2533 / 1.349 * (65 - 14) / 28 / np.sqrt(120))


def test_spread_of_nothing_is_none() -> None:
    assert spread(np.zeros((4, 1))).tolist() == [0]


def test_an_allocator_that_refuses_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**52, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


class FakeEvent:
    made = 0
    time = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made += 1

    def record(self) -> None:
        FakeEvent.time += 250
        self.at = FakeEvent.time

    def elapsed_time(self, other: FakeEvent) -> float:
        return float(other.at - self.at)


def test_cuda_clock_reads_milliseconds_and_uses_events_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    host = iter(range(100))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(clocks, "perf_counter", lambda: float(next(host)))
    clock = CudaClock(torch.device("cuda", 1))
    for _ in range(3):
        start, end = clock.stamp(), clock.stamp()
        clock.settle()
        assert clock.seconds(start, end) == 0.25
        assert clock.host_seconds(start, end) == 1.0
    assert FakeEvent.made == 2
    assert waited == [torch.device("cuda", 1)] * 3

"""Passes by a clock that only the layers move, so that every figure is known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import ModelError
from pplan.profiler import clocks
from pplan.profiler.clocks import CpuClock, CudaClock
from pplan.profiler.layer import Layer
from pplan.profiler.layers import build_chain
from pplan.profiler.losses import Loss
from pplan.profiler.passes import (
    LayerStamps,
    LayerTimes,
    OutputGradients,
    PassTimes,
    run_layers,
    run_whole,
    time_gradient_adding,
)
from pplan.profiler.timed_passes import TimedPasses
from pplan.profiler.user_model import ModelInput, is_out_of_memory


def one_pass(model: nn.Module, given: Tensor, clock: Any) -> LayerTimes:
    return times_of(build_chain(model, given).layers, given.clone(), clock)


def times_of(layers: Sequence[Layer], given: Any, clock: Any, **options: Any) -> LayerTimes:
    stamps = LayerStamps(clock, len(layers))
    run_layers(layers, given, OutputGradients(0), stamps, **options)
    return stamps.times()


def in_order(*modules: nn.Module) -> list[Layer]:
    """Layers that hand tuples to each other."""
    return [
        Layer(str(index), type(module).__name__, module, None, tuple(module.parameters()), (), None)
        for index, module in enumerate(modules)
    ]


class On(nn.Module):
    """Runs `inner` on entry `at` of a tuple, in the place of it or, with `keep`, besides it at the end."""

    def __init__(self, inner: nn.Module, at: int = 0, *, keep: bool = False) -> None:
        super().__init__()
        self.inner, self.at, self.keep = inner, at, keep

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        made = self.inner(given[self.at])
        if self.keep:
            return (*given, made)
        return (*given[: self.at], made, *given[self.at + 1 :])


class Join(nn.Module):
    """Adds the last two entries of a tuple, after `inner` ran on the first of these."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
        made: Tensor = given[-2] + self.inner(given[-1])
        return (*given[:-2], made) if len(given) > 2 else made


def test_a_tensor_handed_through_three_layers_stamps_nothing(clock: Any, takes: Any) -> None:
    # The first layer's tensor crosses three cuts, and is complete only when the last layers have used it.
    layers = in_order(
        On(takes(clock, 1, 2)),
        On(takes(clock, 3, 4), keep=True),
        On(takes(clock, 5, 6), at=1),
        On(takes(clock, 7, 8), at=1),
        Join(takes(clock, 9, 10)),
    )
    times = times_of(layers, (torch.ones(1, 4),), clock)
    assert times.forward.tolist() == [1, 3, 5, 7, 9]
    assert times.backward.tolist() == [2, 4, 6, 8, 10]


def test_skips_as_in_a_u_net(clock: Any, takes: Any) -> None:
    layers = in_order(
        On(takes(clock, 1, 2)),
        On(takes(clock, 3, 4), at=0, keep=True),
        On(takes(clock, 5, 6), at=1, keep=True),
        On(nn.ReLU(inplace=True), at=2),
        Join(takes(clock, 7, 8)),
        On(nn.Identity()),
        Join(takes(clock, 9, 10)),
    )
    times = times_of(layers, (torch.ones(1, 4),), clock)
    assert times.forward.tolist() == [1, 3, 5, 0, 7, 0, 9]
    assert times.backward.tolist() == [2, 4, 6, 0, 8, 0, 10]


def test_two_outputs_consumed_at_different_depths(clock: Any, takes: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = takes(clock, 1, 2), takes(clock, 3, 4)

        def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
            near = self.first(given)
            return near, self.second(near)

    for order in (0, 1):
        layers = in_order(
            takes(clock, 1, 1), Two(), On(takes(clock, 5, 6), at=order), Join(takes(clock, 7, 8))
        )
        times = times_of(layers, torch.ones(1, 4), clock)
        assert times.forward.tolist() == [1, 4, 5, 7]
        assert times.backward.tolist() == [1, 6, 6, 8]


def test_an_output_that_nobody_uses_does_not_matter(clock: Any, takes: Any) -> None:
    class Drops(nn.Module):
        def forward(self, given: tuple[Tensor, ...]) -> Tensor:
            return given[0]

    layers = in_order(
        On(takes(clock, 1, 2), keep=True), On(takes(clock, 3, 4), at=1), Drops(), takes(clock, 5, 6)
    )
    given = torch.ones(1, 4, requires_grad=True) * 1
    assert times_of(layers, (given,), clock).backward.tolist() == [0, 0, 0, 6]


def test_tensors_overwritten_inside_a_tuple(clock: Any, takes: Any) -> None:
    layers = in_order(
        On(takes(clock, 1, 2), keep=True),
        On(nn.ReLU(inplace=True), at=1),
        On(takes(clock, 3, 4), at=1),
        On(nn.ReLU(inplace=True), at=1),
        Join(takes(clock, 5, 6)),
    )
    times = times_of(layers, (torch.ones(1, 4),), clock)
    assert times.backward.tolist() == [2, 0, 4, 0, 6]


def test_a_parameter_that_is_handed_on_keeps_no_hook(clock: Any, takes: Any) -> None:
    class Hands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1, 4))
            self.inner = takes(clock, 1, 2)

        def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(given), self.bias

    hands = Hands()
    times = times_of(in_order(hands, Join(takes(clock, 3, 4))), torch.ones(1, 4), clock)
    assert times.backward.tolist() == [2, 4]
    assert not hands.bias._backward_hooks


def test_the_loss_is_one_layer_more(device_clock: Any, takes: Any) -> None:
    clock = device_clock

    class Timed(Loss):
        def prepare(self, output: Any) -> None:  # noqa: ARG002
            clock.advance(100, 100)  # Outside the time.

    inner = takes(clock, 7, 8)
    loss = Timed("timed", lambda output: inner(output).sum())
    layers = build_chain(nn.Sequential(takes(clock, 1, 2), takes(clock, 3, 4)), torch.ones(1, 4)).layers
    times = times_of(layers, torch.ones(1, 4), clock, loss=loss)
    assert (times.forward.tolist(), times.backward.tolist()) == ([1, 3], [2, 4])
    assert times.loss == PassTimes(7, 8, 1.75, 2)
    made = TimedPasses([times, times], [PassTimes(4, 6)] * 2)
    assert made.loss_medians() == times.loss
    assert TimedPasses([times_of(layers, torch.ones(1, 4), clock)]).loss_medians() is None


def test_forwards_and_the_loss_run_in_the_context_and_backward_outside(clock: Any) -> None:
    seen: list[bool] = []

    class Looks(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            result: Tensor = Linear.apply(given)
            return result

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Tensor) -> Tensor:  # noqa: ARG004
            return given * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient * 2

    def looks(output: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return output.sum()

    model = nn.Sequential(nn.Linear(4, 4), Looks())
    context = partial(torch.autocast, "cpu", torch.bfloat16)
    times_of(in_order(*model), torch.ones(1, 4), clock, loss=Loss("looks", looks), context=context)
    assert seen == [True, True, False]
    run_whole(model, ModelInput.of(torch.ones(1, 4)), OutputGradients(0), clock, context=context)
    assert seen[3:] == [True, False]


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
    times = run_whole(model, ModelInput.of(torch.ones(2, 4)), OutputGradients(0), clock)
    assert times == PassTimes(forward=8, backward=14)


def test_gradients_are_those_of_the_untouched_model_and_accumulate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)).double()
    given = torch.randn(5, 4, dtype=torch.float64)
    one_pass(model, given, CpuClock())
    layers = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    run_whole(model, ModelInput.of(given), OutputGradients(0), CpuClock())
    whole = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert len(layers) == len(whole) == 4
    assert all(torch.equal(a, b) for a, b in zip(layers, whole, strict=True))
    run_whole(model, ModelInput.of(given), OutputGradients(0), CpuClock())
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
        run_whole(model, ModelInput.of(torch.ones(1, 2)), OutputGradients(0), clock)


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


def test_what_events_take_themselves_is_no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: device)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: cycles)
    clock = CudaClock(torch.device("cuda", 0))
    clock.calibrate()
    start, end, later = clock.stamp(), clock.stamp(), clock.stamp()
    clock.settle()
    # 250 ms lie between any two of these events in a row.
    assert (clock.seconds(start, end), clock.seconds(start, later)) == (0.0, 0.25)


def test_a_cuda_device_is_held_back_for_so_many_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: device)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    clock = CudaClock(torch.device("cuda", 0))
    clock.hold_back(0)
    assert slept == []
    # Between two of these events lie 250 ms.
    clock.hold_back(0.5)
    assert slept[-1] == 2 * slept[0]
    # At twice the speed.
    monkeypatch.setattr(FakeEvent, "elapsed_time", lambda *_: 125.0)
    clock.hold_back(0.5)
    assert slept[4:] == [2 * slept[0]]
    clock.calibrate()
    clock.hold_back(0.5)
    assert slept[-1] == 4 * slept[0]


def layer(module: nn.Module, parameters: list[nn.Parameter]) -> Layer:
    return Layer("own", "Linear", module, None, tuple(parameters), (), None)


def gradients(module: nn.Module) -> list[object]:
    return [own.grad.tolist() for own in module.parameters() if own.grad is not None]


def test_every_trained_parameter_is_added_to_once(clock: Any, monkeypatch: Any) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    second.bias.requires_grad = False
    first(torch.ones(1, 3)).sum().backward()
    kept = gradients(first)
    layers = [layer(first, list(first.parameters())), layer(nn.ReLU(), []), layer(second, [second.bias])]

    def add(own: Tensor, other: Tensor) -> Tensor:
        clock.advance(float(own.numel()), 0.0)
        return own.add_(other)

    monkeypatch.setattr(Tensor, "__iadd__", add)
    assert time_gradient_adding(layers, clock, 3) == [12, 0, 0]
    assert gradients(first) == kept


def test_large_gradients_take_longer_than_small_ones() -> None:
    large, small = nn.Linear(1000, 1000), nn.Linear(2, 2)
    seconds = time_gradient_adding(
        [layer(own, list(own.parameters())) for own in (large, small)], CpuClock(), 3
    )
    assert seconds[0] > seconds[1] > 0

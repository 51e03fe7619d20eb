"""A device that only starts what was launched, by a clock that both move: seconds held back and not."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pplan.profiler import clocks
from pplan.profiler.clocks import Direction, DirectionTimes, LeadTuner
from pplan.profiler.layers import build_chain
from pplan.profiler.modes import MeasurementTarget
from pplan.profiler.passes import LayerStamps, LayerTimes, OutputGradients, run_layers, stamped_layers
from pplan.profiler.size_run import SizePasses, SizeRun
from pplan.profiler.size_sweep import WholeSweep
from pplan.profiler.timed_passes import link_sizes
from pplan.profiler.user_model import LoadedModel, ModelInput

DEPTH = 1024
"""Launches that a stream takes ahead."""
HOST, FAST, SLOW = 6e-6, 2e-6, 50e-6
"""Seconds of a launch, and on the device."""

Seconds = tuple[float, float] | tuple[float, float, int]
"""Device's, host's; and, where it is not one, how many launches these are of."""


@pytest.fixture(autouse=True)
def _longer_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed by hand here takes whole seconds."""
    monkeypatch.setattr(clocks, "LONGEST", 100.0)


class Queue:
    """A host that launches, and a device that works through what was launched, in order.

    Where `depth` launches wait, the host waits for the first of them.
    """

    has_host = True

    def __init__(self, depth: int | None = None) -> None:
        self.host = self.device = 0.0
        self.slower = 1.0
        """What the host's launches take, of what they do otherwise."""
        self._ends: deque[float] = deque(maxlen=depth)
        self._depth = depth

    def __deepcopy__(self, memo: object) -> Queue:
        return self

    def advance(self, device: float, host: float, launches: int = 1) -> None:
        for _ in range(launches):
            self.host += self.slower * host / launches
            if len(self._ends) == self._depth:
                self.host = max(self.host, self._ends[0])
            self.device = max(self.device, self.host) + device / launches
            if self._depth is not None:
                self._ends.append(self.device)

    def calibrate(self) -> None:
        assert self.host >= self.device, "inside what is timed"

    def hold_back(self, seconds: float) -> None:
        if seconds:
            self.advance(seconds, 0.0)

    def stamp(self) -> tuple[float, float]:
        return max(self.device, self.host), self.host

    def settle(self) -> None:
        self.host = max(self.host, self.device)

    def seconds(self, start: tuple[float, float], end: tuple[float, float]) -> float:
        return end[0] - start[0]

    def host_seconds(self, start: tuple[float, float], end: tuple[float, float]) -> float:
        return end[1] - start[1]

    def now(self) -> float:
        return self.host


class Launches(nn.Module):
    """Takes so many seconds for forward, for backward and, with `weights`, for the weight's gradient."""

    def __init__(
        self, queue: Queue, forward: Seconds, backward: Seconds, weights: Seconds | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.queue, self.forwards, self.backwards, self.weights = queue, forward, backward, weights

    def forward(self, given: Tensor) -> Tensor:
        self.queue.advance(*self.forwards)
        weight = self.weight if self.weights is None else _Launches.apply(self.weight, self, self.weights)
        result: Tensor = _Launches.apply(given * weight, self, self.backwards)
        return result


class _Launches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, layer: Launches, seconds: Seconds) -> Tensor:
        ctx.layer, ctx.seconds = layer, seconds
        return given * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.layer.queue.advance(*ctx.seconds)
        return gradient, None, None


class Waits(Launches):
    """Needs a value of its input, as `.item()` does."""

    def forward(self, given: Tensor) -> Tensor:
        self.queue.settle()
        return super().forward(given)


def host_bound(queue: Queue) -> nn.Module:
    return nn.Sequential(
        Launches(queue, (1, 4), (2, 8)), Launches(queue, (6, 4), (3, 9)), Launches(queue, (1, 8), (5, 7))
    )


def one_pass(model: nn.Module, queue: Queue, leads: LeadTuner | None = None) -> LayerTimes:
    layers = build_chain(model, torch.ones(1, 4)).layers

    def run(stamps: LayerStamps) -> None:
        queue.settle()
        run_layers(layers, torch.ones(1, 4), OutputGradients(0), stamps)

    return stamped_layers(run, queue, len(layers), leads or LeadTuner())


def settled(model: nn.Module, queue: Queue) -> LeadTuner:
    leads = LeadTuner()
    for _ in range(9):
        if not leads.is_settled:
            one_pass(model, queue, leads)
    assert leads.is_settled
    return leads


def subject_of(model: nn.Module, queue: Queue) -> MeasurementTarget:
    example = ModelInput.of(torch.ones(1, 4))
    loaded, chain = LoadedModel(model, "model", example), build_chain(model, example)
    return MeasurementTarget(loaded, chain, torch.device("cpu"), torch.float32, queue, 0)


def measured(model: nn.Module, queue: Queue, *, parts: bool = False, rounds: int = 3) -> SizeRun:
    """As a sweep measures a size."""
    run = SizeRun(subject_of(model, queue), 1, parts=parts)
    run.warm_up(lambda _layer: None)
    run.warm_up_parts()
    for _ in range(rounds):
        run.round()
    return run


def many(queue: Queue, device: float, forward: int, backward: int, layers: int = 20) -> nn.Module:
    """So many launches in each direction, evenly over the layers."""
    each = [
        (count // layers * device, count // layers * HOST, count // layers) for count in (forward, backward)
    ]
    return nn.Sequential(*(Launches(queue, each[0], each[1]) for _ in range(layers)))


def launches_alone(forward: int, backward: int) -> dict[str, float]:
    """The sums of so many launches that wait for nothing."""
    return {
        "forward": forward * FAST,
        "backward": backward * FAST,
        "forward host": forward * HOST,
        "backward host": backward * HOST,
    }


def sums(run: SizeRun) -> dict[str, float]:
    """Seconds of all layers."""
    rounds = run.rounds
    return {
        "forward": sum(rounds.medians("forward")),
        "backward": sum(rounds.medians("backward")),
        "forward host": sum(seconds or 0.0 for seconds in rounds.host_medians("forward")),
        "backward host": sum(seconds or 0.0 for seconds in rounds.host_medians("backward")),
    }


def test_without_a_lead_waiting_for_the_host_counts_as_the_layers() -> None:
    queue = Queue()
    times = one_pass(host_bound(queue), queue)
    assert times.forward.tolist() == [5, 9, 3]
    assert times.forward_host is not None
    assert times.forward_host.tolist() == [4, 4, 8]


def test_held_back_the_device_has_its_own_seconds_and_the_host_its_own() -> None:
    queue, leads = Queue(), LeadTuner()
    model = host_bound(queue)
    one_pass(model, queue, leads)
    for number in range(4):
        times = one_pass(model, queue, leads)
        assert times.forward == pytest.approx([1, 6, 1])
        assert times.backward == pytest.approx([2, 3, 5])
        assert times.forward_host == pytest.approx([4, 4, 8])
        assert times.backward_host == pytest.approx([8, 9, 7])
        assert leads.is_settled, number
    # Launched after 4, 8, 16, and done after 0, 1, 7; backward 7, 16, 24 and 0, 5, 8.
    assert leads.forward.lead() == pytest.approx(9)
    assert leads.backward.lead() == pytest.approx(16)
    assert leads.leads.forward == pytest.approx(1.3 * 16, abs=1e-4)
    assert leads.forward.holds is not None
    assert leads.forward.holds == pytest.approx([1.2 * 4, 1.2 * 8 - 1.2 * 4 - 1, 1.2 * 8 - 6], abs=1e-4)
    assert leads.short == ()


def test_a_device_that_is_the_limit_is_hardly_held_back() -> None:
    queue = Queue()
    model = nn.Sequential(*(Launches(queue, (10, 1), (20, 2)) for _ in range(3)))
    leads = settled(model, queue)
    assert leads.forward.holds == pytest.approx([1.2 * 1, 0, 0], abs=1e-4)
    assert leads.backward.holds == pytest.approx([1.2 * 2, 0, 0], abs=1e-4)
    assert one_pass(model, queue, leads).forward == pytest.approx([10, 10, 10])


def test_a_whole_size_by_hand() -> None:
    queue = Queue()
    model = nn.Sequential(
        Launches(queue, (1, 4), (2, 8), (3, 5)),
        Launches(queue, (6, 4), (3, 9), (1, 7)),
        Launches(queue, (1, 8), (5, 7), (2, 9)),
    )
    run = measured(model, queue, parts=True)
    assert run.rounds.medians("forward") == pytest.approx([1, 6, 1])
    assert run.rounds.medians("backward") == pytest.approx([5, 4, 7])
    assert run.rounds.host_medians("forward") == pytest.approx([4, 4, 8])
    assert run.rounds.host_medians("backward") == pytest.approx([13, 16, 16])
    assert run.rounds.whole_medians() == pytest.approx((8, 16))
    # All that the first layer does backwards is for its weight.
    assert run.rounds.part_medians("input") == pytest.approx([0, 3, 5])
    assert run.rounds.part_medians("weight") == pytest.approx([5, 1, 2])
    assert run.rounds.backward_parts_ratio() == pytest.approx(1)
    assert run.lead_note is None


def test_a_lead_fills_no_more_than_the_queue() -> None:
    queue = Queue(DEPTH)
    run = measured(many(queue, FAST, 1200, 1200), queue)
    assert sums(run) == pytest.approx(launches_alone(1200, 1200))
    assert run.lead_note is None


def test_layers_of_more_launches_than_a_queue_takes_have_their_own_seconds_and_the_whole_has_not() -> None:
    queue = Queue(DEPTH)
    run = measured(many(queue, FAST, 400, 4000), queue)
    assert sums(run) == pytest.approx(launches_alone(400, 4000))
    assert run.rounds.whole_medians()[0] == pytest.approx(400 * FAST)
    assert run.rounds.whole_medians()[1] > 1.5 * 4000 * FAST
    assert run.lead_note is not None
    assert run.lead_note.startswith(
        "micro-batch size 1: the device waited for the host in the untouched model"
    )


def test_a_layer_of_more_launches_than_a_queue_takes_waits_and_that_is_told() -> None:
    queue = Queue(DEPTH)
    model = many(queue, FAST, 400, 4000, layers=1)
    waiting = float(one_pass(model, queue).backward.sum())
    run = measured(model, queue)
    assert 4000 * FAST < sums(run)["backward"] < 0.85 * waiting
    assert run.lead_note is not None
    assert "waited for the host in backward, " in run.lead_note


def test_a_sweep_tells_of_leads_and_its_sizes_of_each_other() -> None:
    queue = Queue(DEPTH)
    sweep = WholeSweep(subject_of(many(queue, FAST, 400, 4000), queue), [1, 2], 1.0, 1)
    sweep.measure()
    assert sweep.runs[1].rounds.smaller is sweep.runs[0].rounds
    assert sweep.notes == [run.lead_note for run in sweep.runs]
    assert None not in sweep.notes


def test_a_host_that_waits_for_the_device_is_told_from_the_smaller_size() -> None:
    queue = Queue(DEPTH)
    small = measured(many(queue, FAST, 400, 1400), queue)
    large = measured(many(queue, SLOW, 400, 1400), queue)
    truth = [1400 // 20 * HOST] * 20
    assert small.rounds.host_medians("backward") == pytest.approx(truth)
    assert large.rounds.medians("backward") == pytest.approx([1400 // 20 * SLOW] * 20)
    assert sum(seconds or 0.0 for seconds in large.rounds.host_medians("backward")) > 1.5 * 1400 * HOST
    assert large.lead_note is None
    link_sizes([small.rounds, large.rounds])
    assert large.rounds.host_medians("backward") == pytest.approx(truth)
    assert large.rounds.host_bound() is None


def test_a_model_that_waits_for_the_device_keeps_the_hosts_seconds() -> None:
    queue = Queue()
    model = nn.Sequential(Launches(queue, (1, 4), (2, 8)), Waits(queue, (1, 4), (2, 8)))
    plain = one_pass(model, queue)
    run = measured(model, queue)
    assert run.rounds.host_medians("forward") == pytest.approx(plain.forward_host)
    assert run.rounds.host_medians("backward") == pytest.approx([8, 8])
    assert run.rounds.medians("backward") == pytest.approx([2, 2])


def test_a_layer_that_waits_for_the_device_is_not_held_back_and_the_others_are() -> None:
    queue = Queue()
    model = nn.Sequential(
        Launches(queue, (1, 4), (2, 8)), Waits(queue, (1, 4), (2, 8)), Launches(queue, (1, 9), (1, 1))
    )
    plain = one_pass(model, queue)
    leads = settled(model, queue)
    held = one_pass(model, queue, leads)
    assert held.forward[[0, 2]] == pytest.approx([1, 1])
    assert held.forward_host is not None
    assert plain.forward_host is not None
    assert held.forward_host[[0, 2]] == pytest.approx(plain.forward_host[[0, 2]])
    assert leads.backward.holds is not None
    assert leads.backward.holds.all()
    assert leads.short == ("forward",)


@pytest.mark.parametrize("disturbed", range(2, 6))
def test_one_disturbed_pass_is_made_again(disturbed: int) -> None:
    queue, leads = Queue(), LeadTuner()
    layers = build_chain(host_bound(queue), torch.ones(1, 4)).layers

    def run(stamps: LayerStamps) -> None:
        queue.settle()
        run_layers(layers, torch.ones(1, 4), OutputGradients(0), stamps)
        queue.slower = 1.0

    for number in range(6):
        queue.slower = 4.0 if number == disturbed else 1.0
        times = stamped_layers(run, queue, 3, leads)
        if number:
            assert times.forward == pytest.approx([1, 6, 1])
            assert times.backward == pytest.approx([2, 3, 5])
    assert leads.is_settled


def test_a_host_that_does_more_between_the_layers_than_in_them() -> None:
    """As hooks and stamps do: what counts is when a layer is launched, not for how long."""

    queue = Queue()
    model = nn.Sequential(*(Launches(queue, (1, 2), (1, 2)) for _ in range(5)))
    layers = build_chain(model, torch.ones(1, 4)).layers
    leads = LeadTuner()

    class Slow(LayerStamps):
        def before(self, index: int, layer_input: Any) -> None:
            queue.host += 3.0
            super().before(index, layer_input)

    def run(stamps: LayerStamps) -> None:
        queue.settle()
        stamps.__class__ = Slow
        run_layers(layers, torch.ones(1, 4), OutputGradients(0), stamps)

    for _ in range(3):
        times = stamped_layers(run, queue, 5, leads)
    assert times.forward == pytest.approx([1] * 5)
    assert times.forward_host == pytest.approx([2] * 5)
    assert leads.forward.lead() == pytest.approx(5 * 5 - 3 - 4)


def test_a_hold_has_an_end_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "LONGEST", 0.5)
    queue = Queue()
    model = nn.Sequential(*(Launches(queue, (0.1, 1), (0.01, 0.1)) for _ in range(3)))
    leads = settled(model, queue)
    assert leads.forward.holds == pytest.approx([0.5] * 3)
    assert leads.short == ("forward",)


def test_a_layer_that_stops_its_host_again_is_not_held_back() -> None:
    """It launches two thirds, then waits until the device has begun."""
    way, holds = Direction(), []
    plain = np.array([0.3, 0.3, 0.3])
    for _ in range(8):
        begun = np.zeros(3) if way.holds is None else np.cumsum(way.holds) - 0.3 * np.arange(3)
        waiting = np.array([0.0, max(begun[1] - 0.2, 0.0), 0.0])
        way.observe(DirectionTimes(plain + waiting, np.zeros(3), np.full(3, 0.1), begun))
        holds.append(float(way.holds[1]) if way.holds is not None else 0.0)
    assert holds[-1] == 0
    assert way.is_settled


def test_a_direction_without_launches_needs_no_lead() -> None:
    way = Direction()
    way.observe(DirectionTimes(*np.zeros((4, 2))))
    assert way.is_settled
    assert (way.lead(), way.is_short) == (0, False)


def test_a_host_that_is_not_equally_fast_every_time() -> None:
    """Forty layers whose host takes 1 to 1.6 times its least, drawn anew for every pass: nearly all passes
    show the device's own seconds once they are held back for longer."""
    generator = np.random.default_rng(0)
    queue, leads = Queue(), LeadTuner()
    layers = [Launches(queue, (0.1, 0.3), (0.1, 0.3)) for _ in range(40)]
    chain = build_chain(nn.Sequential(*layers), torch.ones(1, 4)).layers

    def run(stamps: LayerStamps) -> None:
        queue.settle()
        for layer in layers:
            layer.forwards = (0.1, 0.3 * generator.uniform(1.0, 1.6))
        run_layers(chain, torch.ones(1, 4), OutputGradients(0), stamps)

    sums = [float(stamped_layers(run, queue, 40, leads).forward.sum()) for _ in range(30)]
    assert np.mean(np.array(sums[5:]) < 1.001 * 4) > 0.9


def test_a_whole_whose_host_is_slower_than_its_layers_is_held_back_for_longer() -> None:
    queue = Queue(DEPTH)
    passes = SizePasses(subject_of(many(queue, FAST, 400, 400), queue), 1)
    queue.settle()
    passes.find_leads()
    queue.slower = 1.6
    times = passes.time_whole()
    assert (times.forward, times.backward) == pytest.approx((400 * FAST, 400 * FAST))
    assert not passes.leads.has_whole_waited

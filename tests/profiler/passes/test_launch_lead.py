"""A device that only starts what was launched, by a clock that both move: seconds with and without a lead."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pplan.profiler.chain.layers import build_chain
from pplan.profiler.measurement_target import MeasurementTarget
from pplan.profiler.passes import launch_lead
from pplan.profiler.passes.launch_lead import Direction, LaunchLead, LeadTuner, lead
from pplan.profiler.passes.layer_stamps import LayerStamps, LayerTimes, update_leads
from pplan.profiler.passes.timed_passes import link_sizes
from pplan.profiler.passes.timing import OutputGradients, run_layers
from pplan.profiler.size_run import SizeRun
from pplan.profiler.user_model.loaded_model import LoadedModel, ModelInput
from pplan.profiler.whole_sweep import WholeSweep

DEPTH = 1024
"""Launches that a stream takes ahead."""
HOST, FAST, SLOW = 6e-6, 2e-6, 50e-6
"""Seconds of a launch, and on the device."""

Seconds = tuple[float, float] | tuple[float, float, int]
"""Device's, host's; and, where it is not one, how many launches these are of."""


@pytest.fixture(autouse=True)
def _longer_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed by hand here takes whole seconds."""
    monkeypatch.setattr(launch_lead, "LONGEST", 100.0)


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


def one_pass(model: nn.Module, queue: Queue, leads: LaunchLead = LaunchLead()) -> LayerTimes:  # noqa: B008
    layers = build_chain(model, torch.ones(1, 4)).layers
    stamps = LayerStamps(queue, len(layers), leads)
    queue.settle()
    run_layers(layers, torch.ones(1, 4), OutputGradients(0), stamps)
    return stamps.times()


def settled(model: nn.Module, queue: Queue) -> LeadTuner:
    ahead = LeadTuner()
    for _ in range(5):
        if not ahead.is_settled:
            update_leads(ahead, one_pass(model, queue, ahead.leads))
    assert ahead.is_settled
    return ahead


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


def test_with_leads_the_device_has_its_own_seconds_and_the_host_its_own() -> None:
    queue, ahead = Queue(), LeadTuner()
    model = host_bound(queue)
    update_leads(ahead, one_pass(model, queue))
    assert ahead.leads == LaunchLead(1.2 * 16, 1.2 * 24)
    for number in range(4):
        times = one_pass(model, queue, ahead.leads)
        assert times.forward == pytest.approx([1, 6, 1])
        assert times.backward == pytest.approx([2, 3, 5])
        assert times.forward_host == pytest.approx([4, 4, 8])
        assert times.backward_host == pytest.approx([8, 9, 7])
        update_leads(ahead, times)
        assert ahead.is_settled == (number > 0)
    # TorchrunEnv after 4, 8, 16; begun after 0, 1, 7. Backward: 7, 16, 24; 0, 5, 8.
    assert ahead.leads.forward == pytest.approx(1.2 * 9)
    assert ahead.leads.backward == pytest.approx(1.2 * 16)
    assert ahead.short == ()


def test_a_device_that_is_the_limit_is_hardly_held_back() -> None:
    queue = Queue()
    model = nn.Sequential(*(Launches(queue, (10, 1), (20, 2)) for _ in range(3)))
    ahead = settled(model, queue)
    assert ahead.leads.forward == pytest.approx(1.2 * 1)
    assert ahead.leads.backward == pytest.approx(1.2 * 2)
    assert one_pass(model, queue, ahead.leads).forward == pytest.approx([10, 10, 10])


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
    assert sums(run) == pytest.approx(
        {
            "forward": 1200 * FAST,
            "backward": 1200 * FAST,
            "forward host": 1200 * HOST,
            "backward host": 1200 * HOST,
        }
    )
    assert run.lead_note is None


def test_a_direction_that_is_too_long_keeps_a_lead_and_the_other_all_of_its_own() -> None:
    queue = Queue(DEPTH)
    model = many(queue, FAST, 400, 4000)
    waiting = float(one_pass(model, queue).backward.sum())
    run = measured(model, queue)
    seen = sums(run)
    assert seen["forward"] == pytest.approx(400 * FAST)
    assert seen["forward host"] == pytest.approx(400 * HOST)
    assert seen["backward host"] == pytest.approx(4000 * HOST)
    assert 4000 * FAST < seen["backward"] < 0.85 * waiting
    # What the lead reaches has its own seconds: the layers that backward comes by first.
    assert run.rounds.medians("backward")[-4:] == pytest.approx([200 * FAST] * 4)
    assert run.lead_note is not None
    assert run.lead_note.startswith("micro-batch size 1: the host cannot launch all of backward before ")


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


def test_a_model_that_waits_for_a_slow_device_is_hardly_held_back() -> None:
    queue = Queue()
    model = nn.Sequential(
        Launches(queue, (8, 4, 8), (2, 8)), Waits(queue, (1, 4), (2, 8)), Launches(queue, (1, 9), (1, 1))
    )
    plain = one_pass(model, queue)
    ahead = settled(model, queue)
    # It waited until half a second after the first launch, when the device had all the same to do.
    assert ahead.leads.forward == pytest.approx(0.9 * 0.5)
    assert ahead.leads.backward > 1
    assert ahead.short == ("forward",)
    held = one_pass(model, queue, ahead.leads)
    assert held.forward_host == pytest.approx(plain.forward_host)


def test_a_direction_that_is_stopped_again_is_not_held_back() -> None:
    way, host = Direction(), np.array([1.0, 1.0, 1.0])
    way.observe(host, host)
    for _ in range(2):
        assert way.lead == pytest.approx(3.6)
        way.observe(np.array([1.0, 3.0, 1.0]), np.array([0.1, 0.1, 0.1]))
    for _ in range(2):
        assert way.lead == pytest.approx(0.9 * 1.6)
        way.observe(np.array([1.0, 2.0, 1.0]), np.array([0.1, 0.1, 0.1]))
    for _ in range(3):
        assert way.is_settled
        assert (way.lead, way.is_short) == (0, True)
        way.observe(host, host)


def test_one_disturbed_pass_changes_no_lead() -> None:
    for disturbed in range(1, 6):
        queue, ahead = Queue(), LeadTuner()
        model = host_bound(queue)
        for number in range(6):
            queue.slower = 4.0 if number == disturbed else 1.0
            update_leads(ahead, one_pass(model, queue, ahead.leads))
        assert ahead.is_settled
        assert ahead.leads.forward == pytest.approx(1.2 * 9), disturbed
        assert ahead.leads.backward == pytest.approx(1.2 * 16), disturbed


def test_a_lead_has_an_end_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_lead, "LONGEST", 1.0)
    queue = Queue()
    model = nn.Sequential(*(Launches(queue, (0.1, 1), (0.01, 0.1)) for _ in range(3)))
    ahead = settled(model, queue)
    assert ahead.leads.forward == 1
    assert ahead.leads.backward < 1
    assert ahead.short == ("forward",)


def test_lead_by_hand() -> None:
    assert lead([]) == 0
    assert lead([2, 3, 1]) == pytest.approx(1.2 * 6)
    assert lead([2, 3, 1], [1, 9, 9]) == pytest.approx(1.2 * 4)
    assert lead([0, 0], [5, 5]) == 0


def test_the_first_pass_of_a_direction_tells_of_the_host_only() -> None:
    way = Direction()
    way.observe(np.array([0.1, 0.2]), np.array([0.25, 0.5]))
    assert way.lead == pytest.approx(0.36)
    way.observe(np.array([0.1, 0.2]), np.array([0.25, 0.1]))
    assert way.lead == pytest.approx(0.36)
    way.observe(np.array([0.1, 0.2]), np.array([0.25, 0.1]))
    assert way.lead == pytest.approx(0.12)


def test_a_direction_without_launches_needs_no_lead() -> None:
    way = Direction()
    way.observe(np.zeros(2), np.zeros(2))
    assert way.is_settled
    assert (way.lead, way.is_short) == (0, False)


def test_a_host_that_is_not_equally_fast_every_time() -> None:
    """Forty layers whose host takes 1 to 1.6 times its least, drawn anew for every pass: nearly all passes
    show the device's own seconds once the lead has grown."""
    generator = np.random.default_rng(0)
    host, own = np.full(40, 0.3), np.full(40, 0.1)
    direction = Direction()
    sums: list[float] = []
    for _ in range(60):
        slower = host * generator.uniform(1.0, 1.6)
        launched = np.cumsum(slower)
        end = max(direction.lead, float(launched[0]))
        ends = [end]
        for at in launched:
            end = max(end, float(at)) + 0.1
            ends.append(end)
        # Between two events, as a stream records them: from the end of the layer before.
        device = np.diff(ends)
        direction.observe(slower, device)
        sums.append(float(device.sum()))
    assert np.mean(np.array(sums[20:]) < 1.02 * own.sum()) > 0.9

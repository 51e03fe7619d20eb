"""Bound on 1F1B and GPipe pipelines of long chains: the stages that fit into a step of given length.

Symbols as in `bound`. Let a step take T seconds. For a stage from cut point i to j with n stages after it

    T >= before[i] + (M - n) x - a + after[j]      n < M - 1; under GPipe M x for (M - n) x
    T >= lead[i] + M x - a + e

`before` and `after` are the least sums of x - a over the layers before i, and of 2 x - a (under GPipe x - a)
over those from j on; `lead` is the least forward of the layers before i. The device holds min(M, n + 1)
micro-batches of the stage. So for a start, n, a kind of device and a number of replicas there is a furthest
end, which bisection finds in running sums over the layers: no table of all stages is needed. A dynamic
programme from the last stage back finds the fewest devices:

    devices[n + 1, i] = min over r of   r + min over j up to the furthest end of devices[n, j]

If every number of stages needs more devices than the topology has, no plan takes T seconds or less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf, sqrt

import numpy as np

from ...cost_models.layer import LayerCosts
from ...cost_models.memory import Recompute, StageBytes, ledger, total
from ...cost_models.schedules import find_schedule
from ..stage_table import Floats, Indices
from .budget import OutOfTime
from .family import SAFE, Family, RoughStage
from .space import Space
from .stage_figures import Choice, list_choices
from .stage_recompute import stage_modes

WORK = 80.0
"""Counted work of a cut point, for each choice of devices and number of stages."""
NARROW = 1.0005
"""Ranges of the step with high <= NARROW * low are not halved."""
NEAR = 1.05
"""First step that is tried for a pipeline, as a multiple of a bound. The next one is its square."""


class ReachBound:
    """Pipelines of a family for which a step of given length has room.

    Tables have shape (choices, places). Figures of layers are summed up to each place, an index of
    `cut_points`.

    Args:
        space: Costs and limits.
        family: Configuration and devices.
    """

    def __init__(self, space: Space, family: Family) -> None:
        config, count = family.config, family.config.micro_batches
        self.space, self.family, self._count = space, family, count
        self._is_gpipe = config.schedule == "gpipe" or count == 1
        self._modes, self._schedule = stage_modes(config), find_schedule(config.schedule)
        _, self.devices, self.speed, self.choices = list_choices(space, family)
        self.capacity = float(self.speed @ self.devices) * (1 + 1e-9)
        self.most_stages = min(int(self.devices.sum()), space.chain.max_stages)
        if not self.choices:
            return
        self.cut_points = np.array(self.choices[0].cut_points)
        self.places = np.arange(len(self.cut_points))
        self._forward = self._sum(
            lambda choice: choice.seconds.costs.forward_seconds * choice.kind.seconds_scale
        )
        backward = self._sum(lambda choice: choice.seconds.costs.backward_seconds * choice.kind.seconds_scale)
        once = self._sum(lambda choice: choice.seconds.costs.accumulation * choice.kind.seconds_scale)
        if count == 1:  # the only backward is a first one
            backward, once = backward - once, np.zeros_like(once)
        self._seconds = backward + self._forward * (1 if self._modes[0] == "never" else 2)
        self._once = once + (self._forward if config.recompute == "except_last" else 0.0)
        self._exposed = self._sum(Choice.least_exposed)
        self._launches = self._sum(Choice.launches)
        self._weights = np.array(
            [[self.speed[choice.place] * choice.counts.fewest] for choice in self.choices]
        )
        self._device_seconds = _least(self._weights * (count * self._seconds - self._once))
        # A stage of a longer pipeline leaves at least one device to the other stages.
        several = self._weights[:, 0] + self._weights.min() <= self.capacity
        several |= not several.any()
        self._lead = _least(self._forward[several])
        self._before = _least((self._seconds - self._once)[several])
        later = _least(((1 if self._is_gpipe else 2) * self._seconds - self._once)[several])
        self._after = later[-1] - later
        self._bytes = dict[tuple[int, ...], RunningBytes]()
        self._rows, self._selected = list[Floats](), list[Indices]()
        self._ends = list[Indices]()

    def _sum(self, values: Callable[[Choice], Floats]) -> Floats:
        """Return (choices, places) running sums of a (layers,) figure."""
        return np.array([_running(values(choice))[self.cut_points] for choice in self.choices])

    def fewest_devices(
        self, step: float, is_allowed: Callable[[int], bool], kinds: Sequence[int] = ()
    ) -> float:
        """Return the fewest devices with which a pipeline takes at most `step` seconds (a bound follows).

        Args:
            step: Seconds of the step.
            is_allowed: Function that returns whether a number of stages is allowed.
            kinds: Kinds of the stages' devices, last stage first. Empty for any.

        Returns:
            Devices in units of the fastest kind: a number that suffices, or more than `capacity` if none
            does.
        """
        if not self.choices:
            return inf
        row, fewest = np.where(self.places == self.places[-1], 0.0, inf), inf
        self._rows, self._selected, self._ends = [row], [], []
        room = self.capacity - self._device_seconds * SAFE / step
        furthest = [self._furthest_alone(step / SAFE, number) for number in range(len(self._modes))]
        places = np.array([[choice.place] for choice in self.choices])
        for remaining in range(1, min(self.most_stages, len(kinds) or self.most_stages) + 1):
            self.space.budget.check()
            self.space.budget.spend(WORK * len(self._modes) * furthest[0].size)
            ends = np.maximum.reduce(
                [
                    np.minimum(alone, self._furthest(step / SAFE, number, remaining))
                    for number, alone in enumerate(furthest)
                ]
            )
            nearest = np.minimum.accumulate(row)
            possible = ends > self.places
            if kinds:
                possible &= places == kinds[remaining - 1]
            devices = np.where(possible, self._weights + nearest[ends], inf)
            row = devices.min(axis=0)
            row[row > room] = inf  # the earlier layers need more devices than are left
            selected = devices.argmin(axis=0)
            self._rows.append(row)
            self._selected.append(selected.astype(np.int32))
            self._ends.append(ends[selected, self.places].astype(np.int32))
            if is_allowed(remaining):
                fewest = min(fewest, float(row[0]))
            if fewest <= self.capacity or not np.isfinite(row).any():
                break
        return fewest

    def shortest_pipeline(
        self, low: float, high: float, is_allowed: Callable[[int], bool], kinds: Sequence[int] = ()
    ) -> list[RoughStage]:
        """Return a pipeline for about the shortest possible step.

        Args:
            low: Seconds that no step is below.
            high: Longest step in seconds.
            is_allowed: Function that returns whether a number of stages is allowed.
            kinds: See `fewest_devices`.

        Returns:
            The stages; empty if none exists within `high` seconds, or only one with an empty stage.
        """
        pipeline, factor, step = list[RoughStage](), NEAR, min(high, NEAR * low)
        with suppress(OutOfTime):
            while 0 < low * NARROW < high:
                if self.fewest_devices(step, is_allowed, kinds) <= self.capacity:
                    pipeline, high = self.pipeline(), step
                    if not pipeline:
                        break
                elif step < high:
                    low = step
                else:
                    break
                factor *= factor
                step = sqrt(low * high) if pipeline else min(high, factor * low)
        return pipeline

    def pipeline(self) -> list[RoughStage]:
        """Return the pipeline of the last `fewest_devices`; empty if a stage holds no layers."""
        place, stages = 0, list[RoughStage]()
        for selected, ends, row in zip(
            self._selected[::-1], self._ends[::-1], self._rows[-2::-1], strict=True
        ):
            number = int(selected[place])
            devices = row[: ends[place] + 1]
            end = int(np.flatnonzero(devices == devices.min())[-1])
            if end <= place:
                return []
            choice, replicas = self.choices[number], self.choices[number].counts.fewest
            seconds = self._seconds[number, end] - self._seconds[number, place]
            stages.append(RoughStage(int(self.cut_points[end]), choice.place, replicas, seconds * replicas))
            place = end
        return stages

    def _furthest_alone(self, step: float, number: int) -> Indices:
        """Return (choices, places) furthest ends of stages that alone fit into a step.

        `number` is the index of the recomputation mode.
        """
        seconds = self._count * (self._seconds + number * self._forward) - self._once
        ends = _furthest(seconds, step - self._lead)
        if self.space.zero == 0:
            ends = np.minimum(ends, _furthest(seconds + self._exposed, step - self._lead))
        if not self.space.one_process:
            ends = np.minimum(ends, _furthest(self._count * self._launches, np.full(len(self.places), step)))
        return ends

    def _furthest(self, step: float, number: int, remaining: int) -> Indices:
        """Return (choices, places) furthest ends of stages with `remaining` - 1 stages after them."""
        in_flight = self._schedule.in_flight(0, remaining, self._count)
        mode = self._modes[number]
        ends = np.array([self._fit(choice, mode, int(in_flight)) for choice in self.choices])
        if not self._is_gpipe and remaining >= self._count:
            return ends
        times = self._count - (0 if self._is_gpipe else remaining - 1)
        seconds = times * (self._seconds + number * self._forward) - self._once
        in_time: Indices = np.minimum(ends, _furthest(seconds, step - self._before, self._after))
        return in_time

    def _fit(self, choice: Choice, mode: Recompute, in_flight: int) -> Indices:
        """Return (places,) furthest ends of stages that fit in memory with `in_flight` micro-batches."""
        limit, starts = self.space.kinds_limit([choice.kind]), self.places[:-1]
        if limit == inf:
            return np.full(len(self.places), self.places[-1])
        replicas = choice.counts.most if self.space.zero else min(choice.counts.most, 2)
        key = choice.kind, choice.kinds, choice.counts.per_replica_batches, replicas, mode
        by_count = self.space.furthest_ends.setdefault(key, {})
        if in_flight in by_count:
            return by_count[in_flight]
        stage_bytes = self._bytes_of(choice)
        fewer = max((count for count in by_count if count < in_flight), default=0)
        fitting = starts.astype(np.int32)
        beyond = by_count[fewer][:-1] + 1 if fewer else np.full_like(fitting, len(self.places))
        while (beyond - fitting > 1).any():
            middle = (fitting + beyond) // 2
            terms = ledger(
                stage_bytes.between(starts, np.maximum(middle, starts + 1)),
                in_flight=in_flight,
                recompute=mode,
                optimizer=self.space.optimizer,
                replicas=replicas,
                **choice.ledger,
            )
            fits = (total(terms) * SAFE <= limit) | (middle == starts)
            fitting, beyond = np.where(fits, middle, fitting), np.where(fits, beyond, middle)
        by_count[in_flight] = np.append(fitting, self.places[-1:].astype(np.int32))
        return by_count[in_flight]

    def _bytes_of(self, choice: Choice) -> RunningBytes:
        batches = choice.counts.per_replica_batches
        if batches not in self._bytes:
            self._bytes[batches] = RunningBytes(choice.table.costs, self.cut_points)
        return self._bytes[batches]


class RunningBytes:
    """Least inputs of the memory ledger of stages, as sums up to each cut point.

    Sent tensors are left out, so that no stage needs less than one that ends earlier. Copies of tied weights,
    and bytes that only some optimizers, schedules and recomputation modes need, are left out, too.

    Args:
        costs: Costs of the layers.
        cut_points: Numbers of layers before each cut point.
    """

    def __init__(self, costs: LayerCosts, cut_points: Indices) -> None:
        starts, ends = cut_points[:-1], cut_points[1:] - 1
        self._sums = {
            name: _running(values)[cut_points]
            for name, values in (
                ("parameters", costs.parameter_bytes),
                ("trainable", costs.trainable_bytes),
                ("buffers", costs.buffer_bytes),
                ("saved", costs.saved_bytes),
            )
        }
        self._saved_input = costs.saved_input_bytes[starts]
        self._crossing = np.concatenate([[0.0], costs.output_bytes[ends[:-1]], [0.0]])
        self._input = np.append(costs.input_bytes, self._crossing[1:-1])
        # While a layer runs, the device holds the saved tensors of the layers up to it and its workspace.
        at_work = np.cumsum(costs.saved_bytes) + costs.workspace_bytes
        self._at_work = _Largest(np.maximum.reduceat(at_work, starts))

    def between(self, start: Indices, end: Indices) -> StageBytes:
        """Return the bytes of (stages,) stages between cut points."""
        sums = {name: values[end] - values[start] for name, values in self._sums.items()}
        return StageBytes(
            **sums,
            saved_input=self._saved_input[start],
            input=self._input[start],
            received=self._crossing[start],
            sent=0.0,
            workspace=np.maximum(self._at_work.between(start, end) - self._sums["saved"][end], 0.0),
            gathered=0.0,
        )


class _Largest:
    """Maximum of any run of values, by a sparse table of runs of 1, 2, 4, ... values."""

    def __init__(self, values: Floats) -> None:
        rows, length = [values], 1
        while 2 * length <= len(values):
            rows.append(np.append(np.maximum(rows[-1][:-length], rows[-1][length:]), rows[-1][-length:]))
            length *= 2
        self._table = np.array(rows)

    def between(self, start: Indices, end: Indices) -> Floats:
        """Return the (runs,) maxima from `start` to before `end` > `start`."""
        level = np.frexp((end - start).astype(np.float64))[1] - 1
        largest: Floats = np.maximum(self._table[level, start], self._table[level, end - (1 << level)])
        return largest


def _running(values: Floats) -> Floats:
    """Return (layers + 1,) sums of the values before each layer."""
    return np.append(0.0, np.cumsum(values))


def _least(sums: Floats) -> Floats:
    """Return (places,) sums over blocks of the least of all choices."""
    return _running(np.diff(sums, axis=1).min(axis=0))


def _furthest(sums: Floats, room: Floats, after: Floats | float = 0.0) -> Indices:
    """Return (choices, places) furthest ends j with sums[j] - sums[i] + after[j] <= room[i].

    The result is below the start i if none exists.
    """
    # The least value of this end and all later ones, so that it grows with the end.
    least = np.minimum.accumulate((sums + after)[:, ::-1], axis=1)[:, ::-1]
    each = zip(least, sums + room, strict=True)
    return np.array([np.searchsorted(values, allowed, side="right") - 1 for values, allowed in each])

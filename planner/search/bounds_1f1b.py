"""Proven lower bounds on the step seconds of 1F1B pipelines, for whole plans and for unfinished ones.

Costs of a stage: f forward, b backward (with what it recomputes), e the all-reduce after its last backward;
of a cut: o = bytes / bandwidth, for which the link is taken, and c = o + latency until the tensor is there,
the same both ways. M micro-batches. `simulate` runs exactly these rules, so a bound on them is a bound on
every step it can report (with transfers that block, a step only grows).

What holds for stage s of any plan (0-based, p stages, w = micro-batches it may hold = min(M, p - s)):

    before its first F   at least sum of (f + c) of the stages before it      (micro-batch 0 has to get there)
    after its last B     at least e, or (b + c) of the stages back to any stage before and its e; the sums of
                         the stage's tied weights count with e, as what they take at the least
    a round trip         D = 2 c + sum of (f + b) + 2 sum of c of the stages after it, between the end of a
                         micro-batch's F and the start of its B

and so, from the first start to the last end on stage s, the largest of

    ceil(M / w) (f + b + D)           micro-batch m + w starts when m is done, so round trips chain
                                      (the busiest stage's work is the last stage's case, D = 0)
    X + (M - w)(f + b) + Y   (M > w)  with X = max(w f, f + D): the first B comes after w F and after a
                                      round trip; Y = max(w b, b + D): after the last F, w B are left and a
                                      round trip; between them every F and B that is left
    M f + M b, M f + D + b, f + D + M b   (M = w), the same without the middle
    f + D + (M - 1) o + b             the link after the stage carries M tensors

The first of several backwards on a stage takes a less than b: it adds to no gradients. It is micro-batch
0's, so that a path through all micro-batches of a stage is shorter by a once, and one on which micro-batch 0
makes its round trip by D - D', the a of the stages after. What follows the last B is another micro-batch's.
(In GPipe the last micro-batch's backward is the first, and its terms, too, are taken with b - a and D'.)

For an unfinished plan the terms of the missing stages are minimised by dynamic programming from the last
stage back, over cut points, positions in the order of the devices and stages that are left, each by itself:
still below every completion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..candidate import PipelineConfig
from ..stage_table import Floats
from .partial import BoundState, Expansion
from .pipelines import Pipelines
from .stage_choices import GroupChoices, StageChoices


class RoundTripBound:
    """The bounds of the module's docstring, for plans below `limit`: all others may be kept, or
    not to be (inf). Of GPipe they hold, too, with all micro-batches held."""

    def __init__(self, choices: StageChoices, limit: float = np.inf) -> None:
        self.choices, self._limit = choices, limit
        self._rows = [self._after_last()]

    def root(self, stages: int) -> float:
        """A bound on every plan of so many stages; inf where there is none."""
        to_last_backward, to_end, *_ = self.rows(stages)
        return float(max(to_last_backward[0, 0], to_end[0, 0]))

    def rows(self, stages: int) -> tuple[Floats, Floats, Floats, Floats]:
        """(positions + 1, cut points) each, for the last so many stages after one that ends there: seconds
        from the first F on the first of them to its last B, to the end of the step, of a round trip, and of
        the first one."""
        while len(self._rows) <= stages:
            self._rows.append(self._before(len(self._rows)))
        return self._rows[stages]

    def start(self) -> BoundState:
        """What is known of the plan of no stages."""
        zero = np.zeros(1)
        return {"lag": zero, "back": zero, "known": zero}

    def extend(self, state: BoundState, stage: Expansion) -> tuple[Floats, BoundState]:
        """(expansions,): the bound with a further stage, and what is known then."""
        f, b, e = stage.forward, stage.backward, stage.least_after
        to_last_backward, to_end, trips, first_trips = self.rows(stage.remaining - 1)
        at = (stage.end_position, stage.end)
        lag, back = state["lag"] + stage.cut, state["back"] + stage.cut
        way = 2 * stage.least_cut
        stay = StageTimes(
            f, b, stage.accumulation, stage.least_occupancy, way + trips[at], way + first_trips[at]
        )
        own = self._stage_term(stage.remaining, stay)
        inward = np.maximum(own, f + b + 2 * stage.least_cut + to_last_backward[at])
        whole = np.maximum(inward + e, f + stage.least_cut + to_end[at])
        sure = np.maximum(state["known"], lag + own + np.maximum(back, e))
        bound = np.maximum(sure, lag + np.maximum(inward + back, whole))
        return bound, {"lag": lag + f, "back": b + np.maximum(back, e), "known": sure}

    def _after_last(self) -> tuple[Floats, Floats, Floats, Floats]:
        nothing = self.choices.after_last
        return nothing, nothing, nothing, nothing

    def _before(self, remaining: int) -> tuple[Floats, Floats, Floats, Floats]:
        rows = tuple(np.full(self.choices.shape, np.inf) for _ in range(4))
        reachable = np.isfinite(self._rows[-1][0])
        if reachable.any():
            for group in self.choices.groups:
                self.choices.space.budget.check()
                self._fill(rows, group, reachable, remaining)
        to_last_backward, to_end, trips, first_trips = map(self.choices.ranges.least_reachable, rows)
        return to_last_backward, to_end, trips, first_trips

    def _fill(
        self, rows: tuple[Floats, ...], group: GroupChoices, reachable: npt.NDArray[np.bool_], remaining: int
    ) -> None:
        """Adds a group's stages before those that are `reachable` from them."""
        stages = group.before(reachable)
        if stages is None:
            return
        to_last_backward, to_end, trips, first_trips = (
            values[stages.after, stages.end] for values in self.rows(remaining - 1)
        )
        f, b = group.forward[stages.pair], self._least_backward(group, remaining)[stages.pair]
        latency, slowness = self.choices.ranges.least_pace(group.replicas, stages.key, stages.after)
        occupancy = slowness * group.sent[stages.pair]
        cut = occupancy + latency * group.inner[stages.pair]
        saved = group.accumulation[stages.pair]
        stay = StageTimes(f, b, saved, occupancy, 2 * cut + trips, 2 * cut + first_trips)
        own = self._stage_term(remaining, stay)
        inward = np.maximum(own, f + b + 2 * cut + to_last_backward)
        whole = np.maximum(inward + group.least_after[stages.pair], f + cut + to_end)
        too_slow = np.maximum(inward, whole) >= self._limit
        around, first_around = f + b + stay.trip, f + b - saved + stay.first_trip
        for seconds, values in zip((inward, whole, around, first_around), rows, strict=True):
            stages.least_into(values, np.where(too_slow, np.inf, seconds))

    def _least_backward(self, group: GroupChoices, remaining: int) -> Floats:
        """Of any micro-batch: under except_last the last one's, without what is run again."""
        b = group.backward(self.choices.in_flight(remaining))[0]
        last_differs = self.choices.config.recompute == "except_last"
        return np.where(np.isinf(b), np.inf, group.plain) if last_differs else b

    def _stage_term(self, remaining: int, stay: StageTimes) -> Floats:
        return stage_term(self.choices.config, self.choices.in_flight(remaining), stay)


@dataclass(frozen=True, eq=False)
class StageTimes:
    """What a stage's term depends on, in the letters of the module's docstring: f, b, a, o, D and D'."""

    forward: Floats
    backward: Floats
    accumulation: Floats
    occupancy: Floats
    trip: Floats
    first_trip: Floats


def stage_term(config: PipelineConfig, in_flight: float, stay: StageTimes) -> Floats:
    """From the first start to the last end on a stage that may hold `in_flight` micro-batches: the largest of
    the module's docstring."""
    count, f, b, trip = config.micro_batches, stay.forward, stay.backward, stay.trip
    first, first_trip = b - stay.accumulation, stay.first_trip
    last, last_trip = (first, first_trip) if config.schedule == "gpipe" else (b, trip)
    chained = multiply_finite(math.ceil(count / in_flight) - 1, f + b + trip) + f + first + first_trip
    if count > in_flight:
        ramped = (
            np.maximum(in_flight * f, f + first_trip)
            + (count - in_flight) * (f + b)
            - stay.accumulation
            + np.maximum(in_flight * b, b + trip)
        )
    else:
        work, ending = count * (f + b) - stay.accumulation, count * f + last + last_trip
        ramped = np.maximum(work, np.maximum(ending, f + multiply_finite(count - 1, b) + first + first_trip))
    link = f + last + last_trip + (count - 1) * stay.occupancy
    term: Floats = np.maximum(np.maximum(chained, ramped), link)
    return term


def multiply_finite(count: int, values: Floats) -> Floats | float:
    """count * values, where 0 times infinity is 0."""
    return count * values if count else 0.0


def whole_bound_1f1b(plans: Pipelines) -> Floats:
    """(plans,): the bound of whole plans."""
    count, stages = plans.config.micro_batches, plans.stages
    after_last = np.zeros((len(plans), 1))
    cut = np.hstack([plans.occupancy + plans.latency, after_last])
    occupancy = np.hstack([plans.occupancy, after_last])
    f, b, e, saved = plans.forward, plans.backward, plans.exposed_allreduce, plans.accumulation
    trips, first_trips = np.zeros((2, stages + 1, len(plans)))
    for stage in reversed(range(stages)):
        trips[stage] = 2 * cut[:, stage] + trips[stage + 1] + (f + b)[:, stage]
        first_trips[stage] = 2 * cut[:, stage] + first_trips[stage + 1] + (f + b - saved)[:, stage]
    lag, back, bound = (np.zeros(len(plans)) for _ in range(3))
    ends = np.zeros((stages, len(plans)))
    for stage in range(stages):
        trip, first_trip = (2 * cut[:, stage] + after[stage + 1] for after in (trips, first_trips))
        own_f, own_b, own_saved = f[:, stage], b[:, stage], saved[:, stage]
        stay = StageTimes(own_f, own_b, own_saved, occupancy[:, stage], trip, first_trip)
        own = stage_term(plans.config, min(count, stages - stage), stay)
        ends[stage] = lag + own + e[:, stage]
        bound = np.maximum(bound, lag + own + np.maximum(back, e[:, stage]))
        lag = lag + f[:, stage] + cut[:, stage]
        back = b[:, stage] + cut[:, stage] + np.maximum(back, e[:, stage])
    latest: Floats = np.maximum(bound, plans.after_tied_sums(ends).max(axis=0))
    return latest

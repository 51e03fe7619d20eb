"""Proven lower bounds on the step seconds of complete and unfinished 1F1B pipelines.

Costs of a stage: f forward, b backward (with what it recomputes), e the all-reduce after its last backward;
of a cut: o = bytes / bandwidth, while the link is busy, and c = o + latency until the tensor has arrived,
in both directions. M micro-batches. `simulate` runs exactly these rules, so a bound on them is a bound on
every step it can report (with transfers that block, a step only grows).

For stage s of any plan (0-based, p stages, w = min(M, p - s) micro-batches in flight):

    before its first F   at least sum of (f + c) of the stages before it      (micro-batch 0 must arrive)
    after its last B     at least e, or (b + c) of the stages back to any earlier stage plus that stage's e;
                         e includes the least seconds of the sums of the stage's tied weights
    a round trip         D = 2 c + sum of (f + b) + 2 sum of c of the stages after it, between the end of a
                         micro-batch's F and the start of its B

so that the time from the first start to the last end on stage s is at least the largest of

    ceil(M / w) (f + b + D)           micro-batch m + w starts when m is done, so round trips chain
                                      (the busiest stage's work is the last stage's case, D = 0)
    X + (M - w)(f + b) + Y   (M > w)  with X = max(w f, f + D): the first B comes after w F and after a
                                      round trip; Y = max(w b, b + D): after the last F, w B are left and a
                                      round trip; between them every F and B that is left
    M f + M b, M f + D + b, f + D + M b   (M = w), the same without the middle
    f + D + (M - 1) o + b             the link after the stage carries M tensors

The first of several backwards on a stage takes a seconds less than b, because it adds to no gradients. It is
that of micro-batch 0. So a path through all micro-batches of a stage is shorter by a once, and a path on
which micro-batch 0 makes its round trip is shorter by D - D', the sum of a over the stages after. The path
after the last B belongs to another micro-batch.
(In GPipe the last micro-batch's backward is the first one, so its terms use b - a and D', too.)

For an unfinished plan, dynamic programming from the last stage back minimises each term of the missing stages
separately, over cut points, positions in the order of the devices and missing stages. The sum of separate
minima is at most the bound of every completion.
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
    """Bounds of the module's docstring, for plans below `limit` seconds; slower plans may get inf.

    They hold for GPipe, too, where every micro-batch is in flight.

    Args:
        choices: Allowed stages.
        limit: Seconds of the best known step.
    """

    def __init__(self, choices: StageChoices, limit: float = np.inf) -> None:
        self.choices, self._limit = choices, limit
        self._rows = [self._after_last()]

    def root(self, stages: int) -> float:
        """Return a bound in seconds on every plan of `stages` stages; inf if no plan exists."""
        to_last_backward, to_end, *_ = self.rows(stages)
        return float(max(to_last_backward[0, 0], to_end[0, 0]))

    def rows(self, stages: int) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the least seconds of the last `stages` stages, by the end of the stage before them.

        Rows are computed by dynamic programming when they are first needed; they are bounds on the missing
        stages.

        Returns:
            Four (positions + 1, cut points) tables: seconds from the first F on the first of these stages to
            its last B, to the end of the step, of a round trip, and of the first round trip.
        """
        while len(self._rows) <= stages:
            self._rows.append(self._before(len(self._rows)))
        return self._rows[stages]

    def start(self) -> BoundState:
        """Return the state of the plan without stages."""
        zero = np.zeros(1)
        return {"lag": zero, "back": zero, "known": zero}

    def extend(self, state: BoundState, stage: Expansion) -> tuple[Floats, BoundState]:
        """Return the bound of plans with one further stage, and their states.

        Args:
            state: State of the plans, by entry of `stage`.
            stage: The further stages.

        Returns:
            (expansions,) bounds in seconds, and the new states.
        """
        f, b, e = stage.forward, stage.backward, stage.least_after
        to_last_backward, to_end, trips, first_trips = self.rows(stage.remaining - 1)
        at = (stage.end_position, stage.end)
        lag, back = state["lag"] + stage.cut, state["back"] + stage.cut
        both_ways = 2 * stage.least_cut
        stay = StageTimes(
            f,
            b,
            stage.accumulation,
            stage.least_occupancy,
            both_ways + trips[at],
            both_ways + first_trips[at],
        )
        stage_seconds = self._stage_term(stage.remaining, stay)
        inward = np.maximum(stage_seconds, f + b + 2 * stage.least_cut + to_last_backward[at])
        whole = np.maximum(inward + e, f + stage.least_cut + to_end[at])
        sure = np.maximum(state["known"], lag + stage_seconds + np.maximum(back, e))
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
        """Lower the rows to the stages of a group that are followed by `reachable` ones."""
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
        stage_seconds = self._stage_term(remaining, stay)
        inward = np.maximum(stage_seconds, f + b + 2 * cut + to_last_backward)
        whole = np.maximum(inward + group.least_after[stages.pair], f + cut + to_end)
        too_slow = np.maximum(inward, whole) >= self._limit
        around, first_around = f + b + stay.trip, f + b - saved + stay.first_trip
        for seconds, values in zip((inward, whole, around, first_around), rows, strict=True):
            stages.least_into(values, np.where(too_slow, np.inf, seconds))

    def _least_backward(self, group: GroupChoices, remaining: int) -> Floats:
        """Return the least backward seconds of any micro-batch.

        Under `except_last` that is the last one's, which recomputes nothing.
        """
        b = group.backward(self.choices.in_flight(remaining))[0]
        last_differs = self.choices.config.recompute == "except_last"
        return np.where(np.isinf(b), np.inf, group.plain) if last_differs else b

    def _stage_term(self, remaining: int, stay: StageTimes) -> Floats:
        return stage_term(self.choices.config, self.choices.in_flight(remaining), stay)


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Inputs of a stage's term, in the letters of the module's docstring: f, b, a, o, D and D'."""

    forward: Floats
    backward: Floats
    accumulation: Floats
    occupancy: Floats
    trip: Floats
    first_trip: Floats


def stage_term(config: PipelineConfig, in_flight: float, stay: StageTimes) -> Floats:
    """Return the least seconds from the first start to the last end on a stage.

    It is the largest term of the module's docstring.

    Args:
        config: Schedule and number of micro-batches.
        in_flight: Micro-batches that the stage may hold.
        stay: Times of the stage and of the round trip after it.
    """
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
    """Return count * values, where 0 times infinity is 0."""
    return count * values if count else 0.0


def whole_bound_1f1b(plans: Pipelines) -> Floats:
    """Return (plans,) bounds in seconds of complete plans."""
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
        trip, first_trip = (2 * cut[:, stage] + later[stage + 1] for later in (trips, first_trips))
        stage_f, stage_b, stage_saved = f[:, stage], b[:, stage], saved[:, stage]
        stay = StageTimes(stage_f, stage_b, stage_saved, occupancy[:, stage], trip, first_trip)
        stage_seconds = stage_term(plans.config, min(count, stages - stage), stay)
        ends[stage] = lag + stage_seconds + e[:, stage]
        bound = np.maximum(bound, lag + stage_seconds + np.maximum(back, e[:, stage]))
        lag = lag + f[:, stage] + cut[:, stage]
        back = b[:, stage] + cut[:, stage] + np.maximum(back, e[:, stage])
    latest: Floats = np.maximum(bound, plans.after_tied_sums(ends).max(axis=0))
    return latest

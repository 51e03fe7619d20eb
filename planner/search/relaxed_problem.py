"""A bound on all pipelines of a configuration whichever devices they take, for problems with many devices.

The letters are those of `one_f_one_b`, x = f + b. Let s be the stage with the largest x of p stages, w the
micro-batches that it may hold, A = sum of (x + 2 c) of the stages before it, D as there (2 c of its cut and
the sum of (x + 2 c) of those after it). Then a step takes no less than each of

    M > w    A + (M - w + 1) x + 2 D             the module's X >= f + D and Y >= b + D
             A + (M - w + 1) x + (w - 1) max(f, b) + D     X + Y >= x + D + (w - 1) max(f, b)
    M = w    A + x + (M - 1) max(f, b) + D
    GPipe    A + M x + D

and with e of s in place of the backwards (and their cuts) of the stages before it, which come after its last.
All of these are sums over the stages, in which s counts otherwise. Each is the length of a path, or of two on
average, which meets the first backward of a stage once at most: what that does not take is left out of every
stage once. For x of s between `low` and `high` no
other stage takes more than `high`, and s counts at least with `low`; for many micro-batches in flight with no
more than that, and max(f, b) as x / 2. What is left to respect is that all
stages together have no more devices than there are, and that is priced: with a price of every device,

    min over all pipelines of (sum of the stages' seconds + prices of their devices) - prices of all devices

is no more than the least sum of a pipeline that fits (Everett, Generalized Lagrange multiplier method,
Operations Research 11(3), 1963), and a dynamic programme from the last stage back finds it: over cut points
and stages, without positions, so that 16,384 devices take no longer than 64. A stage on several kinds of
devices takes the seconds of its slowest kind and so no less than as many devices of that kind, which cost no
more, as no kind is priced below a slower one (of kinds that were profiled themselves: of its cheapest kind).
The bound is the least over ranges of x, the weakest of which are halved again and again.

To show that no plan is below T seconds, stages are left out that no such plan has: on its way to a stage
the first micro-batch takes the least that the layers before it do on any devices, then the stage's M
micro-batches follow, and its all-reduce e. Nor does a stage end before its host launched M micro-batches,
after which e follows, or the backwards before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...cost_models.schedules import find_schedule
from ..pipeline_config import PipelineConfig
from ..stage_table import Floats, Indices
from .relaxed_stages import RelaxedStages
from .stage_recompute import stage_modes

SAFE = 1 - 1e-9
"""Of a bound, so that none is above a step by rounding."""
EVERY_IN_FLIGHT = 8
"""Up to so many micro-batches held, memory is checked for each number; beyond, for every eighth more."""


@dataclass(frozen=True)
class Weights:
    """A sum that bounds a step: what x counts in stages before s and after it; `reduced`: with e of s, and
    without the backwards before it."""

    name: str
    after: float
    reduced: bool = False


DOUBLE, SINGLE = Weights("double", 2.0), Weights("single", 1.0)
REDUCED = Weights("reduced", 1.0, reduced=True)


@dataclass(frozen=True, eq=False)
class RelaxedProblem:
    """The pipelines of a configuration with 1 to `most_stages` stages that take less than `limit` seconds."""

    config: PipelineConfig
    stages: RelaxedStages
    most_stages: int
    limit: float = np.inf
    _entries: dict[tuple[float, float], StageEntries] = field(default_factory=dict)

    @property
    def cut_points(self) -> int:
        """Of the tables, the last behind all layers."""
        return len(self.stages.cut_points)

    @property
    def weights(self) -> tuple[Weights, ...]:
        """The sums that bound its steps."""
        gpipe = self.config.schedule == "gpipe"
        return (SINGLE, REDUCED) if gpipe else (DOUBLE, SINGLE, REDUCED)

    def coefficient(self, weights: Weights, remaining: int) -> float:
        """Of x of stage s as the `remaining`-th from the end; inf where the sum is no bound."""
        count = self.config.micro_batches
        if self.config.schedule == "gpipe":
            return count - 0.5 if self.config.recompute == "except_last" else float(count)
        in_flight = min(count, remaining)
        if weights is DOUBLE:
            return count - in_flight + 1.0 if count > in_flight else np.inf
        return count - in_flight + 1 + (in_flight - 1) / 2

    def in_flight(self, remaining: int) -> float:
        """Micro-batches in flight, of a few numbers: no more than there are."""
        count = find_schedule(self.config.schedule).in_flight(0, remaining, self.config.micro_batches)
        if self.config.schedule == "gpipe":
            return count
        step = 1
        while count > EVERY_IN_FLIGHT * step:
            step += max(1, step // 4)
        return count - count % step if step > 1 else count

    @cached_property
    def depth(self) -> int:
        """Stages that are counted by their number; deeper pipelines are bounded together."""
        return min(self.most_stages, self.cut_points)

    def seconds(self, in_flight: float) -> Floats:
        """x of every stage that holds so many micro-batches, by choice and place; inf where it does not
        fit."""
        seconds = np.full(self.stages.forward.shape, np.inf)
        for mode in reversed(stage_modes(self.config)):
            recompute = 0.0 if mode == "never" else self.stages.forward
            own = self.stages.forward + self.stages.backward + recompute
            seconds = np.where(in_flight <= self.stages.room[mode], own, seconds)
        return seconds

    @property
    def single_stage_step(self) -> float:
        """The least step of one stage."""
        x = self.seconds(self.in_flight(1))[:, 0, -1]
        of = np.s_[:, 0, -1]
        return float(np.maximum(self._own_seconds(x, of), self._hosts_seconds(of)).min()) * SAFE

    def _own_seconds(self, x: Floats, of: Any) -> Floats:
        """From the first forward of stages, which take x a micro-batch, until their gradients are summed."""
        stages = self.stages
        once = stages.accumulation[of]
        if self.config.recompute == "except_last":
            once = once + stages.forward[of]
        with np.errstate(invalid="ignore"):
            own = self.config.micro_batches * x - once + stages.exposed_allreduce[of]
        return np.where(np.isfinite(x), own, np.inf)

    def _hosts_seconds(self, of: Any, trail: Floats | float = 0.0) -> Floats:
        """Until a stage's host launched all, and its gradients are summed, or those of the stages before are
        there, which takes `trail`. Where layers around the stage are left out, they may hide its sum."""
        reduced = self.stages.exposed_allreduce[of] if self.stages.exact else 0.0
        after = np.maximum(reduced, trail)
        seconds: Floats = self.config.micro_batches * self.stages.launches[of] + after
        return seconds

    @cached_property
    def _lead(self) -> Floats:
        """(cut points,): seconds of the first micro-batch up to there, on any devices."""
        forward = (self.stages.forward + self.stages.cut[:, None, :]).min(axis=0)
        lead = np.zeros(self.cut_points)
        for end in range(1, self.cut_points):
            lead[end] = (lead[:end] + forward[:end, end]).min()
        return lead

    def in_time(self, x: Floats) -> Floats:
        """x where the stage is of a plan below the limit; else inf."""
        if not np.isfinite(self.limit):
            return x
        seconds = self._own_seconds(x, np.s_[:]) + self._lead[None, :, None]
        seconds = np.maximum(seconds, self._hosts_seconds(np.s_[:], self._trail[None, :, None]))
        return np.where(seconds * SAFE < self.limit, x, np.inf)

    @cached_property
    def _trail(self) -> Floats:
        """(cut points,): seconds of the last micro-batch's gradients from there on, on any devices."""
        once = self.stages.accumulation if self.config.micro_batches == 1 else 0.0
        with np.errstate(invalid="ignore"):
            own = self.stages.backward - once + self.stages.cut[:, None, :]
        least = np.where(np.isfinite(self.stages.backward), own, np.inf).min(axis=0)
        trail = np.zeros(self.cut_points)
        for end in range(1, self.cut_points):
            trail[end] = (trail[:end] + least[:end, end]).min()
        return trail

    def entries(self, in_flight: float, high: float) -> StageEntries:
        """The stages that hold so many micro-batches and take no longer than `high`."""
        key = (in_flight, high)
        if key not in self._entries:
            for old in [old for old in self._entries if old[1] != high]:
                del self._entries[old]
            self._entries[key] = StageEntries.of(self, in_flight, high)
        return self._entries[key]


@dataclass(frozen=True, eq=False)
class StageEntries:
    """Stages, sorted by their pair of cut points: `pair` of each, `first` of every pair's, `choice`;
    seconds."""

    pair: Indices
    first: Indices
    choice: Indices
    x: Floats
    accumulation: Floats
    forward: Floats
    exposed_allreduce: Floats
    cut: Floats

    @classmethod
    def of(cls, problem: RelaxedProblem, in_flight: float, high: float) -> StageEntries:
        stages, cut_points = problem.stages, problem.cut_points
        choices = len(stages.kind)
        x = problem.in_time(problem.seconds(in_flight)).reshape(choices, -1).T
        at = np.flatnonzero(x <= high)
        pair, choice = np.divmod(at, choices)
        first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1])) if len(pair) else pair

        def own(values: Floats) -> Floats:
            column: Floats = values.reshape(choices, -1).T.reshape(-1)[at]
            return column

        cut = stages.cut[choice, pair % cut_points]
        accumulation, forward = own(stages.accumulation), own(stages.forward)
        reduced = own(stages.exposed_allreduce)
        return cls(pair, first, choice, x.reshape(-1)[at], accumulation, forward, reduced, cut)

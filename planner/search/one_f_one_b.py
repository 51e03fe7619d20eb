"""Proven lower bounds on the step seconds of straight pipelines, for whole plans and for unfinished ones.

Costs of a stage: f forward, b backward (with what it recomputes); of a cut: o = bytes / bandwidth, for which
the link is taken, and c = o + latency until the tensor is there, the same both ways. M micro-batches.
`simulate` runs exactly these rules, so a bound on them is a bound on every step it can report.

What holds for stage s of any plan (0-based, p stages, w = micro-batches it may hold):

    before its first F   at least sum of (f + c) of the stages before it      (micro-batch 0 has to get there)
    after its last B     at least sum of (b + c) of the stages before it      (that micro-batch has to return)
    a round trip         D = 2 c + sum of (f + b) + 2 sum of c of the stages after it, between the end of a
                         micro-batch's F and the start of its B

and so, for 1F1B, from the first start to the last end on stage s, the largest of

    ceil(M / w) (f + b + D)           micro-batch m + w starts when m is done, so round trips chain
                                      (design: the busiest stage's work is the last stage's case, D = 0)
    X + (M - w)(f + b) + Y   (M > w)  with X = max(w f, f + D): the first B comes after w F and after a
                                      round trip; Y = max(w b, b + D): after the last F, w B are left and a
                                      round trip; between them every F and B that is left
    M f + M b, M f + D + b, f + D + M b   (M = w), the same without the middle
    f + D + (M - 1) o + b             the link after the stage carries M tensors

GPipe's forwards and backwards are two flow shops of identical jobs (links are machines, latencies lags),
whose spans are known exactly: sum of f and c plus (M - 1) times the largest f or o; the same for b. Under
`except_last` the first backward job is shorter (b', without the recomputation), and two paths are bounds: it
on the last stage, then the second job through all of them: sum of b and c plus (M - 2) times the largest b or
o, plus b' of the last stage; or it as far as the largest stage, where all others pass: sum of b' and c plus
(M - 1) times the largest b or o.

Where one process drives all stages, the step is at least all launches in turn.

For an unfinished plan the terms of the missing stages are minimised by dynamic programming from the last
stage back, each with the smallest sum of cuts that may follow it: still below every completion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cost_models.communication import point_to_point_seconds
from ..cost_models.memory import LedgerOptions
from ..cost_models.schedules import schedule_named
from ..cost_models.topology import Link
from .setting import Setting
from .stage_table import StageTable

Floats = npt.NDArray[np.float64]
Ends = npt.NDArray[np.int64]
State = dict[str, npt.NDArray[Any]]
"""What a bound knows of unfinished plans, by name: one entry a plan (or one a plan and next place)."""


@dataclass(frozen=True, eq=False)
class Instance:
    """The straight plans of one setting: a table of stages, their links by boundary, and a memory limit."""

    table: StageTable
    setting: Setting
    links: tuple[Link, ...]
    """By boundary: after stage 0, after stage 1, ..."""
    optimizer: str
    memory_limit: float | None = None
    ledger: LedgerOptions = field(default_factory=LedgerOptions)
    single_process: bool = False
    trains_every_stage: bool = False
    """Whether a stage without parameters is refused."""
    _memory: dict[float, npt.NDArray[np.bool_]] = field(default_factory=dict)

    @property
    def last_place(self) -> int:
        """Where the last stage ends."""
        return self.table.blocks

    @property
    def usual_backward(self) -> Floats:
        """Backward seconds of the micro-batches that are recomputed, if any are."""
        return self.table.backward + (self.table.forward if self.setting.recomputed else 0.0)

    def occupancy(self, boundary: int) -> Floats:
        """(places,): seconds for which a transfer takes the link."""
        return self.links[boundary].occupancy_seconds(self.table.crossing)

    def transfer(self, boundary: int) -> Floats:
        """(places,): seconds until a transfer has arrived."""
        return point_to_point_seconds(self.links[boundary], self.table.crossing)

    def allowed(self, remaining: int, stages: int) -> npt.NDArray[np.bool_]:
        """Which stages may be the one with `remaining` stages from it to the end."""
        if self.memory_limit is None:
            return self.usable
        setting = self.setting
        in_flight = schedule_named(setting.schedule).in_flight(
            stages - remaining, stages, setting.micro_batches
        )
        if in_flight not in self._memory:
            needed = self.table.memory(in_flight, setting.recompute, self.optimizer, **self.ledger)
            self._memory[in_flight] = self.usable & (needed <= self.memory_limit)
        return self._memory[in_flight]

    @cached_property
    def usable(self) -> npt.NDArray[np.bool_]:
        """Which stages may be, whatever the memory."""
        trained = np.asarray(self.table.stage_bytes.trainable) > 0
        return self.table.valid & trained if self.trains_every_stage else self.table.valid

    @property
    def launches(self) -> float:
        """Host seconds of all launches of a step, where one process makes them all; else 0."""
        if not self.single_process:
            return 0.0
        forward, backward = (float(t[0, -1]) for t in (self.table.forward_launch, self.table.backward_launch))
        return self.setting.micro_batches * (forward + backward) + self.setting.recomputed * forward

    def quick_bound(self, stages: int) -> float:
        """A bound that needs no table of rows: the work shared evenly, the round trips of stage 0."""
        setting = self.setting
        forward, backward = float(self.table.forward[0, -1]), float(self.table.backward[0, -1])
        work = setting.micro_batches * (forward + backward) + setting.recomputed * forward
        trips = 1 if setting.schedule == "gpipe" else -(-setting.micro_batches // stages)
        return max(work / stages, trips * (forward + backward), self.launches)


class OneFOneBBound:
    """The bounds of the module's docstring for 1F1B."""

    def __init__(self, instance: Instance, stages: int) -> None:
        self.instance, self.stages = instance, stages
        self._left = instance.table.forward[:, -1] + instance.usual_backward[:, -1]

    def root(self) -> float:
        """A bound on every plan of so many stages; inf where memory allows none."""
        return max(float(self._rows[0][0][0]), self.instance.launches)

    def start(self) -> State:
        """The plan of no stages."""
        return {"place": np.zeros(1, dtype=np.int64), "lag": np.zeros(1), "known": np.zeros(1)}

    def extend(self, stage: int, state: State) -> tuple[Floats, State]:
        """(plans, places): the bound with `stage` ending at each place, and the state then."""
        instance, start = self.instance, state["place"]
        f, b = instance.table.forward[start], instance.usual_backward[start]
        lag = state["lag"][:, None]
        follows, cuts = self._rows[stage + 1]
        cut = self._cut(stage)
        own = self._stage_term(stage, f, b, cut, self._trip(cut, cuts))
        known = np.maximum(state["known"][:, None], lag + own)
        lag = lag + f + b + 2 * cut
        bound = np.maximum(known, lag + follows)
        bound = np.where(instance.allowed(self.stages - stage, self.stages)[start], bound, np.inf)
        return np.maximum(bound, instance.launches), {"lag": lag, "known": known}

    def finished(self, ends: Ends) -> Floats:
        """(plans,): the bound of whole plans, whose cuts are all known. ends: (plans, stages)."""
        f, b = self.instance.table.forward, self.instance.usual_backward
        starts = starts_of(ends)
        bound, trip = np.zeros(len(ends)), np.zeros(len(ends))
        for stage in reversed(range(self.stages)):
            own_f, own_b = f[starts[:, stage], ends[:, stage]], b[starts[:, stage], ends[:, stage]]
            cut = self._cut(stage)[ends[:, stage]]
            trip = trip + 2 * cut
            own = self._stage_term(stage, own_f, own_b, cut, trip)
            bound = np.maximum(own, own_f + own_b + 2 * cut + bound)
            trip = trip + own_f + own_b
        return np.maximum(bound, self.instance.launches)

    @cached_property
    def _rows(self) -> list[tuple[Floats, Floats]]:
        """For stage 0, 1, ... starting at each place: the bound from its first start to its last end, and the
        smallest sum of c from its own cut on."""
        f, b = self.instance.table.forward, self.instance.usual_backward
        rows = [self._row_after_last()]
        for stage in reversed(range(self.stages)):
            follows, cuts = rows[-1]
            cut = self._cut(stage)
            own = self._stage_term(stage, f, b, cut, self._trip(cut, cuts))
            allowed = self.instance.allowed(self.stages - stage, self.stages)
            bound = np.where(allowed, np.maximum(own, f + b + 2 * cut + follows), np.inf)
            rows.append((bound.min(axis=1), np.where(allowed, cut + cuts, np.inf).min(axis=1)))
        return rows[::-1]

    def _row_after_last(self) -> tuple[Floats, Floats]:
        nothing = np.full(self.instance.last_place + 1, np.inf)
        nothing[-1] = 0.0
        return nothing, nothing

    def _cut(self, stage: int) -> Floats:
        last = stage == self.stages - 1
        return np.zeros(self.instance.last_place + 1) if last else self.instance.transfer(stage)

    def _trip(self, cut: Floats, cuts: Floats) -> Floats:
        """(places,): D of a stage that ends at each place."""
        return 2 * cut + self._left + 2 * cuts

    def _stage_term(self, stage: int, f: Floats, b: Floats, cut: Floats, trip: Floats) -> Floats:
        count = self.instance.setting.micro_batches
        held = min(count, self.stages - stage)
        chained = -(-count // held) * (f + b + trip)
        if count > held:
            ramped = (
                np.maximum(held * f, f + trip) + (count - held) * (f + b) + np.maximum(held * b, b + trip)
            )
        else:
            ramped = np.maximum(count * (f + b), np.maximum(count * f + b, f + count * b) + trip)
        term = np.maximum(chained, ramped)
        if stage == self.stages - 1:
            return term
        latency = self.instance.links[stage].latency_seconds
        return np.maximum(term, f + b + trip + (count - 1) * (cut - latency))


class GPipeBound:
    """The spans of GPipe's two flow shops: exact where every backward costs the same, else a bound."""

    def __init__(self, instance: Instance, stages: int) -> None:
        self.instance, self.stages = instance, stages
        self._followers = instance.setting.micro_batches - 1
        self._paths = self._known_paths()

    def root(self) -> float:
        """A bound on every plan of so many stages; inf where memory allows none."""
        row = {name: float(values[0]) for name, values in self._rows[0].items()}
        return max(float(self._total(row["f"], row["b"], row["both"], row["cuts"])), self.instance.launches)

    def start(self) -> State:
        """The plan of no stages."""
        zero = np.zeros(1)
        return {"place": np.zeros(1, dtype=np.int64), "f": zero, "b": zero, "both": zero, "cuts": zero}

    def extend(self, stage: int, state: State) -> tuple[Floats, State]:
        """(plans, places): the bound with `stage` ending at each place, and the state then."""
        start, row = state["place"], self._rows[stage + 1]
        f, b, both, cut = self._stage(stage, start)
        known = {
            "f": np.maximum(state["f"][:, None], f),
            "b": np.maximum(state["b"][:, None], b),
            "both": np.maximum(state["both"][:, None], both),
            "cuts": state["cuts"][:, None] + cut,
        }
        bound = self._total(
            np.maximum(known["f"], row["f"]),
            np.maximum(known["b"], row["b"]),
            np.maximum(known["both"], row["both"]),
            known["cuts"] + row["cuts"],
        )
        bound = np.where(self.instance.allowed(self.stages - stage, self.stages)[start], bound, np.inf)
        return np.maximum(bound, self.instance.launches), known

    def finished(self, ends: Ends) -> Floats:
        """(plans,): the bound of whole plans. ends: (plans, stages)."""
        starts = starts_of(ends)
        f, b, both, cuts = (np.zeros(len(ends)) for _ in range(4))
        for stage in range(self.stages):
            costs = self._stage(stage, starts[:, stage])
            own_f, own_b, own_both = (table[np.arange(len(ends)), ends[:, stage]] for table in costs[:3])
            f, b, both = np.maximum(f, own_f), np.maximum(b, own_b), np.maximum(both, own_both)
            cuts = cuts + costs[3][ends[:, stage]]
        return np.maximum(self._total(f, b, both, cuts), self.instance.launches)

    def _known_paths(self) -> list[tuple[float, int]]:
        """Paths through both flow shops: their seconds besides cuts and largest stages, and how many times
        they take the largest backward."""
        table, usual = self.instance.table, float(self.instance.usual_backward[0, -1])
        forward, backward = float(table.forward[0, -1]), float(table.backward[0, -1])
        if self.instance.setting.recompute != "except_last":
            return [(forward + usual, self._followers)]
        on_last = forward + usual + float(table.backward[-2, -1])
        return [(on_last, self._followers - 1), (forward + backward, self._followers)]

    def _total(
        self, f: Floats | float, b: Floats | float, both: Floats | float, cuts: Floats | float
    ) -> Floats:
        """The bound from the largest f, b and f + b of a stage (or 2 o of a cut), and the sum of c."""
        totals = []
        for seconds, count in self._paths:
            apart = _times(self._followers, f) + _times(count, b)
            together = _times(count, both) + _times(self._followers - count, f)
            totals.append(seconds + 2 * cuts + np.maximum(apart, together))
        return np.asarray(np.max(totals, axis=0))

    def _stage(self, stage: int, start: Ends | slice) -> tuple[Floats, Floats, Floats, Floats]:
        f, b = self.instance.table.forward[start], self.instance.usual_backward[start]
        if stage == self.stages - 1:
            return f, b, f + b, np.zeros(self.instance.last_place + 1)
        o = self.instance.occupancy(stage)
        return np.maximum(f, o), np.maximum(b, o), np.maximum(f + b, 2 * o), self.instance.transfer(stage)

    @cached_property
    def _rows(self) -> list[dict[str, Floats]]:
        """For stage 0, 1, ... starting at each place: the smallest each quantity can be from there on."""
        nothing = np.full(self.instance.last_place + 1, np.inf)
        nothing[-1] = 0.0
        rows = [dict.fromkeys(("f", "b", "both", "cuts"), nothing)]
        for stage in reversed(range(self.stages)):
            follows = rows[-1]
            f, b, both, cut = self._stage(stage, slice(None))
            allowed = self.instance.allowed(self.stages - stage, self.stages)
            candidates = {
                "f": np.maximum(f, follows["f"]),
                "b": np.maximum(b, follows["b"]),
                "both": np.maximum(both, follows["both"]),
                "cuts": np.broadcast_to(cut + follows["cuts"], allowed.shape),
            }
            rows.append(
                {name: np.where(allowed, values, np.inf).min(axis=1) for name, values in candidates.items()}
            )
        return rows[::-1]


Bound = OneFOneBBound | GPipeBound

BOUNDS: dict[str, type[OneFOneBBound] | type[GPipeBound]] = {"1f1b": OneFOneBBound, "gpipe": GPipeBound}


def starts_of(ends: Ends) -> Ends:
    """Places that the stages start at, from those they end at: (plans, stages)."""
    return np.concatenate([np.zeros((len(ends), 1), dtype=np.int64), ends[:, :-1]], axis=1)


def bound_of(instance: Instance, stages: int) -> Bound:
    """The bound for the instance's schedule."""
    return BOUNDS[instance.setting.schedule](instance, stages)


def _times(count: int, values: Floats | float) -> Floats | float:
    """count * values, where 0 times infinity is 0."""
    return count * values if count else 0.0

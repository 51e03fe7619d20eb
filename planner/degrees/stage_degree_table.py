"""What each stage that there can be takes with one set of degrees, where every stage has degrees of its own.

A stage is a run of consecutive blocks, alone or with the embedding or the head. What it takes does not depend
on where in the pipeline it stands but for what it keeps: under 1F1B a stage with k stages behind it has
min(m, k + 1) of m micro-batches in flight. What runs again costs backward seconds alone, and concerns no
other stage: of the recomputations that fit the one with the shortest backward is the best.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost_models.schedules import one_f_one_b_in_flight
from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.parallel_degrees import ParallelDegrees
from ...cost_models.transformer.rank_costs import RankCosts
from ...cost_models.transformer.training_setting import Recomputation, TrainingSetting
from ...cost_models.transformer.transformer_shape import TransformerShape

Array = npt.NDArray[np.float64]

FIRST, MIDDLE, LAST = range(3)
"""What a stage has beside blocks: the embedding, nothing, or the head (and predictors)."""


class BlockRuns:
    """Runs of consecutive blocks; those of the same kinds in the same order count as one.

    `number` (blocks + 1, blocks + 1): by the first block and the one behind the last, the place in `runs` of
    a run with its kinds; -1 where there is none. `ends` (2, runs): first block and the one behind the last;
    `lengths`: blocks."""

    def __init__(self, routed: tuple[bool, ...]) -> None:
        blocks = len(routed)
        self.number = np.full((blocks + 1, blocks + 1), -1)
        self.runs: list[range] = []
        # By the run without its last block, and the kind of that one.
        places: dict[tuple[int, bool | None], int] = {}
        for start in range(blocks + 1):
            place = -1
            for stop in range(start, blocks + 1):
                kind = routed[stop - 1] if stop > start else None
                place = places.setdefault((place, kind), len(self.runs))
                if place == len(self.runs):
                    self.runs.append(range(start, stop))
                self.number[start, stop] = place
        self.ends = np.array([(run.start, run.stop) for run in self.runs]).T
        self.lengths = self.ends[1] - self.ends[0]

    def places(self, role: int) -> list[int]:
        """Of the runs those that a stage may have: one between first and last has at least a block."""
        number = self.number
        inner = number[np.triu_indices(len(number), 1)]
        return [int(place) for place in np.unique((number[0], inner, number[:, -1])[role])]


class Recompute(NamedTuple):
    """What runs again on a stage, and of how many of its first blocks; None: of all."""

    kind: Recomputation
    blocks: int | None = None


_NOTHING = Recompute("none")


class StageDegreeTable:
    """Of one set of degrees and one size of micro-batches. By what a stage has beside blocks and by run:
    `forward` and `update` seconds; by stages behind it, too: `backward`. Infinite where no recomputation
    fits, and where the stage alone would take `most_seconds` of a step."""

    def __init__(
        self,
        shape: TransformerShape,
        degrees: ParallelDegrees,
        setting: TrainingSetting,
        costs: RankCosts,
        recompute: str,
        memory_bytes: float,
        runs: BlockRuns,
        most_stages: int,
        most_seconds: float,
    ) -> None:
        self.degrees, self.setting, self.runs = degrees, setting, runs
        self.memory_bytes, self._allowed = memory_bytes, recompute
        # Three stages: with the embedding, with nothing, with the head.
        three = replace(degrees, pipeline=3)
        kinds: tuple[Recomputation, ...] = ("none", "selective", "full")
        self._layers = {
            kind: LayerTable(shape, three, replace(setting, recompute=kind), costs)
            for kind in kinds
            if kind == "none" or recompute in ("auto", kind)
        }
        self._in_flight = np.array(
            [one_f_one_b_in_flight(0, after + 1, setting.micro_batches) for after in range(most_stages)]
        )
        size = len(runs.runs)
        self.forward, self.update = np.full((3, size), np.inf), np.full((3, size), np.inf)
        self.backward = np.full((3, most_stages, size), np.inf)
        for role in (FIRST, MIDDLE, LAST):
            for place in runs.places(role):
                self._fill(role, place, most_seconds)

    def _fill(self, role: int, place: int, most_seconds: float) -> None:
        run, layers = self.runs.runs[place], self._layers["none"]
        own = layers.seconds(run, role)
        if self.setting.micro_batches * own.both >= most_seconds:
            return
        self.forward[role, place] = own.forward
        self.update[role, place] = layers.update_seconds((run,), role)
        afters = slice(0, 1) if role == LAST else slice(1, None)
        backward, fixed, saved = self._once(role, run)
        needs = fixed + saved * self._in_flight[afters]
        if self._may_be(_NOTHING, run) and needs.max(initial=0.0) <= self.memory_bytes:
            self.backward[role, afters, place] = backward
            return
        table = self._recomputes(role, run)[1]
        needs = table[:, 1:2] + table[:, 2:] * self._in_flight[afters]
        fitting = np.where(needs <= self.memory_bytes, table[:, :1], np.inf)
        self.backward[role, afters, place] = fitting.min(axis=0)

    def recompute(self, role: int, run: range, after: int) -> Recompute:
        """Of the recomputations that fit, with so many stages behind, that with the shortest backward."""
        modes, table = self._recomputes(role, run)
        fits = table[:, 1] + table[:, 2] * self._in_flight[after] <= self.memory_bytes
        return modes[int(np.argmin(np.where(fits, table[:, 0], np.inf)))]

    def _may_be(self, mode: Recompute, run: range) -> bool:
        without = self._allowed == "partial" and not run and mode == _NOTHING
        return without or self._allowed in ("auto", mode.kind)

    def _recomputes(self, role: int, run: range) -> tuple[list[Recompute], Array]:
        """All that may be; of each the seconds of backward, bytes beside activations, and bytes that are kept
        of a micro-batch in flight."""
        modes = [mode for mode in map(Recompute, self._layers) if self._may_be(mode, run)]
        table = np.array([self._once(role, run, mode.kind) for mode in modes]).reshape(len(modes), 3)
        if self._allowed in ("auto", "partial") and run:
            modes += [Recompute("full", number) for number in range(1, len(run) + 1)]
            table = np.concatenate([table, self._some_again(role, run)])
        return modes, table

    def _once(self, role: int, run: range, kind: Recomputation = "none") -> tuple[float, float, float]:
        layers = self._layers[kind]
        ledger = layers.ledger((run,), role)
        saved = ledger["activations"] / one_f_one_b_in_flight(role, 3, self.setting.micro_batches)
        return layers.seconds(run, role).backward, sum(ledger.values()) - ledger["activations"], saved

    def _some_again(self, role: int, run: range) -> Array:
        """The same three of the first 1, 2, ... blocks that run again; predictors do not."""
        layers = self._layers["none"]
        whole, empty = layers.ledger((run,), role), layers.ledger((run[:0],), role)
        saved, space = layers.bytes_by_again(run)
        fixed = sum(whole.values()) - whole["activations"] - whole["workspace"]
        kinds = layers.shape.routed[run.start : run.stop]
        blocks = {kind: range(place, place + 1) for place, kind in zip(run, kinds, strict=True)}
        forwards = {kind: layers.seconds(own, MIDDLE).forward for kind, own in blocks.items()}
        columns = (
            layers.seconds(run, role).backward + np.cumsum([forwards[kind] for kind in kinds]),
            fixed + np.maximum(space, empty["workspace"])[1:],
            saved[1:] + empty["activations"] / one_f_one_b_in_flight(role, 3, self.setting.micro_batches),
        )
        return np.stack(columns, axis=1)

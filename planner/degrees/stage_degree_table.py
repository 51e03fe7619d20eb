"""Seconds and bytes of all stages that there can be on some devices, by the run of blocks that they have.

A stage is a run of consecutive blocks, alone or with the embedding or the head. What it takes does not depend
on where in the pipeline it stands but for what it keeps: under 1F1B a stage with k stages behind it has
min(m, k + 1) of m micro-batches in flight. What runs again costs backward seconds alone, and concerns no
other stage: of the recomputations that fit the one with the shortest backward is the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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

    def places(self, role: int) -> npt.NDArray[np.int64]:
        """Of the runs those that a stage may have: one between first and last has at least a block."""
        number = self.number
        inner = number[np.triu_indices(len(number), 1)]
        return np.unique((number[0], inner, number[:, -1])[role])


class RunCosts(NamedTuple):
    """Costs of a stage by run of blocks: seconds of its update, and of the passes of a micro-batch; bytes
    beside activations, and of those that a micro-batch in flight keeps."""

    update: Array
    forward: Array
    backward: Array
    fixed: Array
    saved: Array

    @classmethod
    def of(cls, layers: LayerTable, stage: int, ends: npt.NDArray[np.int64]) -> RunCosts:
        """Costs of a stage of some layers with the runs from one block up to another (2, runs)."""
        update, fixed, saved = layers.columns(ends, stage)
        forward, backward = layers.seconds_between(*ends)
        for count, own in layers.fixed_parts(stage):
            forward, backward = forward + count * own.forward, backward + count * own.backward
        return cls(update, forward, backward, fixed, saved)


class Recompute(NamedTuple):
    """What runs again on a stage, and of how many of its first blocks; None: of all."""

    kind: Recomputation
    blocks: int | None = None


class StageDegreeTable:
    """Costs of the stages with one set of degrees and one size of micro-batches.

    By what a stage has beside blocks and by run: `forward` and `update` seconds; by stages behind it, too:
    `backward`. Infinite where no recomputation fits, and where the stage alone would take `most_seconds` of a
    step."""

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
        size, afters = len(runs.runs), np.arange(most_stages)[:, None]
        in_flight = np.minimum(afters + 1, setting.micro_batches)
        self.forward, self.update = np.full((3, size), np.inf), np.full((3, size), np.inf)
        self.backward = np.full((3, most_stages, size), np.inf)
        self._modes = list(_recomputations(recompute, int(runs.lengths.max())))
        self._mode = np.zeros((3, most_stages, size), dtype=np.int64)
        # Three stages: with the embedding, with nothing, with the head.
        three = replace(degrees, pipeline=3)
        layers = {
            kind: LayerTable(shape, three, replace(setting, recompute=kind), costs)
            for kind in ("none", *{mode.kind for mode in self._modes} - {"none"})
        }
        for role in (FIRST, MIDDLE, LAST):
            places = runs.places(role)
            ends = runs.ends[:, places]
            plain = RunCosts.of(layers["none"], role, ends)
            short = setting.micro_batches * (plain.forward + plain.backward) < most_seconds
            self.forward[role, places] = np.where(short, plain.forward, np.inf)
            self.update[role, places] = np.where(short, plain.update, np.inf)
            is_there = short & (afters == 0 if role == LAST else afters > 0)
            for number, mode in enumerate(self._modes):
                again = replace(setting, recompute=mode.kind, recompute_blocks=mode.blocks)
                own = RunCosts.of(layers[mode.kind].with_setting(again), role, ends)
                fits = is_there & (own.fixed + own.saved * in_flight <= memory_bytes)
                if recompute == "partial":  # a stage without blocks runs nothing again
                    fits &= (runs.lengths[places] == 0) == (mode.blocks is None)
                faster = fits & (own.backward < self.backward[role][:, places])
                self.backward[role][:, places] = np.where(
                    faster, own.backward, self.backward[role][:, places]
                )
                self._mode[role][:, places] = np.where(faster, number, self._mode[role][:, places])

    def recompute(self, role: int, run: range, after: int) -> Recompute:
        """Of the recomputations that fit, with so many stages behind, that with the shortest backward."""
        return self._modes[int(self._mode[role, after, self.runs.number[run.start, run.stop]])]


def _recomputations(allowed: str, longest: int) -> Iterator[Recompute]:
    """List what the option allows for a stage, up to all blocks of the longest."""
    if allowed in ("auto", "none", "partial"):
        yield Recompute("none")
    if allowed in ("auto", "selective"):
        yield Recompute("selective")
    if allowed in ("auto", "full"):
        yield Recompute("full")
    if allowed in ("auto", "partial"):
        yield from (Recompute("full", number) for number in range(1, longest + 1))

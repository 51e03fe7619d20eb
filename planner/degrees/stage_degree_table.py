"""Seconds and bytes of all possible stages on some devices, by run of blocks.

A stage is a run of consecutive blocks, alone or with the embedding or the head. Its costs do not depend on
its place in the pipeline, except for the activations that it holds: under 1F1B a stage with k stages after it
has min(m, k + 1) of m micro-batches in flight. Recomputation costs backward seconds only and affects no other
stage, so of the modes that fit the one with the shortest backward is best.
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
"""Roles of a stage, by its layers other than blocks: the embedding, none, or the head (and predictors)."""


class BlockRuns:
    """Runs of consecutive blocks. Those with the same kinds in the same order count as one.

    `number` (blocks + 1, blocks + 1): by first block and the block after the last, the index in `runs` of a
    run with its kinds; -1 if none exists. `ends` (2, runs): first block and the block after the last.
    `lengths` (runs,): blocks.

    Args:
        routed: By block, whether it has experts.
    """

    def __init__(self, routed: tuple[bool, ...]) -> None:
        blocks = len(routed)
        self.number = np.full((blocks + 1, blocks + 1), -1)
        self.runs: list[range] = []
        # Keys: the run without its last block, and the kind of the last block.
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
        """Return the runs that a stage with this role may have. A middle stage has at least one block."""
        number = self.number
        inner = number[np.triu_indices(len(number), 1)]
        return np.unique((number[0], inner, number[:, -1])[role])


class RunCosts(NamedTuple):
    """Costs of a stage by run of blocks.

    Attributes:
        update: Seconds of its update.
        forward: Forward seconds of a micro-batch.
        backward: Backward seconds of a micro-batch.
        fixed: Bytes without activations.
        saved: Bytes of activations per micro-batch in flight.
    """

    update: Array
    forward: Array
    backward: Array
    fixed: Array
    saved: Array

    @classmethod
    def of(cls, layers: LayerTable, stage: int, ends: npt.NDArray[np.int64]) -> RunCosts:
        """Return the costs of stage number `stage` with the runs between the blocks `ends` (2, runs)."""
        update, fixed, saved = layers.columns(ends, stage)
        forward, backward = layers.seconds_between(*ends)
        for count, part in layers.fixed_parts(stage):
            forward, backward = forward + count * part.forward, backward + count * part.backward
        return cls(update, forward, backward, fixed, saved)


class Recompute(NamedTuple):
    """Recomputation of a stage, and the number of first blocks that it covers; None for all."""

    kind: Recomputation
    blocks: int | None = None


class StageDegreeTable:
    """Costs of the stages with one set of degrees and one micro-batch size.

    `forward` and `update` are seconds by role (`FIRST`, `MIDDLE`, `LAST`) and run; `backward` by role, stages
    after it and run. They are inf if no recomputation fits, and if the stage alone takes `most_seconds` of a
    step.

    Args:
        shape: The transformer.
        degrees: Degrees of the stage.
        setting: Micro-batches of the training.
        costs: Costs of kernels and communication.
        recompute: Allowed recomputation.
        memory_bytes: Bytes that a device may use.
        runs: Runs of blocks.
        most_stages: Most stages of a pipeline.
        most_seconds: Seconds that a step must be below.
    """

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
        # A pipeline of three stages has all roles: embedding, blocks only, head.
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
                mode_setting = replace(setting, recompute=mode.kind, recompute_blocks=mode.blocks)
                mode_costs = RunCosts.of(layers[mode.kind].with_setting(mode_setting), role, ends)
                fits = is_there & (mode_costs.fixed + mode_costs.saved * in_flight <= memory_bytes)
                if recompute == "partial":  # a stage without blocks recomputes nothing
                    fits &= (runs.lengths[places] == 0) == (mode.blocks is None)
                faster = fits & (mode_costs.backward < self.backward[role][:, places])
                self.backward[role][:, places] = np.where(
                    faster, mode_costs.backward, self.backward[role][:, places]
                )
                self._mode[role][:, places] = np.where(faster, number, self._mode[role][:, places])

    def recompute(self, role: int, run: range, later_stages: int) -> Recompute:
        """Return the recomputation with the shortest backward that fits, with so many `later_stages`."""
        return self._modes[int(self._mode[role, later_stages, self.runs.number[run.start, run.stop]])]


def _recomputations(allowed: str, longest: int) -> Iterator[Recompute]:
    """Yield the recomputations that the option allows for a stage, up to all blocks of the longest."""
    if allowed in ("auto", "none", "partial"):
        yield Recompute("none")
    if allowed in ("auto", "selective"):
        yield Recompute("selective")
    if allowed in ("auto", "full"):
        yield Recompute("full")
    if allowed in ("auto", "partial"):
        yield from (Recompute("full", number) for number in range(1, longest + 1))

"""Lower bound on pipelines whose stages have different degrees.

**The bound of a pipeline** under 1F1B. Stage s takes f and b seconds for a micro-batch, and e and l over the
cuts before and after it, in either direction. k stages follow it, and m micro-batches go through. Sends and
receives block: s starts nothing after a forward until l has passed, and nothing after a backward until e has.
Its first forward waits for the forwards of the earlier stages, and their backwards follow its last backward.
Let A be the seconds of a micro-batch in the earlier stages and over the cuts up to s, forwards and backwards.
Then a step takes A - e + m (f + b + e + l), where the last e is part of A. It takes longer if s idles. Let D
be the seconds from the end of a forward of s until the gradient is back at s. The first backward begins f + D
after the first forward began, and s has run k + 1 forwards until then. Likewise, the last backward begins
f + D after the last forward began, and s has run k backwards in between:

    A - e + m (f + b + e + l) + max(0, f + D - (k + 1) (f + l)) + max(0, D - l - k (b + e))

With fewer micro-batches than k + 2 the two idle times overlap, k is at most m - 1, and the longer one counts.
A step is no shorter than this bound for any of its stages, each with its update of the weights.

**The bound of all pipelines.** A dynamic programme from the last stage to the first, over the devices of a
stage and the block with which it begins, finds the least D that can follow it. With it, it finds the least of
these bounds of the stages from there on, each with the fastest possible cut. Stages that alone make the step
longer than a known plan are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...cost_models.errors import UsageError
from ...cost_models.topology import Topology
from .stage_degree_table import FIRST, LAST, MIDDLE, Array, BlockRuns, StageDegreeTable

MOST_PARTS = 64
"""Most parts into which the devices are divided. With more devices, a stage has whole parts."""


class DeviceSlot(NamedTuple):
    """Devices of a stage: `size` devices from rank `first` on."""

    first: int
    size: int

    @property
    def end(self) -> int:
        """Rank after the last device."""
        return self.first + self.size


def stage_slots(topology: Topology) -> list[DeviceSlot]:
    """Return all device slots.

    On each level of the topology, a slot lies inside one group or consists of whole groups, so that its
    devices are linked like the first ones.
    """
    devices = topology.gpus
    part = next(
        count for count in range(1, devices + 1) if devices % count == 0 and devices // count <= MOST_PARTS
    )
    return [
        DeviceSlot(first, count)
        for count in range(part, devices, part)
        for first in range(0, devices - count + 1, part)
        if all(_is_even(first, count, size) for size in topology.group_sizes)
    ]


def check_device_parts(topology: Topology) -> None:
    """Check that stages may have a part of the devices.

    Raises:
        UsageError: They may not.
    """
    if topology.gpus > 1 and not stage_slots(topology):
        raise UsageError(
            f"by_stage: {topology.gpus} devices do not divide into at most {MOST_PARTS} equal parts",
            f"Omit `by_stage`, or use at most {MOST_PARTS} devices, or a number with a suitable divisor.",
        )


def _is_even(first: int, count: int, size: int) -> bool:
    if count <= size:
        return first // size == (first + count - 1) // size
    return first % size == 0 and count % size == 0


def stage_bound(
    forward: Any,
    backward: Any,
    enter: Any,
    leave: Any,
    later_seconds: Any,
    later_stages: int,
    micro_batches: int,
) -> Any:
    """Return the bound of a pipeline by one of its stages, without the earlier stages.

    The module's docstring defines it. Arguments may be arrays.

    Args:
        forward: Forward seconds f of the stage.
        backward: Backward seconds b.
        enter: Seconds e over the cut before it.
        leave: Seconds l over the cut after it.
        later_seconds: Seconds D of the stages after it.
        later_stages: Number k of stages after it.
        micro_batches: Number m of micro-batches.
    """
    ahead = min(later_stages, micro_batches - 1)
    first = forward + later_seconds - (ahead + 1) * (forward + leave)
    last = later_seconds - leave - ahead * (backward + enter)
    if micro_batches >= later_stages + 2:
        idle = np.maximum(first, 0.0) + np.maximum(last, 0.0)
    else:
        idle = np.maximum(np.maximum(first, last), 0.0)
    return micro_batches * (forward + backward + enter + leave) - enter + idle


@dataclass(frozen=True, eq=False)
class DegreeTables:
    """Degrees and costs of stages for one micro-batch size.

    Attributes:
        topology: Devices and links.
        runs: Runs of blocks.
        by_count: By number of devices, the costs with each of the possible degrees.
        micro_batches: Number of micro-batches.
        samples: Samples of a micro-batch.
        token_bytes: Bytes of all tokens that cross a cut.
    """

    topology: Topology
    runs: BlockRuns
    by_count: dict[int, list[StageDegreeTable]]
    micro_batches: int
    samples: int
    token_bytes: float

    def cut_seconds(self, before: DeviceSlot, after: DeviceSlot) -> float:
        """Return the least seconds over the cut between two stages, for any degrees.

        A device of the smaller stage sends or receives its share of all tokens over the fastest link across
        the cut.
        """
        return self._share_seconds(after.first, min(before.size, after.size))

    def enter_seconds(self, slot: DeviceSlot) -> float:
        """Return the least seconds over the cut before a stage, for any previous stage."""
        return self._share_seconds(slot.first, slot.size) if slot.first else 0.0

    def leave_seconds(self, slot: DeviceSlot) -> float:
        """Return the least seconds over the cut after a stage, for any next stage."""
        return self._share_seconds(slot.end, slot.size) if slot.end < self.topology.gpus else 0.0

    def _share_seconds(self, rank: int, devices: int) -> float:
        levels = self.topology.levels[self.topology.shared_level(rank - 1, rank) :]
        return min(float(level.link.seconds(self.token_bytes / devices)) for level in levels)


class _StageArrays:
    """Seconds of stages by degrees, first block and the block after the last.

    All have the same number of devices, and the same number of stages after them.
    """

    def __init__(
        self, tables: Sequence[StageDegreeTable], runs: BlockRuns, role: int, later_stages: int
    ) -> None:
        number = {FIRST: runs.number[:1], MIDDLE: runs.number, LAST: runs.number[:, -1:]}[role]
        columns = (
            [table.forward[role] for table in tables],
            [table.backward[role, later_stages] for table in tables],
            [table.update[role] for table in tables],
        )
        # A run number of -1 selects the padding: no stage.
        padded = (
            np.pad(column, ((0, 0), (0, 1)), constant_values=np.inf) for column in map(np.array, columns)
        )
        self.forward, self.backward, self.update = (column[:, number] for column in padded)


class PipelineBounds:
    """Least seconds of the stages from one on, by the stages after it, its devices and its first block.

    `least_behind` and `least_step`, by stages after and by slot, are arrays by the first block after the
    slot's stage: seconds until a micro-batch's gradient is back, and the bound on the step by the later
    stages. `roots` are the bounds of all pipelines by number of stages; inf if none is below `most_seconds`.

    Args:
        tables: Costs of stages.
        most_stages: Most stages.
        most_seconds: Seconds that a pipeline must be faster than.
    """

    def __init__(self, tables: DegreeTables, most_stages: int, most_seconds: float) -> None:
        self.tables, self.most_seconds = tables, most_seconds
        self.slots = [slot for slot in stage_slots(tables.topology) if tables.by_count.get(slot.size)]
        self.by_first: dict[int, list[DeviceSlot]] = defaultdict(list)
        for slot in self.slots:
            self.by_first[slot.first].append(slot)
        blocks = len(tables.runs.number) - 1
        self._end = np.where(np.arange(blocks + 1) == blocks, 0.0, np.inf)
        self.least_behind: list[dict[DeviceSlot, Array]] = []
        self.least_step: list[dict[DeviceSlot, Array]] = []
        self.roots: dict[int, float] = {}
        rest: dict[DeviceSlot, tuple[Array, Array]] = {}
        for later_stages in range(most_stages):
            self._add_exits(later_stages, rest)
            if later_stages:
                self.roots[later_stages + 1] = self._root(later_stages)
            rest = self._stages(later_stages, LAST if later_stages == 0 else MIDDLE)

    def _add_exits(self, later_stages: int, rest: dict[DeviceSlot, tuple[Array, Array]]) -> None:
        """Add the entries for slots with `later_stages` stages after them, from those with one less."""
        least_behind, step = dict[DeviceSlot, Array](), dict[DeviceSlot, Array]()
        for slot in self.slots:
            if later_stages == 0 and slot.end == self.tables.topology.gpus:
                least_behind[slot], step[slot] = self._end, self._end
            following = (
                [next_slot for next_slot in self.by_first[slot.end] if next_slot in rest]
                if later_stages
                else []
            )
            if following:
                cuts = [2 * self.tables.cut_seconds(slot, next_slot) for next_slot in following]
                least_behind[slot], step[slot] = (
                    np.min(
                        [cut + rest[next_slot][part] for cut, next_slot in zip(cuts, following, strict=True)],
                        axis=0,
                    )
                    for part in (0, 1)
                )
        self.least_behind.append(least_behind)
        self.least_step.append(step)

    def _stages(self, later_stages: int, role: int) -> dict[DeviceSlot, tuple[Array, Array]]:
        """Return, by slot, the least seconds of a micro-batch and of a step from it on, by first block."""
        rest: dict[DeviceSlot, tuple[Array, Array]] = {}
        arrays: dict[int, _StageArrays] = {}
        for slot in self.least_behind[later_stages]:
            if slot.size not in arrays:
                arrays[slot.size] = _StageArrays(
                    self.tables.by_count[slot.size], self.tables.runs, role, later_stages
                )
            both, step = self._slot_seconds(slot, arrays[slot.size], later_stages)
            if np.isfinite(step).any():
                rest[slot] = both, step
        return rest

    def _slot_seconds(self, slot: DeviceSlot, stage: _StageArrays, later_stages: int) -> tuple[Array, Array]:
        least_behind, step = self.least_behind[later_stages][slot], self.least_step[later_stages][slot]
        if stage.forward.shape[2] == 1:
            least_behind, step = least_behind[-1:], step[-1:]
        enter, leave = self.tables.enter_seconds(slot), self.tables.leave_seconds(slot)
        both = stage.forward + stage.backward
        with np.errstate(invalid="ignore"):
            alone = stage.update + stage_bound(
                stage.forward,
                stage.backward,
                enter,
                leave,
                least_behind,
                later_stages,
                self.tables.micro_batches,
            )
        long = ~(alone < self.most_seconds)
        together = np.where(long, np.inf, both + least_behind).min(axis=(0, 2))
        latest = np.where(long, np.inf, np.maximum(alone, both + step)).min(axis=(0, 2))
        return together, latest

    def _root(self, later_stages: int) -> float:
        """Return the bound of pipelines with `later_stages` + 1 stages."""
        least = float("inf")
        for slot in self.by_first[0]:
            if slot in self.least_behind[later_stages]:
                stage = _StageArrays(self.tables.by_count[slot.size], self.tables.runs, FIRST, later_stages)
                least = min(least, float(self._slot_seconds(slot, stage, later_stages)[1].min()))
        return least if least < self.most_seconds else float("inf")

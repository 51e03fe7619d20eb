"""What no pipeline with degrees of its own for each stage is faster than.

**The bound of a pipeline** under 1F1B. Stage s takes f and b seconds for a micro-batch, and e and l over the
cuts before and behind it, in either direction; k stages are behind it, and m micro-batches go through. Sends
and receives block: s begins nothing after a forward until l has passed, and nothing after a backward until e
has. Its first forward waits for the forwards of the stages before, and after its last backward follow theirs,
so that with A the seconds of a micro-batch in the stages before s and over the cuts up to s, forwards and
backwards, a step takes A - e + m (f + b + e + l), the last e being part of A. More, where s idles: with D the
seconds from the end of a forward of s until the gradient is back at s, the first backward begins f + D after
the first forward began, and s has run k + 1 forwards until then; and likewise the last backward, f + D after
the last forward began, after k backwards:

    A - e + m (f + b + e + l) + max(0, f + D - (k + 1) (f + l)) + max(0, D - l - k (b + e))

With fewer micro-batches than k + 2 the two overlap, k is at most m - 1, and the longer one counts. A step is
no shorter than this of any of its stages, each with its own update of the weights.

**Of all pipelines** a programme over the stages from the last to the first, by the devices a stage has and
the block it begins with, finds the least D that can be behind it, and with it the least of these bounds of
the stages from there on, each with the fastest cut there can be. A stage that alone makes the step longer
than a plan that is there is left out.
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
"""Of more devices a stage has whole parts, as many as divide them and are no more than these."""


class DeviceSlot(NamedTuple):
    """Devices that a stage may have: `size` from the rank `first` on."""

    first: int
    size: int

    @property
    def end(self) -> int:
        """The rank behind the last."""
        return self.first + self.size


def stage_slots(topology: Topology) -> list[DeviceSlot]:
    """All of them: of each level of the topology a stage is inside one group, or has whole groups, so that
    its devices are joined as the first ones are."""
    devices = topology.gpus
    part = next(own for own in range(1, devices + 1) if devices % own == 0 and devices // own <= MOST_PARTS)
    return [
        DeviceSlot(first, count)
        for count in range(part, devices, part)
        for first in range(0, devices - count + 1, part)
        if all(_is_even(first, count, size) for size in topology.group_sizes)
    ]


def check_device_parts(topology: Topology) -> None:
    """Raises UsageError for several devices of which no stage may have a part."""
    if topology.gpus > 1 and not stage_slots(topology):
        raise UsageError(
            f"by_stage: {topology.gpus} devices have no equal parts for stages of their own",
            f"Omit `by_stage`, or give up to {MOST_PARTS} devices, or such as divide into so many parts.",
        )


def _is_even(first: int, count: int, size: int) -> bool:
    if count <= size:
        return first // size == (first + count - 1) // size
    return first % size == 0 and count % size == 0


def stage_bound(
    forward: Any, backward: Any, enter: Any, leave: Any, behind: Any, after: int, micro_batches: int
) -> Any:
    """Seconds of a pipeline that one of its stages tells of, but for those of the stages before it; the top
    of this file says which. Of arrays, of each."""
    ahead = min(after, micro_batches - 1)
    first = forward + behind - (ahead + 1) * (forward + leave)
    last = behind - leave - ahead * (backward + enter)
    if micro_batches >= after + 2:
        idle = np.maximum(first, 0.0) + np.maximum(last, 0.0)
    else:
        idle = np.maximum(np.maximum(first, last), 0.0)
    return micro_batches * (forward + backward + enter + leave) - enter + idle


@dataclass(frozen=True, eq=False)
class DegreeTables:
    """Of one size of micro-batches, `micro_batches` of them: the degrees that so many devices may have, and
    what their stages take. `token_bytes`: of all that crosses a cut."""

    topology: Topology
    runs: BlockRuns
    by_count: dict[int, list[StageDegreeTable]]
    micro_batches: int
    samples: int
    token_bytes: float

    def cut_seconds(self, before: DeviceSlot, after: DeviceSlot) -> float:
        """At least, whatever the degrees: a device of the smaller stage sends or receives its share of all
        tokens over the fastest link across the cut."""
        return self._share_seconds(after.first, min(before.size, after.size))

    def enter_seconds(self, slot: DeviceSlot) -> float:
        """Over the cut before a stage, at least, whatever is before it."""
        return self._share_seconds(slot.first, slot.size) if slot.first else 0.0

    def leave_seconds(self, slot: DeviceSlot) -> float:
        """Over the cut behind a stage, at least, whatever is behind it."""
        return self._share_seconds(slot.end, slot.size) if slot.end < self.topology.gpus else 0.0

    def _share_seconds(self, rank: int, devices: int) -> float:
        levels = self.topology.levels[self.topology.shared_level(rank - 1, rank) :]
        return min(float(level.link.seconds(self.token_bytes / devices)) for level in levels)


class _StageArrays:
    """Of the stages of so many devices with so many stages behind them: seconds by degrees, first block and
    the one behind the last."""

    def __init__(self, tables: Sequence[StageDegreeTable], runs: BlockRuns, role: int, after: int) -> None:
        number = {FIRST: runs.number[:1], MIDDLE: runs.number, LAST: runs.number[:, -1:]}[role]
        columns = (
            [table.forward[role] for table in tables],
            [table.backward[role, after] for table in tables],
            [table.update[role] for table in tables],
        )
        # Without a run: no stage.
        padded = (np.pad(own, ((0, 0), (0, 1)), constant_values=np.inf) for own in map(np.array, columns))
        self.forward, self.backward, self.update = (own[:, number] for own in padded)


class PipelineBounds:
    """Least seconds of the stages from one on, by the stages behind it, its devices and its first block.

    `least_behind` and `least_step` (by stages behind, by slot: by the first block behind the slot's stage):
    the seconds until a micro-batch's gradient is back, and those of a step that the stages behind tell of.
    `roots`: by number of stages the bound of all pipelines; inf where none is shorter than `most_seconds`."""

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
        for after in range(most_stages):
            self._add_exits(after, rest)
            if after:
                self.roots[after + 1] = self._root(after)
            rest = self._stages(after, LAST if after == 0 else MIDDLE)

    def _add_exits(self, after: int, rest: dict[DeviceSlot, tuple[Array, Array]]) -> None:
        """Of the slots with so many stages behind them, from those of one less."""
        behind, step = dict[DeviceSlot, Array](), dict[DeviceSlot, Array]()
        for slot in self.slots:
            if after == 0 and slot.end == self.tables.topology.gpus:
                behind[slot], step[slot] = self._end, self._end
            following = [own for own in self.by_first[slot.end] if own in rest] if after else []
            if following:
                cuts = [2 * self.tables.cut_seconds(slot, own) for own in following]
                behind[slot], step[slot] = (
                    np.min([cut + rest[own][part] for cut, own in zip(cuts, following, strict=True)], axis=0)
                    for part in (0, 1)
                )
        self.least_behind.append(behind)
        self.least_step.append(step)

    def _stages(self, after: int, role: int) -> dict[DeviceSlot, tuple[Array, Array]]:
        """By slot, of the stages from it on and by first block: the least seconds of a micro-batch, and of a
        step."""
        rest: dict[DeviceSlot, tuple[Array, Array]] = {}
        arrays: dict[int, _StageArrays] = {}
        for slot in self.least_behind[after]:
            if slot.size not in arrays:
                arrays[slot.size] = _StageArrays(
                    self.tables.by_count[slot.size], self.tables.runs, role, after
                )
            both, step = self._slot_seconds(slot, arrays[slot.size], after)
            if np.isfinite(step).any():
                rest[slot] = both, step
        return rest

    def _slot_seconds(self, slot: DeviceSlot, own: _StageArrays, after: int) -> tuple[Array, Array]:
        behind, step = self.least_behind[after][slot], self.least_step[after][slot]
        if own.forward.shape[2] == 1:
            behind, step = behind[-1:], step[-1:]
        enter, leave = self.tables.enter_seconds(slot), self.tables.leave_seconds(slot)
        both = own.forward + own.backward
        with np.errstate(invalid="ignore"):
            alone = own.update + stage_bound(
                own.forward, own.backward, enter, leave, behind, after, self.tables.micro_batches
            )
        long = ~(alone < self.most_seconds)
        together = np.where(long, np.inf, both + behind).min(axis=(0, 2))
        latest = np.where(long, np.inf, np.maximum(alone, both + step)).min(axis=(0, 2))
        return together, latest

    def _root(self, after: int) -> float:
        """Of the pipelines of so many stages and one more."""
        least = float("inf")
        for slot in self.by_first[0]:
            if slot in self.least_behind[after]:
                own = _StageArrays(self.tables.by_count[slot.size], self.tables.runs, FIRST, after)
                least = min(least, float(self._slot_seconds(slot, own, after)[1].min()))
        return least if least < self.most_seconds else float("inf")

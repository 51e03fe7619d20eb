"""Paths through the actions of a schedule, which give lower bounds on the step for any cuts.

A schedule fixes the order of every device's actions. So the step is no shorter than any path through its
dependencies (on a device from an action to a later one, or along a transfer), with the exposed all-reduce
after the last backward of a part. It is also no shorter than all launches of a host. A path counts how often
it meets each figure of each part, and each cut. Its seconds are a sum over the parts:

    step >= max over paths >= mean of paths >= least mean over all cuts

The least over all cuts is a shortest path through the cut points, part by part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...cost_models.program import Program
from ...cost_models.program_order import NONE, Order, resolve_order
from ...cost_models.simulator import Run
from ...cost_models.step_costs import Hosts
from ..stage_table import Floats, Indices
from .part_tables import SECONDS, PartTables

EXPOSED = SECONDS.index("exposed")


@dataclass(frozen=True, eq=False)
class PathCounts:
    """How often a path meets the figures of every slot and each cut.

    Attributes:
        actions: (slots, 7) counts of the figures in `SECONDS`, negative for accumulation that the first
            backward saves.
        transfers: (2, parts - 1) counts of occupancy and latency of each cut.
    """

    actions: Floats
    transfers: Floats

    @property
    def key(self) -> bytes:
        """Key that is equal for equal paths."""
        return self.actions.tobytes() + self.transfers.tobytes()


def count_critical_path(program: Program, run: Run, after: Floats) -> PathCounts:
    """Count the critical path of a simulated step.

    It ends with the last action, or `after` seconds after the last backward of a slot.

    Args:
        program: Actions of all devices.
        run: Simulated times of the actions.
        after: (slots,) seconds.
    """
    order = resolve_order(program)
    end, arrival = run.end.tolist(), run.arrival.tolist()
    action, last = int(np.argmax(run.end)), _last_actions(order)
    ends = np.asarray(run.end)[last] + after
    is_exposed = bool(ends.max() > run.end[action])
    if is_exposed:
        action = int(last[np.argmax(ends)])
    path, sends = [action], []
    while action != NONE:
        previous, source = int(order.previous[action]), int(order.source[action])
        if source != NONE and (previous == NONE or arrival[source] >= end[previous]):
            sends.append(source)
            previous = source
        path.append(previous)
        action = previous
    return _count(order, path[:-1], sends, is_exposed)


def device_paths(program: Program) -> list[PathCounts]:
    """Return two paths through the actions of each device, starting with the first micro-batch's path to it.

    One goes through all of its actions. The other ends after its last B with the path of the gradient back
    through other devices.
    """
    order, paths = resolve_order(program), []
    last = _last_actions(order)
    for device in range(program.devices):
        actions = np.flatnonzero(order.device == device)
        lead = _follow(int(actions[0]), order.source)
        end = int(actions[-1])
        paths.append(_count(order, [*lead, *actions], lead, end in last))
        end = int(actions[order.kind[actions] == 1][-1])
        trail = _follow(end, order.target)
        path = [*lead, *actions[actions <= end], *trail]
        paths.append(_count(order, path, [*lead, *[end, *trail][:-1]], path[-1] in last))
    return paths


def launch_paths(program: Program, hosts: Hosts) -> list[PathCounts]:
    """Count the launches of each device's host.

    One process launches all forwards, and the backwards of one device.

    Args:
        program: Actions of all devices.
        hosts: Number of launching processes, see `Costs`.
    """
    order, paths = resolve_order(program), []
    for device in range(program.devices):
        counts = _count(order, [], [], False)
        for kind in (0, 1):
            is_launched = (order.kind == kind) & ((order.device == device) | (hosts == "one" and kind == 0))
            np.add.at(counts.actions[:, 4 + kind], _slots(order)[is_launched], 1.0)
        paths.append(counts)
    return paths


def endless_paths(program: Program, micro_batches: int) -> list[PathCounts]:
    """Count what one global batch of an asynchronous pipeline needs from each resource.

    A device runs the actions of its parts, its host launches them, its parts are reduced once, and a cut
    carries every transfer. The paths of the devices' actions come first.

    Args:
        program: Actions of all devices.
        micro_batches: Micro-batches of a global batch.
    """
    order = resolve_order(program)
    slots, cuts = _slots(order), program.slots - 1
    shape, paths = (program.devices * program.chunks, len(SECONDS)), list[PathCounts]()
    for figures, times in (([0, 1], micro_batches), ([4, 5], micro_batches), ([EXPOSED], 1)):
        for device in range(program.devices):
            counts = PathCounts(np.zeros(shape), np.zeros((2, cuts)))
            counts.actions[np.unique(slots[order.device == device])[:, None], figures] = times
            paths.append(counts)
    for cut in range(cuts):
        transfers = np.zeros((2, cuts))
        transfers[0, cut] = micro_batches
        paths.append(PathCounts(np.zeros(shape), transfers))
    return paths


def _follow(action: int, following: Indices) -> list[int]:
    """Return the actions to which an action leads, from device to device."""
    chain = list[int]()
    while (action := int(following[action])) != NONE:
        chain.append(action)
    return chain


def _slots(order: Order) -> Indices:
    return np.asarray(order.device * order.program.chunks + order.chunk)


def _last_actions(order: Order) -> Indices:
    """Return (slots,) last actions that complete gradients.

    On a device, later actions have larger numbers.
    """
    last = np.full(order.program.devices * order.program.chunks, NONE)
    np.maximum.at(last, _slots(order)[order.finishing], np.flatnonzero(order.finishing))
    return last


def _count(order: Order, path: list[int], sends: list[int], is_exposed: bool) -> PathCounts:
    """Count the actions of a path, and its transfers by their sending actions.

    `is_exposed`: the path ends with the gradient exchange of its last slot (of its first slot for
    `count_critical_path`, which goes backwards).
    """
    program, cuts = order.program, order.program.slots - 1
    if "path_counts" not in program.derived:
        shares = np.array([program.share(micro_batch) for micro_batch in order.micro_batch])
        counts = np.zeros((len(order), len(SECONDS)))
        counts[np.arange(len(order)), order.kind] = 1.0
        if program.splits_backward:
            counts[(order.kind == 1) & ~order.splits, 2] = (
                1.0  # a B that is not split computes the weight gradient, too
            )
        counts[order.first_backwards, 3] = -1.0
        program.derived["path_counts"] = counts * shares[:, None], shares
    counts, shares = program.derived["path_counts"]
    actions, transfers = np.zeros((program.devices * program.chunks, len(SECONDS))), np.zeros((2, cuts))
    np.add.at(actions, _slots(order)[path], counts[path])
    for sender in sends:
        transfers[:, order.cut[sender] % cuts] += (shares[sender], 1.0)
    if is_exposed:
        actions[_slots(order)[max(path)], EXPOSED] = 1.0
    return PathCounts(actions, transfers)


def path_table(tables: PartTables, counts: PathCounts) -> Floats:
    """Return (parts, n + 1, n + 1) seconds of each part on a path, with the transfer after it.

    They are inf if the part cannot lie there.

    Args:
        tables: Seconds of all parts.
        counts: The path.
    """
    seconds = np.zeros(tables.usable.shape)
    for slot, part in tables.program.parts_by_slot.items():
        slot_counts = counts.actions[slot.device * tables.program.chunks + slot.chunk]
        for name, count in zip(SECONDS, slot_counts.tolist(), strict=True):
            if count:
                seconds[part] += count * tables.seconds[name][slot]
    occupied, late = counts.transfers
    seconds[:-1] += (occupied[:, None] * tables.occupancy + (late * tables.latency)[:, None])[:, None, :]
    seconds[~tables.usable] = np.inf
    return seconds


def remaining_seconds(seconds: Floats) -> Floats:
    """Return (parts + 1, n + 1) least seconds of this part and all later ones, by where it begins."""
    parts, places = seconds.shape[0], seconds.shape[1]
    remaining = np.full((parts + 1, places), np.inf)
    remaining[parts, -1] = 0.0
    for part in reversed(range(parts)):
        remaining[part] = (seconds[part] + remaining[part + 1]).min(axis=1)
    return remaining

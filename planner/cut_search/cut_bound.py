"""A lower bound on the step under a schedule, over all ways to cut the layers.

A schedule fixes the order of every device's actions, so that whatever the cuts, the step is no shorter than
any path through its dependencies: on a device from an action to a later one, or along a transfer, and behind
the last backward of a part what of its all-reduce follows; nor than all launches of a host. A path says how
often it meets the F, B and W of each part, their launches and each cut, and its seconds are a sum over the
parts of what each takes alone. So of any mixture of paths (weights that add up to 1) the least over all cuts
is a shortest way through the cut points, part by part, and no step is below it:

    step >= max over paths >= mixture of paths >= least mixture over all cuts

The mixture is sought that makes the bound largest. Paths against cuts are a game, of which each turn solves
what is known of it (regret matching plus, Tammelin, arXiv:1407.5042), and adds the cuts that are the least of
the paths' mixture, and the critical path of the cuts' mixture, a step with the average of their seconds. The
bound holds for any mixture, however good. What the cuts cost beside the paths (ports, sums of tied weights)
only adds to a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...cost_models.schedules import Program
from ...cost_models.simulator.costs import Costs, Hosts
from ...cost_models.simulator.dependencies import NONE, Order, resolve_order
from ...cost_models.simulator.engine import Run
from ...cost_models.timeline import simulate
from ..stage_table import Floats, Indices
from .part_tables import Cuts, PartTables

FIGURES = 7
"""Of a slot that a path counts."""
AFTER = 6
"""Which of them is what follows the last backward."""
ROUNDS = 120
"""Of the game in which a mixture is made."""


@dataclass(frozen=True, eq=False)
class PathCounts:
    """How often a path meets the forwards, backwards, weight gradients, credits of first backwards, launches
    of forwards and of backwards, and what follows the last backward, of every slot (slots, 7), and the
    occupancy and the latency of every cut (2, parts - 1)."""

    actions: Floats
    transfers: Floats

    @property
    def key(self) -> bytes:
        """The same for paths that are alike."""
        return self.actions.tobytes() + self.transfers.tobytes()


def count_critical_path(program: Program, run: Run, after: Floats) -> PathCounts:
    """The counts of the path that ends last of a simulated step: with the last action, or `after` (slots,)
    seconds behind the last backward of a slot."""
    order = resolve_order(program)
    columns, counts = _columns(order), np.zeros((program.devices * program.chunks, FIGURES))
    cuts = program.slots - 1
    transfers = np.zeros((2, cuts))
    end, arrival = run.columns[1], run.columns[3]
    action, last = int(np.argmax(run.end)), _last_actions(order)
    ends = np.asarray(run.end)[last] + after
    if ends.max() > run.end[action]:
        slot = int(np.argmax(ends))
        action = int(last[slot])
        counts[slot, AFTER] = 1.0
    while action != NONE:
        counts[columns.slot[action]] += columns.counts[action]
        previous, source = columns.previous[action], columns.source[action]
        if source != NONE and (previous == NONE or arrival[source] >= end[previous]):
            transfers[:, columns.cut[source] % cuts] += (columns.share[source], 1.0)
            previous = source
        action = previous
    return PathCounts(counts, transfers)


def work_paths(program: Program) -> list[PathCounts]:
    """By device, the path through all of its actions."""
    order = resolve_order(program)
    columns, paths = _columns(order), []
    transfers = np.zeros((2, program.slots - 1))
    for device in range(program.devices):
        counts = np.zeros((program.devices * program.chunks, FIGURES))
        own = np.flatnonzero(order.device == device)
        np.add.at(counts, np.array(columns.slot)[own], columns.counts[own])
        slots = slice(device * program.chunks, (device + 1) * program.chunks)
        latest = slots.start + int(np.argmax(_last_actions(order)[slots]))
        counts[latest, AFTER] = 1.0
        paths.append(PathCounts(counts, transfers))
    return paths


def launch_paths(program: Program, hosts: Hosts) -> list[PathCounts]:
    """By device, what its host launches; of one process all forwards, and the backwards of a device."""
    order = resolve_order(program)
    slot, paths = np.array(_columns(order).slot), []
    transfers = np.zeros((2, program.slots - 1))
    for device in range(program.devices):
        counts = np.zeros((program.devices * program.chunks, FIGURES))
        for kind in (0, 1):
            own = (order.kind == kind) & ((order.device == device) | (hosts == "one" and kind == 0))
            np.add.at(counts[:, 4 + kind], slot[own], 1.0)
        paths.append(PathCounts(counts, transfers))
    return paths


def _last_actions(order: Order) -> Indices:
    """(slots,): the last of the actions that complete the gradients of each; on a device a later one has a
    larger number."""
    chunks, last = order.program.chunks, np.full(order.program.devices * order.program.chunks, NONE)
    finishing = np.flatnonzero(order.finishing)
    np.maximum.at(last, order.device[finishing] * chunks + order.chunk[finishing], finishing)
    return last


@dataclass(frozen=True, eq=False)
class _Columns:
    """Of every action of an order, as lists: slot, what it counts, what it waits for, its share."""

    slot: list[int]
    counts: Floats
    previous: list[int]
    source: list[int]
    cut: list[int]
    share: list[float]


def _columns(order: Order) -> _Columns:
    program = order.program
    if "path_columns" not in program.derived:
        share = np.ones(len(order))
        if program.shares is not None:
            share = np.asarray(program.shares, dtype=np.float64)[order.micro_batch]
        counts = np.zeros((len(order), FIGURES))
        counts[np.arange(len(order)), order.kind] = 1.0
        if program.splits_backward:
            counts[(order.kind == 1) & ~order.splits, 2] = 1.0  # such a B makes the weights' gradient, too
        counts[order.first_backwards, 3] = 1.0
        program.derived["path_columns"] = _Columns(
            (order.device * program.chunks + order.chunk).tolist(),
            counts * share[:, None],
            order.previous.tolist(),
            order.source.tolist(),
            order.cut.tolist(),
            share.tolist(),
        )
    columns: _Columns = program.derived["path_columns"]
    return columns


def mixture_tables(tables: PartTables, counts: PathCounts) -> Floats:
    """(parts, n + 1, n + 1): seconds of each part on a path or a mixture of some, wherever it lies; inf where
    it may not be."""
    seconds = np.zeros(tables.usable.shape)
    for slot, part in tables.program.parts_by_slot.items():
        own_counts = counts.actions[slot.device * tables.program.chunks + slot.chunk]
        forward, backward, weight, credit, forward_launch, backward_launch, after = own_counts
        own = seconds[part]
        own += forward * tables.forward[slot]
        own += backward * tables.backward[slot]
        if weight:
            own += weight * tables.weight[slot]
        if credit:
            own -= credit * tables.credit[slot]
        if after:
            own += after * tables.after[slot]
        if forward_launch or backward_launch:
            own += forward_launch * tables.forward_launch[slot]
            own += backward_launch * tables.backward_launch[slot]
    occupied, late = counts.transfers
    seconds[:-1] += (occupied[:, None] * tables.occupancy + (late * tables.latency)[:, None])[:, None, :]
    seconds[~tables.usable] = np.inf
    return seconds


def remaining_seconds(seconds: Floats) -> Floats:
    """(parts + 1, n + 1): the least seconds of this part and all after it, by the place where it begins."""
    parts, places = seconds.shape[0], seconds.shape[1]
    remaining = np.full((parts + 1, places), np.inf)
    remaining[parts, -1] = 0.0
    for part in reversed(range(parts)):
        remaining[part] = (seconds[part] + remaining[part + 1]).min(axis=1)
    return remaining


def least_cuts(seconds: Floats, remaining: Floats) -> list[int] | None:
    """The cuts that these seconds are least with; None where there are none."""
    if not np.isfinite(remaining[0, 0]):
        return None
    cuts = [0]
    for part in range(seconds.shape[0]):
        cuts.append(int(np.argmin(seconds[part, cuts[-1]] + remaining[part + 1])))
    return cuts


def path_seconds(tables: PartTables, counts: PathCounts, cuts: Cuts) -> Floats:
    """(candidates,): of a path with these cuts."""
    seconds = mixture_tables(tables, counts)
    total: Floats = sum(
        (seconds[part, cuts[:, part], cuts[:, part + 1]] for part in range(tables.parts)),
        np.zeros(len(cuts)),
    )
    return total


class CutBound:
    """The bound of a shape, made better step by step; `cuts`: all that were tried, and `paths` of theirs."""

    def __init__(self, tables: PartTables) -> None:
        self.tables = tables
        self.bound = 0.0
        self.paths: list[PathCounts] = []
        self.cuts: list[list[int]] = []
        self.best_mixture: PathCounts | None = None
        self._values = np.zeros((0, 0))
        self._path_keys: set[bytes] = set()
        self._cut_keys: set[tuple[int, ...]] = set()
        for path in work_paths(tables.program):
            self._add_path(path)
        if tables.is_late:
            for path in launch_paths(tables.program, tables.hosts):
                self._add_path(path)

    def add(self, cuts: Sequence[int]) -> bool:
        """Adds some cuts to the game, with their critical path; whether anything is new."""
        new_cuts = tuple(cuts) not in self._cut_keys
        row = np.array([cuts], dtype=np.int64)
        if new_cuts:
            self._cut_keys.add(tuple(cuts))
            self.cuts.append(list(cuts))
            own = [float(path_seconds(self.tables, path, row)[0]) for path in self.paths]
            self._values = np.column_stack([self._values, np.array(own)])
        after = self.tables.seconds_after(row)[:, 0]
        return self._add_critical_path(self.tables.costs(row).candidate(0), after) or new_cuts

    def _add_critical_path(self, costs: Costs, after: Floats) -> bool:
        timeline = simulate(self.tables.program, costs)
        return self._add_path(count_critical_path(self.tables.program, timeline.run, after))

    def _add_path(self, path: PathCounts) -> bool:
        if path.key in self._path_keys:
            return False
        self._path_keys.add(path.key)
        self.paths.append(path)
        rows = np.array(self.cuts, dtype=np.int64).reshape(-1, self.tables.parts + 1)
        self._values = np.vstack([self._values, path_seconds(self.tables, path, rows)[None]])
        return True

    def improve(self) -> bool:
        """A turn. Whether there may be more to gain."""
        paths, cuts = solve_game(self._values)
        counts = PathCounts(
            np.tensordot(paths, [path.actions for path in self.paths], 1),
            np.tensordot(paths, [path.transfers for path in self.paths], 1),
        )
        seconds = mixture_tables(self.tables, counts)
        remaining = remaining_seconds(seconds)
        least = float(remaining[0, 0])
        if least > self.bound or self.best_mixture is None:
            self.bound, self.best_mixture = max(self.bound, least), counts
        least_row = least_cuts(seconds, remaining)
        if least_row is None:
            return False
        new_path = len(cuts) > 0 and self._add_critical_path(*self._average(cuts))
        return self.add(least_row) or new_path

    def _average(self, weights: Floats) -> tuple[Costs, Floats]:
        """The costs of all cuts, and what follows their last backwards, mixed."""
        rows = np.array(self.cuts, dtype=np.int64)
        several = self.tables.costs(rows)
        averages = {name: values @ weights for name, values in several.arrays().items()}
        costs = replace(several, **averages)  # type: ignore[arg-type]  # arrays only
        return costs, self.tables.seconds_after(rows) @ weights


def solve_game(values: Floats) -> tuple[Floats, Floats]:
    """(paths,) and (cuts,): weights with which the least over the cuts of the paths' mixed seconds, of
    `values` (paths, cuts), is about the largest, and the largest over the paths of the cuts' the least."""
    rows, columns = (np.zeros(length) for length in values.shape)
    if not len(columns):
        return np.full(len(rows), 1 / len(rows)), columns
    path_sums, cut_sums = np.zeros(len(rows)), np.zeros(len(columns))
    scaled = values / values.mean()

    def choose(regrets: Floats) -> Floats:
        whole = regrets.sum()
        return regrets / whole if whole > 0 else np.full(len(regrets), 1 / len(regrets))

    cuts = choose(columns)
    for turn in range(1, ROUNDS + 1):
        gains = scaled @ cuts
        paths = choose(rows)
        rows = np.maximum(rows + gains - paths @ gains, 0.0)
        paths = choose(rows)
        losses = paths @ scaled
        columns = np.maximum(columns + losses @ cuts - losses, 0.0)
        cuts = choose(columns)
        path_sums += turn * paths
        cut_sums += turn * cuts
    return path_sums / path_sums.sum(), cut_sums / cut_sums.sum()

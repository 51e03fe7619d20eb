"""Proof that memory rules out every plan with several parts of the layers on each device.

Device d of p holds v parts. Let `x(k, c)` be the bytes that part k adds to its device while it runs the
fullest action of its chunk c. A plan fits into M bytes on n devices only if

    sum over parts k of d of x(k, c) <= M for every d and c,    sum over d of replicas(d) <= n,

because each term of a ledger is a sum over the parts of a device, or a maximum, of which each part counts an
equal share. With prices `l(d, c)` of sum 1 and a price `u` of a device, a plan that fits has

    M >= min over cuts of sum over k of [sum over c of l(d, c) x(k, c) + u replicas(k) / v] - u n

The minimum is a shortest path over (part, cut point). Each part runs as is cheapest for it, and leaves room
for the other parts of its device (`PartShape.rules_out`). Prices of devices that need more bytes than the
others rise (multiplicative weights).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from ..cost_models.errors import UsageError
from ..cost_models.memory import (
    FRAGMENTATION_RESERVE,
    StageBytes,
    Training,
    micro_batch_bytes,
    micro_batches_by_action,
    receive_ahead,
    total,
)
from ..cost_models.program import Program
from ..cost_models.schedules import PUBLISHED, find_schedule
from .candidate import SEVERAL_PARTS, VIRTUAL_STAGES, PipelineConfig
from .problem import Problem
from .search.space import Space, divide_batch
from .search.stage_recompute import stage_modes
from .stage_table import Floats, Indices, fullest_kind, ledger_options

ROUNDS = 60
"""Most price changes of a shape."""
MOST_NUMBERS = 14_000_000
"""Most numbers in the tables of all shapes, which take about a second."""
ACTION = 200
"""Time to count one action, in numbers of a table."""
FIGURES = 13
"""Figures of a part: micro-batches (see `micro_batches_by_action`), two workspaces, two transfers, states."""


class Choice(NamedTuple):
    """Configuration, replicas and recomputation of a part."""

    config: PipelineConfig
    replicas: int
    mode: str


def parts_are_ruled_out(problem: Problem, stage_counts: Container[int], room: float) -> bool:
    """Return whether plans with several parts per device are proven to need more than `room` bytes.

    Args:
        problem: What is asked.
        stage_counts: Numbers of devices of the pipeline.
        room: Bytes of a device.
    """
    size, most = 0, MOST_NUMBERS * min(1.0, problem.options.time_limit)
    for (stages, few, parts, name), configs in _group_configs(problem, stage_counts):
        choices = _list_choices(problem, configs, stages)
        if min((choice.replicas for choice in choices), default=inf) * stages > problem.usable_gpus:
            continue
        with suppress(UsageError):  # the schedule does not run with these numbers
            shape = PartShape(problem, choices, find_schedule(name).program(stages, few, parts))
            size += shape.size
            if size > most or not shape.rules_out(room):
                return False
    return True


def _group_configs(
    problem: Problem, stage_counts: Container[int]
) -> list[tuple[tuple[int, int, int, str], list[PipelineConfig]]]:
    """Return configurations grouped by (devices, micro-batches, parts, schedule).

    Groups with about half of the devices come first, because they are counted quickly and fit if others do.
    Under the published schedules few micro-batches stand for many: twice as many as devices hold as much as
    any larger number.
    """
    blocks, usable, groups = len(problem.space.usable) - 1, problem.usable_gpus, defaultdict(list)
    most = min(usable, problem.options.max_stages or usable, blocks // 2)
    for config in problem.configs:
        name, number = config.schedule, config.micro_batches
        default = find_schedule(name).default_virtual_stages
        for parts in VIRTUAL_STAGES if name in SEVERAL_PARTS else (default,) * (default > 1):
            for stages in filter(stage_counts.__contains__, range(2, min(most, blocks // parts) + 1)):
                rest = number % stages if _needs_multiple(name) else 0
                representative = 2 * stages + rest if name in PUBLISHED else number
                with_parts = replace(config, virtual_stages=parts)
                groups[stages, min(representative, number), parts, name].append(with_parts)
    return sorted(groups.items(), key=lambda item: (abs(2 * item[0][0] - most), item[0]))


@cache
def _needs_multiple(name: str) -> bool:
    """Return whether the micro-batches of a published schedule must be a multiple of the stages."""
    with suppress(UsageError):
        find_schedule(name).program(2, 5)
        return False
    return True


def _list_choices(problem: Problem, configs: Sequence[PipelineConfig], devices: int) -> list[Choice]:
    """Return the choices for a part, smallest micro-batches first."""
    usable = problem.usable_gpus
    return [
        Choice(config, count, mode)
        for config in sorted(configs, key=lambda config: config.micro_batch_size)
        for counts in problem.replica_choices(config.micro_batch_size)
        for count in counts
        for mode in stage_modes(config)
        if count <= (usable // devices if len(counts) == 1 else usable - devices + 1)
    ]


def _is_better(problem: Problem, one: Choice, other: Choice) -> bool:
    """Return whether no part needs more bytes or replicas with `one` than with `other`."""
    space, schedule = problem.space, find_schedule(one.config.schedule)
    counts_all = (
        space.mini_batch is not None or schedule.splits_backward or schedule.closed_in_flight is not None
    )
    if (
        one.mode != other.mode
        or one.replicas > other.replicas
        or (space.zero and one.replicas < other.replicas)
        or (counts_all and one.config.micro_batches > other.config.micro_batches)
    ):
        return False
    return _is_smaller(space, *(_share(choice) for choice in (one, other)))


@lru_cache(maxsize=4096)
def _is_smaller(space: Space, one: int, other: int) -> bool:
    """Return whether micro-batches of `one` samples need at most the bytes of `other`, in every stage."""
    first, second = (space.table(share).tables(space.zero) for share in (one, other))
    return all(first[name] is second[name] or np.all(first[name] <= second[name]) for name in first)


def _share(choice: Choice) -> int:
    """Return the samples of a micro-batch on a replica."""
    return divide_batch(choice.config.micro_batch_size, choice.replicas)


class PartShape:
    """Plans on the devices of a program, whose parts each run with one of several choices.

    Args:
        problem: What is asked.
        choices: Possible choices. Those that another one dominates are dropped.
        program: Actions of a number of micro-batches that holds as much as the real one.
    """

    def __init__(self, problem: Problem, choices: Sequence[Choice], program: Program) -> None:
        space, config = problem.space, choices[0].config
        self.problem, self.program, self.parts = problem, program, program.chunks
        self.choices = list[Choice]()
        for choice in choices:
            if not any(_is_better(problem, other, choice) for other in self.choices):
                self.choices.append(choice)
        self.schedule = find_schedule(config.schedule)
        self.options = ledger_options(
            fullest_kind(space.topology.kinds), space.dtype, space.number_bytes, space.zero
        )
        self.device, self.chunk = np.array(program.pipes[0]).T
        self.is_ahead = space.mini_batch is not None and not program.splits_backward
        number = len(self.device)
        places = np.arange(number)[:, None] + np.arange(len(space.usable) - number)
        self.start, self.end = places[:, :, None], places[:, None, :] + 1

    @property
    def size(self) -> int:
        """Numbers in the table of bytes, plus the equivalent of the time to count actions."""
        table: int = self.parts * len(self.choices) * self.start.size * self.start.shape[1]
        return table + ACTION * sum(map(len, self.program.actions))

    def rules_out(self, room: float) -> bool:
        """Return whether no plan is possible on devices with `room` bytes."""
        usable, places, devices = self.problem.usable_gpus, range(len(self.device)), self.program.devices
        replicas = np.array([choice.replicas for choice in self.choices])
        if len(self.program.pipes) > 1 or self.program.shares is not None:
            return False
        needs = self._needs_within(room)
        prices, device_price = np.full((devices, self.parts), 1 / (devices * self.parts)), 0.0
        for step in range(ROUNDS):
            price = device_price * replicas[:, None, None] / self.parts
            costs = [np.tensordot(prices[self.device[k]], needs[k], 1) + price for k in places]
            least, cuts = _shortest_path([cost.min(axis=0) for cost in costs])
            if least - device_price * usable > room:
                return True
            path_choices = [int(costs[k][:, cuts[k], cuts[k + 1]].argmin()) for k in places]
            path_bytes = self._by_device(
                np.stack([needs[k, :, path_choices[k], cuts[k], cuts[k + 1]] for k in places])
            )
            used = float(replicas[path_choices].sum()) / self.parts
            if path_bytes.max() <= room and used <= usable:
                return False
            rate, scale = (
                1 / (1 + step / 8),
                max(float(path_bytes.max()) - self.options["context_bytes"], 1.0),
            )
            prices *= np.exp(4 * rate * (path_bytes - path_bytes.max()) / scale)
            prices /= prices.sum()
            device_price = max(0.0, device_price + rate * (used / usable - 1) * scale / usable)
        return False

    def _needs_within(self, room: float) -> Floats:
        """Return (parts, actions, choices, starts, ends) bytes that parts add to devices with `room` bytes.

        They are inf if a part is not allowed, or leaves too little for the other parts of its device.
        """
        space = self.problem.space
        counts = {mode: self._counts(mode) for mode in {choice.mode for choice in self.choices}}
        needs = np.stack([self._needs(choice, counts[choice.mode].copy()) for choice in self.choices], axis=2)
        for part, part_needs in enumerate(needs):
            start, end = np.broadcast_arrays(self.start[part], self.end[part])
            may_be = np.broadcast_to(space.may_be(part, start.ravel(), end.ravel()), start.size)
            part_needs[:, :, ~(space.usable[start, end] & may_be.reshape(start.shape))] = inf
        least = np.minimum(needs.min(axis=(2, 3, 4)), 1e300)  # inf - inf is not a number
        rest = self._by_device(least)[self.device] - least
        is_too_large = (needs > (room - rest)[..., None, None, None]).any(axis=1, keepdims=True)
        np.copyto(needs, inf, where=is_too_large)
        return needs

    def _needs(self, choice: Choice, counts: Floats) -> Floats:
        """Return (parts, actions, starts, ends) bytes that each part adds to its device."""
        space, program, number = self.problem.space, self.program, choice.config.micro_batches
        if (closed := self.schedule.closed_in_flight) is not None:
            few = program.micro_batches
            counts[..., :8:4] *= closed(0, program.devices, number) / closed(0, program.devices, few)
        if self.is_ahead or program.splits_backward:
            counts[..., 10:12] = (2 * number, number) if program.splits_backward else 1
        stage = StageBytes(**space.table(_share(choice)).tables(space.zero))
        stage = receive_ahead(stage, number) if self.is_ahead else stage
        training = Training(space.optimizer, self.options["precision"], choice.replicas, space.zero)
        exchanged = training.exchange_bytes(stage) / (self.parts if space.zero > 1 else 1)
        passing = [
            total(sizes_by_term._asdict())
            for sizes in micro_batch_bytes(stage, program)
            for sizes_by_term in sizes
        ]
        states = total(training.states(stage)) + exchanged
        figures = [*passing, stage.workspace, stage.layer_workspace, stage.received, stage.sent, states]
        terms = np.stack([np.broadcast_to(figure, space.usable.shape) for figure in figures])
        terms = np.moveaxis(terms[:, self.start, self.end], 0, 1)
        needs: Floats = np.einsum(
            "pcf,pfse->pcse", (1 + FRAGMENTATION_RESERVE) * counts, terms, optimize=True
        )
        return needs + self.options["context_bytes"] / self.parts

    def _counts(self, mode: str) -> Floats:
        """Return (parts, actions, figures) counts of each figure of a part in an action of its device."""
        counts = np.ones((len(self.device), self.parts, FIGURES))
        moves = np.diff(self.device, prepend=self.device[0], append=self.device[-1]) != 0
        counts[..., 10], counts[..., 11] = moves[:-1, None] / self.parts, moves[1:, None] / self.parts
        for device, actions in enumerate(self.program.actions):
            numbers, _ = micro_batches_by_action(self.program, device, mode)
            level = numbers[..., :3].sum(axis=(1, 2, 3))
            level[[action.kind == "F" for action in actions]] = -1.0
            in_two = {action[1:] for action in actions if action.kind == "W"}
            parts = np.flatnonzero(self.device == device)
            for chunk in range(self.parts):
                at_work = np.array([action.chunk == chunk for action in actions])
                action = int(np.where(at_work, level, -inf).argmax())
                counts[parts, chunk, :8] = numbers[action][self.chunk[parts]].reshape(len(parts), 8)
                counts[parts, chunk, 8:10] = 0.0
                workspace = 9 if actions[action][1:] in in_two else 8
                counts[parts, chunk, workspace] = self.chunk[parts] == chunk
        return counts

    def _by_device(self, amounts: Floats) -> Floats:
        """Return the sums of the parts of each device."""
        sums = np.zeros((self.program.devices, *amounts.shape[1:]))
        np.add.at(sums, self.device, amounts)
        return sums


def _shortest_path(costs: Sequence[Floats]) -> tuple[float, list[int]]:
    """Return the least sum of costs, and the cut points of the parts that attain it."""
    rest, nexts = np.where(np.arange(costs[0].shape[-1]) == costs[0].shape[-1] - 1, 0.0, inf), list[Indices]()
    for cost in reversed(costs):
        sums = cost + rest
        nexts.append(sums.argmin(axis=1))
        rest = sums.min(axis=1)
    cuts = [0]
    for following in reversed(nexts):
        cuts.append(int(following[cuts[-1]]))
    return float(rest[0]), cuts

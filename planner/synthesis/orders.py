"""Orders of actions on given stages: costs, memory, a lower bound, and orders made by rules.

Micro-batches are alike, so they may be assumed to run in order on every part of the layers. Renaming them
from part to part gives an order that is as fast and holds as much, because the j-th to start on a part finds
j that have ended earlier. An order is thus one sequence of (kind, part) per device.

A rule makes an order event by event. Each device runs what has arrived, and fills waits with W. A free device
runs a B that has arrived (of the part nearest to the loss first). Otherwise it runs an F that has arrived, if
there is room and the device is not further ahead than the rule allows. Otherwise it runs a W, if nothing
arrives within a share of the seconds that the W takes. Shares and depths are tried one after another, as in
the heuristic of Qi et al. (ICLR 2024, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import product
from math import inf

import numpy as np

from ...cost_models.errors import UsageError
from ...cost_models.program import Kind, Program
from ...cost_models.program_order import resolve_order
from ...cost_models.schedules import number_actions
from ...cost_models.step_costs import Costs, lower_costs
from ...cost_models.timeline import step_seconds

F, B, W = range(3)
KINDS: tuple[Kind, ...] = ("F", "B", "W")
Step = tuple[int, int]
"""Kind and part of an action. Its micro-batch is the next one of that kind and part."""
Lists = tuple[tuple[Step, ...], ...]
"""An order: the steps of each device."""
Bytes = Sequence[Sequence[float]]
"""By part, bytes of an action: those held from its beginning on, those added at its end, and its
workspace."""
ROUNDING = 1 + 1e-12
"""Factor on the room of a device, for sums that differ by rounding."""


@dataclass(frozen=True, eq=False)
class OrderProblem:
    """Costs and memory of the parts of a pipeline.

    Attributes:
        program: Any order of the same parts on the same devices, with one pipe.
        costs: Seconds of the actions and transfers.
        bytes: Bytes of an action by kind and part.
        room: Bytes by device for micro-batches in flight and workspaces.
    """

    program: Program
    costs: Costs
    bytes: Sequence[Bytes]
    room: Sequence[float]

    @property
    def parts(self) -> int:
        """Number of parts of the layers."""
        return self.program.slots

    @property
    def devices(self) -> int:
        """Number of devices of the pipeline."""
        return self.program.devices

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return self.program.micro_batches

    @property
    def kinds(self) -> range:
        """Kinds of actions. The last one frees the memory of a micro-batch."""
        return range(3 if self.program.splits_backward else 2)

    @cached_property
    def device(self) -> list[int]:
        """Device of each part."""
        return [slot.device for slot in self.program.pipes[0]]

    @cached_property
    def parts_of_device(self) -> list[list[int]]:
        """Parts of each device in the order of its chunks."""
        return [[part for part, host in enumerate(self.device) if host == n] for n in range(self.devices)]

    @cached_property
    def end(self) -> list[float]:
        """Seconds by device that follow its last action."""
        end = np.zeros(self.devices)
        if self.costs.optimizer is not None:
            end += self.costs.optimizer
        if self.costs.all_reduce is not None and self.program.chunks == 1:
            end += self.costs.all_reduce[:, 0]
        return list(end.tolist())

    @cached_property
    def seconds(self) -> list[list[list[float]]]:
        """Three seconds by kind and part: of the first micro-batch, of another one, and of the transfer.

        The transfer takes the result of the action to the next part.
        """
        order, table = resolve_order(self.program), np.zeros((3, self.parts, 3))
        values, at, first = lower_costs(order, self.costs), (order.kind, order.place), order.micro_batch == 0
        table[:, :, 1][at] = values.duration  # of the last micro-batch
        table[:, :, 0][order.kind[first], order.place[first]] = values.duration[first]
        table[:, :, 2][at] = (values.occupancy + values.latency)[values.cut]
        return list(table.tolist())

    def duration(self, kind: int, part: int, number: int) -> float:
        """Return the seconds of the action on micro-batch `number`."""
        return self.seconds[kind][part][min(number, 1)]

    def next_action(self, kind: int, part: int) -> tuple[int, int, float] | None:
        """Return kind and part of the action that an F or B enables, and the seconds until it may begin."""
        if kind == F and part + 1 == self.parts:
            return B, part, 0.0
        following = part + (1 if kind == F else -1)
        return None if kind == W or following < 0 else (kind, following, self.seconds[kind][part][2])

    def fits(self, lists: Lists) -> bool:
        """Return whether no device ever holds more than it has room for."""
        for room, steps in zip(self.room, lists, strict=True):
            level = 0.0
            for kind, part in steps:
                begins, ends, workspace = self.bytes[kind][part]
                if level + begins + workspace > room * ROUNDING:
                    return False
                level += begins + ends
        return True

    def one_at_a_time(self, micro_batches: int) -> Lists:
        """Return the order that holds least: no micro-batch begins until the previous one has ended."""
        lists = list[tuple[Step, ...]]()
        for parts in self.parts_of_device:
            backward = [(kind, part) for part in reversed(parts) for kind in self.kinds[1:]]
            lists.append((*((F, part) for part in parts), *backward) * micro_batches)
        return tuple(lists)

    def has_order(self) -> bool:
        """Return whether an order fits. If one micro-batch at a time does not, none does."""
        return self.fits(self.one_at_a_time(1))

    def arrange(self, lists: Lists) -> Program:
        """Return the order as a program."""
        chunk = [slot.chunk for slot in self.program.pipes[0]]
        turns = [[(KINDS[kind], chunk[part]) for kind, part in steps] for steps in lists]
        actions = tuple(tuple(number_actions(row)) for row in turns)
        return Program(actions, self.program.pipes, self.program.pipe_of)

    def step(self, lists: Lists) -> float:
        """Return the simulated seconds of the order; inf in a deadlock."""
        try:
            return float(step_seconds(self.arrange(lists), self.costs)[0])
        except UsageError:
            return inf

    def bound(self) -> float:
        """Return a lower bound on the step of every order.

        It is the largest of, for each device, the path of the first micro-batch to it, its work and what
        follows; and the round trip of one micro-batch.
        """
        table = np.array(self.seconds)
        work = (table[..., 0] + (self.micro_batches - 1) * table[..., 1]).sum(axis=0)
        lead = np.append(0.0, np.cumsum(table[F, :, 0] + table[F, :, 2]))
        least = float(table[[F, B]][..., [0, 2]].sum())
        for parts, end in zip(self.parts_of_device, self.end, strict=True):
            least = max(least, float(lead[parts].min() + work[parts].sum()) + end)
        return least


SHARES = (0.0, 0.3, 0.6, 0.9, 1.0)
"""Least distances of the next arrival for a W to run first, in seconds of the W."""


@dataclass(frozen=True)
class Rule:
    """A rule by which devices choose their next action.

    Attributes:
        share: See `SHARES`.
        ahead: By device, the most micro-batches times parts in flight.
        forward_first: Whether an F runs before a B while fewer than `ahead` are in flight.
    """

    share: float
    ahead: tuple[int, ...]
    forward_first: bool


def fill_orders(problem: OrderProblem) -> Iterator[Lists]:
    """Yield the distinct orders of all rules that do not end in a deadlock."""
    parts = problem.parts // problem.devices
    ranks = range(problem.devices, 0, -1)
    depths = (
        tuple(rank * parts for rank in ranks),
        tuple((2 * rank - 1) * parts for rank in ranks),
        tuple((rank + rank // 2) * parts for rank in ranks),
        (problem.micro_batches * parts,) * problem.devices,
    )
    orders = set[Lists]()
    shares = SHARES if W in problem.kinds else SHARES[:1]
    for rule in product(shares, dict.fromkeys(depths), (False, True)):
        lists = _Filler(problem, Rule(*rule)).lists()
        if lists is not None and lists not in orders:
            orders.add(lists)
            yield lists


class _Filler:
    """State of all devices while a rule makes an order."""

    def __init__(self, problem: OrderProblem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        parts, devices = problem.parts, problem.devices
        self.done = [[0] * parts for _ in KINDS]
        # Known times at which each F and B of a part can begin, in order.
        self.arrivals: list[list[list[float]]] = [[[] for _ in range(parts)] for _ in (F, B)]
        self.arrivals[F][0] = [0.0] * problem.micro_batches
        self.level, self.in_flight = [0.0] * devices, [0] * devices
        self.steps: list[list[Step]] = [[] for _ in range(devices)]

    def lists(self) -> Lists | None:
        """Return the order; None in a deadlock."""
        problem = self.problem
        per_part = len(problem.kinds) * problem.micro_batches
        left = [per_part * len(parts) for parts in problem.parts_of_device]
        events = [(0.0, device) for device in range(problem.devices)]
        free, idle = [0.0] * problem.devices, set[int]()
        while events:
            now, device = heappop(events)
            if now < free[device] or not left[device]:
                continue
            step, wake = self._choose(device, now)
            if step is None:
                if wake < inf:
                    heappush(events, (wake, device))
                else:
                    idle.add(device)
                continue
            idle.discard(device)
            left[device] -= 1
            free[device] = self._run(device, step, now)
            heappush(events, (free[device], device))
            for waiting in tuple(idle):
                heappush(events, (now, waiting))
        return None if any(left) else tuple(map(tuple, self.steps))

    def _arrives(self, kind: int, part: int) -> float:
        """Return when the next F or B of a part can begin; inf if unknown."""
        number, times = self.done[kind][part], self.arrivals[kind][part]
        return times[number] if number < len(times) else inf

    def _has_room(self, device: int, kind: int, part: int) -> bool:
        """Return whether an action fits.

        With an F, also an F of a later part of the device and a B must fit, because otherwise nothing would
        end.
        """
        forward, backward, *_ = self.problem.bytes
        begins, _, needed = self.problem.bytes[kind][part]
        level = self.level[device] + begins
        if kind == F:
            parts = self.problem.parts_of_device[device]
            level += max((forward[later][0] for later in parts if later > part), default=0.0)
            needed = max([needed, *(backward[own_part][0] + backward[own_part][2] for own_part in parts)])
        return level + needed <= self.problem.room[device] * ROUNDING

    def _choose(self, device: int, now: float) -> tuple[Step | None, float]:
        """Return the next action, or None and the time at which to look for one."""
        problem, rule = self.problem, self.rule
        parts = problem.parts_of_device[device]
        forwards, backwards = (
            [
                (self._arrives(kind, part), part)
                for part in reversed(parts)
                if self._has_room(device, kind, part)
            ]
            for kind in (F, B)
        )
        forward, backward = (
            next((part for at, part in arrivals if at <= now), None) for arrivals in (forwards, backwards)
        )
        is_few = self.in_flight[device] < rule.ahead[device]
        if forward is not None and is_few and (backward is None or rule.forward_first):
            return (F, forward), now
        if backward is not None:
            return (B, backward), now
        coming = min([at for at, _ in backwards] + [at for at, _ in forwards if is_few], default=inf)
        weight = next((part for part in parts if self.done[W][part] < self.done[B][part]), None)
        if weight is not None and W in problem.kinds:
            patience = rule.share * problem.duration(W, weight, 1)
            if coming - now >= patience:
                return (W, weight), now
        if coming == inf and forward is not None:
            return (F, forward), now
        return None, coming

    def _run(self, device: int, step: Step, now: float) -> float:
        """Run an action and return its end."""
        problem, (kind, part) = self.problem, step
        end = now + problem.duration(kind, part, self.done[kind][part])
        self.steps[device].append(step)
        self.done[kind][part] += 1
        self.level[device] += sum(problem.bytes[kind][part][:2])
        self.in_flight[device] += (kind == F) - (kind == problem.kinds[-1])
        if (following := problem.next_action(kind, part)) is not None:
            next_kind, receiver, wait = following
            self.arrivals[next_kind][receiver].append(end + wait)
        return end

"""Orders made by a rule, event by event: each device runs what has arrived, and fills waits with W.

A free device runs a B that has arrived (of the part nearest to the loss first). Otherwise it runs an F that
has arrived, if there is room and the device is not further ahead than the rule allows. Otherwise it runs a W,
if nothing arrives within a share of the seconds that the W takes. Shares and depths are tried one after
another, as in the heuristic of Qi et al. (ICLR 2024, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from math import inf

from .orders import ROUNDING, B, F, Lists, OrderProblem, Step, W

SHARES = (0.0, 0.3, 0.6, 0.9, 1.0)
"""How far off the next arrival must be for a W to run first, in seconds of the W."""


@dataclass(frozen=True)
class Rule:
    """A rule by which devices choose their next action.

    Attributes:
        share: See `SHARES`.
        ahead: By device, the most micro-batches times parts in flight.
        forward_first: An F runs before a B while fewer than `ahead` are in flight.
    """

    share: float
    ahead: tuple[int, ...]
    forward_first: bool


def fill_orders(problem: OrderProblem) -> Iterator[Lists]:
    """The different orders of all rules that do not end in a deadlock."""
    parts = problem.parts // problem.devices
    ranks = range(problem.devices, 0, -1)
    depths = (
        tuple(rank * parts for rank in ranks),
        tuple((2 * rank - 1) * parts for rank in ranks),
        tuple((rank + rank // 2) * parts for rank in ranks),
        (problem.micro_batches * parts,) * problem.devices,
    )
    orders = set[Lists]()
    shares = SHARES if problem.split else SHARES[:1]
    for rule in product(shares, dict.fromkeys(depths), (False, True)):
        lists = _Filler(problem, Rule(*rule)).lists()
        if lists is not None and lists not in orders:
            orders.add(lists)
            yield lists


class _Filler:
    """The state of all devices while a rule makes an order."""

    def __init__(self, problem: OrderProblem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        parts, devices = problem.parts, problem.devices
        self.done = [[0] * parts for _ in (F, B, W)]
        # When each F and B of a part can begin, in order, as far as it is known.
        self.arrivals: list[list[list[float]]] = [[[] for _ in range(parts)] for _ in (F, B)]
        self.arrivals[F][0] = [0.0] * problem.micro_batches
        self.level, self.in_flight = [0.0] * devices, [0] * devices
        self.steps: list[list[Step]] = [[] for _ in range(devices)]

    def lists(self) -> Lists | None:
        """The order; None in a deadlock."""
        problem = self.problem
        each = (3 if problem.split else 2) * problem.micro_batches
        left = [each * len(parts) for parts in problem.parts_of_device]
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
        """When the next F or B of a part can begin, as far as it is known."""
        number, times = self.done[kind][part], self.arrivals[kind][part]
        return times[number] if number < len(times) else inf

    def _has_room(self, device: int, kind: int, part: int) -> bool:
        """Return whether an action fits; with an F, also an F of a later part of the device and a B, without
        which nothing would end."""
        problem = self.problem
        level = self.level[device] + problem.level_change(kind, part)[0]
        needed = problem.workspace_bytes(kind, part)
        if kind == F:
            parts = problem.parts_of_device[device]
            level += max((problem.micro_batch_bytes[later] for later in parts if later > part), default=0.0)
            for each in parts:
                needed = max(needed, problem.level_change(B, each)[0] + problem.workspace_bytes(B, each))
        return level + needed <= problem.room[device] * ROUNDING

    def _choose(self, device: int, now: float) -> tuple[Step | None, float]:
        """The next action, or None and the time at which to look for one."""
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
        if problem.split and weight is not None and coming - now >= rule.share * problem.weight[weight]:
            return (W, weight), now
        if coming == inf and forward is not None:
            return (F, forward), now
        return None, coming

    def _run(self, device: int, step: Step, now: float) -> float:
        """Run an action; returns its end."""
        problem, (kind, part) = self.problem, step
        end = now + problem.duration(kind, part, self.done[kind][part] == 0)
        self.steps[device].append(step)
        self.done[kind][part] += 1
        self.level[device] += sum(problem.level_change(kind, part))
        self.in_flight[device] += (kind == F) - (kind == problem.release)
        if (following := problem.next_action(kind, part)) is not None:
            next_kind, receiver, wait = following
            self.arrivals[next_kind][receiver].append(end + wait)
        return end

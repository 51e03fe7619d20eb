"""Orders made by a rule, event by event: each device takes what is there, and fills its waiting with weight
gradients.

A device that is free takes a B that has arrived (the part nearest to the loss first), else an F that has
arrived, as long as there is room and it is not further ahead than the rule allows, else a W, where nothing
arrives within a share of what the W takes. The shares and how far devices run ahead are tried one after
another, in the manner of the heuristic of Qi et al. (ICLR 2024, section 3.1).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from .order_problem import B, F, Lists, OrderProblem, Step, W

NEVER = float("inf")
SHARES = (0.0, 0.3, 0.6, 0.9, 1.0)
"""Of the seconds of a W: how far off the next arrival must be for a W to be run before it."""


@dataclass(frozen=True)
class Rule:
    """`share` as above; `ahead`: by device, micro-batches times parts that it holds at the most while it
    waits for no room; `forward_first`: whether an F goes before a B while fewer are held."""

    share: float
    ahead: tuple[int, ...]
    forward_first: bool


def fill_orders(problem: OrderProblem) -> Iterator[Lists]:
    """The orders of all rules, those that fit and can be run."""
    parts_a_device = problem.parts // problem.devices
    count = problem.devices
    most = problem.micro_batches * parts_a_device
    depths = (
        tuple((count - device) * parts_a_device for device in range(count)),
        tuple((2 * (count - device) - 1) * parts_a_device for device in range(count)),
        tuple((count - device + (count - device) // 2) * parts_a_device for device in range(count)),
        (most,) * count,
    )
    rules = product(SHARES, dict.fromkeys(depths), (False, True))
    orders = set()
    for share, ahead, forward_first in rules:
        lists = _Filler(problem, Rule(share, ahead, forward_first)).lists()
        if lists is not None and lists not in orders:
            orders.add(lists)
            yield lists


class _Filler:
    """The devices as the clock goes on."""

    def __init__(self, problem: OrderProblem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        parts, count = problem.parts, problem.micro_batches
        self.done = [[0] * parts for _ in range(3)]
        self.arrivals: list[list[list[float]]] = [[[], []] for _ in range(parts)]
        """By part, when each F and each B has what it needs, in order, as far as it is known."""
        self.arrivals[0][F] = [0.0] * count
        self.level = [0.0] * problem.devices
        self.in_flight = [0] * problem.devices
        self.own: list[list[Step]] = [[] for _ in range(problem.devices)]
        self.split = problem.split

    def lists(self) -> Lists | None:
        """What the devices do; None where they wait for each other for ever."""
        problem = self.problem
        total = (3 if self.split else 2) * problem.micro_batches
        left = [total * len(own) for own in problem.own_parts]
        events = [(0.0, device) for device in range(problem.devices)]
        free = [0.0] * problem.devices
        idle: set[int] = set()
        while events:
            now, device = heapq.heappop(events)
            if now < free[device] or not left[device]:
                continue
            step, wake = self._choose(device, now)
            if step is None:
                if wake < NEVER:
                    heapq.heappush(events, (wake, device))
                else:
                    idle.add(device)
                continue
            idle.discard(device)
            left[device] -= 1
            self.own[device].append(step)
            free[device] = self._run(device, step, now)
            heapq.heappush(events, (free[device], device))
            for other in tuple(idle):
                heapq.heappush(events, (now, other))
        if any(left):
            return None
        return tuple(tuple(own) for own in self.own)

    def _arrives(self, kind: int, part: int) -> float:
        """When the next F or B of a part can begin, as far as it is known."""
        number = self.done[kind][part]
        times = self.arrivals[part][kind]
        return times[number] if number < len(times) else NEVER

    def _has_room(self, device: int, kind: int, part: int) -> bool:
        """Whether an action fits, and after an F one of a later part of the device and a B: else nothing
        would end."""
        problem = self.problem
        level = self.level[device] + problem.level_change(kind, part)[0]
        needed = problem.workspace_bytes(kind, part)
        if kind == F:
            own = problem.own_parts[device]
            level += max((problem.micro_batch_bytes[later] for later in own if later > part), default=0.0)
            for other in own:
                needed = max(needed, problem.level_change(B, other)[0] + problem.workspace_bytes(B, other))
        return level + needed <= problem.room[device] * (1 + 1e-12)

    def _choose(self, device: int, now: float) -> tuple[Step | None, float]:
        """What is done next, or until when to wait."""
        parts = self.problem.own_parts[device]
        backwards, forwards = (
            [
                (self._arrives(kind, part), part)
                for part in reversed(parts)
                if self._has_room(device, kind, part)
            ]
            for kind in (B, F)
        )
        ready_backward = next((part for at, part in backwards if at <= now), None)
        ready_forward = next((part for at, part in forwards if at <= now), None)
        few = self.in_flight[device] < self.rule.ahead[device]
        if ready_forward is not None and few and (ready_backward is None or self.rule.forward_first):
            return (F, ready_forward), now
        if ready_backward is not None:
            return (B, ready_backward), now
        coming = min([at for at, _ in backwards] + [at for at, _ in forwards if few], default=NEVER)
        weight = next((part for part in parts if self.done[W][part] < self.done[B][part]), None)
        if self.split and weight is not None:
            seconds = self.problem.weight[weight]
            if coming - now >= self.rule.share * seconds:
                return (W, weight), now
        if coming == NEVER and ready_forward is not None:
            return (F, ready_forward), now
        return None, coming

    def _run(self, device: int, step: Step, now: float) -> float:
        """An action; when it ends."""
        problem, (kind, part) = self.problem, step
        number = self.done[kind][part]
        self.done[kind][part] += 1
        end = now + problem.duration(kind, part, number == 0)
        self.level[device] += sum(problem.level_change(kind, part))
        self.in_flight[device] += kind == F
        if (arrival := problem.next_arrival(kind, part, end)) is not None:
            other, action, at = arrival
            self.arrivals[other][action].append(at)
        if kind == problem.release:
            self.in_flight[device] -= 1
        return end

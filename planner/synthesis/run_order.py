"""The run of an order: when each action starts and ends, and what made it wait; the order of a program."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf

from ...cost_models.schedules.action import Program, StageSlot
from .order_problem import KINDS, B, F, Lists, OrderProblem, Step, W

NONE, NEVER = -1, inf


@dataclass(frozen=True, eq=False)
class OrderRun:
    """Of the actions of all devices, device after device: start and end, and the action that it waited for at
    last (NONE: for nothing), which is the one before on its device or the one that sent to it.

    `first`: by device, the number of its first action. `step`: seconds of all.
    """

    start: list[float]
    end: list[float]
    waited_for: list[int]
    first: list[int]
    step: float
    device_ends: list[float]

    def critical_path(self, problem: OrderProblem) -> list[int]:
        """The actions, last first, of which each starts when the one before on the path lets it."""
        ends = [end + extra for end, extra in zip(self.device_ends, problem.end, strict=True)]
        device = max(range(len(ends)), key=ends.__getitem__)
        action = self.first[device + 1] - 1
        path = []
        while action != NONE:
            path.append(action)
            action = self.waited_for[action]
        return path


def run_order(problem: OrderProblem, lists: Lists, limit: float = inf) -> OrderRun | None:
    """The run of an order; None where it cannot be run to its end, or a device is not done at `limit`."""
    parts, count = problem.parts, problem.micro_batches
    device_of = problem.device
    first = [0]
    for own in lists:
        first.append(first[-1] + len(own))
    total = first[-1]
    start, end, waited = [0.0] * total, [0.0] * total, [NONE] * total
    # When the F or B of a micro-batch has what it needs from another part, and which action sent it.
    arrival = [[[NEVER] * count for _ in range(parts)] for _ in (F, B)]
    sender = [[[NONE] * count for _ in range(parts)] for _ in (F, B)]
    arrival[F][0] = [0.0] * count
    arrival[B][-1] = [0.0] * count
    done = [[0] * parts for _ in KINDS]
    link_free: dict[tuple[int, int], float] = {}
    durations = [
        [(problem.duration(kind, part, True), problem.duration(kind, part, False)) for part in range(parts)]
        for kind in range(len(KINDS))
    ]
    position, free = [0] * len(lists), [0.0] * len(lists)
    waiting = list(range(len(lists)))
    while waiting:
        device = waiting.pop()
        own, at, now = lists[device], position[device], free[device]
        base = first[device]
        while at < len(own):
            kind, part = own[at]
            number = done[kind][part]
            ready = 0.0 if kind == W else arrival[kind][part][number]
            if ready == NEVER or (kind != F and number >= done[kind - 1][part]):
                break
            index = base + at
            begin = now
            if at:
                waited[index] = index - 1
            if ready > begin:
                begin, waited[index] = ready, sender[kind][part][number]
            now = begin + durations[kind][part][0 if number == 0 else 1]
            start[index], end[index] = begin, now
            done[kind][part] = number + 1
            other = part + 1 if kind == F else part - 1
            if kind != W and 0 <= other < parts:
                arrival[kind][other][number] = _arrival(problem, link_free, kind, part, other, now)
                sender[kind][other][number] = index
                if device_of[other] != device:
                    waiting.append(device_of[other])
            at += 1
        position[device], free[device] = at, now
        if now > limit:
            return None
    if any(position[device] < len(own) for device, own in enumerate(lists)):
        return None
    step = max(now + extra for now, extra in zip(free, problem.end, strict=True))
    return OrderRun(start, end, waited, first, step, free)


def _arrival(
    problem: OrderProblem,
    link_free: dict[tuple[int, int], float],
    kind: int,
    part: int,
    other: int,
    now: float,
) -> float:
    """When what an action made at `now` is where it is needed; the link carries one at a time."""
    wait = (problem.forward_wait, problem.backward_wait)[kind][part]
    busy = (problem.forward_busy, problem.backward_busy)[kind][part]
    if not wait:
        return now
    link = problem.link(kind, part, other)
    begins = max(now, link_free.get(link, 0.0))
    link_free[link] = begins + busy
    return begins + wait


def list_steps(program: Program) -> Lists | None:
    """The kinds and parts of a program in their order; None where its micro-batches are not in order, or some
    backwards are in two parts and others whole."""
    of_kind = Counter(action.kind for own in program.actions for action in own)
    if of_kind["W"] not in (0, of_kind["B"]):
        return None
    part_of = program.parts_by_slot
    lists = []
    for device, own in enumerate(program.actions):
        done: dict[Step, int] = {}
        row = []
        for action in own:
            step = (KINDS.index(action.kind), part_of[StageSlot(device, action.chunk)])
            if action.micro_batch != done.get(step, 0):
                return None
            done[step] = action.micro_batch + 1
            row.append(step)
        lists.append(tuple(row))
    return tuple(lists)

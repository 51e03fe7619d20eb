"""Orders of actions on given stages: costs, memory, run and lower bound.

Micro-batches are alike. They may therefore be assumed to run in their order on every part of the layers:
renaming them from part to part gives an order that is as fast and holds as much, because the j-th to start on
a part finds j that have ended earlier. An order is thus one sequence of (kind, part) for each device.

`OrderProblem.bound` is the larger of two lower bounds on the step: the work of a device after the first
forward reaches it, and the round trip of the first micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf

from ...cost_models.schedules.action import Kind, Program
from ...cost_models.schedules.zb_v import number_actions

F, B, W = range(3)
KINDS: tuple[Kind, ...] = ("F", "B", "W")
Step = tuple[int, int]
"""Kind and part of an action; its micro-batch is the next one of that kind and part."""
Lists = tuple[tuple[Step, ...], ...]
"""An order: the steps of each device."""
ROUNDING = 1 + 1e-12
"""Factor on the room of a device, for sums that differ by rounding."""


@dataclass(frozen=True, eq=False)
class OrderProblem:
    """Costs and memory of the parts of a pipeline, in seconds and bytes of one micro-batch.

    Attributes:
        micro_batches: Number of micro-batches.
        device: Device of each part.
        forward: Seconds of F by part.
        backward: Seconds of B by part.
        weight: Seconds of W by part; 0 where B computes the weight gradients, too (`split` is False).
        credit: Seconds by part that the first backward does not take.
        forward_wait: Seconds from the end of an F to its arrival at the next part; 0 on the same device.
        forward_busy: Seconds of `forward_wait` that occupy the link.
        backward_wait: Seconds from the end of a B to its arrival at the previous part.
        backward_busy: Seconds of `backward_wait` that occupy the link.
        end: Seconds by device that follow its last action.
        micro_batch_bytes: Bytes by part of a micro-batch in flight.
        room: Bytes by device for micro-batches in flight and workspaces.
        split: The backward has two parts, B and W.
        first_part: By part, bytes that a B adds when it begins and when it ends (mostly negative).
        workspace: By part, bytes while an F runs and while another action runs.
        forward_link: By part, the port by which an F's transfer leaves if only one device sends by it, else
            -1: then each pair of devices is a link. May be empty.
        backward_link: The same for B.
    """

    micro_batches: int
    device: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    credit: tuple[float, ...]
    forward_wait: tuple[float, ...]
    forward_busy: tuple[float, ...]
    backward_wait: tuple[float, ...]
    backward_busy: tuple[float, ...]
    end: tuple[float, ...]
    micro_batch_bytes: tuple[float, ...]
    room: tuple[float, ...]
    split: bool = True
    first_part: tuple[tuple[float, float], ...] = ()
    workspace: tuple[tuple[float, float], ...] = ()
    forward_link: tuple[int, ...] = ()
    backward_link: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        """Number of parts of the layers."""
        return len(self.device)

    @property
    def devices(self) -> int:
        """Number of devices of the pipeline."""
        return len(self.end)

    @property
    def release(self) -> int:
        """Kind of the action that frees the memory of a micro-batch and makes the weight gradients."""
        return W if self.split else B

    @cached_property
    def parts_of_device(self) -> tuple[tuple[int, ...], ...]:
        """Parts of each device in the order of its chunks."""
        return tuple(
            tuple(part for part, host in enumerate(self.device) if host == device)
            for device in range(self.devices)
        )

    @property
    def is_line(self) -> bool:
        """Return whether every part has a device of its own."""
        return self.parts == self.devices

    @cached_property
    def parts_held(self) -> tuple[tuple[float, float], ...]:
        """`first_part` of every part, zeros where there is none."""
        return self.first_part if self.split and self.first_part else ((0.0, 0.0),) * self.parts

    def workspace_bytes(self, kind: int, part: int) -> float:
        """Bytes that an action needs while it runs."""
        return self.workspace[part][int(kind != F)] if self.workspace else 0.0

    def link(self, kind: int, part: int, receiver: int) -> tuple[int, int]:
        """Key of the link by which an F or B is sent to another part; each link serves in turn."""
        port = (self.forward_link, self.backward_link)[kind]
        if port and port[part] >= 0:
            return -1, port[part]
        return self.device[part], self.device[receiver]

    def level_change(self, kind: int, part: int) -> tuple[float, float]:
        """Bytes that a device holds more once an action has begun, and once it has ended."""
        held, (begins, ends) = self.micro_batch_bytes[part], self.parts_held[part]
        if kind == F:
            return held, 0.0
        return (0.0, -held - begins - ends) if kind == self.release else (begins, ends)

    def duration(self, kind: int, part: int, first: bool) -> float:
        """Seconds of an action; `first`: it is the first of its kind on its part."""
        seconds = (self.forward, self.backward, self.weight)[kind][part]
        return max(0.0, seconds - self.credit[part]) if first and kind == self.release else seconds

    def next_action(self, kind: int, part: int) -> tuple[int, int, float] | None:
        """Kind and part of the action that an F or B makes possible, and the seconds until that arrives."""
        if kind == F and part + 1 < self.parts:
            return F, part + 1, self.forward_wait[part]
        if kind == F:
            return B, part, 0.0
        return (B, part - 1, self.backward_wait[part]) if kind == B and part else None

    def fits(self, lists: Lists) -> bool:
        """Return whether no device ever holds more than it has room for."""
        return all(self.fits_device(device, steps) for device, steps in enumerate(lists))

    def fits_device(self, device: int, steps: Sequence[Step]) -> bool:
        """Return whether a device with these steps never holds more than it has room for."""
        level, room = 0.0, self.room[device] * ROUNDING
        for kind, part in steps:
            begins, ends = self.level_change(kind, part)
            level += begins
            if level + self.workspace_bytes(kind, part) > room:
                return False
            level += ends
        return True

    def one_at_a_time(self, micro_batches: int) -> Lists:
        """The order that holds least: no micro-batch begins until the previous one has ended."""
        kinds = (B, W) if self.split else (B,)
        lists = list[tuple[Step, ...]]()
        for parts in self.parts_of_device:
            backward = [(kind, part) for part in sorted(parts, reverse=True) for kind in kinds]
            lists.append((*((F, part) for part in sorted(parts)), *backward) * micro_batches)
        return tuple(lists)

    def has_order(self) -> bool:
        """Return whether an order fits: if one micro-batch at a time does not, none does."""
        return self.fits(self.one_at_a_time(1))

    def program(self, lists: Lists, places: Program) -> Program:
        """The order as a program whose parts lie as those of `places`."""
        chunk = {part: place.chunk for part, place in enumerate(places.pipes[0])}
        turns = [[(KINDS[kind], chunk[part]) for kind, part in steps] for steps in lists]
        return Program(tuple(tuple(number_actions(row)) for row in turns), places.pipes, places.pipe_of)

    def bound(self) -> float:
        """Lower bound on the step of every order, see the head of this module."""
        arrivals = accumulate(f + wait for f, wait in zip(self.forward, self.forward_wait, strict=True))
        lead = [0.0, *arrivals]
        round_trip = sum(self.forward) + sum(self.forward_wait) + sum(self.backward_wait)
        least = round_trip + sum(self.duration(B, part, True) for part in range(self.parts))
        for device, parts in enumerate(self.parts_of_device):
            work = sum(self._work(part) for part in parts)
            least = max(least, min(lead[part] for part in parts) + work + self.end[device])
        return least

    def _work(self, part: int) -> float:
        """Seconds of all actions of a part."""
        usual, first = (
            sum(self.duration(kind, part, is_first) for kind in (F, B, W)) for is_first in (False, True)
        )
        return (self.micro_batches - 1) * usual + first


@dataclass(frozen=True, eq=False)
class OrderRun:
    """Start and end of every action, device after device, and the seconds of the step.

    `sequence` lists the actions so that each follows those that it waits for.
    """

    start: list[float]
    end: list[float]
    sequence: list[int]
    step: float


def run_order(problem: OrderProblem, lists: Lists, limit: float = inf) -> OrderRun | None:
    """Simulate an order.

    Args:
        problem: Costs of the actions and transfers.
        lists: The order.
        limit: Seconds after which the run stops.

    Returns:
        The run; None if devices wait for each other forever or one is busy at `limit`.
    """
    parts, count = problem.parts, problem.micro_batches
    first = [0, *accumulate(map(len, lists))]
    start, end = [0.0] * first[-1], [0.0] * first[-1]
    sequence = list[int]()
    # When the F or B of a micro-batch can begin on a part, as far as it is known.
    ready = [[[inf] * count for _ in range(parts)] for _ in (F, B)]
    ready[F][0] = [0.0] * count
    done = [[0] * parts for _ in KINDS]
    link_free: dict[tuple[int, int], float] = {}
    durations = [
        [(problem.duration(kind, part, True), problem.duration(kind, part, False)) for part in range(parts)]
        for kind in (F, B, W)
    ]
    following = [[problem.next_action(kind, part) for part in range(parts)] for kind in (F, B, W)]
    position, free = [0] * len(lists), [0.0] * len(lists)
    waiting = list(range(len(lists)))
    while waiting:
        device = waiting.pop()
        steps, at, now = lists[device], position[device], free[device]
        while at < len(steps):
            kind, part = steps[at]
            number = done[kind][part]
            begin = max(now, 0.0 if kind == W else ready[kind][part][number])
            if begin == inf or (kind != F and number >= done[kind - 1][part]):
                break
            now = begin + durations[kind][part][0 if number == 0 else 1]
            index = first[device] + at
            start[index], end[index] = begin, now
            sequence.append(index)
            done[kind][part] = number + 1
            if (action := following[kind][part]) is not None:
                next_kind, receiver, wait = action
                leaves = now
                if wait:
                    link = problem.link(kind, part, receiver)
                    leaves = max(now, link_free.get(link, 0.0))
                    link_free[link] = leaves + (problem.forward_busy, problem.backward_busy)[kind][part]
                ready[next_kind][receiver][number] = leaves + wait
                if problem.device[receiver] != device:
                    waiting.append(problem.device[receiver])
            at += 1
        position[device], free[device] = at, now
        if now > limit:
            return None
    if len(sequence) < first[-1]:
        return None
    step = max(now + extra for now, extra in zip(free, problem.end, strict=True))
    return OrderRun(start, end, sequence, step)

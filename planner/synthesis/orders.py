"""Orders of actions on given stages: costs, memory, run and lower bound.

Micro-batches are alike. They may therefore be assumed to run in their order on every part of the layers:
renaming them from part to part gives an order that is as fast and holds as much, because the j-th to start on
a part finds j that have ended earlier. An order is thus one sequence of (kind, part) for each device.

Lower bound for parts on devices of their own (`OrderProblem.bound`). Symbols:

    M         number of micro-batches
    f, b, w   seconds of F, B and W of a part
    lead      seconds that precede the first F of a part
    e         seconds that follow the last action of a device
    trail     seconds that follow the last B of a part: the B's of earlier parts and a W
    K         micro-batches for which the memory of a part has room
    k         K of another part, at most the micro-batches that are left
    q         micro-batches that may wait for their W when the last B begins
    R         seconds from the start of an F to the end of its micro-batch on that part, without a pause
    A         seconds from the start of an F to the start of the same micro-batch's B

The step takes at least

    lead + M (f + b + w) + e
    lead + M (f + b) + (M - q) w + trail

The F of micro-batch j + K starts after j has ended, so that micro-batch n K of a part starts no earlier than
n R. A later part whose memory holds k micro-batches then needs, from lead + n R on, at least

    (M - n K) (f + b + w) + A - k f                its B's return A later, and until then it has k F's
    (M - n K) (f + b + w) - q w + A - k f + trail  up to the end of its last B, with q W's left
    A - k f + (M - n K - 1) f + (M - n K - k) (b + w) + A + b + trail
                                                   before its last F, B and W of all but k micro-batches
    (M - n K - 1) f + A + b + trail                the last micro-batch; for n >= 1, f is replaced by
                                                   max(f, f + b + w of the part with K)

Qi et al. (ICLR 2024) discuss what memory does to zero-bubble schedules.

Orders made by a rule, event by event: each device runs what has arrived, and fills waits with W.

A free device runs a B that has arrived (of the part nearest to the loss first). Otherwise it runs an F that
has arrived, if there is room and the device is not further ahead than the rule allows. Otherwise it runs a W,
if nothing arrives within a share of the seconds that the W takes. Shares and depths are tried one after
another, as in the heuristic of Qi et al. (ICLR 2024, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, product
from math import inf

from ...cost_models.program import Kind, Program
from ...cost_models.schedules import number_actions

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
        amount, (begins, ends) = self.micro_batch_bytes[part], self.parts_held[part]
        if kind == F:
            return amount, 0.0
        return (0.0, -amount - begins - ends) if kind == self.release else (begins, ends)

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
        """Lower bound on the step of every order of these parts (see the head of this module); with several
        parts a device it counts only the work and the first micro-batch's round trip."""
        lead = [0.0, *accumulate(f + wait for f, wait in zip(self.forward, self.forward_wait, strict=False))]
        least = self.round_trip_seconds(0)
        for device, parts in enumerate(self.parts_of_device):
            work = sum(self._work(part) for part in parts)
            least = max(least, min(lead[part] for part in parts) + work + self.end[device])
        if not self.is_line:
            return least
        if 0 in self.most_in_flight:
            return inf
        trail = self._trails()
        pairs = ((part, later) for part in range(self.parts) for later in range(part, self.parts))
        return max(least, *(lead[later] + self._windows(part, later, trail[later]) for part, later in pairs))

    def _windows(self, part: int, later: int, trail: float) -> float:
        """Least seconds from the first F of the part `later` to the end, given the memory of `part`."""
        count, most, room = self.micro_batches, self.most_in_flight[part], self.most_in_flight[later]
        forward, backwards = self.forward[later], self.backward[later] + self.weight[later]
        turn, credit = self.round_trip_seconds(later), self._credit(B, later) + self._credit(W, later)
        there = turn - self.backward[later] + self._credit(B, later)
        end = self.end[self.device[later]]
        trail = max(trail, self.weight[later] - self._credit(W, later) + end)
        round_trip = self.round_trip_seconds(part) + self.weight[part] - self._credit(W, part)
        least, rounds = 0.0, (count - 1) // most
        for number in {0, rounds}:
            left = count - number * most
            begin = number * round_trip
            work = left * (forward + backwards) - credit + end
            each = forward if number == 0 else self.forward[part] + self.backward[part] + self.weight[part]
            last = (left - 1) * max(forward, each) + turn + trail
            if left > room:
                idle = max(0.0, there - room * forward)
                busy = (left - 1) * forward + (left - room) * backwards - credit
                last = max(last, idle + busy + turn + trail)
            idle = max(0.0, there - min(room, left) * forward)
            weights = (left - self.most_without_weight[later]) * self.weight[later]
            drain = left * (forward + self.backward[later]) - self._credit(B, later)
            drain += max(0.0, weights - self._credit(W, later)) + trail
            least = max(least, begin + idle + max(work, drain), begin + last)
        return least

    @cached_property
    def most_in_flight(self) -> tuple[int, ...]:
        """Micro-batches for which the device of each part has room, at most all of them.

        When an F begins, one of those in flight has had its B and not its W, or the next B begins with all
        of them.
        """
        most = []
        for part, device in enumerate(self.device):
            begins, pending = self.parts_held[part][0], sum(self.parts_held[part])
            forward, backward = (self.workspace_bytes(kind, part) for kind in (F, B))
            amount = self.micro_batch_bytes[part]
            count = self._most(device, max(forward, backward + begins), amount)
            if self.split:
                count = max(
                    count, self._most(device, forward + max(0.0, pending), amount + min(0.0, pending))
                )
            most.append(count)
        return tuple(most)

    @cached_property
    def most_without_weight(self) -> tuple[int, ...]:
        """Micro-batches of each part that may have begun their B and not their W: 1 to all of them."""
        most = []
        for part, device in enumerate(self.device):
            amount, (begins, ends) = self.micro_batch_bytes[part], self.parts_held[part]
            last = self.workspace_bytes(B, part) + amount + begins
            most.append(min(self.micro_batches, 1 + self._most(device, last, amount + begins + ends)))
        return tuple(most)

    def _most(self, device: int, occupied: float, each: float) -> int:
        """Micro-batches of `each` bytes for which a device with occupied bytes has room."""
        room = (self.room[device] - occupied) * ROUNDING
        if each <= 0 or room == inf:
            return self.micro_batches
        return max(0, min(self.micro_batches, int(room / each)))

    def _credit(self, kind: int, part: int) -> float:
        """Seconds that the first action of a kind is shorter."""
        return self.duration(kind, part, False) - self.duration(kind, part, True)

    def _work(self, part: int) -> float:
        each = self.forward[part] + self.backward[part] + self.weight[part]
        return self.micro_batches * each - self._credit(B, part) - self._credit(W, part)

    def round_trip_seconds(self, part: int) -> float:
        """From the start of the first micro-batch's F on a part to the end of its B there."""
        total = 0.0
        for later in range(part, self.parts):
            total += self.forward[later] + self.duration(B, later, True)
            if later + 1 < self.parts:
                total += self.forward_wait[later] + self.backward_wait[later + 1]
        return total

    def _trails(self) -> list[float]:
        """Seconds from the end of the last B of each part to the end of the step: the B's of the parts in
        front of it and the W of the first, or its own W."""
        back = [self.duration(W, 0, True)]
        for part in range(1, self.parts):
            back.append(back[-1] + self.backward_wait[part] + self.duration(B, part - 1, True))
        return [max(seconds, self.duration(W, part, True)) for part, seconds in enumerate(back)]


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

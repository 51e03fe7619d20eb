"""What an order of actions is judged by: seconds, transfers and memory of stages that are given.

Micro-batches are alike, so that of every part of the layers they may be taken to run in their order,
forwards, backwards and weight gradients each: were they not, exchanging their names from part to part would
give an order that is as fast and holds as much (the j-th to start on a part finds j that have ended before).
An order is therefore, for each device, the sequence of kinds and parts alone.

A bound on the step under any order, of parts on devices of their own (lead: what comes before the first F of
a part; R: from the start of an F to the end of its micro-batch on this device, with nothing in between; K:
micro-batches that the memory holds):

    lead + M (f + b + w) + e     a device computes from its first F on; e: what follows its last action
    lead + M (f + b) + (M - q) w + trail
                                 its last B goes back through the parts before; as it begins, memory lets no
                                 more than q micro-batches, its own with them, wait for their W
    lead + n R + ...             the F of micro-batch j + K starts after j has ended, n rounds of K later

The third holds as the j-th to end has begun no later than the j-th start (Qi et al., ICLR 2024, discuss what
memory does to zero-bubble schedules; the recurrences are this module's own). Any part s at or behind the one
whose memory holds K cannot start micro-batch n K before lead(s) + n R. From then on it has (A: from the start
of an F to that of the same micro-batch's B; k: micro-batches that s holds, at most what is left)

    (M - n K) (f + b + w) + A - k f                its B's return A later, and until then it has k F's
    (M - n K) (f + b + w) - q w + A - k f + trail  the same up to the end of its last B, q W's left
    A - k f + (M - n K - 1) f + (M - n K - k) (b + w) + A + b + trail
                                                   before its last F come B and W of all but k micro-batches
    (M - n K - 1) f + A + b + trail                the last micro-batch; from n = 1 on with f + b + w of the
                                                   part with K for f: its F's wait for a B and a W each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ...cost_models.schedules.action import Kind, Program
from ...cost_models.schedules.zb_v import number_actions

F, B, W = range(3)
KINDS: tuple[Kind, ...] = ("F", "B", "W")
Step = tuple[int, int]
"""A kind and a part of the layers; the micro-batch is the next one."""
Lists = tuple[tuple[Step, ...], ...]
"""By device, what it does."""


@dataclass(frozen=True, eq=False)
class OrderProblem:
    """Seconds of one micro-batch, by part of the layers; `device`: of each part. `weight` is 0 where B
    computes the weights' gradient as well (`split` False). `credit`: what the first backward of a part does
    not take. `forward_wait`: from the end of an F to its arrival at the part after, of which `forward_busy`
    seconds occupy the link; `backward_wait`: of a B at the part before; both 0 to a part on the same device.
    `forward_link` and `backward_link`: the number of the port that an F's and a B's transfer leaves by, where
    one device alone sends by it; else, -1 or where they are empty, a pair of devices is a link. `end`: by
    device, what follows its last action. `micro_batch_bytes`: of a micro-batch in flight, by part; `room`: by
    device, bytes for all of them. By part, where it is split: `first_part` bytes that B adds as it begins
    and, mostly less than 0, as it ends; `workspace` bytes while an F, and while another action runs.
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
        """Parts of the layers."""
        return len(self.device)

    @property
    def devices(self) -> int:
        """Devices of the pipeline."""
        return len(self.end)

    @property
    def release(self) -> int:
        """The kind of action that frees what a micro-batch holds, and makes the weights' gradients."""
        return W if self.split else B

    @cached_property
    def own_parts(self) -> tuple[tuple[int, ...], ...]:
        """By device, its parts in the order of its chunks."""
        return tuple(
            tuple(part for part, own in enumerate(self.device) if own == device)
            for device in range(self.devices)
        )

    @property
    def is_line(self) -> bool:
        """Whether every part has a device of its own."""
        return self.parts == self.devices

    @cached_property
    def most_in_flight(self) -> tuple[int, ...]:
        """By part of a line, the micro-batches that its device may have room for: M at the most. As an F
        begins, one of those in flight has had its B and not its W, or the next B begins with all of them."""
        most = []
        for part, device in enumerate(self.device):
            begins, behind = self.parts_held[part][0], sum(self.parts_held[part])
            forward, backward = (self.workspace_bytes(kind, part) for kind in (F, B))
            own = self._most(device, max(forward, backward + begins), self.micro_batch_bytes[part])
            later = self._most(device, forward + max(0.0, behind), self.least_bytes(part))
            most.append(max(own, later) if self.split else own)
        return tuple(most)

    @cached_property
    def most_behind_backward(self) -> tuple[int, ...]:
        """By part of a line, the micro-batches that may have had their B and not their W, one at its B
        included: M at the most, and 1 at the least."""
        most = []
        for part, device in enumerate(self.device):
            own, (begins, ends) = self.micro_batch_bytes[part], self.parts_held[part]
            last = self.workspace_bytes(B, part) + own + begins
            most.append(min(self.micro_batches, 1 + self._most(device, last, own + begins + ends)))
        return tuple(most)

    def _most(self, device: int, besides: float, each: float) -> int:
        """Micro-batches of so many bytes for which a device has room, beside others: M at the most."""
        room = (self.room[device] - besides) * (1 + 1e-12)
        if each <= 0 or room == float("inf"):
            return self.micro_batches
        return max(0, min(self.micro_batches, int(room / each)))

    def least_bytes(self, part: int) -> float:
        """What a micro-batch in flight holds at the least: behind its B that may be less than before."""
        return self.micro_batch_bytes[part] + min(0.0, sum(self.parts_held[part]))

    @cached_property
    def parts_held(self) -> tuple[tuple[float, float], ...]:
        """`first_part`, of all parts."""
        return self.first_part if self.split and self.first_part else ((0.0, 0.0),) * self.parts

    def workspace_bytes(self, kind: int, part: int) -> float:
        """While an action runs."""
        return self.workspace[part][int(kind != F)] if self.workspace else 0.0

    def link(self, kind: int, part: int, other: int) -> tuple[int, int]:
        """Of what an F or B sends to another part: transfers with the same one are served in turn."""
        own = (self.forward_link, self.backward_link)[kind]
        if own and own[part] >= 0:
            return -1, own[part]
        return self.device[part], self.device[other]

    def level_change(self, kind: int, part: int) -> tuple[float, float]:
        """Bytes that a device holds more as an action begins, and as it has ended."""
        own, (begins, ends) = self.micro_batch_bytes[part], self.parts_held[part]
        if kind == F:
            return own, 0.0
        return (0.0, -own - begins - ends) if kind == self.release else (begins, ends)

    def duration(self, kind: int, part: int, first: bool) -> float:
        """Seconds of an action; `first`: of the first backward of its part."""
        seconds = (self.forward, self.backward, self.weight)[kind][part]
        adds = kind == self.release
        return max(0.0, seconds - self.credit[part]) if adds and first else seconds

    def fits(self, lists: Lists) -> bool:
        """Whether no device ever holds more than it has room for."""
        return all(self.fits_device(device, own) for device, own in enumerate(lists))

    def fits_device(self, device: int, own: Sequence[Step]) -> bool:
        """Whether a device with this list never holds more than it has room for."""
        level, room = 0.0, self.room[device] * (1 + 1e-12)
        for kind, part in own:
            before, after = self.level_change(kind, part)
            level += before
            if level + self.workspace_bytes(kind, part) > room:
                return False
            level += after
        return True

    def bound(self) -> float:
        """Seconds that no order of these parts is below; see above. Of several parts a device, of the work
        and one micro-batch's way alone."""
        work = [self._work(part) for part in range(self.parts)]
        lead = [0.0, *accumulate(f + wait for f, wait in zip(self.forward, self.forward_wait, strict=False))]
        trail = self._trails()
        least = self.way_seconds(0)
        for device, own in enumerate(self.own_parts):
            busy = sum(work[part] for part in own)
            least = max(least, min(lead[part] for part in own) + busy + self.end[device])
        if not self.is_line:
            return least
        for part, most in enumerate(self.most_in_flight):
            if most == 0:
                return float("inf")
            least = max(
                least,
                *(
                    lead[later] + self._windows(part, later, trail[later])
                    for later in range(part, self.parts)
                ),
            )
        return least

    def _windows(self, part: int, later: int, trail: float) -> float:
        """Seconds from the start of the first F of the part `later` to the end, as the memory of `part` lets
        micro-batches through."""
        count, most, own = self.micro_batches, self.most_in_flight[part], self.most_in_flight[later]
        forward, after = self.forward[later], self.backward[later] + self.weight[later]
        turn, adds_less = self.way_seconds(later), self._credit_of_b(later) + self._credit_of_w(later)
        back = turn - self.backward[later] + self._credit_of_b(later)
        trail = max(trail, self.weight[later] - self._credit_of_w(later) + self.end[self.device[later]])
        round_trip = self.way_seconds(part) + self.weight[part] - self._credit_of_w(part)
        least, rounds = 0.0, (count - 1) // most
        for number in {0, rounds}:
            left = count - number * most
            begin, ahead = number * round_trip, min(own, left)
            work = left * (forward + after) - adds_less + self.end[self.device[later]]
            each = forward if number == 0 else self.forward[part] + self.backward[part] + self.weight[part]
            last = (left - 1) * max(forward, each) + turn + trail
            if left > own:
                idle = max(0.0, back - own * forward)
                last = max(
                    last, idle + (left - 1) * forward + (left - own) * after - adds_less + turn + trail
                )
            idle = max(0.0, back - ahead * forward)
            weights = (left - self.most_behind_backward[later]) * self.weight[later]
            drain = left * (forward + self.backward[later]) - self._credit_of_b(later)
            drain += max(0.0, weights - self._credit_of_w(later)) + trail
            least = max(least, begin + idle + max(work, drain), begin + last)
        return least

    def _credit_of_b(self, part: int) -> float:
        return 0.0 if self.split else min(self.credit[part], self.backward[part])

    def _credit_of_w(self, part: int) -> float:
        return min(self.credit[part], self.weight[part]) if self.split else 0.0

    def _work(self, part: int) -> float:
        each = self.forward[part] + self.backward[part] + self.weight[part]
        return self.micro_batches * each - self._credit_of_b(part) - self._credit_of_w(part)

    def next_arrival(self, kind: int, part: int, end: float) -> tuple[int, int, float] | None:
        """The part, the action and when it may begin that an action which ends at `end` makes possible: the
        next part's F, or the B of the part before; None where there is none."""
        if kind == F and part + 1 < self.parts:
            return part + 1, F, end + self.forward_wait[part]
        if kind == F:
            return part, B, end
        return (part - 1, B, end + self.backward_wait[part]) if kind == B and part else None

    def way_seconds(self, part: int) -> float:
        """From the start of an F of a part to the end of the same micro-batch's B, the first of all parts."""
        total = 0.0
        for later in range(part, self.parts):
            total += self.forward[later] + self.backward[later] - self._credit_of_b(later)
            if later + 1 < self.parts:
                total += self.forward_wait[later] + self.backward_wait[later + 1]
        return total

    def _trails(self) -> list[float]:
        """By part, from the end of its last B to the end of the step: the B's of the parts before, and the W
        of the last of them."""
        trails = [self.weight[0] - self._credit_of_w(0)]
        for part in range(1, self.parts):
            before = self.backward[part - 1] - self._credit_of_b(part - 1)
            trails.append(trails[-1] + self.backward_wait[part] + before)
        # A part's own W follows its last B, too.
        return [max(trail, self.weight[part] - self._credit_of_w(part)) for part, trail in enumerate(trails)]

    def program(self, lists: Lists, like: Program) -> Program:
        """The order as a program with the places of another one."""
        chunk = {part: place.chunk for part, place in enumerate(like.pipes[0])}
        turns = [[(KINDS[kind], chunk[part]) for kind, part in own] for own in lists]
        return Program(tuple(tuple(number_actions(own)) for own in turns), like.pipes, like.pipe_of)

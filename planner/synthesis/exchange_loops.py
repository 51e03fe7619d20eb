"""The loops of exchanges in an order: plain Python over lists, and compiled by numba over arrays. The same
code, of additions and comparisons alone, so the results are the same bits.

Each action is a number. Of an action that moves on its device only what comes later is timed again, and as
soon as that with what followed it before is over the limit the change is taken back: what follows is known of
all actions but those that it moves across, and those whose way goes through these, of which now and then less
follows, so that a change within the limit is not taken (E. Balas and A. Vazacopoulos, "Guided local search
with shifting bottleneck for job shop scheduling", Management Science 1998).
"""

from __future__ import annotations

from typing import Any, NamedTuple

NONE = -1
RANDOM_FACTOR, RANDOM_MODULUS = 48_271, 2_147_483_647
"""Of random whole numbers (S. K. Park, K. W. Miller and P. K. Stockmeyer, Communications of the ACM 1993)."""
REACH = 6
"""Actions that one is moved across, at the most; half of the moves are across one."""
MOST_FRUITLESS = 2_000
"""Changes in a row that do not fit, after which none is sought."""


class Jobs(NamedTuple):
    """By action: its device; kind and part as one number; the action of its device that it needs; seconds;
    what sends to it, what it sends to, and seconds from the sender's end to its arrival; bytes held more as
    it begins, as it ends, and while it runs. By device: where its actions begin, room, seconds behind the
    last. `exponential`: random numbers of mean 1."""

    device: Any
    step: Any
    needs: Any
    seconds: Any
    sender: Any
    receiver: Any
    wait: Any
    begins: Any
    ends: Any
    workspace: Any
    first: Any
    room: Any
    device_end: Any
    exponential: Any


class TimedOrder(NamedTuple):
    """The actions device after device (`own`), by action its place there, the one before and the one after,
    start, end, and what follows its end; the actions by the clock, and by action its rank there; by place,
    bytes held behind it. The rest is for a change in the making, and the best order."""

    own: Any
    place: Any
    before: Any
    after: Any
    start: Any
    end: Any
    tail: Any
    clock: Any
    rank: Any
    level: Any
    old_start: Any
    segment: Any
    late: Any
    marked: Any
    path: Any
    best: Any


def anneal(jobs: Any, row: Any, turns: int, heat: float, bound: float, least: float, random: int) -> Any:
    """Exchanges in so many turns; an order that is better than `least` goes to `row.best`. Returns the step
    of the best, the work (actions that were timed), whether exchanges can go on, and the next random
    number."""
    device, place, first, own = jobs.device, row.place, jobs.first, row.own
    step = seconds_of_step(jobs, row)
    turn, fruitless, count, work = 0, 0, NONE, 0
    while turn < turns and least > bound and fruitless < MOST_FRUITLESS and count != 0:
        if count == NONE:
            count = find_path(jobs, row, step)
            continue
        random = random * RANDOM_FACTOR % RANDOM_MODULUS
        action = row.path[random // 16 % count]
        random = random * RANDOM_FACTOR % RANDOM_MODULUS
        reach = 1 if random // 16 % 2 == 0 else 1 + random // 32 % REACH
        origin = place[action]
        target = max(origin - reach, first[device[action]])
        if random // 1024 % 2 == 0:
            origin -= 1
            target = min(origin + reach, first[device[action] + 1] - 1)
        if not may_move(jobs, row, origin, target):
            fruitless, work = fruitless + 1, work + 1
            continue
        fruitless, turn = 0, turn + 1
        random = random * RANDOM_FACTOR % RANDOM_MODULUS
        limit = step + heat * jobs.exponential[random // 16 % len(jobs.exponential)]
        changed, timed = change(jobs, row, origin, target, limit)
        work += timed
        if changed <= limit:
            step, count = changed, NONE
            if step < least:
                least = step
                for i in range(len(own)):
                    row.best[i] = own[i]
    return least, work, count != 0 and fruitless < MOST_FRUITLESS, random


def seconds_of_step(jobs: Any, row: Any) -> float:
    """Until every device is done."""
    first, device_end, own, end = jobs.first, jobs.device_end, row.own, row.end
    step = 0.0
    for device in range(len(device_end)):
        step = max(step, end[own[first[device + 1] - 1]] + device_end[device])
    return step


def find_path(jobs: Any, row: Any, step: float) -> int:
    """Fills `path` with the actions of a critical path that follow another one on their device without a
    pause; how many."""
    first, device_end, senders, wait = jobs.first, jobs.device_end, jobs.sender, jobs.wait
    own, start, end, befores, path = row.own, row.start, row.end, row.before, row.path
    action, count = NONE, 0
    for device in range(len(device_end)):
        last = own[first[device + 1] - 1]
        if end[last] + device_end[device] == step:
            action = last
    while action != NONE:
        sender, before = senders[action], befores[action]
        if sender != NONE and end[sender] + wait[action] == start[action]:
            action = sender
        elif before != NONE and end[before] == start[action]:
            path[count] = action
            count += 1
            action = before
        else:
            break
    return count


def may_move(jobs: Any, row: Any, origin: int, target: int) -> bool:
    """Whether the action at a place may go to another one of its device: across none of its kind and part,
    none that it needs or that needs it, and in the device's room."""
    step, needs, begins, ends, workspace = jobs.step, jobs.needs, jobs.begins, jobs.ends, jobs.workspace
    own = row.own
    action, way = own[origin], 1 if target > origin else -1
    place = origin
    while place != target:
        place += way
        other = own[place]
        if step[other] == step[action]:
            return False
        if needs[other if way > 0 else action] == (action if way > 0 else other):
            return False
    device, begin = jobs.device[action], min(origin, target)
    level = row.level[begin - 1] if begin > jobs.first[device] else 0.0
    room = jobs.room[device]
    for place in range(begin, max(origin, target) + 1):
        other = own[place + way] if place != target else action
        level += begins[other]
        if level + workspace[other] > room:
            return False
        level += ends[other]
    return True


def change(jobs: Any, row: Any, origin: int, target: int, limit: float) -> Any:
    """Moves an action; the step, or more than `limit` where it is taken back, and how many actions were
    timed."""
    clock, rank, segment, old_start = row.clock, row.rank, row.segment, row.old_start
    begin, end = min(origin, target), max(origin, target)
    first, last = rank[row.own[begin]], rank[row.own[end]]
    if not sort_segment(jobs, row, first, last, origin, target):
        return limit + 1.0, last - first
    move_action(jobs, row, origin, target)
    until, over = time_again(jobs, row, first, begin, end, limit)
    step = limit + 1.0 if over else seconds_of_step(jobs, row)
    if step <= limit:
        sort_by_start(row, first, until)
        return step, until - first + follow_again(jobs, row, begin, end)
    for i in range(first, until):
        action = clock[i]
        row.start[action] = old_start[i]
        row.end[action] = old_start[i] + jobs.seconds[action]
    move_action(jobs, row, target, origin)
    for i in range(first, last + 1):
        clock[i] = segment[i - first]
        rank[clock[i]] = i
    return limit + 1.0, until - first


def sort_segment(jobs: Any, row: Any, first: int, last: int, origin: int, target: int) -> bool:
    """Puts the part of the clock in which an action moves in an order that goes with that: what waits for
    those that become later goes behind the others. False, and nothing is changed, where an action would wait
    for itself (D. J. Pearce and P. H. J. Kelly, Journal of Experimental Algorithmics 2006)."""
    own, place, befores, senders = row.own, row.place, row.before, jobs.sender
    clock, rank, segment, lates, marked = row.clock, row.rank, row.segment, row.late, row.marked
    action, late, early, possible = own[origin], 0, first, True
    if target > origin:
        marked[action] = 1
    for i in range(target, origin):
        marked[own[i]] = 1
    for i in range(first, last + 1):
        other = clock[i]
        segment[i - first] = other
        sender, before = senders[other], befores[other]
        if sender != NONE and marked[sender] == 1:
            # Those that become earlier wait for none of those that become later.
            earlier = other == action if target < origin else origin < place[other] <= target
            possible = possible and not earlier
            marked[other] = 1
        elif before != NONE and marked[before] == 1 and before != action and other != action:
            marked[other] = 1
        if marked[other] == 1:
            lates[late] = other
            late += 1
        else:
            clock[early] = other
            early += 1
    for i in range(late):
        marked[lates[i]] = 0
    for i in range(first, last + 1):
        if not possible:
            clock[i] = segment[i - first]
        elif i >= early:
            clock[i] = lates[i - early]
        rank[clock[i]] = i
    return possible


def move_action(jobs: Any, row: Any, origin: int, target: int) -> None:
    """From its place on its device to another; what is held behind each is noted."""
    own, places, before, after, level = row.own, row.place, row.before, row.after, row.level
    action, way = own[origin], 1 if target > origin else -1
    place, device = origin, jobs.device[action]
    while place != target:
        own[place] = own[place + way]
        place += way
    own[target] = action
    first, begin = jobs.first[device], min(origin, target)
    bytes_now = level[begin - 1] if begin > first else 0.0
    for place in range(begin, max(origin, target) + 1):
        action = own[place]
        bytes_now = bytes_now + jobs.begins[action] + jobs.ends[action]
        places[action], level[place] = place, bytes_now
        before[action], after[action] = NONE, NONE
        if place > first:
            before[action] = own[place - 1]
            after[own[place - 1]] = action
        if place + 1 < jobs.first[device + 1]:
            after[action] = own[place + 1]
            before[own[place + 1]] = action


def time_again(jobs: Any, row: Any, first: int, begin: int, end: int, limit: float) -> Any:
    """Starts and ends from a rank on, as far as they change: where that ends, and whether a step is over the
    limit. `begin` and `end`: places of the device between which an action moved."""
    own, place, rank, clock, old_start = row.own, row.place, row.rank, row.clock, row.old_start
    starts, ends, tails, befores, afters = row.start, row.end, row.tail, row.before, row.after
    senders, receivers, wait, seconds = jobs.sender, jobs.receiver, jobs.wait, jobs.seconds
    until, i = first, first
    for own_place in range(begin, end + 1):
        until = max(until, rank[own[own_place]])
    if afters[own[end]] != NONE:
        until = max(until, rank[afters[own[end]]])
    while i <= until:
        action = clock[i]
        start, before, sender = 0.0, befores[action], senders[action]
        if before != NONE:
            start = ends[before]
        if sender != NONE:
            start = max(start, ends[sender] + wait[action])
        old_start[i] = starts[action]
        i += 1
        if start == starts[action]:
            continue
        starts[action], ends[action] = start, start + seconds[action]
        if ends[action] + tails[action] > limit and not begin <= place[action] <= end:
            return i, True
        after, receiver = afters[action], receivers[action]
        if after != NONE:
            until = max(until, rank[after])
        if receiver != NONE:
            until = max(until, rank[receiver])
    return i, False


def sort_by_start(row: Any, first: int, until: int) -> None:
    """The actions of some ranks by the clock: each has its senders before it, also where starts are equal."""
    clock, rank, starts = row.clock, row.rank, row.start
    for i in range(first + 1, until):
        action, j = clock[i], i
        while j > first and starts[clock[j - 1]] > starts[action]:
            clock[j] = clock[j - 1]
            rank[clock[j]] = j
            j -= 1
        clock[j] = action
        rank[action] = j


def follow_again(jobs: Any, row: Any, begin: int, end: int) -> int:
    """What follows the ends of actions, of those between two places and from them back to the beginning as
    far as it changes; how many actions those are."""
    own, rank, clock, tails, befores, afters = row.own, row.rank, row.clock, row.tail, row.before, row.after
    senders, receivers, wait, seconds = jobs.sender, jobs.receiver, jobs.wait, jobs.seconds
    top, until = 0, len(clock)
    if begin > jobs.first[jobs.device[own[begin]]]:
        begin -= 1
    for place in range(begin, end + 1):
        top = max(top, rank[own[place]])
        until = min(until, rank[own[place]])
    i = top
    while i >= until:
        action = clock[i]
        i -= 1
        after, receiver = afters[action], receivers[action]
        tail = jobs.device_end[jobs.device[action]]
        if after != NONE:
            tail = seconds[after] + tails[after]
        if receiver != NONE:
            tail = max(tail, wait[receiver] + seconds[receiver] + tails[receiver])
        if tail == tails[action]:
            continue
        tails[action] = tail
        if befores[action] != NONE:
            until = min(until, rank[befores[action]])
        if senders[action] != NONE:
            until = min(until, rank[senders[action]])
    return top - i


LOOPS = (
    seconds_of_step, find_path, may_move, sort_segment, move_action, time_again, sort_by_start, follow_again,
    change, anneal,
)  # fmt: skip
"""Each behind those that it calls."""

"""The loops of orders by rule: plain Python over lists, and compiled by numba over arrays. The same code, so
the results are the same bits. Tables are rows one behind the other."""

from __future__ import annotations

from math import inf
from typing import Any

from .order_problem import B, F, W

WAIT = -1
"""Nothing can be done yet."""


def make_turns(
    count: int, distances: Any, begins: Any, numbers: Any, forwards_before: Any, turns: Any
) -> None:
    """Fills `turns`, by part of a line, with the F's and B's of `count` micro-batches in order. `begins`: by
    micro-batch, how far the first part is as it begins; `numbers`: how much further at its B, as slope,
    period, phase and offset of an `AheadRule`."""
    slope, period, phase, offset = numbers
    for number in range(count):
        forwards_before[number] = 0
    for part in range(len(distances) - 1, -1, -1):
        place, forwards, arrived, until = 2 * count * part, 0, 0, 0.0
        for number in range(count):
            later = (number / period + phase) % 1.0 if period != 0.0 else 0.0
            until = max(until, begins[number] + slope * distances[part] + later + offset)
            while arrived < count and begins[arrived] <= until + 1e-9:
                arrived += 1
            # No fewer than the part behind: it would wait for ever.
            before = max(number + 1, arrived, forwards_before[number])
            forwards_before[number] = before
            while forwards < before:
                turns[place] = F
                forwards, place = forwards + 1, place + 1
            turns[place] = B
            place += 1


def put_weights(
    count: int,
    splits: bool,
    share: float,
    most_behind: int,
    seconds: Any,
    first_seconds: Any,
    waits: Any,
    adds: Any,
    needs: Any,
    own_bytes: Any,
    room: Any,
    device_end: Any,
    turns: Any,
    arrivals: Any,
    done: Any,
    level: Any,
    free: Any,
    looks: Any,
    waiting: Any,
    own: Any,
) -> float:
    """What `fill_weights` says, instant by instant: fills `own`, by part, with the kinds of what it does. By
    part and kind: seconds, those of the first, until what an F or B made is there, and bytes that are held
    more behind it and while it runs. Returns the seconds of the step, where links carry any number at a time;
    infinite where a part has no room, or they wait for each other for ever."""
    parts, step = len(room), 0.0
    for i in range(2 * parts * count):
        arrivals[i] = 0.0 if i < count else inf
    for part in range(parts):
        level[part], free[part], looks[part], waiting[part] = 0.0, 0.0, 0.0, 0
        for kind in range(3):
            done[3 * part + kind] = 0
    while True:
        part, now = WAIT, inf
        for other in range(parts):
            if looks[other] < now:
                part, now = other, looks[other]
        if part == WAIT:
            break
        forwards, backwards, row = done[3 * part + F], done[3 * part + B], 3 * part
        at, behind = forwards + backwards, backwards - done[3 * part + W] if splits else 0
        kind, ready = WAIT, inf
        if at == 2 * count:
            kind = W if behind > 0 else WAIT
        else:
            kind = turns[2 * count * part + at]
            fits = level[part] + needs[row + kind] <= room[part]
            if kind == F:
                bytes_now = (forwards - backwards + 1) * own_bytes[part]
                fits = fits and bytes_now + needs[row + B] <= room[part]
            if behind > most_behind or not fits:
                if behind > 0:
                    kind = W
                elif kind == F and forwards > backwards and level[part] + needs[row + B] <= room[part]:
                    # The next B goes first.
                    later = at
                    while turns[2 * count * part + later] != B:
                        later += 1
                    turns[2 * count * part + later] = F
                    turns[2 * count * part + at] = B
                    kind = B
                else:
                    kind = WAIT
            if kind != WAIT and kind != W:
                ready = arrivals[(kind * parts + part) * count + done[row + kind]]
                if ready > now:
                    kind = W if behind > 0 and ready - now >= share * seconds[row + W] else WAIT
        if kind == WAIT:
            waiting[part], looks[part] = 1 if ready == inf else 0, ready
            continue
        number = done[row + kind]
        end = now + (first_seconds[row + kind] if number == 0 else seconds[row + kind])
        own[3 * count * part + forwards + backwards + done[row + W]] = kind
        done[row + kind] = number + 1
        level[part] += adds[row + kind]
        free[part], looks[part] = end, end
        step = max(step, end + device_end[part])
        other, action = WAIT, kind
        if kind == F:
            other, action = (part + 1, F) if part + 1 < parts else (part, B)
        elif kind == B:
            other = part - 1
        if other != WAIT:
            arrivals[(action * parts + other) * count + number] = end + waits[row + kind]
            if other != part and waiting[other] == 1:
                waiting[other], looks[other] = 0, max(now, free[other])
    for part in range(parts):
        if done[3 * part + (W if splits else B)] < count:
            return inf
    return step


RULE_LOOPS = (make_turns, put_weights)
"""Each behind those that it calls."""

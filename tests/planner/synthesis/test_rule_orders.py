"""Orders made by a rule, worked out once more: gaps by trying every start, and devices step by step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import inf

import numpy as np
import pytest

from pplan.planner.synthesis.action_bound import _one_machine
from pplan.planner.synthesis.fill_orders import Rule, _Filler
from pplan.planner.synthesis.fill_weights import fill_weights, list_turns
from pplan.planner.synthesis.insert_orders import _Inserter, _Timeline
from pplan.planner.synthesis.order_problem import B, F, OrderProblem, Step, W


def random_problem(
    seed: int, devices: int, micro_batches: int, *, room: float, chunks: int = 1
) -> OrderProblem:
    """Seconds of eighths, whose sums are the same in whatever order; a V where there are two chunks."""
    random = np.random.default_rng(seed)
    parts = devices * chunks
    device = [*range(devices), *reversed(range(devices))][:parts]
    ways = [here != there for here, there in pairwise(device)]

    def seconds(low: int, high: int) -> tuple[float, ...]:
        return tuple((random.integers(low, high, parts) / 8).tolist())

    late = random.integers(0, 4, (2, parts - 1)) / 8 * ways
    split = bool(seed % 3)
    return OrderProblem(
        micro_batches=micro_batches,
        device=tuple(device),
        forward=seconds(4, 12),
        backward=seconds(4, 16),
        weight=seconds(4, 12) if split else (0.0,) * parts,
        credit=seconds(0, 4),
        forward_wait=(*late[0], 0.0),
        forward_busy=(0.0,) * parts,
        backward_wait=(0.0, *late[1]),
        backward_busy=(0.0,) * parts,
        end=(0.0,) * devices,
        micro_batch_bytes=seconds(6, 10),
        room=(room * chunks,) * devices,
        split=split,
        first_part=tuple((float(own) / 8, -float(own) / 8) for own in random.integers(0, 3, parts)),
        workspace=tuple(map(tuple, (random.integers(0, 3, (parts, 2)) / 8).tolist())),
    )


def test_a_gap_is_the_earliest_start_of_all() -> None:
    for seed in range(200):
        random = np.random.default_rng(seed)
        line, busy = _Timeline(), list[tuple[float, float]]()
        for number in range(8):
            ready, seconds = (random.integers((0, 1), (40, 12)) / 4).tolist()
            starts = [ready, *(end for _, end in busy if end > ready)]
            free = [
                start
                for start in starts
                if all(start + seconds <= begin or start >= end for begin, end in busy)
            ]
            assert line.gap(ready, seconds) == min(free)
            line.insert(min(free), seconds, (F, number))
            busy.append((min(free), min(free) + seconds))
        assert line.starts == sorted(start for start, _ in busy)
        assert list(zip(line.starts, line.ends, strict=True)) == sorted(busy)
        assert [busy[part][0] for _, part in line.steps] == line.starts


def holds(problem: OrderProblem, own: list[Step]) -> list[float]:
    """What a device holds while each of its actions runs."""
    level, most = 0.0, []
    for kind, part in own:
        before, after = problem.level_change(kind, part)
        most.append(level + before + problem.workspace_bytes(kind, part))
        level += before + after
    return most


def test_windows_are_the_most_for_which_there_is_room() -> None:
    """Of every number of micro-batches in flight: while at most `lag` wait for their W, the largest sequence
    that a device may meet fits, and with one micro-batch more it does not."""
    seen = set()
    for seed in range(60):
        problem = random_problem(seed, 2, 5, room=0.5 + seed % 7)
        inserter = _Inserter(problem, (0, 0), 1.0, 1, 0.0)
        for part, lag in product(range(2), range(4)):
            window, own = inserter._window(part, lag), problem.micro_batch_bytes[part]
            begins, ends = problem.parts_held[part]
            forward, backward = (problem.workspace_bytes(kind, part) for kind in (F, B))
            adds = max(0.0, begins + ends)

            def most(count: int) -> float:
                """With so many in flight: `lag` of them behind their B, and one in it, in F, or in W."""
                held = count * own + lag * adds  # noqa: B023
                return held + max(adds + max(forward, backward), begins + backward)  # noqa: B023

            fitting = [n for n in range(6) if n == 0 or most(n) <= problem.room[part] * (1 + 1e-12)]
            assert window == min(max(fitting), problem.micro_batches), (seed, part, lag)
            seen.add(window)
        lags = [inserter._lag(part, 3) for part in range(2)]
        for part, lag in enumerate(lags):
            allowed = [n for n in range(4) if n == 0 or inserter._window(part, n) > n]
            assert lag == (max(allowed) if problem.split else 0)
    assert seen == {0, 1, 2, 3, 4, 5}


def step_by_step(problem: OrderProblem, rule: Rule) -> list[list[Step]] | None:
    """What the rule's text says: whoever is free and looks around does what it finds to do. A device looks as
    it is done, and as what it waits for comes; where nothing is known to come, whenever another begins."""
    devices, count = problem.devices, problem.micro_batches
    kinds = (F, B, W) if problem.split else (F, B)
    own: list[list[Step]] = [[] for _ in range(devices)]
    end: dict[tuple[int, int, int], float] = {}
    free, idle = [0.0] * devices, set[int]()

    def number(kind: int, part: int) -> int:
        return own[problem.device[part]].count((kind, part))

    def arrives(kind: int, part: int) -> float:
        """When the next one has what it needs, inf where that is not known."""
        n = number(kind, part)
        if n == count:
            return inf
        if kind == F:
            if part == 0:
                return 0.0
            return end.get((F, part - 1, n), inf) + problem.forward_wait[part - 1]
        if part == problem.parts - 1:
            return end.get((F, part, n), inf)
        return end.get((B, part + 1, n), inf) + problem.backward_wait[part + 1]

    def level(device: int) -> float:
        return sum(sum(problem.level_change(kind, part)) for kind, part in own[device])

    def fits(device: int, kind: int, part: int) -> bool:
        held = level(device) + problem.level_change(kind, part)[0]
        need = problem.workspace_bytes(kind, part)
        if kind == F:
            mine = problem.own_parts[device]
            held += max([problem.micro_batch_bytes[own] for own in mine if own > part], default=0.0)
            need = max([need, *(problem.level_change(B, p)[0] + problem.workspace_bytes(B, p) for p in mine)])
        return held + need <= problem.room[device] * (1 + 1e-12)

    def choose(device: int, now: float) -> tuple[Step | None, float]:
        """What to do, or when something is known to come."""
        mine = problem.own_parts[device]
        backward = [part for part in reversed(mine) if fits(device, B, part)]
        forward = [part for part in reversed(mine) if fits(device, F, part)]
        ready = {
            kind: [part for part in parts if arrives(kind, part) <= now]
            for kind, parts in ((B, backward), (F, forward))
        }
        held = sum(kind == F for kind, _ in own[device])
        held -= sum(kind == problem.release for kind, _ in own[device])
        few = held < rule.ahead[device]
        if ready[F] and few and (rule.forward_first or not ready[B]):
            return (F, ready[F][0]), now
        if ready[B]:
            return (B, ready[B][0]), now
        coming = [arrives(B, part) for part in backward] + [arrives(F, part) for part in forward if few]
        coming.append(inf)
        for part in mine:
            if problem.split and number(W, part) < number(B, part):
                if min(coming) - now >= rule.share * problem.weight[part]:
                    return (W, part), now
                break
        return ((F, ready[F][0]), now) if ready[F] and min(coming) == inf else (None, min(coming))

    looks = {(0.0, device) for device in range(devices)}
    while looks:
        now, device = min(looks)
        looks.remove((now, device))
        if free[device] > now:
            continue
        step, coming = choose(device, now)
        if step is None:
            looks |= {(coming, device)} if coming < inf else set()
            idle |= {device} if coming == inf else set()
            continue
        kind, part = step
        n = number(kind, part)
        free[device] = end[kind, part, n] = now + problem.duration(kind, part, n == 0)
        own[device].append(step)
        idle.discard(device)
        looks |= {(free[device], device)} | {(now, other) for other in idle}
    total = len(kinds) * count
    complete = all(len(row) == total * len(parts) for row, parts in zip(own, problem.own_parts, strict=True))
    return own if complete else None


@pytest.mark.parametrize("chunks", [1, 2])
def test_devices_do_what_the_rule_says(chunks: int) -> None:
    """The orders of random rules, against devices that look around at every instant."""
    complete = 0
    for seed in range(60):
        problem = random_problem(seed, 3, 4, room=[2.5, 4.0, 20.0][seed % 3], chunks=chunks)
        if seed % 2:
            problem = replace(problem, first_part=(), workspace=())
        random = np.random.default_rng(seed)
        ahead = tuple((chunks * random.integers(1, 6, 3)).tolist())
        rule = Rule(float(random.choice([0.0, 0.3, 0.6, 1.0])), ahead, bool(random.integers(2)))
        lists, expected = _Filler(problem, rule).lists(), step_by_step(problem, rule)
        assert (lists is None) == (expected is None), seed
        if lists is not None and expected is not None:
            assert [list(own) for own in lists] == expected, seed
            assert all(
                max(holds(problem, own)) <= room * (1 + 1e-9)
                for own, room in zip(expected, problem.room, strict=True)
            )
            complete += 1
    assert complete > 15


def weights_step_by_step(
    problem: OrderProblem, turns: list[list[int]], share: float, most_behind: int
) -> list[list[Step]] | None:
    """What `fill_weights` says that it does, instant by instant; a part's number is its device's."""
    turns, count = [list(own) for own in turns], problem.micro_batches
    own: list[list[Step]] = [[] for _ in turns]
    end: dict[tuple[int, int, int], float] = {}
    free, now = [0.0] * len(turns), 0.0

    def done(kind: int, part: int) -> int:
        return own[part].count((kind, part))

    def arrives(kind: int, part: int) -> float:
        n = done(kind, part)
        if kind == F:
            before = end.get((F, part - 1, n), inf) + problem.forward_wait[part - 1]
            return before if part else 0.0
        if part == problem.parts - 1:
            return end.get((F, part, n), inf)
        return end.get((B, part + 1, n), inf) + problem.backward_wait[part + 1]

    def fits(kind: int, part: int) -> bool:
        """And behind an F a B, once no weight gradient waits."""
        level = sum(sum(problem.level_change(*step)) for step in own[part])
        needs = {k: problem.level_change(k, part)[0] + problem.workspace_bytes(k, part) for k in (F, B)}
        room = problem.room[part] * (1 + 1e-12)
        later = (done(F, part) - done(B, part) + 1) * problem.micro_batch_bytes[part] + needs[B]
        return level + needs[kind] <= room and (kind == B or later <= room)

    def choose(part: int) -> int | None:
        at = done(F, part) + done(B, part)
        behind = done(B, part) - done(W, part) if problem.split else 0
        if at == 2 * count:
            return W if behind else None
        kind = turns[part][at]
        if behind and (behind > most_behind or not fits(kind, part)):
            return W
        if not fits(kind, part):
            if kind == B or done(F, part) == done(B, part) or not fits(B, part):
                return None
            turns[part].insert(at, turns[part].pop(turns[part].index(B, at)))
            kind = B
        if arrives(kind, part) <= now:
            return kind
        return W if behind and arrives(kind, part) - now >= share * problem.weight[part] else None

    while True:
        acted = True
        while acted:
            acted = False
            for part in range(len(turns)):
                if free[part] <= now and (kind := choose(part)) is not None:
                    n = done(kind, part)
                    free[part] = end[kind, part, n] = now + problem.duration(kind, part, n == 0)
                    own[part].append((kind, part))
                    acted = True
        known = [
            arrives(kind, part) for part in range(len(turns)) for kind in (F, B) if done(kind, part) < count
        ]
        if not (later := [at for at in (*free, *known) if now < at < inf]):
            break
        now = min(later)
    complete = all(row.count((problem.release, part)) == count for part, row in enumerate(own))
    return own if complete else None


def test_weight_gradients_are_put_where_the_rule_says() -> None:
    """Random turns, also such as lack room, against devices that look around at every instant."""
    complete, moved = 0, 0
    for seed in range(90):
        problem = random_problem(seed, 3, 4, room=[1.9, 3.0, 20.0][seed % 3])
        if seed % 2:
            problem = replace(problem, first_part=(), workspace=())
        random = np.random.default_rng(seed)
        turns = []
        for _ in range(3):
            row: list[int] = []
            while len(row) < 8:
                kind = int(random.integers(2))
                if row.count(kind) < (4 if kind == F else row.count(F)):
                    row.append(kind)
            turns.append(row)
        share, behind = float(random.choice([0.0, 0.3, 0.6, 1.0])), int(random.integers(4))
        lists = fill_weights(problem, turns, share, behind)
        expected = weights_step_by_step(problem, turns, share, behind)
        assert (lists is None) == (expected is None), seed
        if lists is not None and expected is not None:
            assert [list(row) for row in lists] == expected, seed
            complete += 1
            moved += list_turns(lists) != turns
    assert complete > 15
    assert moved > 3


def test_one_machine_that_may_interrupt_by_units_of_time() -> None:
    """Of all that have come, the job with the longest tail runs for one unit; some come
    as others end."""
    for seed in range(200):
        random = np.random.default_rng(seed)
        jobs = random.integers((0, 0, 1), (12, 10, 5), (1 + seed % 6, 3)).tolist()
        left, now, least = [seconds for _, _, seconds in jobs], 0, 0
        while any(left):
            ready = [(tail, job) for job, (head, tail, _) in enumerate(jobs) if head <= now and left[job]]
            now += 1
            if ready:
                tail, job = max(ready)
                left[job] -= 1
                least = max(least, (now + tail) * (left[job] == 0))
        assert _one_machine([(float(a), float(b), float(c)) for a, b, c in jobs]) == least

"""Orders made by a rule, worked out once more: gaps by trying every start, and devices step by step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.schedules import SCHEDULES
from pplan.planner.synthesis import orders as fill_module
from pplan.planner.synthesis.orders import B, F, OrderProblem, Rule, Step, W, _Filler, fill_orders

from .test_orders import bytes_of_parts, costs_of_parts


def random_problem(
    seed: int, devices: int, micro_batches: int, *, room: float, chunks: int = 1
) -> OrderProblem:
    """Seconds of eighths, whose sums are the same in whatever order; a V where there are two chunks."""
    random = np.random.default_rng(seed)
    parts, split = devices * chunks, bool(seed % 3)
    base = ("zb-h1" if split else "1f1b") if chunks == 1 else "zb-v"
    program = SCHEDULES[base].program(devices, micro_batches)
    passes = np.array([random.integers(low, high, parts) / 8 for low, high in ((4, 12), (4, 16), (4, 12))])
    late, nothing = random.integers(0, 4, (2, parts - 1)) / 8, np.zeros((2, parts - 1))
    costs = costs_of_parts(program, passes, random.integers(0, 4, parts) / 8, nothing, late)
    pending, workspace = random.integers(0, 3, parts) / 8, random.integers(0, 3, (2, parts)) / 8
    each = random.integers(6, 10, parts) / 8
    amounts = bytes_of_parts(program, each, (pending, -pending), workspace)
    return OrderProblem(program, costs, amounts, (room * chunks,) * devices)


def holds(problem: OrderProblem, own: list[Step]) -> list[float]:
    """What a device holds while each of its actions runs."""
    level, most = 0.0, []
    for kind, part in own:
        before, after, workspace = problem.bytes[kind][part]
        most.append(level + before + workspace)
        level += before + after
    return most


def step_by_step(problem: OrderProblem, rule: Rule) -> list[list[Step]] | None:
    """What the rule's text says: whoever is free and looks around does what it finds to do. A device looks as
    it is done, and as what it waits for comes; where nothing is known to come, whenever another begins."""
    devices, count = problem.devices, problem.micro_batches
    kinds = problem.kinds
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
            return end.get((F, part - 1, n), inf) + problem.seconds[F][part - 1][2]
        if part == problem.parts - 1:
            return end.get((F, part, n), inf)
        return end.get((B, part + 1, n), inf) + problem.seconds[B][part + 1][2]

    def level(device: int) -> float:
        return sum(sum(problem.bytes[kind][part][:2]) for kind, part in own[device])

    def fits(device: int, kind: int, part: int) -> bool:
        begins, _, need = problem.bytes[kind][part]
        held = level(device) + begins
        if kind == F:
            mine = problem.parts_of_device[device]
            held += max([problem.bytes[F][own][0] for own in mine if own > part], default=0.0)
            need = max([need, *(problem.bytes[B][p][0] + problem.bytes[B][p][2] for p in mine)])
        return held + need <= problem.room[device] * (1 + 1e-12)

    def choose(device: int, now: float) -> tuple[Step | None, float]:
        """What to do, or when something is known to come."""
        mine = problem.parts_of_device[device]
        backward = [part for part in reversed(mine) if fits(device, B, part)]
        forward = [part for part in reversed(mine) if fits(device, F, part)]
        ready = {
            kind: [part for part in parts if arrives(kind, part) <= now]
            for kind, parts in ((B, backward), (F, forward))
        }
        held = sum(kind == F for kind, _ in own[device])
        held -= sum(kind == problem.kinds[-1] for kind, _ in own[device])
        few = held < rule.ahead[device]
        if ready[F] and few and (rule.forward_first or not ready[B]):
            return (F, ready[F][0]), now
        if ready[B]:
            return (B, ready[B][0]), now
        coming = [arrives(B, part) for part in backward] + [arrives(F, part) for part in forward if few]
        coming.append(inf)
        for part in mine:
            if W in kinds and number(W, part) < number(B, part):
                if min(coming) - now >= rule.share * problem.duration(W, part, 1):
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
        free[device] = end[kind, part, n] = now + problem.duration(kind, part, n)
        own[device].append(step)
        idle.discard(device)
        looks |= {(free[device], device)} | {(now, other) for other in idle}
    total = len(kinds) * count
    complete = all(
        len(row) == total * len(parts) for row, parts in zip(own, problem.parts_of_device, strict=True)
    )
    return own if complete else None


@pytest.mark.parametrize("chunks", [1, 2])
def test_devices_do_what_the_rule_says(chunks: int) -> None:
    """The orders of random rules, against devices that look around at every instant."""
    complete = 0
    for seed in range(60):
        problem = random_problem(seed, 3, 4, room=[2.5, 4.0, 20.0][seed % 3], chunks=chunks)
        if seed % 2:
            problem = replace(problem, bytes=bytes_of_parts(problem.program, np.ones(problem.parts)))
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


@pytest.mark.parametrize("chunks", [1, 2])
def test_how_far_devices_run_ahead_and_fill(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 1F1B, as ZB-H2, half as much more than 1F1B, and without an end; forwards first or backwards. Of
    orders that are the same the first."""
    depths = {
        1: ((3, 2, 1), (5, 3, 1), (4, 3, 1), (4, 4, 4)),
        2: ((6, 4, 2), (10, 6, 2), (8, 6, 2), (8, 8, 8)),
    }
    rules, alike = list[Rule](), {0.3: "none", 0.9: "0.6"}

    def filler(_: OrderProblem, rule: Rule) -> Any:
        rules.append(rule)
        order = f"{alike.get(rule.share, rule.share)} {rule.ahead} {rule.forward_first}"
        return SimpleNamespace(lists=lambda: None if "none" in order else order)

    monkeypatch.setattr(fill_module, "_Filler", filler)
    orders: list[Any] = list(fill_orders(random_problem(1, 3, 4, room=9.0, chunks=chunks)))
    every = list(product((0.0, 0.3, 0.6, 0.9, 1.0), depths[chunks], (False, True)))
    assert rules == [Rule(*own) for own in every]
    assert orders == [f"{own[0]} {own[1]} {own[2]}" for own in every if own[0] not in alike]

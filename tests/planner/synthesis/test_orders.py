"""Orders of their own against the simulator, and against every order that there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise, product
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import Recompute, StageBytes, bytes_by_action
from pplan.cost_models.program import Action, Program, StageSlot
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.step_costs import Costs
from pplan.cost_models.timeline import simulate, step_seconds
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import PipelineConfig, ScoredPlan, linear_pipeline, replicated_pipeline
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest
from pplan.planner.search.budget import SearchBudget
from pplan.planner.synthesis.exchanges import improve_order
from pplan.planner.synthesis.orders import B, F, Lists, OrderProblem, Step, W, fill_orders
from pplan.planner.synthesis.synthesize import _with_base, make_candidate, synthesize

TOLERANCE = 1e-9
MODES: tuple[Recompute, ...] = ("never", "always")


def random_problem(
    base: str, devices: int, micro_batches: int, seed: int, *, room: float = inf
) -> OrderProblem:
    """Random seconds of the parts of a schedule's places; `room`: micro-batches of all parts of a device."""
    random = np.random.default_rng(seed)
    program = SCHEDULES[base].program(devices, micro_batches)
    parts = program.slots
    passes = random.uniform(0.5, 1.5, (3, parts))
    credit, *links = random.uniform(0, 0.2, parts), *random.uniform(0, 0.3, (2, parts - 1))
    reduce, update = random.uniform(0, 2, (2, devices))
    reduce = reduce if parts == devices else np.zeros(devices)
    costs = replace(
        costs_of_parts(program, passes, credit, (links[0], links[0]), (links[1], links[1])),
        all_reduce=reduce[:, None] * np.ones(program.chunks),
        optimizer=update,
    )
    amounts = bytes_of_parts(program, np.ones(parts))
    return OrderProblem(program, costs, amounts, (room * parts / devices,) * devices)


def costs_of_parts(program: Program, passes: Any, credit: Any, busy: Any, late: Any) -> Costs:
    """Of F, B and W by part, of what the first backward does not take, and of transfers, there and back."""
    devices = [place.device for place in program.pipes[0]]
    crosses = np.array([[here != there for here, there in pairwise(devices)]])

    def by_place(values: Any) -> Any:
        table = np.zeros((program.devices, program.chunks, 1))
        for slot, part in program.parts_by_slot.items():
            table[slot] = values[part]
        return table

    return Costs(
        forward=by_place(passes[0]),
        backward=by_place(passes[1]),
        weight=by_place(passes[2]) if program.splits_backward else None,
        accumulation=by_place(np.minimum(credit, passes[2 if program.splits_backward else 1])),
        forward_occupancy=busy[0] * crosses,
        forward_latency=late[0] * crosses,
        backward_occupancy=busy[1] * crosses,
        backward_latency=late[1] * crosses,
    )


def bytes_of_parts(program: Program, each: Any, pending: Any = None, workspace: Any = None) -> Any:
    """Bytes of a micro-batch in flight by part; what a B adds as it begins and ends; workspaces of F and of
    the others."""
    parts = len(each)
    (begins, ends), table = np.zeros((2, parts)) if pending is None else pending, np.zeros((3, parts, 3))
    if not program.splits_backward:
        begins = ends = np.zeros(parts)
    table[F, :, 0], table[B, :, 0], table[B, :, 1] = each, begins, ends
    table[2 if program.splits_backward else 1, :, 1] = -each - begins - ends
    if workspace is not None:
        table[F, :, 2], table[B, :, 2], table[W, :, 2] = workspace[0], workspace[1], workspace[1]
    return table.tolist()


def list_steps(program: Program) -> Lists | None:
    """The order of a program; None if its micro-batches do not run in order, or if it has both whole
    backwards and backwards in two parts."""
    of_kind = Counter(action.kind for row in program.actions for action in row)
    if of_kind["W"] not in (0, of_kind["B"]):
        return None
    lists, done = list[tuple[Step, ...]](), Counter[Step]()
    for device, row in enumerate(program.actions):
        steps = list[Step]()
        for action in row:
            step = "FBW".index(action.kind), program.parts_by_slot[StageSlot(device, action.chunk)]
            if action.micro_batch != done[step]:
                return None
            done[step] += 1
            steps.append(step)
        lists.append(tuple(steps))
    return tuple(lists)


@pytest.mark.parametrize("base", ["1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved"])
def test_an_order_is_the_program_that_it_was_made_of(base: str) -> None:
    problem = random_problem(base, 3, 9, 3)
    lists = list_steps(problem.program)
    assert lists is not None
    assert problem.arrange(lists).actions == problem.program.actions
    timeline = simulate(problem.program, problem.costs)
    assert problem.step(lists) == timeline.step_seconds >= problem.bound() * (1 - TOLERANCE)


@pytest.mark.parametrize("base", ["1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("modes", [("never", "never"), ("always", "never")])
def test_the_bound_is_of_all_that_a_plan_takes(
    make_chain: Callable[..., Chain],
    make_topology: Callable[..., Topology],
    base: str,
    modes: tuple[Recompute, Recompute],
) -> None:
    """With replicas, recomputation, transfers, sums of gradients and a first backward that adds to none: the
    first device's work and the sum of its gradients are all of the step where the others wait for nothing."""
    for seed in range(4):
        chain = make_chain(seed, 5, cuts=1.0, adding=0.5)
        problem = Problem(
            chain, make_topology(4, per_node=2, latency=0.1), PlanOptions(mini_batch=12, micro_batches=6)
        )
        proposal = replicated_pipeline(PipelineConfig(base, "by_stage", 6, 2), (1 + seed % 4, 5), (2, 2))
        orders = make_candidate(problem, proposal, modes).problem
        timeline = simulate(orders.program, orders.costs)
        assert max(orders.end) > 0
        busy = [seconds + end for seconds, end in zip(timeline.busy_seconds, orders.end, strict=True)]
        assert max(busy) * (1 - TOLERANCE) <= orders.bound() <= timeline.step_seconds * (1 + TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["1f1b", "zb-h1", "zb-v", "interleaved"])
def test_orders_by_rule_fit_and_run_and_are_above_the_bound(base: str) -> None:
    for seed, room in product(range(2), (1.0, 1.5, 3.0, inf)):
        problem, count = random_problem(base, 3, 6, seed, room=room), 0
        for lists in fill_orders(problem):
            assert problem.fits(lists)
            assert inf > problem.step(lists) >= problem.bound() * (1 - TOLERANCE)
            own = problem.arrange(lists)
            held = [max(own.in_flight(device)) * own.parts for device in range(3)]
            assert max(held) <= room * own.parts * (1 + TOLERANCE)
            count += 1
        assert count or (room == 1.0 and problem.parts > problem.devices), (seed, room)


def every_list(problem: OrderProblem, parts: list[int]) -> Iterator[tuple[Step, ...]]:
    """Every sequence of a device in which no B stands before its F and no W before its B."""
    kinds, micro_batches = problem.kinds, problem.micro_batches

    def extend(own: tuple[Step, ...], counts: dict[Step, int]) -> Iterator[tuple[Step, ...]]:
        if len(own) == len(kinds) * len(parts) * micro_batches:
            yield own
        for part in parts:
            for kind in kinds:
                done = counts.get((kind, part), 0)
                before = micro_batches if kind == F else counts.get((kind - 1, part), 0)
                if done < before:
                    yield from extend((*own, (kind, part)), counts | {(kind, part): done + 1})

    return extend((), {})


def best_of_all(problem: OrderProblem) -> float:
    """The least step of all orders that fit."""
    each = [
        [row for row in every_list(problem, own) if alone(problem, device).fits((row,))]
        for device, own in enumerate(problem.parts_of_device)
    ]
    return min((problem.step(lists) for lists in product(*each)), default=inf)


def alone(problem: OrderProblem, device: int) -> OrderProblem:
    """With the room of one device."""
    return replace(problem, room=(problem.room[device],))


SMALL = [
    pytest.param("zb-h1", 2, 2, inf, marks=pytest.mark.slow),
    pytest.param("zb-h1", 2, 2, 1.0, marks=pytest.mark.slow),
    ("1f1b", 2, 4, inf),
    ("1f1b", 2, 4, 1.0),
    ("1f1b", 2, 4, 2.0),
    ("1f1b", 3, 3, 2.0),
    ("zb-h1", 2, 3, 2.0),
]


@pytest.mark.parametrize(("base", "devices", "micro_batches", "room"), SMALL)
def test_against_every_order(base: str, devices: int, micro_batches: int, room: float) -> None:
    """No order is below the bound, and the search ends at the least step."""
    for seed in range(2 if micro_batches * devices > 4 and base == "zb-h1" else 6):
        problem = random_problem(base, devices, micro_batches, seed, room=room)
        least = best_of_all(problem)
        assert least >= problem.bound() * (1 - TOLERANCE)
        start = min(fill_orders(problem), key=lambda lists: problem.step(lists))
        lists, step = improve_order(problem, start, problem.bound(), 20_000)
        assert problem.fits(lists)
        assert problem.step(lists) == step
        assert least * (1 - TOLERANCE) <= step <= problem.step(start)
        assert step == pytest.approx(least, rel=0.01)


def uneven(problem: OrderProblem, seed: int, room: float) -> OrderProblem:
    """With what the two parts of a backward hold besides, and workspaces."""
    random = np.random.default_rng(seed)
    pending = random.uniform(0, 1, problem.parts), -random.uniform(0, 1.2, problem.parts)
    workspace = random.uniform(0, 0.4, (2, problem.parts))
    amounts = bytes_of_parts(problem.program, np.ones(problem.parts), pending, workspace)
    return replace(problem, bytes=amounts, room=(room,) * problem.devices)


@pytest.mark.parametrize(("base", "room"), [("zb-h1", 2.0), ("zb-h1", 3.0), ("zb-v", 4.5)])
def test_what_fits_is_what_the_ledger_holds(base: str, room: float) -> None:
    """Random sequences of a device against the ledger's count of the same bytes."""
    fitting = 0
    for seed in range(60):
        problem = uneven(random_problem(base, 2, 4, seed), seed, room)
        random, device = np.random.default_rng(seed), seed % 2
        chunks = [
            StageBytes(
                *(0.0,) * 3, saved=1.0, saved_input=0.0, input=0.0, received=0.0, sent=0.0,
                workspace=problem.bytes[F][part][2], layer_workspace=problem.bytes[B][part][2],
                pending=problem.bytes[B][part][0], released=-problem.bytes[B][part][1],
            )
            for part in problem.parts_of_device[device]
        ]  # fmt: skip
        lists = tuple(next(random_lists(problem, own, random)) for own in range(2))
        most = bytes_by_action(problem.arrange(lists), device, chunks).bytes.max()
        assert alone(problem, device).fits(lists[device : device + 1]) == bool(most <= room)
        fitting += int(most <= room)
    assert 0 < fitting < 60


def random_lists(
    problem: OrderProblem, device: int, random: np.random.Generator
) -> Iterator[tuple[Step, ...]]:
    """Sequences of a device in which no B stands before its F and no W before its B."""
    kinds = problem.kinds
    while True:
        done, own = Counter[Step](), list[Step]()
        steps = [(kind, part) for kind in kinds for part in problem.parts_of_device[device]]
        while len(own) < len(steps) * problem.micro_batches:
            kind, part = steps[random.integers(len(steps))]
            if done[kind, part] < (problem.micro_batches if kind == F else done[kind - 1, part]):
                done[kind, part] += 1
                own.append((kind, part))
        yield tuple(own)


@pytest.mark.parametrize(("micro_batches", "room"), [(2, 2.0), (3, 3.0)])
def test_against_every_order_that_holds_more_between_the_parts(micro_batches: int, room: float) -> None:
    """No order that fits is below the bound; orders by rule fit."""
    for seed in range(3 if micro_batches == 2 else 1):
        problem = uneven(random_problem("zb-h1", 2, micro_batches, seed), seed, room)
        least = best_of_all(problem)
        assert least >= problem.bound() * (1 - TOLERANCE)
        starts = list(fill_orders(problem))
        assert all(problem.fits(lists) for lists in starts)
        assert bool(starts) <= (least < inf)


def equal_stages(stages: int, count: int, room: float) -> OrderProblem:
    """Of equal stages, with room for so many micro-batches."""
    program, waits = SCHEDULES["zb-h1"].program(stages, count), np.full(stages - 1, 0.377)
    passes, nothing = np.repeat([[11.347], [11.248], [8.132]], stages, axis=1), np.zeros(stages)
    costs = costs_of_parts(program, passes, nothing, (0 * waits, 0 * waits), (waits, waits))
    return OrderProblem(program, costs, bytes_of_parts(program, np.ones(stages)), (room,) * stages)


def test_micro_batches_in_another_order_are_no_faster() -> None:
    """That of every part micro-batches may be taken in their order: every order of two, freely numbered."""
    problem = random_problem("zb-h1", 2, 2, 3)
    actions = [Action(kind, m) for kind in "FBW" for m in range(2)]  # type: ignore[arg-type]  # F, B, W

    def sequences(left: tuple[Action, ...], own: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
        if not left:
            yield own
        for action in left:
            before = "FBW"["FBW".index(action.kind) - 1]
            if action.kind == "F" or Action(before, action.micro_batch) in own:  # type: ignore[arg-type]
                yield from sequences(tuple(a for a in left if a != action), (*own, action))

    every = list(sequences(tuple(actions), ()))
    assert len(every) == 20
    freely = inf
    for lists in product(every, every):
        own = Program(lists, (tuple(StageSlot(device) for device in range(2)),), (0, 0))
        with suppress(UsageError):  # they wait for each other for ever
            freely = min(freely, float(step_seconds(own, problem.costs)[0]))
    assert best_of_all(problem) == pytest.approx(freely, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_bound_of_an_answer_holds_for_every_order_of_every_cut(
    make_chain: Callable[..., Chain], make_topology: Callable[..., Topology], seed: int
) -> None:
    """Of pipelines of two stages with the backward in two parts or whole, whatever the cut and the order."""
    chain = make_chain(seed, 4, traffic=0.05, cuts=1.0, adding=0.5)
    share = np.random.default_rng(seed).uniform(0.3, 0.7, chain.backward_seconds.shape)
    chain = replace(
        chain,
        backward_input_seconds=share * chain.backward_seconds,
        backward_weight_seconds=(1 - share) * chain.backward_seconds,
    )
    options = PlanOptions(mini_batch=2, micro_batches=2, schedule="synthesized", memory_limit=600)
    problem = Problem(chain, make_topology(2, latency=0.01), options)
    answer = find_best_plan(problem).result
    assert answer.best is not None
    steps = []
    for base, end in product(("zb-h1", "1f1b"), (1, 2, 3)):
        proposal = linear_pipeline(PipelineConfig(base, "by_stage", 2, 1), (end, 4))
        for modes in product(MODES, repeat=2):
            candidate = make_candidate(problem, proposal, modes)
            steps.append(best_of_all(candidate.problem))
    assert answer.bound_seconds <= min(steps) * (1 + TOLERANCE)
    assert answer.best.step_seconds <= min(steps) * (1 + TOLERANCE)


def test_exchanges_lead_out_of_orders_behind_which_all_are_worse() -> None:
    """Six equal stages with room for five micro-batches: exchanges that accept longer steps for a while find
    an order 4.8 % faster than the best one by rule."""
    problem = equal_stages(6, 10, 5.0)
    orders = fill_orders(problem)
    start = min(orders, key=lambda lists: problem.step(lists))
    first = problem.step(start)
    lists, step = improve_order(problem, start, problem.bound(), 300_000)
    assert problem.fits(lists)
    assert step == problem.step(lists) < first / 1.048
    assert improve_order(problem, start, problem.bound(), 300_000, lambda: True) == (start, first)
    assert improve_order(problem, start, problem.bound(), 5)[1] <= first


def test_where_no_plan_is_known_an_order_is_made_also_without_time(
    make_chain: Callable[..., Chain], make_topology: Callable[..., Topology]
) -> None:
    """In memory for one micro-batch in flight; where a plan is known nothing is done without time."""
    options = PlanOptions(
        mini_batch=4, micro_batches=4, schedule="synthesized", memory_limit=1000, time_limit=0.1
    )
    problem = Problem(make_chain(0, 4, cuts=1.0), make_topology(2, latency=0.01), options)
    over = replace(problem, budget=SearchBudget(seconds=0.0))
    known = find_best_plan(problem).best
    assert known is not None
    plans = synthesize(over, None)
    assert plans
    assert all(plan.config.schedule.startswith("synthesized-") for plan in plans)
    assert all(fastest(problem.space, [plan.proposal]) == plan for plan in plans)
    assert not synthesize(over, known)


def test_memory_for_one_micro_batch_is_enough_for_an_order_and_less_for_none() -> None:
    """Of every base's places, also where the parts of a backward and workspaces hold more."""
    fitting = 0
    for seed, (base, number) in enumerate([("zb-h1", 2), ("1f1b", 3), ("zb-v", 1)] * 12):
        problem = uneven(random_problem(base, 2, number, seed), seed, 0.5 + 0.1 * (seed % 24))
        least, lists = best_of_all(problem), problem.one_at_a_time(number)
        assert problem.has_order() == (least < inf)
        if least < inf:
            fitting += 1
            assert problem.fits(lists)
            assert problem.step(lists) >= least * (1 - TOLERANCE)
    assert 6 < fitting < 30


def test_known_schedules_leave_time_for_orders(
    make_chain: Callable[..., Chain], make_topology: Callable[..., Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the clock makes the search of the known schedules."""
    options = PlanOptions(mini_batch=8, micro_batches=8, schedule="synthesized", time_limit=1.0)
    ticks = count()
    budget = SearchBudget(seconds=1.0, clock=lambda: 0.01 * next(ticks))
    problem = Problem(make_chain(0, 12, cuts=1.0), make_topology(4, latency=0.01), options, budget=budget)
    left: list[float] = []

    def note_time(own: Problem, *_: object) -> list[ScoredPlan]:
        left.append(own.budget.seconds_left)
        return []

    monkeypatch.setattr("pplan.planner.synthesis.synthesize.synthesize", note_time)
    assert find_best_plan(problem).best is not None
    assert left[0] > 0.1
    assert budget.was_interrupted


def test_more_room_is_never_slower() -> None:
    for seed in range(3):
        steps = []
        for room in (1.0, 2.0, 3.0):
            problem = random_problem("1f1b", 3, 3, seed, room=room)
            steps.append(best_of_all(problem))
        assert steps == sorted(steps, reverse=True)


def test_backwards_partly_in_two_parts_are_no_start() -> None:
    assert list_steps(SCHEDULES["dualpipe-v"].program(3, 9)) is None


def test_no_room_is_no_order() -> None:
    problem = random_problem("zb-h1", 2, 2, 0, room=0.5)
    assert not problem.has_order()
    assert not list(fill_orders(problem))
    assert replace(problem, room=(inf, inf)).has_order()


def test_the_fastest_few_plans_of_each_base() -> None:
    """Of nine plans of ZB-H1 six start orders with the backward in two parts, and six with it whole."""
    plans = [
        ScoredPlan(linear_pipeline(PipelineConfig("zb-h1", "never", 4, 1), (end, 12)), ("never",) * 2, 1.0)
        for end in range(1, 10)
    ]
    asked = SimpleNamespace(schedules=("1f1b", "zb-h1", "zb-v"))
    found = list(_with_base(cast(Any, asked), plans))
    assert [own.config.schedule for own in found] == ["zb-h1", "1f1b"] * 6
    assert [own.ends[0] for own in found] == [end for end in range(1, 7) for _ in range(2)]

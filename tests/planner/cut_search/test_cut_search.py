"""Cuts searched for a schedule against every cut that there is: the answer, the bound, and what excludes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, islice, pairwise, product
from math import inf

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.schedule_text import register_schedule
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.timeline import step_seconds
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan, linear_pipeline
from pplan.planner.cut_search.part_tables import PipelineShape, make_part_tables
from pplan.planner.cut_search.schedule_search import MOST_ACTIONS, search_schedules
from pplan.planner.cut_search.shape_search import Record, ShapeSearch
from pplan.planner.joint_search import find_best_plan
from pplan.planner.other_schedules import propose_parts
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest
from pplan.planner.search.least_exchange import LeastExchanges

TOLERANCE = 1e-9
MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
NAMES = ("interleaved", "looped-bfs", "zb-v", "dualpipe-v", "zb-h1", "zb-h2", "dapple", "chimera", "autopipe")


def in_two_parts(chain: Chain, seed: int) -> Chain:
    """The chain with a backward whose parts were measured."""
    share = np.random.default_rng(seed).uniform(0.3, 0.7, chain.backward_seconds.shape)
    return replace(
        chain,
        backward_input_seconds=share * chain.backward_seconds,
        backward_weight_seconds=(1 - share) * chain.backward_seconds,
    )


def every_shape(problem: Problem, name: str, devices: int, parts: int) -> Iterator[PipelineShape]:
    """Of so many devices in a row, with every number of replicas."""
    for config in problem.configs:
        with suppress(UsageError):  # the schedule does not run with these numbers
            own = replace(config, schedule=name, virtual_stages=parts)
            program = SCHEDULES[name].program(devices, config.micro_batches, parts)
            for counts in product(range(1, problem.gpus + 1), repeat=devices):
                if sum(counts) <= problem.gpus:
                    ends = np.cumsum([0, *counts]).tolist()
                    ranks = tuple(tuple(range(a, b)) for a, b in pairwise(ends))
                    yield PipelineShape(own, program, ranks)


def every_plan(problem: Problem, name: str) -> Iterator[Proposal]:
    """All that there are, each with all of its cuts."""
    usual = SCHEDULES[name].default_virtual_stages
    parts = (2, 3, 4) if name in ("interleaved", "looped-bfs") else (usual,)
    places = [int(i) + 1 for i in np.flatnonzero(problem.space.chain.cut_after)]
    for devices, each in product(range(1, problem.gpus + 1), parts):
        if devices == 1 < each:
            continue
        for shape in every_shape(problem, name, devices, each):
            for cuts in combinations(places, devices * each - 1):
                ends = (*cuts, len(problem.chain))
                yield Proposal(
                    shape.config, ends, tuple(shape.ranks[slot.device] for slot in shape.program.pipes[0])
                )


def best_of_all(problem: Problem, name: str) -> float:
    """The least step of all plans that fit."""
    plans = [fastest(problem.space, [own]) for own in every_plan(problem, name) if problem.allows(own)]
    return min((plan.step_seconds for plan in plans if plan is not None), default=inf)


QUICK = ("interleaved", "zb-v", "chimera")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_against_every_cut(make_chain: MakeChain, make_topology: MakeTopology, name: str) -> None:
    """The answer is the fastest plan, and is proven to be; what little work proves holds, too."""
    proven = 0
    for seed, memory in ((0, None), (1, 2500), (2, 2500)):
        chain = in_two_parts(make_chain(seed, 5, traffic=0.1, cuts=1.0, adding=0.5), seed)
        options = PlanOptions(mini_batch=4, schedule=name, optimizer="adam")
        problem = Problem(chain, make_topology(2, latency=0.05, memory=memory), options)
        best = best_of_all(problem, name)
        result = search_schedules(problem, [name])
        assert (result.best.step_seconds if result.best else inf) == pytest.approx(best, rel=TOLERANCE)
        assert result.bound_seconds == pytest.approx(best, rel=TOLERANCE)
        proven += best < inf
        near = known_plans(problem, name) if seed == 1 else []
        for work in (0.0, 3e7, 1e8):
            less = search_schedules(problem, [name], work=work, near=near)
            assert less.bound_seconds <= best * (1 + TOLERANCE)
        if near:
            known = search_schedules(problem, [name], near=near)
            assert known.best is not None
            assert known.best.step_seconds == pytest.approx(best, rel=TOLERANCE)
    assert proven > 1


def known_plans(problem: Problem, name: str) -> list[ScoredPlan]:
    """Two plans that fit, of any cuts."""
    plans = (fastest(problem.space, [own]) for own in every_plan(problem, name))
    return list(islice((plan for plan in plans if plan is not None), 2))


def test_the_shape_of_a_known_plan_is_looked_at_first(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """With work for little more than one shape: near a plan that is known it is made faster."""
    faster = 0
    for seed in range(4):
        chain = in_two_parts(make_chain(seed, 8, traffic=0.1, cuts=1.0), seed)
        options = PlanOptions(mini_batch=8, schedule="zb-h1")
        problem = Problem(chain, make_topology(4), options)
        config = next(own for own in problem.configs if own.micro_batches == 8)
        known = fastest(problem.space, [linear_pipeline(config, (2, 4, 6, 8))])
        assert known is not None
        limit = known.step_seconds
        near, far = (search_schedules(problem, ["zb-h1"], limit, 3e7, plans) for plans in ([known], []))
        best, without = (inf if own.best is None else own.best.step_seconds for own in (near, far))
        assert best <= limit
        faster += best < without
    assert faster > 1


@pytest.mark.slow
def test_any_is_the_best_of_all(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """With as little memory as to leave some schedules out, as fast as the fastest answer for one of them, or
    of those of a runtime; and proven."""
    winners = set()
    for seed, memory, runtime in ((0, None, None), (3, 2200, None), (5, 2500, "torch")):
        chain = in_two_parts(make_chain(seed, 5, traffic=0.1, cuts=1.0, adding=0.5), seed)
        topology = make_topology(2, latency=0.05, memory=memory)
        options = PlanOptions(mini_batch=4, schedule="any", optimizer="adam", runtime=runtime)
        problem = Problem(chain, topology, options)
        answer = find_best_plan(problem)
        named = ["naive", "gpipe", "1f1b", *NAMES]
        ran = [name for name in named if problem.runtime is None or problem.runtime.runs(name)]
        assert set(problem.schedules) == set(ran)
        each = [find_best_plan(replace(problem, options=replace(options, schedule=name))) for name in ran]
        steps = [own.best.step_seconds for own in each if own.best is not None]
        assert answer.best is not None
        assert answer.best.step_seconds == pytest.approx(min(steps), rel=TOLERANCE)
        assert answer.result.exact
        winners.add(answer.best.config.schedule)
    assert len(winners) > 1


@pytest.mark.parametrize(("weights", "recomputes"), [("", True), (" W", False)])
def test_nothing_recomputes_beside_a_backward_in_two_parts(
    make_chain: MakeChain, make_topology: MakeTopology, weights: str, recomputes: bool
) -> None:
    """Of a schedule of the user's own, in memory that holds too few micro-batches; unless it is asked for."""
    name = register_schedule(f"name: own-{len(weights)}\ndevice i: F*m (B{weights})*m\n").name
    chain = make_chain(1, 5, cuts=1.0)
    options = PlanOptions(mini_batch=8, micro_batches=8, schedule=name)
    problem = Problem(chain, make_topology(2, memory=1600), options)
    best = find_best_plan(problem).best
    assert (best is not None and "always" in best.recompute) == recomputes
    always = find_best_plan(replace(problem, options=replace(options, recompute="always"))).best
    assert always is not None
    assert set(always.recompute) == {"always"}


def test_several_parts_on_one_device_are_no_pipeline(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """Data parallelism whose gradients leave in parts would be named interleaved."""
    chain = make_chain(0, 5, traffic=0.0, cuts=1.0)
    problem = Problem(chain, make_topology(1), PlanOptions(mini_batch=4, schedule="any"))
    assert {own.config.virtual_stages for own in problem_answers(problem)} == {1}


def problem_answers(problem: Problem) -> list[ScoredPlan]:
    """The answers for each schedule of a problem by itself that have any."""
    own = [replace(problem, options=replace(problem.options, schedule=name)) for name in problem.schedules]
    return [best for one in own if (best := find_best_plan(one).best) is not None]


def test_limits_pins_and_forbidden_cuts_are_kept(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    for seed in range(6):
        chain = make_chain(seed, 8, traffic=0.1, cuts=0.7)
        options = PlanOptions(
            mini_batch=4,
            micro_batches=4,
            schedule="interleaved",
            max_stages=2,
            pins=(("layer3", 1),) if seed % 2 else (),
            cut_after=(f"layer{np.flatnonzero(chain.cut_after)[0]}",),
            recompute=("never", "always", "auto")[seed % 3],
        )
        problem = Problem(chain, make_topology(3, latency=0.05), options)
        best, answer = best_of_all(problem, "interleaved"), find_best_plan(problem)
        if best == inf:
            assert answer.best is None
        else:
            assert answer.best is not None
            assert answer.best.step_seconds == pytest.approx(best, rel=TOLERANCE)
            assert answer.result.exact
            assert problem.allows(answer.best.proposal)


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_holds_for_every_cut_and_order_of_the_devices(make_chain: MakeChain, name: str) -> None:
    """On devices that are not alike: the bound, tables of the least, and the game's own bound."""
    for seed in range(2):
        chain = in_two_parts(make_chain(seed, 6, traffic=0.3, cuts=1.0, adding=0.5), seed)
        topology = two_kinds(seed)
        problem = Problem(chain, topology, PlanOptions(mini_batch=4, micro_batches=4, schedule=name))
        orders = [
            replace(own, devices=tuple(tuple(1 - rank for rank in ranks) for ranks in own.devices))
            for own in every_plan(problem, name)
        ]
        plans: list[ScoredPlan | None] = [fastest(problem.space, [own]) for own in orders]
        turned = min((plan.step_seconds for plan in plans if plan is not None), default=inf)
        best = min(turned, best_of_all(problem, name))
        result = search_schedules(problem, [name])
        assert result.bound_seconds <= best * (1 + TOLERANCE)
        assert result.bound_seconds > 0.2 * best


def two_kinds(seed: int) -> Topology:
    slow = 0.5 + 0.4 * seed
    groups = (Group(Device("fast", 3000), 1), Group(Device("slow", 2000, speed=slow), 1))
    return Topology(groups, (Level("node", None, Link(20.0, 0.05)),))


@pytest.mark.parametrize("name", [*NAMES, "gpipe", "avgpipe"])
def test_no_cut_is_below_the_bound_of_its_shape(
    make_chain: MakeChain, make_topology: MakeTopology, name: str
) -> None:
    """A plan that fits is never excluded, nor below what is said of it."""
    chain = in_two_parts(make_chain(7, 9, traffic=0.2, cuts=1.0, adding=0.5), 7)
    options = PlanOptions(mini_batch=4, schedule=name)
    problem = Problem(chain, make_topology(2, latency=0.1, memory=2000), options)
    parts = SCHEDULES[name].default_virtual_stages
    program = SCHEDULES[name].program(2, 4, parts)
    shape = PipelineShape(PipelineConfig(name, "by_stage", 4, 1, parts), program, ((0,), (1,)))
    exchanges = LeastExchanges(problem.space)
    tables = make_part_tables(problem.space, shape, exchanges)
    every = [(0, *cuts, 9) for cuts in combinations(range(1, 9), 2 * parts - 1)]
    rows = np.array(every, dtype=np.int64)
    steps = step_seconds(program, tables.costs(rows))
    least = inf
    for cuts, step in zip(every, steps.tolist(), strict=True):
        plan = fastest(problem.space, [shape.proposal(range(10), cuts)])
        if plan is not None:
            assert all(tables.usable[part, cuts[part], cuts[part + 1]] for part in range(2 * parts))
            assert step <= plan.step_seconds * (1 + TOLERANCE)
            least = min(least, plan.step_seconds)
    search = ShapeSearch(Record(problem, problem.budget, exchanges, inf), shape, 0.0)
    search.begin()
    assert 0.5 * least < search.bound <= least * (1 + TOLERANCE)
    search.exhaust()
    assert search.step == pytest.approx(least, rel=TOLERANCE)
    assert search.bound >= search.step


def test_virtual_stages_with_replicas_are_proposed(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """Balanced parts on one device each, and on as many replicas as make all devices; of programs that are
    not too long."""
    chain = make_chain(2, 8, cuts=1.1)
    problem = Problem(chain, make_topology(4), PlanOptions(mini_batch=8, schedule="any"))
    proposals = list(propose_parts(problem, ["interleaved", "zb-v"]))
    shapes = {(own.config.schedule, own.device_count, own.replicas[0]) for own in proposals}
    assert shapes >= {("interleaved", 2, 1), ("interleaved", 4, 1), ("interleaved", 4, 2), ("zb-v", 4, 2)}
    for own in proposals:
        assert len(own.ends) == 2 * own.device_count // own.replicas[0]
        assert own.config.micro_batch_size % own.replicas[0] == 0
        actions = 3 * len(own.ends) * own.config.micro_batches
        assert actions <= MOST_ACTIONS
    many = Problem(chain, make_topology(4), PlanOptions(mini_batch=4096, schedule="any"))
    counts = {own.config.micro_batches for own in propose_parts(many, ["interleaved"])}
    assert counts
    assert max(counts) * 3 * 4 <= MOST_ACTIONS


def test_where_a_shape_is_looked_at_first(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Of forty equal layers the parts of a V as long as each other, and those down shorter or longer than
    those up: by shares of 0.7 and 1.3, or 0.5 and 1.5."""
    chain, alike = make_chain(0, 40, cuts=1.1, traffic=0.0), np.ones((40, 3)) * [1, 2, 4]
    chain = replace(chain, forward_seconds=alike, backward_seconds=alike)
    problem = Problem(chain, make_topology(2), PlanOptions(mini_batch=8, micro_batches=8, schedule="zb-v"))
    program = SCHEDULES["zb-v"].program(2, 8)
    shape = PipelineShape(replace(problem.configs[0], virtual_stages=2), program, ((0,), (1,)))
    record = Record(problem, problem.budget, LeastExchanges(problem.space), inf)
    starts = {tuple(own) for own in ShapeSearch(record, shape, 0.0)._starts().tolist()}
    assert starts >= {(0, 10, 20, 30, 40), (0, 7, 14, 27, 40), (0, 13, 26, 33, 40), (0, 5, 10, 25, 40)}

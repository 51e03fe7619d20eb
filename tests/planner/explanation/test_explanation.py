"""What limits a plan, what comes second, how far it holds and what changes bring: against brute force and
direct scans of tiny problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import Proposal, ScoredPlan
from pplan.planner.explanation.explain_context import (
    MANY,
    resolve,
    with_bandwidth,
    with_slower_layers,
)
from pplan.planner.explanation.rivals import WORTH, Sensitivity, runners_up, sensitivities
from pplan.planner.explanation.step_limits import find_limits
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_file import REPLANNED, Aim
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
Solve = Callable[..., Any]


def heavy(chain: Chain, size: float = 1e4) -> Chain:
    """With so heavy weights that replicas do not pay."""
    weights = np.full(len(chain), size)
    return replace(chain, parameter_bytes=weights, trainable_bytes=weights)


def every_plan(problem: Problem) -> Iterator[Proposal]:
    """Every cut, run of devices and setting."""
    places = np.flatnonzero(problem.chain.cut_after) + 1
    for stages in problem.stage_counts:
        for cuts in combinations(places.tolist(), stages - 1):
            for bounds in combinations(range(1, problem.gpus + 1), stages):
                edges = (0, *bounds)
                devices = tuple(tuple(range(a, b)) for a, b in zip(edges, bounds, strict=False))
                for config in problem.configs:
                    yield Proposal(config, (*cuts, len(problem.chain)), devices)


def shape(plan: ScoredPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return plan.proposal.ends, plan.proposal.replicas


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 4))]
)
def test_the_second_best_is_that_of_brute_force(
    seed: int, make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    chain = make_chain(seed, 5, traffic=0.1)
    if seed % 2:
        chain = heavy(chain)
    question = solved(chain, make_topology(3), mini_batch=8).question
    problem, present = question.problem, question.present
    scored = [plan for proposal in every_plan(problem) if (plan := fastest(problem.space, [proposal]))]
    others = [
        plan.step_seconds
        for plan in scored
        if shape(plan) != shape(present) and plan.step_seconds > present.step_seconds * (1 + 1e-8)
    ]
    stages = [plan.step_seconds for plan in scored if len(plan.proposal.ends) != len(present.proposal.ends)]
    found = runners_up(question, [present], busiest=0)
    for rival, truth in ((found.second_best, others), (found.other_stages, stages)):
        assert rival.plan is not None
        assert rival.plan.step_seconds == pytest.approx(min(truth))
        assert rival.slower == pytest.approx(min(truth) / present.step_seconds - 1)
        assert rival.proven or found.as_fast is not None
    second = found.second_best.plan
    assert second is not None
    other = (tuple(second.balance), tuple(second.replicas))
    assert other != (tuple(np.diff([0, *present.proposal.ends])), present.proposal.replicas)


def test_a_plan_that_is_as_fast_is_told_apart(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    """Layers of no cost around every cut: it may stand before or after them."""
    chain = heavy(make_chain(3, 8, cuts=1.0, traffic=0.0))
    free = np.arange(8) % 2 == 1
    forward, backward = (
        np.where(free[:, None], 0.0, own) for own in (chain.forward_seconds, chain.backward_seconds)
    )
    chain = replace(chain, forward_seconds=forward, backward_seconds=backward)
    made = solved(chain, make_topology(2), mini_batch=8)
    assert len(made.plan.balance) == 2
    question = made.question
    found = runners_up(question, [question.present], busiest=0)
    assert found.as_fast is not None
    assert found.as_fast.step_seconds == pytest.approx(question.present.step_seconds, rel=1e-8)
    assert found.as_fast.proposal.ends != question.present.proposal.ends
    assert found.second_best.slower is not None
    assert found.second_best.slower > 1e-4


def scanned(question: Any, varied: Callable[[float], Problem], end: float) -> float | None:
    """The factor nearest to 1 at which the problem, solved again, has a better plan: every 4 %."""
    count = int(abs(np.log(end)) / 0.04)
    for step in range(1, count + 1):
        factor = float(end ** (step / count))
        problem = varied(factor)
        own = fastest(problem.space, [question.present.proposal])
        best = find_best_plan(problem, planners=()).best
        assert own is not None
        assert best is not None
        if best.step_seconds < own.step_seconds * (1 - WORTH):
            return factor
    return None


def agrees(reach: Sensitivity, question: Any, varied: Callable[[float], Problem]) -> int:
    """Whether both turns are where a scan finds them; how many there are."""
    turns = ((reach.below, reach.least), (reach.above, reach.most))
    for turn, end in turns:
        truth = scanned(question, varied, end)
        assert (turn is None) == (truth is None)
        if turn is not None:
            assert turn.factor == pytest.approx(truth, rel=0.05)
            assert turn.rival.step_seconds < turn.plan_seconds * (1 - WORTH)
    return sum(turn is not None for turn, _ in turns)


@pytest.mark.slow
def test_how_far_it_holds_is_what_a_scan_finds(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    seen = 0
    for seed in (1, 3):
        chain = make_chain(seed, 4, traffic=0.3)
        question = solved(chain, make_topology(2), mini_batch=4).question
        problem = question.problem
        busiest = question.timeline.busy_seconds.index(max(question.timeline.busy_seconds))
        links, layers = sensitivities(question, [question.present], busiest)
        assert links.what == "bandwidth of all links"
        seen += agrees(
            links,
            question,
            lambda f, p=problem: replace(p, topology=with_bandwidth(p.topology, f)),  # type: ignore[misc]
        )
        assert layers.first_layer is not None
        assert layers.last_layer is not None
        first, end = layers.first_layer, layers.last_layer + 1
        seen += agrees(
            layers,
            question,
            lambda f, p=problem, a=first, b=end: with_slower_layers(p, a, b, f),  # type: ignore[misc]
        )
    assert seen >= 2


def test_links_between_nodes_are_varied_alone(make_topology: MakeTopology) -> None:
    topology = with_bandwidth(make_topology(4, per_node=2), 3, between_nodes=True)
    assert topology.link(0, 1).bandwidth_bytes_per_second == 20
    assert topology.link(1, 2).bandwidth_bytes_per_second == 15
    everywhere = with_bandwidth(make_topology(4, per_node=2), 3)
    assert everywhere.link(0, 1).bandwidth_bytes_per_second == 60


@pytest.mark.slow
def test_a_change_for_the_better_is_never_worse(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    made = solved(make_chain(0, 6), make_topology(3, per_node=2, memory=2000), mini_batch=12)
    explained = made.explained()
    step = explained.plan.step_seconds
    assert step == pytest.approx(made.plan.prediction.step_seconds)
    by_change = {row.change: row for row in explained.what_if}
    for change in ("one more GPU", "double the bandwidth", "double the memory"):
        row = by_change[change]
        assert row.plan is not None
        assert row.plan.step_seconds <= step * (1 + 1e-9)
        assert row.faster == pytest.approx(step / row.plan.step_seconds - 1)
    forced = by_change["recompute always"]
    assert forced.plan is not None
    assert set(forced.plan.stage_recompute) == {"always"}
    assert forced.plan.step_seconds >= step * (1 - 1e-9)
    assert [reach.what for reach in explained.holds[:2]] == [
        "bandwidth of all links",
        "bandwidth between nodes",
    ]
    assert sum(share.seconds for share in explained.limits.kinds) == pytest.approx(step)
    assert sum(share.share for share in explained.limits.places) == pytest.approx(1)


@pytest.mark.slow
def test_offload_is_tried_where_a_stage_recomputes(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    """And the host's bandwidth is known."""
    chain = make_chain(1, 4)
    chain = replace(chain, saved_bytes=5 * chain.saved_bytes)
    asked: dict[str, Any] = {"mini_batch": 8, "schedule": "gpipe", "use_all": True, "micro_batches": 8}
    free = solved(chain, make_topology(2), **asked)
    memory = round(0.7 * max(stage.memory_bytes for stage in free.plan.stages))
    for bandwidth in (None, 1e9):
        tight = solved(chain, make_topology(2, memory=memory), host_bandwidth=bandwidth, **asked)
        assert tight.plan.recompute != "never"
        rows = {row.change: row for row in tight.explained().what_if}
        assert ("recompute offload" in rows) == (bandwidth is not None)
    plan = rows["recompute offload"].plan
    assert plan is not None
    assert "offload" in plan.stage_recompute
    assert plan.step_seconds < tight.plan.prediction.step_seconds


@pytest.mark.parametrize("kind", ["GPU", "CPU"])
def test_what_is_added_is_called_what_it_is(
    kind: str, make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    made = solved(make_chain(1, 3), make_topology(2), mini_batch=4)
    made = replace(made, plan=made.plan.model_copy(update={"device_kind": kind}))
    changes = [row.change for row in made.explained().what_if]
    assert [change for change in changes if change.startswith("one more")] == [f"one more {kind}"]


@pytest.mark.slow
def test_what_launches_that_take_no_time_would_bring(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    chain = make_chain(1, 3)

    def explained(seconds: float) -> Any:
        hosts = np.full_like(chain.forward_seconds, seconds)
        slow = replace(chain, forward_host_seconds=hosts, backward_host_seconds=hosts)
        return solved(slow, make_topology(2), mini_batch=4).explained()

    waits, free = explained(20.0), explained(0.0)
    row = waits.what_if[-1]
    assert row.change == "launches in no time"
    assert row.plan is not None
    assert row.plan.step_seconds == pytest.approx(free.plan.step_seconds)
    assert row.faster == pytest.approx(waits.plan.step_seconds / free.plan.step_seconds - 1)
    assert "launches in no time" not in [other.change for other in free.what_if]


def test_memory_that_forbids_a_faster_plan(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    """Light weights: data parallelism is fastest, but does not fit."""
    chain = make_chain(1, 6, traffic=0.1)
    free = solved(chain, make_topology(2), mini_batch=8, recompute="never", schedule="1f1b")
    most = max(stage.memory_bytes for stage in free.plan.stages)
    tight = solved(chain, make_topology(2, memory=most - 1), mini_batch=8, recompute="never", schedule="1f1b")
    limits = find_limits(tight.question, [tight.question.present])
    assert limits.without_memory_limit is not None
    assert limits.without_memory_limit.step_seconds == pytest.approx(free.plan.prediction.step_seconds)
    unlimited = find_limits(free.question, [free.question.present])
    assert unlimited.without_memory_limit is None
    assert unlimited.memory_forbids_nothing


@pytest.mark.slow
def test_a_plan_that_is_not_the_best(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    chain, topology = heavy(make_chain(4, 8, cuts=1.0)), make_topology(3)
    best = solved(chain, topology, mini_batch=8)
    even = solved(chain, topology, mini_batch=8, planner="even")
    assert even.plan.prediction.step_seconds > best.plan.prediction.step_seconds
    explained = even.explained()
    assert explained.better is not None
    assert explained.better.step_seconds == pytest.approx(best.plan.prediction.step_seconds)
    assert explained.holds == []
    assert best.explained().better is None


@pytest.mark.slow
def test_a_plan_that_was_made_for_something_else(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    """A plan with the least memory is not called a bad one for its step; nor one for the devices left."""
    made = solved(make_chain(1, 3), make_topology(2), mini_batch=2)
    aim = Aim(name="memory", value=1.0, unit="bytes", lower_bound=1.0, exact=True)
    changes: list[tuple[dict[str, object], str]] = [
        ({"objective": aim}, "the least memory"),
        ({"searched": f"{REPLANNED} that are near"}, "few weights to move"),
        ({}, ""),
    ]
    for change, words in changes:
        explained = replace(made, plan=made.plan.model_copy(update=change)).explained()
        assert explained.made_for == words
        assert any("those that were lost" in note for note in explained.notes) == ("searched" in change)


def test_an_asynchronous_plan_is_refused(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    made = solved(make_chain(1, 4), make_topology(2), mini_batch=8)
    plan = made.plan.model_copy(update={"schedule": "pipedream"})
    with pytest.raises(UsageError, match="pipedream, is asynchronous"):
        replace(made, plan=plan).explained()


def test_on_many_devices_only_near_plans_are_searched(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    question = solved(heavy(make_chain(2, 6)), make_topology(MANY + 2), mini_batch=4).question
    present, problem = question.present, question.problem
    found = resolve(problem, [present])
    assert not found.exact
    assert found.best is not None
    assert found.best.step_seconds == pytest.approx(present.step_seconds)
    without = resolve(problem, [])
    assert without.exact


def test_slower_layers(make_chain: MakeChain, make_topology: MakeTopology, solved: Solve) -> None:
    """Their seconds alone, on every kind of device."""
    problem = solved(make_chain(1, 4), make_topology(2), mini_batch=4).question.problem
    slower = with_slower_layers(problem, 1, 3, 2.0)
    for before, after in [
        (problem.chain, slower.chain),
        *((own, slower.profiles[name]) for name, own in problem.profiles.items()),
    ]:
        factors = np.ones(len(before))
        factors[1:3] = 2.0
        assert np.array_equal(after.forward_seconds.T, before.forward_seconds.T * factors)
        assert np.array_equal(after.backward_seconds.T, before.backward_seconds.T * factors)
        assert np.array_equal(after.saved_bytes, before.saved_bytes)


def test_what_solving_from_the_beginning_finds_counts(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the seeds lead to a slower plan, of which nothing is proven: as under other schedules."""
    own = solved(make_chain(1, 6), make_topology(3), mini_batch=8)
    best = resolve(own.question.problem, [])
    assert best.best is not None
    slower = replace(best.best, step_seconds=2 * best.best.step_seconds)
    for exact, expected in ((False, best.best), (True, slower)):
        far = replace(best, best=slower, exact=exact)
        monkeypatch.setattr("pplan.planner.explanation.explain_context.joint_search", lambda *_, far=far: far)
        answer = resolve(own.question.problem, [], fully=True).best
        assert answer is not None
        assert answer.step_seconds == expected.step_seconds

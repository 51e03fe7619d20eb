"""WPipe's search against the simulator's steady state of every one of its plans in small spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from math import inf

import pytest

from pplan.cost_models.memory import Recompute
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import stage_costs
from pplan.cost_models.timeline import simulate
from pplan.planner.asynchronous import (
    assemble_endless,
    asynchronous_notes,
    steady_bubble,
    steady_seconds,
)
from pplan.planner.candidate import Proposal, ScoredPlan
from pplan.planner.objectives import paired_search, throughput
from pplan.planner.objectives.paired_search import PairedSearch, _most_in_flight
from pplan.planner.objectives.throughput import asynchronous_names, fastest_asynchronous, paired_searches
from pplan.planner.plan_simulation import plan_stages
from pplan.planner.problem import Problem

MakeProblem = Callable[..., Problem]
MODES: tuple[Recompute, Recompute] = ("never", "always")


def every_plan(search: PairedSearch) -> Iterator[tuple[Proposal, tuple[Recompute, ...]]]:
    """All cuts and ways to recompute, whether they fit or not."""
    cut_points = search.cut_points
    devices = [
        tuple(search.placement.ranks[first : first + search.replicas])
        for first in range(0, search.stages * search.replicas, search.replicas)
    ]
    for ends in combinations(cut_points[1:-1], 2 * search.stages - 1):
        proposal = Proposal(search.config, (*ends, cut_points[-1]), tuple(devices) * 2)
        for modes in product(MODES, repeat=search.stages):
            yield proposal, modes * 2


def fits(problem: Problem, proposal: Proposal, modes: tuple[Recompute, ...]) -> bool:
    """By the ledger of the pipeline as it runs on and on."""
    assembly = assemble_endless(problem.space, proposal, modes)
    held = [sum(assembly.ledger(device).values()) for device in range(assembly.program.devices)]
    return max(held) <= problem.space.limit(range(problem.gpus))


@pytest.mark.parametrize(
    ("seed", "memory"),
    [
        (0, None),
        (6, 900),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, None), (5, 1500), (8, None), (9, 1500))
        ),
        pytest.param(2, 900, id="nothing fits"),
    ],
)
def test_no_plan_is_below_the_bound_nor_faster_than_the_answer(
    seed: int, memory: float | None, make_problem: MakeProblem
) -> None:
    problem = make_problem(
        seed, 5 + seed % 2, 2 + seed % 2, memory=memory, optimizer=["sgd", "adam"][seed % 2], mini_batch=6
    )
    searches, plans = paired_searches(problem), 0
    for search in searches:
        fastest, bound = search.fastest(inf)
        steps = [
            steady_seconds(problem.space, proposal, modes)
            for proposal, modes in every_plan(search)
            if fits(problem, proposal, modes)
        ]
        plans += len(steps)
        least = min(steps, default=inf)
        assert bound <= least * (1 + 1e-9)
        if fastest is None:
            assert least == inf
        else:
            assert fits(problem, fastest.proposal, fastest.recompute)
            assert bound == pytest.approx(least, rel=1e-9)
            assert fastest.step_seconds == pytest.approx(least, rel=1e-9)
    assert (plans > 0) == (seed != 2)


def test_launches_of_what_runs_again_count_twice(make_problem: MakeProblem) -> None:
    """Hosts that take twenty times as long, where some devices must recompute: the bound is the best step."""
    made = make_problem(6, 5, 2, memory=900, optimizer="sgd", mini_batch=6)
    chain = replace(
        made.chain,
        forward_host_seconds=20 * made.chain.forward_host_seconds,
        backward_host_seconds=20 * made.chain.backward_host_seconds,
    )
    problem = replace(made, chain=chain)
    again = 0
    for search in paired_searches(problem):
        fastest, bound = search.fastest(inf)
        if fastest is None:
            continue
        table = search.space.replica_group(search.config.micro_batch_size, (0,)).table
        launches = [0.0] * search.stages
        for part, (at, mode) in enumerate(_parts(search, fastest)):
            twice = table.forward_launch[at] * (1 + (mode != "never"))
            launches[part % search.stages] += float(table.backward_launch[at] + twice)
        assert bound >= search.config.micro_batches * max(launches) * (1 - 1e-9)
        steps = [
            steady_seconds(problem.space, proposal, modes)
            for proposal, modes in every_plan(search)
            if fits(problem, proposal, modes)
        ]
        assert fastest.step_seconds == pytest.approx(min(steps), rel=1e-9)
        again += "always" in fastest.recompute
    assert again


def _parts(search: PairedSearch, plan: ScoredPlan) -> Iterator[tuple[tuple[int, int], Recompute]]:
    """Between which places the parts lie, and how they recompute."""
    points, ends = search.cut_points, plan.proposal.ends
    for first, end, mode in zip((0, *ends), ends, plan.recompute, strict=False):
        yield (points.index(first), points.index(end)), mode


def test_fewer_cuts_than_there_are_leave_a_bound(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a search that ends early no plan is below what it says."""
    problem = make_problem(1, 6, 3, mini_batch=6)
    whole = [search.fastest(inf)[1] for search in paired_searches(problem)]
    monkeypatch.setattr(paired_search, "MOST_SIMULATED", 1)
    for search, least in zip(paired_searches(problem), whole, strict=True):
        fastest, bound = search.fastest(inf)
        assert fastest is None or bound <= least * (1 + 1e-9) <= fastest.step_seconds * (1 + 2e-9)


def test_wpipe_is_the_answer_where_two_versions_have_no_room(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(0, 6, 2, memory=700, mini_batch=4, optimizer="momentum")
    best, bound = fastest_asynchronous(problem, inf)
    assert best is not None
    assert best.config.schedule == "wpipe"
    assert best.step_seconds == pytest.approx(bound, rel=1e-9)
    assert asynchronous_names(problem) == ["pipedream", "pipedream-2bw", "wpipe"]
    notes = asynchronous_notes(best)
    assert (
        "1.5 weight versions, and gradients are 1 update late in the first group of layers and never"
        in notes[0]
    )
    assert 0 <= steady_bubble(problem.space, best) < 1
    stages = plan_stages(problem.space, best)
    assert [stage.devices for stage in stages] == [[0], [1], [0], [1]]
    for here, there in ((0, 2), (1, 3)):
        assert stages[here].memory == stages[there].memory
        parts = [
            problem.chain.parameter_bytes[stages[part].first_layer : stages[part].last_layer + 1].sum()
            for part in (here, there)
        ]
        assert stages[here].memory["weights"] >= sum(parts) * (1 - 1e-9)
        assert stages[here].memory["weight_versions"] == pytest.approx(parts[0])
    monkeypatch.setattr(throughput, "paired_searches", lambda problem: [])  # noqa: ARG005 - called with it
    assert fastest_asynchronous(problem, inf) == (None, inf)


def test_it_is_the_best_of_all_asynchronous_ones(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(1, 6, 2, memory=1500, mini_batch=4)
    best, bound = fastest_asynchronous(problem, inf)
    pairs = min(search.fastest(inf)[1] for search in paired_searches(problem))
    monkeypatch.setattr(throughput, "paired_searches", lambda problem: [])  # noqa: ARG005 - called with it
    line, least = fastest_asynchronous(problem, inf)
    assert best is not None
    assert line is not None
    assert bound == pytest.approx(min(pairs, least), rel=1e-9)
    assert best.step_seconds <= line.step_seconds


def test_long_chains_and_runtimes_have_no_wpipe(make_problem: MakeProblem) -> None:
    """It is in no text of what was searched, then."""
    assert "wpipe" in asynchronous_names(make_problem(0, 6, 2))
    assert "wpipe" not in asynchronous_names(make_problem(0, 40, 2))
    assert "wpipe" not in asynchronous_names(make_problem(0, 6, 2, runtime="torch"))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 6)])
def test_what_a_device_holds_of_each_part(stages: int, micro_batches: int) -> None:
    """As many micro-batches as the simulator sees at the peak."""
    program = find_schedule("wpipe").program(stages, micro_batches)
    timeline = simulate(program, stage_costs(program, 1.0, 2.0))
    for device in range(stages):
        peaks = [
            max(level for _, level in timeline.memory_over_time(device, 0, own))
            for own in ([1.0, 0.0], [0.0, 1.0])
        ]
        assert _most_in_flight(program, device) == tuple(peaks)

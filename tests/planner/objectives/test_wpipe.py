"""WPipe's search against the simulator's steady state of every one of its plans in small spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from math import inf

import pytest

from pplan.cost_models.memory import Recompute
from pplan.planner.asynchronous import (
    assemble_endless,
    asynchronous_notes,
    bubble,
    steady_seconds,
)
from pplan.planner.candidate import Proposal, ScoredPlan
from pplan.planner.cut_search.part_tables import PipelineShape
from pplan.planner.cut_search.shape_search import Record, ShapeSearch, search_shapes
from pplan.planner.objectives import throughput
from pplan.planner.objectives.throughput import asynchronous_names, fastest_asynchronous, wpipe_shapes
from pplan.planner.plan_simulation import plan_stages
from pplan.planner.problem import Problem
from pplan.planner.search.budget import SearchBudget
from pplan.planner.search.least_exchange import LeastExchanges

MakeProblem = Callable[..., Problem]
MODES: tuple[Recompute, Recompute] = ("never", "always")


def wpipe_searches(problem: Problem, work: float = inf) -> Iterator[tuple[ShapeSearch, float]]:
    """The search of each shape, and a bound on its plans."""
    for shape in wpipe_shapes(problem):
        record = Record(problem, SearchBudget(work), LeastExchanges(problem.space), inf)
        search = ShapeSearch(record, shape, 0.0)
        yield search, search_shapes(record, [search])[1]


def every_plan(problem: Problem, shape: PipelineShape) -> Iterator[tuple[Proposal, tuple[Recompute, ...]]]:
    """All cuts and ways to recompute, whether they fit or not."""
    cut_points = problem.space.table(problem.space.chain.sizes[0]).cut_points
    for inner in combinations(range(1, len(cut_points) - 1), 2 * len(shape.ranks) - 1):
        proposal = shape.proposal(cut_points, (0, *inner, len(cut_points) - 1))
        for modes in product(MODES, repeat=len(shape.ranks)):
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
    plans = 0
    for search, bound in wpipe_searches(problem):
        steps = [
            steady_seconds(problem.space, proposal, modes)
            for proposal, modes in every_plan(problem, search.shape)
            if fits(problem, proposal, modes)
        ]
        plans += len(steps)
        least = min(steps, default=inf)
        assert bound <= least * (1 + 1e-9)
        if search.best is None:
            assert least == inf
        else:
            assert fits(problem, search.best.proposal, search.best.recompute)
            assert bound == pytest.approx(least, rel=1e-9)
            assert search.step == pytest.approx(least, rel=1e-9)
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
    for search, bound in wpipe_searches(problem):
        if search.best is None:
            continue
        config, stages = search.shape.config, len(search.shape.ranks)
        table = problem.space.replica_group(config.micro_batch_size, (0,)).table
        launches = [0.0] * stages
        for part, (at, mode) in enumerate(_parts(search.best, table.cut_points)):
            twice = table.forward_launch[at] * (1 + (mode != "never"))
            launches[part % stages] += float(table.backward_launch[at] + twice)
        assert bound >= config.micro_batches * max(launches) * (1 - 1e-9)
        steps = [
            steady_seconds(problem.space, proposal, modes)
            for proposal, modes in every_plan(problem, search.shape)
            if fits(problem, proposal, modes)
        ]
        assert search.step == pytest.approx(min(steps), rel=1e-9)
        again += "always" in search.best.recompute
    assert again


def _parts(plan: ScoredPlan, points: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], Recompute]]:
    """Between which places the parts lie, and how they recompute."""
    for first, end, mode in zip((0, *plan.proposal.ends), plan.proposal.ends, plan.recompute, strict=False):
        yield (points.index(first), points.index(end)), mode


def test_little_work_leaves_a_bound(make_problem: MakeProblem) -> None:
    """No plan is below the bound of a search that ends early."""
    problem = make_problem(1, 6, 3, mini_batch=6)
    least = [bound for _, bound in wpipe_searches(problem)]
    for (search, bound), own in zip(wpipe_searches(problem, 3e7), least, strict=True):
        assert bound <= own * (1 + 1e-9) <= search.step * (1 + 2e-9)


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
    assert 0 <= bubble(problem.space, best) < 1
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
    monkeypatch.setattr(throughput, "wpipe_shapes", lambda problem: [])  # noqa: ARG005 - called with it
    assert fastest_asynchronous(problem, inf) == (None, inf)


def test_it_is_the_best_of_all_asynchronous_ones(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(1, 6, 2, memory=1500, mini_batch=4)
    best, bound = fastest_asynchronous(problem, inf)
    pairs = min(bound for _, bound in wpipe_searches(problem))
    monkeypatch.setattr(throughput, "wpipe_shapes", lambda problem: [])  # noqa: ARG005 - called with it
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

"""The steps to the highest throughput, by hand: which schedules and micro-batches are in the running, which
searches there is time for, and what is proven of two kinds of plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.cost_models.errors import DefectError
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.objectives import throughput as module
from pplan.planner.objectives.throughput import (
    CUTS_A_SECOND,
    _allows,
    _fits_devices,
    _join_bounds,
    _replica_counts,
    _spaces,
    asynchronous_configs,
    asynchronous_names,
    asynchronous_refusal,
    fastest_asynchronous,
    throughput,
    wpipe_shapes,
)
from pplan.planner.plan_file import TIE
from pplan.planner.problem import Problem
from pplan.planner.search.branch_and_bound import SearchResult
from pplan.planner.search.budget import OutOfTime

MakeProblem = Callable[..., Problem]
Patch = pytest.MonkeyPatch


def plan(seconds: float, schedule: str = "pipedream-2bw") -> ScoredPlan:
    proposal = Proposal(PipelineConfig(schedule, "never", 4, 1), (2, 4), ((0,), (1,)))
    return ScoredPlan(proposal, ("never", "never"), seconds)


def noted(log: list[Any], entry: Any, answer: Any) -> Any:
    """The answer of a function that notes what it was asked."""
    log.append(entry)
    return answer


@pytest.mark.parametrize(
    ("flushed", "bound", "late", "late_bound", "expected"),
    [
        # Step and bound of either kind; the step, the bound and whether it is proven.
        (4.0, 3.0, None, inf, (4.0, 3.0, False)),
        (4.0, 4.0, None, inf, (4.0, 4.0, True)),
        (4.0, 4.0, None, 3.5, (4.0, 3.5, False)),
        (4.0, 4.0, 3.0, 3.0, (3.0, 3.0, True)),
        (4.0, 2.5, 3.0, 3.0, (3.0, 2.5, False)),
        (4.0, 4.0, 3.0, 3.0 * (1 - 5 * TIE), (3.0, 3.0, True)),
        (4.0, 4.0, 3.0, 3.0 * (1 - 20 * TIE), (3.0, 3.0 * (1 - 20 * TIE), False)),
        (4.0, 4.0, 3.0, 3.0 * (1 + 5 * TIE), (3.0, 3.0, True)),
        (None, inf, None, inf, (inf, inf, True)),
        (None, 2.0, None, inf, (inf, 2.0, False)),
    ],
)
def test_what_is_proven_of_both_kinds(
    flushed: float | None,
    bound: float,
    late: float | None,
    late_bound: float,
    expected: tuple[float, float, bool],
) -> None:
    best = None if flushed is None else plan(flushed, "1f1b")
    result = SearchResult(best, bound, 2.75, exact=False, universal=True)
    own = _join_bounds(result, None if late is None else plan(late), late_bound)
    step = inf if own.best is None else own.best.step_seconds
    assert (step, own.bound_seconds, own.exact) == expected
    assert own.root_bound_seconds == min(2.75, bound, late_bound)
    assert own.universal


def test_a_plan_below_its_bound_is_a_defect() -> None:
    result = SearchResult(plan(4.0, "1f1b"), 4.0, 4.0, exact=True)
    with pytest.raises(DefectError, match=r"a plan of 3.0 s a global batch is below its bound of 3.1 s"):
        _join_bounds(result, plan(3.0), 3.1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"planner": "pipedream"}, ""),
        ({"planner": "even"}, "the planner even makes no asynchronous plan"),
        ({"zero": 1}, "ZeRO-1 gathers the weights once a step: asynchronous schedules were left out"),
        ({"schedule": "1f1b"}, "schedule 1f1b was given: asynchronous ones were left out"),
        ({"runtime": "deepspeed"}, "deepspeed runs no asynchronous schedule"),
        ({"recompute": "always"}, ""),
    ],
)
def test_why_none_is_looked_for(options: dict[str, Any], why: str, make_problem: MakeProblem) -> None:
    assert asynchronous_refusal(make_problem(1, 4, 2, **options)) == why


@pytest.mark.parametrize(
    ("batch", "optimizer", "expected"),
    [
        # One micro-batch of all; 2BW of several; XPipe of fewer than the three stages that there may be.
        (4, "momentum", [("pipedream", 1, 4), ("pipedream-2bw", 4, 1), ("pipedream-2bw", 2, 2)]),
        (
            4,
            "adam",
            [
                ("pipedream", 1, 4),
                ("pipedream-2bw", 4, 1),
                ("pipedream-2bw", 2, 2),
                ("xpipe", 2, 2),
                ("xpipe", 1, 4),
            ],
        ),
        (
            8,
            "adam",
            [
                *[("pipedream", 1, 8), ("pipedream-2bw", 8, 1), ("pipedream-2bw", 4, 2)],
                *[("pipedream-2bw", 2, 4), ("xpipe", 2, 4), ("xpipe", 1, 8)],
            ],
        ),
    ],
)
def test_schedules_and_micro_batches(
    batch: int, optimizer: str, expected: list[tuple[str, int, int]], make_problem: MakeProblem
) -> None:
    problem = make_problem(1, 5, 3, mini_batch=batch, optimizer=optimizer)
    configs = asynchronous_configs(problem)
    assert [(own.schedule, own.micro_batches, own.micro_batch_size) for own in configs] == expected
    assert {own.recompute for own in configs} == {"by_stage"}


def test_names_of_what_is_in_the_running(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    pairs = list[Any]()
    monkeypatch.setattr(module, "wpipe_shapes", lambda _: pairs)
    assert asynchronous_names(make_problem(1, 4, 2)) == ["pipedream", "pipedream-2bw"]
    assert asynchronous_names(make_problem(1, 4, 2, optimizer="adam")) == [
        "pipedream",
        "pipedream-2bw",
        "xpipe",
    ]
    pairs.append("one")
    assert asynchronous_names(make_problem(1, 4, 2)) == ["pipedream", "pipedream-2bw", "wpipe"]


def test_a_plan_of_the_options(make_problem: MakeProblem) -> None:
    """Of two stages or more, as many as there may be, of 2BW as many as micro-batches."""
    problem = make_problem(1, 6, 3)
    two, many = PipelineConfig("pipedream-2bw", "never", 2, 2), PipelineConfig("pipedream", "never", 1, 4)
    assert _allows(problem, two, (3, 6))
    assert not _allows(problem, two, (6,))
    assert not _allows(problem, two, (2, 4, 6))
    assert _allows(problem, many, (2, 4, 6))
    assert not _allows(problem, many, (1, 2, 4, 6))
    pinned = make_problem(1, 6, 3, pins=(("layer5", 0),))
    assert not _allows(pinned, two, (3, 6))


def test_devices_of_pairs(make_problem: MakeProblem) -> None:
    problem = make_problem(1, 6, 4)
    assert [_fits_devices(problem, 4, stages, 2) for stages in (1, 2, 3)] == [True, True, False]
    assert [_fits_devices(problem, 1, 2, replicas) for replicas in (1, 2)] == [True, False]
    whole = make_problem(1, 6, 4, use_all=True)
    assert [_fits_devices(whole, 4, stages, 2) for stages in (1, 2, 3)] == [False, True, False]
    # Sixteen samples on one device are more than were measured.
    assert [_fits_devices(problem, 16, 2, replicas) for replicas in (1, 2)] == [
        problem.space.fits_someone(16, replicas) for replicas in (1, 2)
    ]


def test_coarse_spaces_are_searched_first(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """Few cut points and powers of two of replicas, then all."""
    monkeypatch.setattr(module, "thin_cuts", lambda _, blocks: f"{blocks} blocks")
    problem = make_problem(1, 6, 3)
    assert _replica_counts(problem) == (1, 2, 3)
    assert list(_spaces(problem)) == [(problem.space, (1, 2, 3), True)]
    monkeypatch.setattr(module, "COARSE", (3, 4, 99))
    assert list(_spaces(problem)) == [
        ("3 blocks", (1, 2), False),
        ("4 blocks", (1, 2), False),
        (problem.space, (1, 2, 3), True),
    ]


def test_pairs_that_there_is_time_for(make_problem: MakeProblem) -> None:
    """Of stages with two parts each, rounds of as many micro-batches, and replicas that there are;
    of eight samples on four devices."""
    problem = make_problem(1, 8, 4, mini_batch=8, time_limit=1e6)
    places = len(problem.space.table(1).cut_points)
    expected = {
        (size, stages, replicas)
        for size in problem.sizes
        for stages in (2, 3, 4)
        for replicas in (1, 2, 3, 4)
        if 2 * stages < places and (8 // size) % stages == 0 and stages * replicas <= 4 and replicas <= size
    }
    searches = wpipe_shapes(problem)
    own = [(each.config.micro_batch_size, len(each.ranks), len(each.ranks[0])) for each in searches]
    assert set(own) == expected
    assert len(own) == len(expected) * len(problem.placements)
    assert {
        (each.config.schedule, each.config.micro_batches, each.config.virtual_stages) for each in searches
    } == {("wpipe", 8 // size, 2) for size, _, _ in expected}
    seconds = sum(len(each.ranks) for each in searches) * places**4 / CUTS_A_SECOND
    enough = make_problem(1, 8, 4, mini_batch=8, time_limit=seconds * (1 + 1e-12))
    assert len(wpipe_shapes(enough)) == len(searches)
    assert wpipe_shapes(make_problem(1, 8, 4, mini_batch=8, time_limit=seconds * 0.999)) == []
    assert wpipe_shapes(make_problem(1, 8, 4, mini_batch=8, time_limit=1e6, planner="pipedream")) == []


class Search:
    """With an answer, or no time for it."""

    def __init__(self, best: float | None, bound: float, *, late: bool = False) -> None:
        self.best, self.bound, self.late, self.asked = best, bound, late, list[float]()

    def fastest(self, below: float) -> tuple[ScoredPlan | None, float]:
        self.asked.append(below)
        if self.late:
            raise OutOfTime
        return (None if self.best is None or self.best >= below else plan(self.best)), self.bound


@pytest.mark.parametrize(
    ("searches", "expected"),
    [
        # Step and bound of searches, and whether they are whole; a limit of 5.
        ([(3.0, 3.0, True)], (3.0, 3.0)),
        ([(3.0, 3.0, False), (2.0, 2.0, True)], (2.0, 2.0)),
        ([(3.0, 2.75, False), (None, 3.0, True)], (3.0, 3.0)),
        ([(None, 4.0, True), (None, 3.5, True)], (None, 3.5)),
        ([(6.0, 5.0, True)], (None, 5.0)),
        ([], (None, 5.0)),
    ],
)
def test_the_fastest_of_all_searches(
    searches: list[tuple[float | None, float, bool]],
    expected: tuple[float | None, float],
    make_problem: MakeProblem,
    monkeypatch: Patch,
) -> None:
    """Each is asked for less than the best plan so far; coarse searches prove nothing."""
    every = [(Search(best, bound), is_whole) for best, bound, is_whole in searches]
    monkeypatch.setattr(module, "_searches", lambda _: iter(every))
    monkeypatch.setattr(module, "wpipe_shapes", lambda _: [])
    steps = iter([best for best, _, _ in searches if best is not None])
    monkeypatch.setattr(module, "steady_seconds", lambda *_: next(steps))
    best, bound = fastest_asynchronous(make_problem(1, 4, 2), 5.0)
    assert (None if best is None else best.step_seconds, bound) == expected
    limits = [search.asked for search, _ in every]
    assert limits == [[min([5.0, *(best for best, _, _ in searches[:n] if best)])] for n in range(len(every))]


def test_no_time_for_a_search(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """What was found by then, and what is known of all plans."""
    first, last = Search(3.0, 3.0), Search(1.0, 1.0)
    own = [(each, True) for each in (first, Search(None, 0.0, late=True), last)]
    monkeypatch.setattr(module, "_searches", lambda _: iter(own))
    monkeypatch.setattr(module, "wpipe_shapes", lambda _: [])
    monkeypatch.setattr(module, "work_bound", lambda _: 2.5)
    monkeypatch.setattr(module, "steady_seconds", lambda *_: 3.25)
    best, bound = fastest_asynchronous(make_problem(1, 4, 2), inf)
    assert best is not None
    assert (best.step_seconds, bound, last.asked) == (3.25, 2.5, [])
    # As it is simulated a plan may be slower than what there was.
    best, _ = fastest_asynchronous(make_problem(1, 4, 2), 3.2)
    assert best is None


@pytest.mark.parametrize(
    ("late", "notes"), [(None, ("no asynchronous pipeline is faster",)), (2.0, ("late",))]
)
def test_what_is_said(
    late: float | None, notes: tuple[str, ...], make_problem: MakeProblem, monkeypatch: Patch
) -> None:
    answer = SimpleNamespace(
        best=plan(4.0, "1f1b"), result=SearchResult(plan(4.0, "1f1b"), 1.0, 1.0, exact=False)
    )
    asked = list[Any]()
    monkeypatch.setattr(module, "find_best_plan", lambda _: answer)
    monkeypatch.setattr(
        module, "fastest_asynchronous", lambda _, step: noted(asked, step, (late and plan(late), 1.5))
    )
    monkeypatch.setattr(module, "asynchronous_notes", lambda _: ["late"])
    outcome = throughput(make_problem(1, 4, 2))
    assert asked == [4.0]
    assert outcome.notes == notes
    assert outcome.best is not None
    assert outcome.best.step_seconds == (late or 4.0)
    assert outcome.result.bound_seconds == 1.0
    answer.best = None
    answer.result = replace(answer.result, best=None, bound_seconds=inf)
    throughput(make_problem(1, 4, 2))
    assert asked == [4.0, inf]
    refused = throughput(make_problem(1, 4, 2, zero=1))
    assert refused.result is answer.result
    assert len(refused.notes) == 1
    assert len(asked) == 2

"""The steps of solving again, with searches whose plans are written down here; what limits a step, by
segments; and which bound a row of a comparison is held against."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.explanation import compare, step_limits
from pplan.planner.explanation import explain_context as module
from pplan.planner.explanation.compare import ComparisonRow, _of_planner, _of_planners, _proven_bound
from pplan.planner.explanation.explain_context import (
    MANY,
    _is_near,
    _score_seeds,
    _suited,
    resolve_fully,
    search_near,
)
from pplan.planner.explanation.step_limits import Segment, _by_kind, _by_place, find_busiest
from pplan.planner.joint_search import BEST
from pplan.planner.plan_file import TIE
from pplan.planner.plan_options import PlanOptions
from pplan.planner.search.branch_and_bound import SearchResult
from pplan.planner.search.budget import WORK_A_SECOND

Patch = pytest.MonkeyPatch


def plan(
    seconds: float, stages: int = 2, schedule: str = "1f1b", size: int = 2, count: int = 4
) -> ScoredPlan:
    config = PipelineConfig(schedule, "never", count, size)
    ends = (*range(1, stages), 8)
    return ScoredPlan(
        Proposal(config, ends, tuple((n,) for n in range(stages))), ("never",) * stages, seconds
    )


def problem(gpus: int = 4, **more: Any) -> Any:
    """Of families of six sizes and up to ten stages, that allows all but plans of one stage."""
    families = [SimpleNamespace(config=plan(0.0, size=size).config) for size in (1, 2, 4, 5, 8, 16)]
    known: dict[str, Any] = {
        "usable_gpus": gpus,
        "gpus": gpus,
        "schedules": ("1f1b", "gpipe"),
        "heuristic_schedules": (),
        "space": "space",
        "families": families,
        "stage_counts": range(1, 11),
        "mini_batch": 8,
        "options": PlanOptions(),
        "modes": lambda schedule: ("never", "always") if schedule == "1f1b" else ("by_stage",),
        "allows": lambda own: len(own.ends) > 1,
    }
    return Problem(**(known | more))


class Problem(SimpleNamespace):
    """With what `replace` needs."""

    def __replace__(self, **more: Any) -> Any:
        return Problem(**(vars(self) | more))


@pytest.fixture(autouse=True)
def replaced(monkeypatch: Patch) -> None:
    """`replace` of the stand-in, too."""
    monkeypatch.setattr(
        module,
        "replace",
        lambda own, **more: own.__replace__(**more) if isinstance(own, Problem) else replace(own, **more),
    )


def result(best: ScoredPlan | None, *, exact: bool = True) -> SearchResult:
    return SearchResult(best, 0.5, 0.5, exact=exact)


def test_which_search_solves_again(monkeypatch: Patch) -> None:
    """All of it of few devices; of many what is near the seeds, of which nothing is proven then."""
    asked = list[Any]()
    monkeypatch.setattr(module, "_score_seeds", lambda space, seeds: ("scored", space, list(seeds)))

    def joint(problem: Any, seeds: Any) -> str:
        asked.append((problem, seeds))
        return "joint"

    monkeypatch.setattr(module, "joint_search", joint)
    monkeypatch.setattr(module, "search_near", lambda *own: asked.append(own) or result(plan(1.0)))  # type: ignore[func-returns-value]
    solve: Any = module.resolve
    seeds = [plan(1.0, 3), plan(2.0, 5), plan(1.0, 1)]
    assert solve(problem(MANY), seeds, 3.0) == "joint"
    own, (_, space, proposals) = asked.pop()
    assert (own.options.time_limit, space) == (3.0, "space")
    assert proposals == [seeds[0].proposal, seeds[1].proposal]
    near = solve(problem(MANY + 1), seeds, 3.0)
    assert (near.best, near.exact) == (plan(1.0), False)
    space, families, counts, proposals, seconds = asked.pop()
    assert [own.config.micro_batch_size for own in families] == [1, 2, 4]
    assert (counts, seconds, space) == ([2, 3, 4, 5, 6, 7, 8, 9, 10], 3.0, "space")
    assert proposals == [seeds[0].proposal, seeds[1].proposal]
    assert solve(problem(MANY + 1), [seeds[0]]).exact is False
    assert asked.pop()[2] == [2, 3, 4, 5, 6]
    assert solve(problem(MANY + 1), []) == "joint"
    assert solve(problem(MANY + 1, schedules=("1f1b", "zb-h1")), seeds) == "joint"


def test_solving_from_the_beginning(monkeypatch: Patch) -> None:
    """Where nothing is proven, of few devices: the faster of both, and the first of equal ones."""
    other, first = result(plan(1.0), exact=False), result(plan(2.0), exact=False)
    asked = list[float]()

    def find(own: Any) -> Any:
        asked.append(own.options.time_limit)
        return SimpleNamespace(result=other)

    monkeypatch.setattr(module, "find_best_plan", find)
    monkeypatch.setattr(module, "resolve", lambda *_: first)
    assert resolve_fully(problem(), [], 3.0) is other
    assert asked == [3.0]
    assert resolve_fully(problem(MANY + 1), [], 3.0) is first
    assert len(asked) == 1
    assert resolve_fully(problem(MANY), [], 3.0) is other
    other = result(plan(2.0))
    assert resolve_fully(problem(), [], 3.0) is first
    other = result(None)
    assert resolve_fully(problem(), [], 3.0) is first
    first, other = result(None, exact=False), result(plan(9.0))
    assert resolve_fully(problem(), [], 3.0) is other
    del asked[:]
    resolve_fully(problem(heuristic_schedules=("zb-h1",)), [], 3.0)
    assert asked == [module.OTHERS_LONGER * 3.0]
    assert module.OTHERS_LONGER > 1
    first, count = result(plan(5.0)), len(asked)
    assert resolve_fully(problem(), [], 3.0) is first
    assert len(asked) == count


def test_what_is_near_seeds() -> None:
    for size, near in ((1, False), (2, True), (3, True), (8, True), (9, False)):
        assert _is_near(plan(0.0, size=size).config, [plan(0.0, size=4).proposal]) == near
    assert _is_near(plan(0.0, size=1).config, [plan(0.0, size=4).proposal, plan(0.0, size=2).proposal])
    assert not _is_near(plan(0.0).config, [])


def test_the_part_of_a_space(monkeypatch: Patch) -> None:
    """With as much work as seconds, from the seeds."""
    monkeypatch.setattr(module, "_score_seeds", lambda *own: own)
    monkeypatch.setattr(module, "search", lambda *own: own)
    near: Any = search_near
    own = near("space", ["families"], [2, 3], ["seeds"], 2.0)
    assert own == ("space", ["families"], [2, 3], ("space", ["seeds"]), 2.0 * WORK_A_SECOND)


def test_seeds_are_scored_anew(monkeypatch: Patch) -> None:
    """The fastest of the schedules that are searched, and of the others."""
    known = [plan(2.0), plan(1.0, 3, "gpipe"), plan(0.5, schedule="zb-h1"), plan(0.7, 3, "zb-h1")]
    steps = {own.proposal: own for own in known}

    def fastest(_: Any, own: Sequence[Proposal]) -> ScoredPlan | None:
        return min((steps[each] for each in own), key=lambda each: each.step_seconds, default=None)

    monkeypatch.setattr(module, "fastest", fastest)
    score: Any = _score_seeds
    assert score("space", [own.proposal for own in known]) == [known[1], known[2]]
    assert score("space", [known[3].proposal]) == [known[3]]
    assert score("space", []) == []


def test_seeds_as_a_problem_lets_them_recompute() -> None:
    """As they do, where it may be, else in all ways; of the same global batch."""
    own = problem()
    seed, other = plan(1.0), plan(1.0, schedule="gpipe")
    assert list(_suited(own, [seed, plan(1.0, 1), plan(1.0, count=3)])) == [seed.proposal]
    (found,) = _suited(own, [other])
    assert found == replace(other.proposal, config=replace(other.config, recompute="by_stage"))
    both = problem(modes=lambda _: ("by_stage", "always"))
    assert [each.config.recompute for each in _suited(both, [seed])] == ["by_stage", "always"]


PATH = [
    Segment("compute", 0, None, 0.0, 2.0),
    Segment("transfer", 0, 1, 2.0, 2.5),
    Segment("compute", 1, None, 2.5, 7.0),
    Segment("compute", 0, None, 7.0, 8.0),
]


def test_what_a_path_spends() -> None:
    """By kind, and by place the largest first: 8 seconds in all."""
    kinds = {share.kind: (share.seconds, share.share) for share in _by_kind(PATH, 8.0)}
    assert kinds == {"compute": (7.5, 7.5 / 8), "transfer": (0.5, 0.5 / 8)}
    assert [(own.kind, own.stage, own.to_stage, own.seconds, own.share) for own in _by_place(PATH, 8.0)] == [
        ("compute", 1, None, 4.5, 4.5 / 8),
        ("compute", 0, None, 3.0, 3.0 / 8),
        ("transfer", 0, 1, 0.5, 0.5 / 8),
    ]
    timeline: Any = SimpleNamespace(busy_seconds=[1.0, 4.0, 4.0], step_seconds=8.0)
    busiest = find_busiest(timeline)
    assert (busiest.stage, busiest.seconds, busiest.busy) == (1, 4.0, 0.5)


def test_what_memory_forbids(monkeypatch: Patch) -> None:
    """Only what is faster than the plan, and than what fits of the seeds."""
    asked = list[Any]()
    answer = result(plan(3.0))
    limits = {"limit": 9.0}

    def limit(ranks: range) -> float:
        asked.append(ranks)
        return limits["limit"]

    def solve(own: Any, seeds: Any) -> SearchResult:
        asked.append((own, seeds))
        return answer

    context: Any = SimpleNamespace(problem=problem(space=SimpleNamespace(limit=limit)), present=plan(4.0))
    monkeypatch.setattr(step_limits, "with_memory", lambda own, factor: (own.gpus, factor))
    monkeypatch.setattr(step_limits, "resolve", solve)
    monkeypatch.setattr(step_limits, "plan_row", lambda own: own)
    find: Any = step_limits._without_memory_limit
    assert find(context, [plan(3.5)]) == (plan(3.0), True)
    assert asked == [range(4), ((4, None), [plan(3.5)])]
    assert find(context, [])[0] == plan(3.0)
    assert find(context, [plan(3.5), plan(3.0)]) == (None, True)
    assert find(context, [plan(3.0 * (1 + TIE / 2))])[0] is None
    assert find(context, [plan(3.0 * (1 + 2 * TIE))])[0] == plan(3.0)
    for seconds, found in ((4.0, False), (4.0 * (1 - TIE / 2), False), (4.0 * (1 - 2 * TIE), True)):
        answer = result(plan(seconds), exact=False)
        assert find(context, [plan(9.0)]) == (plan(seconds) if found else None, False)
    answer = result(None, exact=False)
    assert find(context, []) == (None, False)
    limits["limit"] = inf
    asked.clear()
    assert find(context, []) == (None, True)
    assert asked == [range(4)]


def file(step: float, bound: float, schedule: str = "1f1b", *, fixed: bool = False, name: str = "a") -> Any:
    """A plan file, as far as a comparison looks at its bound."""
    return SimpleNamespace(
        prediction=SimpleNamespace(step_seconds=step, lower_bound_seconds=bound),
        schedule=schedule,
        is_fixed_partition=fixed,
        problem={"model": name},
    )


def test_whose_bound_it_is() -> None:
    """The best of the searches of its problem, if its schedule is among theirs and it keeps to it; else its
    own, if it was searched for."""
    bounds = [(("a",), 2.0), (("a",), 3.0), (("b",), 3.5)]
    assert _proven_bound(file(4.0, 1.0), bounds) == 3.0
    assert _proven_bound(file(4.0, 1.0, name="b"), bounds) == 3.5
    assert _proven_bound(file(4.0, 1.0, name="c"), bounds) == 1.0
    assert _proven_bound(file(4.0, 1.0, "zb-h1"), bounds) == 1.0
    assert _proven_bound(file(4.0, 1.0, "zb-h1", fixed=True), bounds) == 0.0
    assert _proven_bound(file(4.0, 1.0, fixed=True), bounds) == 3.0
    assert _proven_bound(file(3.0 * (1 - TIE / 2), 1.0), bounds) == 3.0
    assert _proven_bound(file(3.0 * (1 - 2 * TIE), 1.0), bounds) == 1.0
    assert _proven_bound(file(4.0, 1.0), []) == 1.0
    assert _proven_bound(file(4.0, 1.0), [(("a",), 0.0)]) == 1.0


def test_rows_of_planners(monkeypatch: Patch) -> None:
    """The fastest first, those without a plan last; gaps to the bound, where a plan keeps to it."""
    stages = [SimpleNamespace(memory_bytes=own) for own in (5, 9, 7)]
    monkeypatch.setattr(compare, "plan_stages", lambda *_: stages)
    monkeypatch.setattr(compare, "busy_seconds", lambda own, count: (len(own), count))
    monkeypatch.setattr(compare, "energy_joules", lambda *own: own[2] if own[1] == (3, 4) else None)
    monkeypatch.setattr(compare, "bubble", lambda *_: 0.25)
    context: Any = SimpleNamespace(problem=problem(topology="topology"))
    answer: Any = SimpleNamespace(result=SimpleNamespace(bound_seconds=2.0))
    own = _of_planner(context, answer, "x", plan(3.0, 3), {})
    expected = ComparisonRow(
        name="x",
        step_seconds=3.0,
        samples_per_second=8 / 3.0,
        bubble=0.25,
        memory_bytes=9,
        devices=3,
        gap=0.5,
        balance=[1, 1, 6],
        schedule="1f1b",
        micro_batches=4,
        micro_batch_size=2,
        energy_joules=3.0,
    )
    assert own == expected
    for seconds, gap in ((2.0, 0.0), (1.9, None)):
        assert _of_planner(context, answer, "x", plan(seconds), {}).gap == gap
    nothing: Any = SimpleNamespace(result=SimpleNamespace(bound_seconds=0.0))
    assert _of_planner(context, nothing, "x", plan(2.0), {}).gap is None
    estimated = replace(plan(3.0), proposal=replace(plan(3.0).proposal, estimate_seconds=2.5))
    assert _of_planner(context, answer, "x", estimated, {}).estimate_seconds == 2.5
    assert _of_planner(context, answer, BEST, estimated, {}).estimate_seconds is None
    answer.best, answer.by_planner = plan(2.5), {"slow": plan(9.0), "none": "why", "fast": plan(2.75)}
    rows = _of_planners(context, answer, {})
    assert [(row.name, row.reason) for row in rows] == [
        (BEST, ""),
        ("fast", ""),
        ("slow", ""),
        ("none", "why"),
    ]
    answer.best = None
    assert _of_planners(context, answer, {})[-1].reason in ("no plan fits", "why")


def test_a_comparison_in_a_notebook() -> None:
    """Steps, how much slower than the first, and why there is none."""
    rows = [
        ComparisonRow(name="first", step_seconds=2.0, slower=0.0, memory_bytes=2**30, schedule="1f1b"),
        ComparisonRow(name="other", step_seconds=3.0, slower=0.5, schedule="gpipe"),
        ComparisonRow(name="none", reason="does not fit"),
    ]
    text = compare.PlanComparison(rows=rows, first_slower=None)._repr_html_()
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in text.split("<tr")]
    found = [own for own in cells if own]
    assert [own[:2] for own in found] == [["first", "2.00 s"], ["other", "3.00 s"], ["none", "-"]]
    assert [own[2] for own in found] == ["the same", "1.50 x slower", "-"]
    assert [own[3:] for own in found] == [["1.00 GiB", "1f1b"], ["-", "gpipe"], ["-", "does not fit"]]
    assert (
        repr(compare.PlanComparison(rows=rows, first_slower=None)) == "<PlanComparison of first, other, none>"
    )

"""The steps of solving again, with searches whose plans are written down here; what limits a step, by
segments; and which bound a row of a comparison is held against."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.explanation import compare, step_limits
from pplan.planner.explanation.compare import ComparisonRow, _of_planner, _of_planners, _proven_bound
from pplan.planner.explanation.step_limits import Segment, _by_kind, _by_place, find_busiest
from pplan.planner.joint_search import BEST
from pplan.planner.plan_file import TIE, plan_row
from pplan.planner.plan_options import PlanOptions
from pplan.planner.search.branch_and_bound import SearchResult

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
    return SimpleNamespace(**(known | more))


def result(best: ScoredPlan | None, *, exact: bool = True) -> SearchResult:
    return SearchResult(best, 0.5, 0.5, exact=exact)


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
    monkeypatch.setattr(step_limits, "plan_row", lambda own, **_: own)
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
        training=None,
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
    assert own.plan is not None
    assert (own.name, own.step_seconds, own.plan.samples_per_second) == ("x", 3.0, 8 / 3.0)
    assert (own.bubble, own.memory_bytes, own.plan.device_count) == (0.25, 9, 3)
    assert (own.gap, own.plan.balance, own.plan.schedule) == (0.5, [1, 1, 6], "1f1b")
    assert (own.plan.micro_batches, own.plan.micro_batch_size, own.energy_joules) == (4, 2, 3.0)
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
        ComparisonRow(name="first", plan=plan_row(plan(2.0, 1), memory_bytes=[2**30]), slower=0.0),
        ComparisonRow(name="other", plan=plan_row(plan(3.0, 1, "gpipe"), memory_bytes=[2**31]), slower=0.5),
        ComparisonRow(name="none", reason="does not fit"),
    ]
    text = compare.PlanComparison(rows=rows, first_slower=None)._repr_html_()
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in text.split("<tr")]
    found = [own for own in cells if own]
    assert [own[:2] for own in found] == [["first", "2.00 s"], ["other", "3.00 s"], ["none", "-"]]
    assert [own[2] for own in found] == ["the same", "1.50 x slower", "-"]
    assert [own[3:] for own in found] == [["1.00 GiB", "1f1b"], ["2.00 GiB", "gpipe"], ["-", "does not fit"]]
    assert (
        repr(compare.PlanComparison(rows=rows, first_slower=None)) == "<PlanComparison of first, other, none>"
    )

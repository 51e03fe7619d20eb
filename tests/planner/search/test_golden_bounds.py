"""Bounds of small problems, whole and step by step, and the plans that come with them, against golden files.

A bound that is weaker breaks no plan: `test_whole_bounds.py` and `test_bound_programmes.py` hold their terms
against formulas, here is what they add up to. Also of problems that are taken for large ones. `make golden`
rewrites the files: read the diff.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from math import inf
from typing import Any

import pytest

from pplan.planner.candidate import Proposal
from pplan.planner.joint_search import find_best_plan
from pplan.planner.problem import Problem
from pplan.planner.search.branch_and_bound import search
from pplan.planner.search.budget import SearchBudget
from pplan.planner.search.coarse import search_large
from pplan.planner.search.deep_pipelines import propose_deep
from pplan.planner.search.fill_bound import fill_bound
from pplan.planner.search.fluid_bound import fluid_bound
from pplan.planner.search.relaxed_bound import RelaxedBound
from pplan.planner.search.subproblem import Family, quick_bound, shared_work

Cases = Mapping[str, Any]
Golden = Callable[[str, str], None]
AsText = Callable[[object], str]
NAMES = (
    *("small nodes", "small kinds", "small memory", "small and launched", "gradients add up"),
    *("torchgpipe's recomputing", "recompute", "a pinned layer"),
)

LONG = ("gradients add up", "torchgpipe's recomputing", "recompute")


def file_name(name: str) -> str:
    return name.replace(" ", "_").replace("'", "")


def one_of_each(problem: Problem) -> list[Family]:
    """By configuration the first family, up to a few."""
    return list({family.config: family for family in reversed(problem.families)}.values())[:4]


def spending(problem: Problem, work: float) -> Problem:
    return replace(problem, budget=SearchBudget(work))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in NAMES]
)
def test_bounds(name: str, cases: Cases, golden: Golden, as_text: AsText) -> None:
    problem: Problem = cases[name].problem()
    found = search(problem.space, problem.families, problem.stage_counts)
    assert found.best is not None
    step = found.best.step_seconds
    rows: dict[str, object] = {"step": step}
    for family in one_of_each(problem):
        space, counts = problem.space, problem.stage_counts
        own = search(space, [family], counts)
        relaxed = RelaxedBound(space, [family], counts, True, SearchBudget(1e9))
        rows[str(family.config)] = {
            "quick": [quick_bound(space, family), shared_work(space, family)],
            "fluid": [fluid_bound(space, family, limit) for limit in (inf, step, 3 * step)],
            "fill": [fill_bound(space, family, limit) for limit in (inf, step, 3 * step)],
            "relaxed": [relaxed.least(limit) for limit in (step, 2 * step)],
            "searched": [own.bound_seconds, own.root_bound_seconds, own.exact],
            "by stages": [search(space, [family], [count]).root_bound_seconds for count in counts],
            "below": search(space, [family], counts, limit=0.9 * step).best,
            "deep": [line(plan) for plan in propose_deep(space, [family], lambda: 3 * step)],
        }
    golden(f"planner/bounds/{file_name(name)}.txt", as_text(rows))


def line(own: Proposal) -> str:
    return f"{own.config}, {own.ends}, {own.devices}"


@pytest.mark.parametrize("work", [1e8, 1e9])
@pytest.mark.parametrize("name", ["small nodes", "small kinds", "small memory", "a pinned layer", "one size"])
def test_problems_taken_for_large_ones(
    name: str, work: float, cases: Cases, golden: Golden, as_text: AsText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pplan.planner.search.space.MOST_BLOCKS", 1)
    monkeypatch.setattr("pplan.planner.search.coarse.COARSE_BLOCKS", 3)
    monkeypatch.setattr("pplan.planner.search.fluid_bound.RUNS", 2)
    problem: Problem = spending(cases[name].problem(), 1e12)
    proposals: list[str] = []

    def score(plans: Any) -> float:
        proposals.extend(map(line, plans))
        return inf

    counts = list(problem.stage_counts)
    relaxed = RelaxedBound(problem.space, problem.families, counts, False, SearchBudget(work), score)
    bound = relaxed.least(1e9)
    relaxed.propose_rest(SearchBudget(work))
    found = search_large(problem.space, problem.families, counts, [], work, deeper=problem.may_be_deeper)
    answer = find_best_plan(replace(problem, options=replace(problem.options, time_limit=work / 1e9)), ())
    rows = {
        "relaxed": bound,
        "proposals": [len(proposals), sha256("\n".join(proposals).encode()).hexdigest()[:12], *proposals[:3]],
        "large": found,
        "answer": answer.result,
    }
    golden(f"planner/bounds/large_{file_name(name)}_{work:g}.txt", as_text(rows))

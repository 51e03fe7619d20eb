"""What is said of small problems, against golden files: plans with what they are compared with, why they are
so, other objectives, plans side by side, what to do where nothing fits.

`make golden` rewrites the files: read the diff. Whether it is true is tested elsewhere, against brute force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import PplanError
from pplan.planner import device_loss
from pplan.planner.build_plan import build_plan
from pplan.planner.explanation.compare import compare_plans
from pplan.planner.explanation.explain_context import make_context
from pplan.planner.explanation.explain_options import ExplainOptions
from pplan.planner.explanation.explanation import explain_plan
from pplan.planner.infeasible import no_plan_fits
from pplan.planner.joint_search import find_best_plan
from pplan.planner.objectives.frontier import build_frontier
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Plan
from pplan.planner.plan_records import ProfileReference
from pplan.planner.problem import Problem
from pplan.planner.smallest_plan import find_smallest_plan

Cases = Mapping[str, Any]
Golden = Callable[[str, str], None]
AsText = Callable[[object], str]
REFERENCE = ProfileReference(file="toy.profile.json", sha256="0" * 64)
PLANS = (
    "two nodes",
    "small kinds",
    "weight of both ends",
    "torchgpipe's recomputing",
    "a pinned layer",
    "deepspeed",
)
EXPLANATIONS = ("small memory", "small and launched")
LITTLE = 60.0
"""Bytes, into which nothing fits."""
REFUSALS = ("two kinds", "deepspeed", "zero 1")


def planned(problem: Problem) -> Plan:
    return build_plan(problem, find_best_plan(problem), model="toy", profile=REFERENCE)


def path(kind: str, name: str) -> str:
    return f"planner/{kind}/{name.replace(' ', '_').replace(chr(39), '')}.txt"


def said(call: Callable[[], object]) -> object:
    """What it returns, or what it refuses."""
    try:
        return call()
    except PplanError as error:
        return error.as_json


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str, cases: Cases, golden: Golden, as_text: AsText) -> None:
    golden(path("plans", name), as_text(planned(cases[name].problem())))


@pytest.mark.parametrize("name", EXPLANATIONS)
def test_explanations(name: str, cases: Cases, golden: Golden, as_text: AsText) -> None:
    problem = cases[name].problem()
    ends = [
        0,
        *(np.flatnonzero(problem.chain.cut_after)[: problem.gpus - 1] + 1).tolist(),
        len(problem.chain),
    ]
    split = ExplainOptions(current=tuple(end - start for start, end in pairwise(ends)))
    why = explain_plan(planned(problem), problem.chain, problem.topology, options=split)
    golden(path("explanations", name), as_text(why))


@pytest.mark.parametrize("name", ["small nodes"])
def test_objectives(name: str, cases: Cases, golden: Golden, as_text: AsText) -> None:
    problem = cases[name].problem()
    prices = {kind.name: 1.0 + number for number, kind in enumerate(problem.topology.kinds)}
    rows = {
        own.name: said(lambda own=own: solve_objective(own, problem, model="toy", profile=REFERENCE))  # type: ignore[misc]
        for own in (
            Objective("memory", 0.2),
            Objective("throughput"),
            Objective("cost", prices={"toy": 2.0, "": 1.0}),
        )
    }
    varied = replace(cases[name], spread=0.2)
    for own in ({"robust": True}, {"slow_devices": (0.05, 1.5)}):
        rows[str(own)] = said(
            lambda own=own: solve_objective(
                Objective(), varied.problem(**own), model="toy", profile=REFERENCE
            )  # type: ignore[misc]
        )
    rows["frontier"] = said(lambda: build_frontier(problem, model="toy", profile=REFERENCE, points=4))
    golden(path("objectives", name), as_text(rows | prices))


def test_plans_side_by_side(cases: Cases, golden: Golden, as_text: AsText) -> None:
    rows = {}
    for name in ("small kinds", "two kinds"):
        problem = cases[name].problem()
        plan = planned(problem)
        other = plan.model_copy(update={"optimizer": "adam", "mini_batch": 2 * plan.mini_batch})
        watts = {
            kind.name: (400.0 / (1 + number), 60.0) for number, kind in enumerate(problem.topology.kinds)
        }
        context = make_context(plan, problem.chain, problem.topology)
        rows[name] = compare_plans([("one", plan), ("two", other)], context, watts)
    golden("planner/comparisons.txt", as_text(rows))


@pytest.mark.parametrize("name", REFUSALS)
def test_what_to_do_where_nothing_fits(name: str, cases: Cases, golden: Golden, as_text: AsText) -> None:
    rows, smallest = {}, find_smallest_plan(cases[name].problem(memory_limit=LITTLE))
    assert smallest is not None
    least = smallest.memory_bytes
    for share in (0.3, 0.95):
        problem = cases[name].problem(memory_limit=share * least)
        assert find_best_plan(problem, []).best is None
        rows[f"{share:g} of the least"] = said(lambda problem=problem: no_plan_fits(problem))  # type: ignore[misc]
    golden(path("refusals", name), as_text(rows))


def test_plans_for_the_devices_that_are_left(
    cases: Cases, golden: Golden, as_text: AsText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shapes scored that are near to the best."""
    monkeypatch.setattr(device_loss, "MOST_SHAPES", 20)
    rows = {}
    for name, lost in (("two nodes", [1]), ("two kinds", [0]), ("fast links", [7])):
        problem = cases[name].problem()
        present = find_best_plan(problem).best
        assert present is not None
        rows[name] = said(lambda own=(problem, present, lost): device_loss.replan_problem(*own))  # type: ignore[misc]
    golden("planner/replans.txt", as_text(rows))

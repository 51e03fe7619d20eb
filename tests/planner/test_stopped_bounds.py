"""Searches that end early prove no less than they once did.

That no bound is too high is tested elsewhere, against every plan; here, that none has become weaker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pplan.planner.joint_search import find_best_plan
from pplan.planner.search.budget import SearchBudget

WORK = 3e6
"""That a search has left."""
NAMES = (
    *("two nodes", "two kinds", "few cuts", "little memory", "weight of both ends", "gradients add up"),
    *("deepspeed", "torchgpipe", "zero 3", "gpipe without recomputing", "1f1b of many", "fast links"),
)


def test_no_bound_is_lower_than_it_was(cases: Mapping[str, Any], no_lower: Callable[..., None]) -> None:
    bounds = {}
    for name in NAMES:
        problem = replace(cases[name].problem(), budget=SearchBudget(WORK))
        bounds[name] = find_best_plan(problem, []).result.bound_seconds
    no_lower("stopped_bounds", bounds)

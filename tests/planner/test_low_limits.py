"""Small problems under the limits of large ones: what is proven there, against the best plan that there is.

Beyond so many devices, cuts or plans a search looks at a part of what there is. Here every such limit of the
planner is low at once, so that small problems meet all of them; no bound may then be above the best plan that
there is.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest

import pplan.planner
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_file import TIE
from pplan.planner.planners import PLANNERS
from pplan.planner.problem import Problem

Cases = Mapping[str, Any]
LIMIT = re.compile(
    r"(MOST_(?!MICRO_BATCHES|SECONDS|TOTAL_BYTES|MINI_BATCH)|EVERY|FEW|MANY|SMALL|LEADING|SHAPES|COARSE|RUNS)[A-Z_]*"
)
NO_LIMITS = {
    "plan_options",
    "problem_grid",
    "deepspeed_partition",
    "plan_file",
} | {
    "asynchronous",
    "stage_figures",
}
"""Modules whose limits are of what may be asked, of a formula, or large against each other."""
NAMES = (
    *("two nodes", "two kinds", "few cuts", "little memory", "a pinned layer", "weight of both ends"),
    *("zb-h1", "interleaved", "any schedule"),
)


def limits() -> Iterator[tuple[ModuleType, str, float]]:
    for own in pkgutil.walk_packages(pplan.planner.__path__, "pplan.planner."):
        module = importlib.import_module(own.name)
        for name, value in vars(module).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if LIMIT.fullmatch(name) and is_number and own.name.rpartition(".")[2] not in NO_LIMITS:
                yield module, name, value


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes each at most so large."""

    def lower(most: int) -> None:
        for module, name, value in list(limits()):
            if value > most:
                monkeypatch.setattr(module, name, type(value)(most))

    return lower


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(
            pytest.param(name, 2, marks=[pytest.mark.slow] * (index % 3 != 0))
            for index, name in enumerate(NAMES)
        ),
        *(pytest.param(*own, marks=pytest.mark.slow) for own in (("two nodes", 1), ("few cuts", 4))),
        ("two kinds", 4),
    ],
)
def test_bounds_hold(name: str, most: int, cases: Cases, low_limits: Callable[[int], None]) -> None:
    problem: Problem = cases[name].problem(time_limit=0.05)
    truth = find_best_plan(cases[name].problem())
    assert truth.best is not None
    low_limits(most)
    many = name == "two nodes"
    answer = find_best_plan(problem, tuple(PLANNERS)) if many else find_best_plan(problem)
    assert answer.best is not None
    assert answer.best.step_seconds >= truth.result.bound_seconds * (1 - TIE)
    if set(problem.allowed_schedules) <= {"1f1b", "gpipe"}:
        assert answer.result.bound_seconds <= truth.best.step_seconds * (1 + TIE)

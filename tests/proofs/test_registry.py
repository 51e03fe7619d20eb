"""Every function of planner/ that returns a bound is registered; test_attack.py: each is reached."""

from __future__ import annotations

import re
from pathlib import Path

from attack.registry import ATTACKED_BY_TESTS, BOUNDS, NOT_BOUNDS, functions_about_bounds

PLANNER = Path(__file__).parents[2] / "planner"


def test_every_function_about_bounds_is_registered() -> None:
    found = set(functions_about_bounds(PLANNER))
    known = set(BOUNDS) | set(ATTACKED_BY_TESTS) | set(NOT_BOUNDS)
    assert found <= known, "register it with the check that attacks it"
    for name, test in ATTACKED_BY_TESTS.items():
        function = re.split("[:.]", name)[-1]
        assert f"{function}(" in (PLANNER.parent / test).read_text()


def test_a_new_bound_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        "class Search:\n"
        "    def least(self):\n        '''A bound on all plans.'''\n"
        "    def of(self):\n        return SearchResult(best, 1.0, 1.0, exact=True)\n"
        "def work_bound(problem):\n    return 0.0\n"
        "def other(problem):\n    '''Nothing of that kind.'''\n"
    )
    assert set(functions_about_bounds(tmp_path)) == {
        "new.py:Search.least",
        "new.py:Search.of",
        "new.py:work_bound",
    }

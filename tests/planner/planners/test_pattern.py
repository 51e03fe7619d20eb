"""Regular expressions out of a file: what could match for ever is refused, the usual ones are taken."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.planner.planners import find_planner
from pplan.planner.planners.deepspeed_partition import compile_pattern, match_names
from pplan.planner.problem import Problem

NAMES = [f"encoder.layers.{i}.attention.self.query" for i in range(100)] + ["head", "a" * 60 + "!"]


@pytest.mark.parametrize(
    "pattern",
    [
        "attention",
        r"layers\.\d+\.attention",
        ".*attn.*|.*query.*",
        r"^h\.[0-9]+$",
        "(a|b)c?",
        "(?i:HEAD)",
        "",
        "(ab)*c",
        "(?:ab)*c",
    ],
)
def test_what_it_finds_is_what_python_finds(pattern: str) -> None:
    expected = [re.search(pattern, name, re.IGNORECASE) is not None for name in NAMES]
    assert match_names(pattern, NAMES) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*b",
        "(a|aa)+$",
        "a?" * 40 + "b",
        "(a?){40}b",
        "(.*)*x",
        ".*.*.*.*.*.*x",
        "(?=(a+)+b)x",
        "((a|b|ab)*c)?d",
        r"(\w+\.)+!x",
        "(a*)*(?(1)b|c)",
        "(?x)(a+) +b",
        "(?:(a+)b)+c",
        r"(a+)(?#comment)+b",
        r"a*\|" * 6 + "b",
        "a*[|]" * 6 + "b",
    ],
)
def test_what_may_match_for_ever_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="forever"):
        match_names(pattern, NAMES)


@pytest.mark.parametrize("pattern", ["(", "a" * 1001, "(" * 999, "a{1,99999999999}", "[z-a]"])
def test_what_is_no_expression(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"characters|in the regular expression"):
        compile_pattern(pattern)


def test_a_planner_says_what_is_wrong_with_its_pattern(
    make_named: Callable[..., Chain], make_problem: Callable[..., Problem]
) -> None:
    planner = find_planner("deepspeed-type:(a+)+$")
    with pytest.raises(UsageError, match=r"planner='deepspeed-type:\(a\+\)\+\$': it nests repetitions"):
        planner.refusal(make_problem(make_named(["a" * 60, "b"]), 2))

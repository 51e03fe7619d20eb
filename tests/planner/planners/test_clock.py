"""Planners that search stop where the time is over; those of a rule make their plan all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pplan.cost_models.layer import Chain
from pplan.planner.planners import PLANNERS
from pplan.planner.problem import Problem
from pplan.planner.search.budget import OutOfTime, SearchBudget

QUICK = {
    *("one-gpu", "data-parallel", "even", "parameters", "gpipe", "megatron", "interleaved"),
    *("deepspeed-type", "torchgpipe-time", "torchgpipe-size"),
}
GPT = ["wte", *(f"h.{block}" for block in range(4)), "ln_f"]


@pytest.mark.parametrize("name", PLANNERS)
def test_they_stop(name: str, make_named: Callable[..., Chain], make_problem: Callable[..., Problem]) -> None:
    problem = replace(
        make_problem(make_named(GPT), 4, mini_batch=8), budget=SearchBudget.of_seconds(0.0, lambda: 1.0)
    )
    if name in QUICK:
        assert list(PLANNERS[name].propose(problem))
    else:
        with pytest.raises(OutOfTime):
            list(PLANNERS[name].propose(problem))

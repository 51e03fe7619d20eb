"""Why a named planner has no plan: the cause that is named is the one without which it has one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.planner.joint_search import NOT_ALLOWED, plan_with
from pplan.planner.planners import PLANNERS, find_planner
from pplan.planner.planners.base import refusal_reason
from pplan.planner.problem import Problem

MakeProblem = Callable[..., Problem]


@pytest.mark.parametrize(
    ("batch", "micro_batches", "words"),
    [
        (8, 8, "4 devices cannot share any of the micro-batches asked for"),
        (8, None, "4 devices cannot share any of the micro-batches that the profile reaches"),
    ],
)
def test_the_batch_or_the_micro_batches(batch: int, micro_batches: int | None, words: str) -> None:
    options = SimpleNamespace(micro_batches=micro_batches)
    machine = SimpleNamespace(gpus=4)
    problem: Any = SimpleNamespace(topology=machine, runtime=None, mini_batch=batch, options=options)
    assert PLANNERS["data-parallel"].refusal(problem) == words


@pytest.mark.parametrize("planner", ["one-gpu", "data-parallel"])
def test_options_that_leave_out_what_it_proposes(make_problem: MakeProblem, planner: str) -> None:
    pinned = make_problem(pins=[("layer5", 1)])
    assert str(plan_with(find_planner(planner), pinned)).startswith(f"{NOT_ALLOWED}: ")
    assert not isinstance(plan_with(find_planner(planner), make_problem()), str)


def test_no_memory_is_blamed_where_none_is_known(make_problem: MakeProblem) -> None:
    """Of any schedule and any planner."""
    for schedule in ("interleaved", "looped-bfs", "zb-h2", "zb-v", "naive", "chimera", "autopipe"):
        problem = make_problem(schedule=schedule)
        for planner in PLANNERS.values():
            reason = refusal_reason(planner, problem)
            assert "fit" not in reason, (schedule, planner.name)
            assert "asked for" not in reason, (schedule, planner.name)


def test_a_schedule_with_several_parts_a_device(make_problem: MakeProblem) -> None:
    problem = make_problem(schedule="looped-bfs")
    words = "the schedule has several parts of the layers on a device"
    assert plan_with(find_planner("data-parallel"), problem) == words
    assert plan_with(find_planner("even"), problem) == words


def test_a_schedule_that_the_planner_does_not_know(make_problem: MakeProblem) -> None:
    problem = make_problem(schedule="zb-h2")
    assert plan_with(find_planner("bapipe"), problem) == "it knows only 1f1b, dapple, gpipe"
    assert plan_with(find_planner("galvatron"), problem) == "it knows only 1f1b, dapple, gpipe"

"""The tables against golden files, and the first line of a plan in each case."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from pplan.cli.plan_tables import answer_lines, print_ledger, print_plan
from pplan.cli.profile_tables import print_profile
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

Golden = Callable[[str, str], None]


def _console(width: int) -> Console:
    return Console(
        file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False, color_system=None
    )


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("width", "file"), [(110, "profile.txt"), (80, "profile_narrow.txt")])
def test_profile(profile: Profile, golden: Golden, width: int, file: str) -> None:
    console = _console(width)
    print_profile(profile, console)
    golden(file, _text(console))


@pytest.mark.parametrize(("width", "file"), [(110, "plan.txt"), (80, "plan_narrow.txt")])
def test_plan(plan: Plan, golden: Golden, width: int, file: str) -> None:
    console = _console(width)
    print_plan(plan, console)
    print_ledger(plan, console)
    golden(file, _text(console))


def test_ledger_of_many_stages_goes_on_below(plan: Plan) -> None:
    console = _console(53)
    print_ledger(changed(plan, stages=[*plan.stages, *plan.stages]), console)
    heads = [
        line.split()
        for line in _text(console).splitlines()
        if line.split()[:1] == ["stage"] and "inputs" not in line
    ]
    assert heads == [["stage", str(a), "stage", str(a + 1), "stage", str(a + 2)] for a in (0, 3)]


def changed(document: Plan, **fields: Any) -> Plan:
    return document.model_copy(update=fields)


def _one_stage(plan: Plan, gpus: int) -> Plan:
    whole = plan.stages[0].model_copy(
        update={"first_layer": 0, "last_layer": 11, "replicas": gpus, "devices": list(range(gpus))}
    )
    return changed(plan, stages=[whole], balance=[12], gpus=gpus)


def test_answer_pipeline_on_fewer_gpus(plan: Plan) -> None:
    assert answer_lines(plan) == [
        "A pipeline of 3 stages over 6 GPUs is the fastest: 650 ms a step, 98.5 samples/s.",
        "It uses 6 of the 8 GPUs; on all 8, data parallelism takes 700 ms a step.",
    ]


def test_answer_fewer_gpus_with_nothing_on_all(plan: Plan) -> None:
    bare = changed(plan, baselines=[], alternatives=[])
    assert answer_lines(bare)[1] == "It uses 6 of the 8 GPUs: more of them would not be faster."


def test_answer_data_parallelism(plan: Plan) -> None:
    assert answer_lines(_one_stage(plan, 8)) == [
        "Data parallelism over 8 GPUs is the fastest: 650 ms a step, 98.5 samples/s."
    ]


def test_answer_one_gpu(plan: Plan) -> None:
    alone = changed(_one_stage(plan, 1), gpus=4)
    first, second = answer_lines(alone)
    assert first == "One GPU is the fastest: 650 ms a step, 98.5 samples/s."
    assert second.startswith("It uses 1 of the 4 GPUs;")


def test_answer_when_a_runtime_leaves_out_the_faster_way(plan: Plan) -> None:
    baselines = [plan.baselines[1].model_copy(update={"step_seconds": 0.5})]
    held = changed(plan, runtime="torchgpipe", baselines=baselines, gpus=6)
    assert answer_lines(held) == [
        "Data parallelism over 6 GPUs is the fastest: 500 ms a step, 128 samples/s; "
        "torchgpipe does not run it.",
        "This plan is a pipeline of 3 stages over 6 GPUs: 650 ms a step, 98.5 samples/s.",
    ]


def test_answer_is_not_proven_without_exact(plan: Plan) -> None:
    prediction = plan.prediction.model_copy(update={"exact": False})
    first = answer_lines(changed(plan, prediction=prediction))[0]
    assert first.startswith("A pipeline of 3 stages over 6 GPUs is the fastest of those scored: ")


def test_what_all_gpus_would_give_is_what_the_runtime_can_run(plan: Plan) -> None:
    whole, half = [1, 1, 1, 1, 2, 2, 2, 2], [6, 6]
    alternatives = [
        plan.alternatives[0].model_copy(
            update={"runtimes": runtimes, "balance": balance, "step_seconds": step}
        )
        for runtimes, balance, step in (
            (["deepspeed"], whole, 0.7),
            (["torchgpipe"], half, 0.75),
            ([], whole, 0.9),
            (["torchgpipe"], whole, 0.6),
        )
    ]
    held = changed(plan, runtime="torchgpipe", alternatives=alternatives)
    assert answer_lines(held) == [
        "A pipeline of 3 stages over 6 GPUs is the fastest that torchgpipe can run: "
        "650 ms a step, 98.5 samples/s.",
        "It uses 6 of the 8 GPUs; on all 8, a straight gpipe pipeline takes 900 ms a step.",
    ]

"""`pplan explain`: its tables against golden files, and what its command line does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cli.explain_tables import answer_lines, describe_plan, print_explanation, stage_name
from pplan.planner.explanation.explanation import Explanation
from pplan.planner.explanation.rivals import RunnerUp
from pplan.planner.plan_file import Plan, PlanRow
from pplan.profiler.profile_file import Profile

Golden = Callable[[str, str], None]
Run = Callable[..., Any]
Terminal = Callable[[int], Any]


def outline(step: float, balance: list[int], **more: Any) -> dict[str, Any]:
    made = {
        "step_seconds": step,
        "samples_per_second": 64 / step,
        "balance": balance,
        "replicas": [1] * len(balance),
        "devices": [[stage] for stage in range(len(balance))],
        "schedule": "1f1b",
        "virtual_stages": 1,
        "micro_batches": 16,
        "micro_batch_size": 4,
        "recompute": "never",
        "stage_recompute": ["never"] * len(balance),
    }
    return made | more


def place(kind: str, stage: int | None, seconds: float, to_stage: int | None = None) -> dict[str, Any]:
    return {"kind": kind, "stage": stage, "to_stage": to_stage, "seconds": seconds, "share": seconds / 0.65}


def side(plan: dict[str, Any], busiest: int) -> dict[str, Any]:
    bounds = [sum(plan["balance"][:stage]) for stage in range(len(plan["balance"]) + 1)]
    return {
        "plan": plan,
        "bubble": 0.25,
        "busiest": {"stage": busiest, "seconds": 0.5, "busy": 0.5 / plan["step_seconds"]},
        "stages": [
            {
                "first_layer": bounds[stage],
                "last_layer": bounds[stage + 1] - 1,
                "replicas": 1,
                "devices": [stage],
                "forward_seconds": 0.012,
                "backward_seconds": 0.024,
                "memory_bytes": 17 * 2**30 if busiest == stage else 2**30,
                "memory_limit_bytes": 16 * 2**30,
            }
            for stage in range(len(plan["balance"]))
        ],
    }


@pytest.fixture
def explanation() -> Explanation:
    """Of a plan of three stages, with everything that there may be in it."""
    own = outline(0.65, [4, 5, 3])
    turn = {"factor": 1 / 3.2, "plan_seconds": 0.8, "rival": outline(0.75, [9, 3])}
    holds = [
        {"what": "bandwidth of all links", "least": 1 / 16, "most": 16, "below": turn, "above": None},
        {
            "what": "seconds of the layers of stage 1",
            "first_layer": 4,
            "last_layer": 8,
            "least": 0.25,
            "most": 4,
            "below": None,
            "above": {"factor": 1.12, "plan_seconds": 0.7, "rival": outline(0.69, [5, 4, 3])},
        },
    ]
    changes = [
        {"change": "one more server of 8 GPUs", "reason": "no plan fits"},
        {
            "change": "double the memory",
            "plan": outline(0.5, [12], replicas=[3], devices=[[0, 1, 2]]),
            "faster": 0.3,
            "proven": True,
        },
        {
            "change": "recompute always",
            "plan": outline(0.8, [4, 5, 3], recompute="always"),
            "faster": -0.1875,
            "proven": True,
        },
        {"change": "recompute never", "plan": own, "faster": 0.0, "proven": False},
    ]
    split = outline(0.9, [2, 8, 2], micro_batches=8, micro_batch_size=8, recompute="always")
    causes = [
        ("work of the busiest stage", 0.5, 0.45),
        ("recompute", 0.2, 0.0),
        ("transfers", 0.0, 0.01),
        ("warm-up and cool-down", 0.2, 0.19),
    ]
    return Explanation.model_validate(
        {
            "model": "toy",
            "plan": own,
            "limits": {
                "kinds": [
                    place("compute", None, 0.5),
                    place("transfer", None, 0.14),
                    place("all_reduce", None, 0.01),
                ],
                "places": [
                    place("compute", 1, 0.4),
                    place("transfer", 0, 0.14, 1),
                    place("compute", 0, 0.1),
                    place("all_reduce", 0, 0.01),
                    place("transfer", 1, 1e-5, 2),
                ],
                "busiest": {"stage": 1, "seconds": 0.5, "busy": 0.5 / 0.65},
                "without_memory_limit": outline(0.5, [12], replicas=[3], devices=[[0, 1, 2]]),
            },
            "second_best": {
                "differs": "cuts, replicas or devices",
                "plan": outline(0.655, [5, 4, 3]),
                "slower": 0.655 / 0.65 - 1,
                "proven": True,
            },
            "as_fast": outline(0.65, [4, 6, 2]),
            "other_stages": {"differs": "number of stages", "plan": None, "slower": None, "proven": False},
            "holds": holds,
            "what_if": changes,
            "current": {
                "current": side(split, 1),
                "plan": side(own, 1),
                "slower": 0.9 / 0.65 - 1,
                "causes": [
                    {"name": name, "current_seconds": mine, "plan_seconds": plans}
                    for name, mine, plans in causes
                ],
                "best_setting": outline(0.8, [2, 8, 2]),
                "best_cuts": None,
                "notes": ["it does not fit: device 1 needs 17.00 GiB of 16.00 GiB"],
            },
            "notes": ["the plan takes 650 ms a step here"],
        }
    )


@pytest.mark.parametrize("width", [110, 80, 40])
def test_tables(explanation: Explanation, golden: Golden, width: int, terminal: Terminal) -> None:
    console = terminal(width)
    print_explanation(explanation, console)
    golden(f"explain_{width}.txt", console.text)


@pytest.mark.parametrize("width", [20, 50, 65, 95])
def test_no_figure_is_cut_at_any_width(explanation: Explanation, width: int, terminal: Terminal) -> None:
    narrow, wide = terminal(width), terminal(250)
    for console in (narrow, wide):
        print_explanation(explanation, console)
    assert "…" not in narrow.text

    def figures(text: str) -> set[str]:
        return set(re.findall(r"\d+(?:\.\d+)?", text))

    assert figures(narrow.text) <= figures(wide.text)
    assert {"400", "140", "61.5", "655"} <= figures(narrow.text)


def test_the_answer_says_what_is_better(explanation: Explanation) -> None:
    better = explanation.model_copy(update={"better": explanation.second_best.plan})
    assert answer_lines(better)[-1] == (
        "It is not the best for its options: 3 stages of 5-4-3 layers, 16 micro-batches x 4, 1f1b takes "
        "655 ms, 0.8 % slower."
    )
    other = better.model_copy(update={"made_for": "the least memory"})
    assert answer_lines(other)[-1].startswith(
        "It was made for the least memory, not for the shortest step: 3 stages"
    )
    limits = explanation.limits.model_copy(
        update={"without_memory_limit": None, "memory_forbids_nothing": True}
    )
    free = explanation.model_copy(update={"limits": limits})
    assert answer_lines(free)[-1] == "Memory forbids no faster plan."
    unproven = limits.model_copy(update={"memory_forbids_nothing": False})
    assert answer_lines(explanation.model_copy(update={"limits": unproven}))[-1] == (
        "Without a memory limit no faster plan was found; there may be one."
    )
    assert answer_lines(free)[0] == (
        "A step of toy takes 650 ms and waits 76.9 % for computing, 21.5 % for transfers, "
        "1.5 % for all-reduce."
    )


@pytest.fixture
def planned(here: Path, profile: Profile, solve_once: Callable[..., Plan]) -> Plan:
    """The plan of the profile on three GPUs, with both files in the working directory."""
    profile.save(here / "toy.profile.json", force=False)
    plan = solve_once(here / "toy.profile.json", gpus=3, mini_batch=16, schedule="1f1b")
    plan.save(here / "toy.plan.json", force=False)
    return plan


@pytest.mark.slow
def test_explains_the_newest_plan(run: Run, planned: Plan) -> None:
    ran = run("explain", "--json")
    assert ran.status == 0, ran.err
    assert ran.lines == ["Using toy.plan.json (newest plan in this directory)"]
    made = json.loads(ran.out)
    assert made["plan"]["step_seconds"] == pytest.approx(planned.prediction.step_seconds)
    assert made["plan"]["balance"] == planned.balance
    assert made["current"] is None
    assert Explanation.model_validate(made) == pplan.explain("toy.plan.json", "toy.profile.json")
    shown = run("explain", "toy.plan.json")
    assert shown.out.startswith("A step of toy takes ")
    assert "No better plan was found with" in shown.out
    assert shown.lines == []


@pytest.mark.slow
def test_a_split_in_use(run: Run, planned: Plan) -> None:
    own = ",".join(map(str, planned.balance))
    options = ["--replicas", str(planned.replicas[0]), "--micro-batches", str(planned.micro_batches)]
    ran = run("explain", "--json", "--current", own, *options, "--schedule", planned.schedule)
    made = json.loads(ran.out)["current"]
    assert made["current"]["plan"]["balance"] == planned.balance
    if len(set(planned.replicas)) == 1:
        assert made["slower"] == pytest.approx(0, abs=1e-9)
    lopsided = run("explain", "--current", "1, 1,10")
    assert lopsided.status == 0, lopsided.err
    assert "The split in use, 3 stages of 1-1-10 layers" in lopsided.out


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("--current 4,x", "--current x: is not a whole number"),
        ("--current 4,0", "--current 0: must be at least 1"),
        ("--current 4,4", "--current 4,4: holds 8 layers, the model has 12"),
        ("--current 5,7", "stage 0 ends after layer 4"),
        ("--current 3,3,3,3", "the split takes 4 devices, the plan is for"),
        ("--current 6,6 --schedule 1f2b", "--schedule 1f2b: not known"),
        ("--current 6,6 --replicas 0", "--replicas 0: must be at least 1"),
        ("--replicas 2", "explain --replicas 2: without --current"),
        ("--micro-batches 2", "explain --micro-batches 2: without --current"),
        ("other.plan.json", "other.plan.json: no such plan file"),
    ],
)
def test_refusals(run: Run, planned: Plan, options: str, what: str) -> None:
    assert planned
    ran = run("explain", *options.split())
    assert ran.status == 2
    assert ran.out == ""
    assert what in ran.err
    assert len(ran.lines) <= 3


def test_python_arguments_are_checked(planned: Plan, profile: Profile) -> None:
    with pytest.raises(pplan.UsageError, match="current='4,8': is not a list"):
        pplan.explain(planned, profile, current="4,8")  # type: ignore[arg-type]
    other = profile.model_copy(update={"layers": profile.layers[:-1]})
    with pytest.raises(pplan.UsageError, match="has other layers"):
        pplan.explain(planned, other)


def test_virtual_stages_in_words() -> None:
    made = outline(0.5, [3, 4, 2, 3], virtual_stages=2, schedule="interleaved")
    words = "2 stages of 3-4-2-3 layers, 2 virtual stages each, 16 micro-batches x 4, interleaved"
    assert describe_plan(PlanRow(**made)) == words
    one = outline(0.5, [1], schedule="1f1b")
    assert describe_plan(PlanRow(**one)) == "1 stage of 1 layer, 16 micro-batches x 4, 1f1b"


SHARED = """name,forward_ms,backward_ms,activation_mb,parameter_mb,{}
a,10,20,50,400,6,12,30,200
b,12,22,50,400,6,12,30,200
c,10,20,50,400,6,12,30,200
""".format(",".join(f"tp2_{name}" for name in ("forward_ms", "backward_ms", "activation_mb", "parameter_mb")))


def test_of_layers_that_devices_share(here: Path, run: Callable[..., Any]) -> None:
    """What is changed is a group, and every plan compared shares its layers alike."""
    (here / "table.csv").write_text(SHARED)
    run("import", "table.csv")
    machine = ("--gpus", "4", "--bandwidth", "50GB/s", "--memory", "2GB")
    ran = run("solve", "table.profile.json", *machine, "--mini-batch", "4")
    assert "over 2 groups of 2 GPUs" in " ".join(ran.out.split())
    text = " ".join(run("explain", "table.plan.json").out.split())
    assert "one more group of 2 GPUs" in text
    assert "in all other plans here 2 devices share every layer, as in this one" in text


def test_layers_that_devices_share_are_not_advised_to_offload(here: Path, run: Callable[..., Any]) -> None:
    """It is not run: `solve --recompute offload` refuses it."""
    (here / "table.csv").write_text(SHARED)
    run("import", "table.csv")
    machine = ("--gpus", "4", "--tp", "2", "--gpu", "a100-40gb", "--mini-batch", "4", "--recompute", "always")
    run("solve", "table.profile.json", *machine)
    assert "offload" not in run("explain", "table.plan.json").out


def test_a_group_costs_as_much_as_its_devices(here: Path, run: Callable[..., Any]) -> None:
    (here / "table.csv").write_text(SHARED)
    run("import", "table.csv")
    machine = ("--gpus", "4", "--tp", "2", "--bandwidth", "50GB/s", "--memory", "9GB")
    run("solve", "table.profile.json", *machine, "--mini-batch", "4", "--objective", "cost", "--price", "3")
    plan = Plan.load(here / "table.plan.json")
    gpus = 2 * len({rank for stage in plan.stages for rank in stage.devices})
    assert plan.objective is not None
    assert plan.objective.value == pytest.approx(gpus * 3 / 3600 * plan.prediction.step_seconds / 4)


def test_several_stages_of_a_device_are_named_by_the_device() -> None:
    """A plan's tables number them one by one: "stage 3 is at work for 95 %" was said of the fourth device."""
    summary = PlanRow(
        step_seconds=1.0,
        samples_per_second=1.0,
        balance=[1] * 4,
        replicas=[1] * 4,
        devices=[[0], [1], [1], [0]],
        schedule="zb-v",
        virtual_stages=2,
        micro_batches=4,
        micro_batch_size=1,
        recompute="never",
        stage_recompute=["never"] * 4,
    )
    assert stage_name(summary, 1) == "device 1"
    pairs = summary.model_copy(update={"replicas": [2] * 4, "devices": [[0, 1], [2, 3], [2, 3], [0, 1]]})
    assert stage_name(pairs, 1) == "each of devices 2-3"
    assert stage_name(summary.model_copy(update={"virtual_stages": 1}), 3) == "stage 3"


def test_a_runner_up_that_nobody_looked_for_is_not_said_not_to_fit() -> None:
    assert (
        RunnerUp(differs="number of stages", plan=None, slower=None, proven=False).reason == "none was found"
    )
    assert (
        RunnerUp(differs="number of stages", plan=None, slower=None, proven=True).reason == "none is possible"
    )

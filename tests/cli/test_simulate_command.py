"""`pplan simulate`: what it prints and finds, of given costs and of plans, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cost_models import step_costs
from pplan.cost_models.errors import FileError
from pplan.cost_models.quantities import compare_steps
from pplan.cost_models.schedules import SCHEDULES
from pplan.planner.plan_file import Plan
from pplan.planner.plan_options import TRANSFERS
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]
Golden = Callable[[str, str], None]

EIGHT = "--stages 8 --micro-batches 24 --forward-ms 18.522 --backward-ms 18.086 --weight-ms 9.337"
ENDS = [("features.0", 0), ("classifier[2]", 2)]
"""Stages of the first and the last layer, which leave a GPU to each of three."""
SMALL = "--schedule 1f1b --stages 4 --micro-batches 6 --forward-ms 2 --backward-ms 4"


@pytest.fixture
def found(run: Run) -> Callable[..., dict[str, Any]]:
    """The JSON of `pplan simulate` with these arguments, one text or several."""

    def simulate(*arguments: str) -> dict[str, Any]:
        words = [word for text in arguments for word in text.split()]
        ran = run("simulate", *words, "--json")
        assert ran.status == 0, ran.err
        document: dict[str, Any] = json.loads(ran.out)
        return document

    return simulate


Found = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("costs", "rates"),
    [
        (EIGHT + " --transfer-ms 0.601", {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}),
        (
            "--stages 8 --micro-batches 32 --forward-ms 29.802 --backward-ms 29.428 --weight-ms 19.530 "
            "--transfer-ms .577",
            {"1f1b": 0.1898, "zb-h1": 0.1045, "zb-h2": 0.0559},
        ),
    ],
)
def test_the_rates_of_zero_bubble(found: Found, costs: str, rates: dict[str, float]) -> None:
    """Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, table 5, from the times of its table 9."""
    for schedule, rate in rates.items():
        assert round(found(f"--schedule {schedule}", costs)["bubble_rate_span"], 4) == rate


def test_closed_forms(found: Found) -> None:
    for stages, count in ((1, 1), (3, 5), (4, 8)):
        numbers = f"--stages {stages} --micro-batches {count} --forward-ms 2 --backward-ms 4"
        for schedule in ("gpipe", "1f1b"):
            made = found(f"--schedule {schedule}", numbers)
            assert made["step_seconds"] == pytest.approx((count + stages - 1) * 6e-3)
            assert made["bubble"] == pytest.approx((stages - 1) / (count + stages - 1))
            held = [count if schedule == "gpipe" else min(count, stages - i) for i in range(stages)]
            assert made["peak_in_flight"] == held
    made = found("--schedule interleaved --stages 4 --micro-batches 8 --forward-ms 2 --backward-ms 4")
    assert made["bubble"] == pytest.approx(3 / (2 * 8 + 3))
    assert made["peak_in_flight"] == [min(16, 2 * (3 - i) + 5) / 2 for i in range(4)]


def test_the_times_of_a_stage_sum_to_the_step(found: Found) -> None:
    for schedule in SCHEDULES:
        made = found(
            f"--schedule {schedule} --stages 4 --micro-batches 8 --forward-ms 2,3,2,1 --backward-ms 3,2,2,4",
            "--weight-ms 1 --transfer-ms 0.5",
        )
        assert (made["schema"], made["schedule"], made["micro_batches"]) == (1, schedule, 8)
        for stage in made["stages"]:
            names = ("compute", "transfer", "warm_up_cool_down", "imbalance", "update")
            seconds = sum(stage[f"{name}_seconds"] for name in names)
            assert seconds == pytest.approx(made["step_seconds"], rel=1e-9)
            assert stage["memory_bytes"] is None
        computed = sum(stage["compute_seconds"] for stage in made["stages"])
        assert made["bubble"] == pytest.approx(1 - computed / 4 / made["step_seconds"])
        assert len(made["peak_in_flight"]) == len(made["weight_versions"]) == len(made["staleness"]) == 4
        assert (made["steady_seconds"] is None) is SCHEDULES[schedule].synchronous


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_are_not_called_unequal(found: Found, schedule: str) -> None:
    costs = "--forward-ms 10 --backward-ms 10 --weight-ms 10"
    equal = found(f"--schedule {schedule} --stages 4 --micro-batches 8", costs)
    assert [stage["imbalance_seconds"] for stage in equal["stages"]] == pytest.approx([0] * 4, abs=1e-12)
    assert any(stage["warm_up_cool_down_seconds"] > 0 for stage in equal["stages"])


def test_stages_wait_for_the_busiest(found: Found) -> None:
    """1F1B, 4 micro-batches. Stage 1 works 4 x 6 ms with 3 ms before and after; stage 0 works 12 ms."""
    slow = found("--schedule 1f1b --stages 2 --micro-batches 4 --forward-ms 1,2 --backward-ms 2,4")
    assert slow["step_seconds"] == pytest.approx(27e-3)
    assert [stage["imbalance_seconds"] for stage in slow["stages"]] == pytest.approx([12e-3, 0])
    assert [stage["warm_up_cool_down_seconds"] for stage in slow["stages"]] == pytest.approx([3e-3, 3e-3])


def test_asynchronous_schedules(found: Found) -> None:
    costs = "--stages 4 --micro-batches 8 --forward-ms 2,3,2,2 --backward-ms 4"
    made = found("--schedule pipedream", costs)
    assert made["weight_versions"] == [4, 3, 2, 1]
    assert made["staleness"] == [3, 2, 1, 0]
    assert made["steady_seconds"] == pytest.approx(7e-3)
    made = found("--schedule pipedream-2bw", costs)
    assert (made["weight_versions"], made["staleness"]) == ([2] * 4, [1] * 4)
    assert made["steady_seconds"] == pytest.approx(7e-3)


def test_actions(found: Found) -> None:
    made = found(SMALL, "--transfer-ms 0.5 --actions")
    assert len(made["actions"]) == 2 * 4 * 6
    assert len(made["transfers"]) == 2 * 3 * 6
    for stage in range(4):
        own = [action for action in made["actions"] if action["stage"] == stage]
        assert all(a["end_seconds"] <= b["start_seconds"] for a, b in pairwise(own))
        assert {(a["kind"], a["micro_batch"], a["chunk"]) for a in own} == {
            (kind, m, 0) for kind in "FB" for m in range(6)
        }
    ends = {(a["stage"], a["kind"], a["micro_batch"]): a["end_seconds"] for a in made["actions"]}
    for sent in made["transfers"]:
        assert sent["start_seconds"] == ends[sent["stage"], sent["kind"], sent["micro_batch"]]
        assert sent["end_seconds"] - sent["start_seconds"] == pytest.approx(5e-4)
    assert found(SMALL)["actions"] is None


def test_a_schedule_that_does_not_split_takes_both_backwards(found: Found) -> None:
    split = found("--schedule 1f1b", EIGHT)
    whole = found("--schedule 1f1b", EIGHT.replace("18.086 --weight-ms 9.337", "27.423"))
    assert split["step_seconds"] == pytest.approx(whole["step_seconds"], rel=1e-12)
    assert any("together" in note for note in split["notes"])


def test_chunks_share_the_costs_of_their_stage(found: Found) -> None:
    made = found(
        "--schedule interleaved --virtual-stages 3 --stages 2 --micro-batches 4 --forward-ms 3,6",
        "--backward-ms 9 --actions",
    )
    seconds = {(a["stage"], a["kind"]): a["end_seconds"] - a["start_seconds"] for a in made["actions"]}
    wanted = {(0, "F"): 1e-3, (1, "F"): 2e-3, (0, "B"): 3e-3, (1, "B"): 3e-3}
    assert seconds == pytest.approx(wanted)
    assert made["virtual_stages"] == 3
    assert any("equal part" in note for note in made["notes"])


def test_transfers_by_boundary(found: Found) -> None:
    base = "--schedule gpipe --stages 3 --micro-batches 1 --forward-ms 1 --backward-ms 1"
    assert found(base, "--transfer-ms 1,3")["step_seconds"] == pytest.approx(14e-3)
    assert found(base, "--transfer-ms 1,3,9")["step_seconds"] == pytest.approx(14e-3)
    looped = base.replace("gpipe", "looped-bfs").replace("--forward-ms 1 --backward-ms 1", "")
    made = found(looped, "--forward-ms 2 --backward-ms 2 --transfer-ms 1,3,9")
    assert made["step_seconds"] == pytest.approx((12 + 2 * (1 + 3 + 9 + 1 + 3)) * 1e-3)
    folded = base.replace("gpipe", "zb-v").replace("--forward-ms 1 --backward-ms 1", "--weight-ms 0")
    made = found(folded, "--forward-ms 2 --backward-ms 2 --transfer-ms 1,3")
    assert made["step_seconds"] == pytest.approx((12 + 4 * (1 + 3)) * 1e-3)


def test_transfers_that_block(found: Found) -> None:
    """Two stages, one micro-batch after another: all wait for all. Three: stage 0 sends F0 before F1."""
    assert TRANSFERS == step_costs.TRANSFERS
    one = "--schedule gpipe --stages 2 --micro-batches 1 --forward-ms 2 --backward-ms 4 --transfer-ms 1"
    for transfers in TRANSFERS:
        assert found(one, f"--transfers {transfers}")["step_seconds"] == pytest.approx(14e-3)
    three = one.replace("--micro-batches 1", "--micro-batches 3")
    # Overlapped: (3 + 1) (2 + 4) + 2. A sender that waits loses two transfers more each way.
    assert found(three)["step_seconds"] == pytest.approx(26e-3)
    made = found(three, "--transfers blocking")
    assert made["step_seconds"] == pytest.approx(30e-3)
    assert made["notes"] == ["transfers are blocking"]


def test_transfers_of_a_plan_that_block(found: Found, planned: Plan) -> None:
    del planned
    link = "--bandwidth 1MB/s --latency 1ms"
    overlapped, blocking = (found(link, f"--transfers {word}") for word in ("overlapped", "blocking"))
    assert blocking["plan_step_seconds"] == pytest.approx(overlapped["step_seconds"])
    assert blocking["step_seconds"] > overlapped["step_seconds"]
    assert "transfers are blocking" in blocking["notes"]


def test_values_a_stage_tell_their_number(found: Found) -> None:
    made = found("--schedule 1f1b --micro-batches 4 --forward-ms 1,2,3 --backward-ms 2")
    assert len(made["stages"]) == 3


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        ("--schedule zbh1", "--schedule zbh1: not known", "Did you mean zb-h1?"),
        ("--stages 0", "--stages 0: must be at least 1", "--stages 8"),
        ("--stages two", "--stages two: is not a whole number", "--stages 8"),
        ("--micro-batches -1", "--micro-batches -1: must be at least 1", "--micro-batches 8"),
        ("--virtual-stages 0", "--virtual-stages 0: must be at least 1", "--virtual-stages 8"),
        ("--virtual-stages 2", "--virtual-stages 2: 1f1b runs 1 on a device", "interleaved"),
        ("--forward-ms -1", "--forward-ms -1: -1 must not be negative", "Give milliseconds"),
        ("--forward-ms nan", "--forward-ms nan: 'nan' is not a number", "--forward-ms 18.5"),
        ("--forward-ms 2,,3", "--forward-ms 2,,3: '' is not a number", "--forward-ms 18.5"),
        ("--backward-ms 1e400", "--backward-ms 1e400: 1e400 must be at most 1000000000", "--backward-ms"),
        ("--transfer-ms 5us", "--transfer-ms 5us: '5us' is not a number", "milliseconds"),
        ("--forward-ms 1,2,3", "--forward-ms 1,2,3: 3 values for 4 stages", "one for each stage: 4"),
        ("--transfer-ms 1,2", "--transfer-ms 1,2: 2 values for 4 stages", "each of the 3 boundaries"),
        ("--schedule zb-h1", "--weight-ms is missing", "--backward-ms is then the gradient of the input"),
        ("--schedule chimera --stages 5", "--stages 5: chimera needs an even number", "Use 4 or 6."),
        ("--schedule interleaved", "--micro-batches 6: interleaved needs a multiple", "Use 4 or 8."),
        (
            "--schedule looped-bfs --transfer-ms 1,2,3",
            "--transfer-ms: 3 values, and the schedule sends from the last stage",
            "Give 4 values",
        ),
        ("--forward-ms 0 --backward-ms 0", "--forward-ms and --backward-ms are 0", "above 0"),
        ("--micro-batches 9999999", "--stages 4 and --micro-batches 9999999", "Use fewer"),
        (
            "--schedule pipedream --stages 9999 --micro-batches 1",
            "--stages 9999: the steady state shows after 79992 micro-batches",
            "Use fewer stages",
        ),
        ("--actions", "simulate --actions: without --json", "pplan simulate --json --actions"),
        ("--profile a.json", "simulate: both --profile a.json and costs", "omit one of the two"),
        ("--bandwidth 1GB/s", "simulate: both --bandwidth 1GB/s and costs", "omit one of the two"),
        ("a.plan.json", "simulate: both PLAN a.plan.json and costs", "omit one of the two"),
        ("--trace no/t.json", "no/t.json: the folder no does not exist", "another place with --trace"),
        ("--trace .", ".: is a folder", "Name a file."),
        ("--plot a.svg --trace a.svg", "--trace and --plot a.svg: the same file", "Name two files."),
    ],
)
def test_what_cannot_be(run: Run, options: str, what: str, hint: str) -> None:
    ran = run("simulate", *SMALL.split(), *options.split())
    assert (ran.status, ran.out) == (2, "")
    first, second = ran.lines
    assert first.startswith(f"pplan: {what}")
    assert hint in second


@pytest.mark.parametrize("missing", ["schedule", "stages", "micro-batches", "forward-ms", "backward-ms"])
def test_costs_need_these(run: Run, missing: str) -> None:
    words = SMALL.split()
    at = words.index(f"--{missing}")
    ran = run("simulate", *words[:at], *words[at + 2 :])
    assert ran.status == 2
    assert ran.lines[0] == f"pplan: --{missing} is missing"
    assert f"--{missing} " in ran.lines[1]


@pytest.mark.parametrize("width", [110, 80, 40])
def test_what_is_printed(run: Run, golden: Golden, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    ran = run("simulate", *SMALL.split(), "--transfer-ms", "0.5")
    assert (ran.status, ran.err) == (0, "")
    golden(f"simulate_{width}.txt", ran.out)


def test_an_asynchronous_schedule_printed(run: Run, golden: Golden) -> None:
    ran = run("simulate", *SMALL.replace("1f1b", "pipedream").split())
    golden("simulate_pipedream.txt", ran.out)


@pytest.fixture
def planned(here: Path, profile: Profile, solve_once: Callable[..., Plan]) -> Plan:
    """A plan of three stages and its profile, as files."""
    profile.save(here / "toy.profile.json", force=False)
    plan = solve_once(
        Path("toy.profile.json"), gpus=3, mini_batch=32, micro_batches=8, schedule="1f1b", pins=ENDS
    )
    plan.save(here / "toy.plan.json", force=False)
    assert plan.replicas == [1, 1, 1]
    return plan


def test_a_plan_as_it_is(found: Found, planned: Plan) -> None:
    made = found("toy.plan.json")
    assert made["step_seconds"] == pytest.approx(planned.prediction.step_seconds, rel=1e-12)
    assert made["samples_per_second"] == pytest.approx(planned.prediction.samples_per_second)
    assert (made["schedule"], made["micro_batches"], made["plan"]) == ("1f1b", 8, "toy.plan.json")
    assert made["plan_step_seconds"] is None
    assert made["notes"] == []
    for own, stage in zip(made["stages"], planned.stages, strict=True):
        assert own["layers"] == [[stage.first_layer, stage.last_layer]]
        assert own["memory_bytes"] == pytest.approx(stage.memory_bytes, abs=10)
        assert own["memory_bytes"] == sum(own["memory"].values())
        assert own["memory_limit_bytes"] == stage.memory_limit_bytes


def test_the_newest_plan(run: Run, planned: Plan) -> None:
    del planned
    ran = run("simulate")
    assert ran.status == 0
    assert ran.lines == ["Using toy.plan.json (newest plan in this directory)"]


def test_no_plan(run: Run) -> None:
    ran = run("simulate")
    assert ran.status == 2
    assert ran.lines == [
        "pplan: no plan named, and no *.plan.json in this directory",
        "  Name one, or make one first, as in: pplan solve --gpus 8; or give costs: --forward-ms 18.5 "
        "--backward-ms 37",
    ]


def test_a_plan_overridden(found: Found, planned: Plan) -> None:
    made = found("toy.plan.json --schedule zb-h1 --micro-batches 4 --stages 4")
    assert (made["schedule"], made["micro_batches"], len(made["stages"])) == ("zb-h1", 4, 4)
    assert made["plan_step_seconds"] == pytest.approx(planned.prediction.step_seconds)
    assert [note.split()[1] for note in made["notes"]] == ["layers", "profile", "profile"]


def test_against_the_plan_stands_what_a_global_batch_takes(run: Run, found: Found, planned: Plan) -> None:
    """Under a schedule that is never flushed that is not the time of one batch, filled and drained."""
    made = found("toy.plan.json --schedule pipedream-2bw")
    each = planned.mini_batch / made["samples_per_second"]
    assert each < made["step_seconds"] * 0.99
    said = compare_steps(each, planned.prediction.step_seconds)
    ran = run("simulate", "--schedule", "pipedream-2bw", "toy.plan.json")
    assert f": in the steady state this is {said}.\n" in ran.out


def test_a_plan_that_is_never_flushed_takes_what_it_says(run: Run, found: Found, planned: Plan) -> None:
    del planned
    options = "--gpus 3 --mini-batch 32 --objective throughput --bandwidth 1GB/s -o late.plan.json"
    assert run("solve", "toy.profile.json", *options.split()).status == 0
    late = Plan.load(Path("late.plan.json"))
    assert late.schedule == "pipedream-2bw"
    made = found("late.plan.json --schedule 1f1b")
    assert made["plan_step_seconds"] == pytest.approx(late.prediction.step_seconds, rel=1e-9)


def test_a_plan_overridden_printed(run: Run, planned: Plan, golden: Golden) -> None:
    del planned
    ran = run("simulate", "--schedule", "interleaved", "--stages", "2")
    golden("simulate_plan.txt", ran.out)


def test_another_machine_than_the_plans(found: Found, planned: Plan) -> None:
    made = found("toy.plan.json --bandwidth 10MB/s --latency 1ms")
    assert made["step_seconds"] > planned.prediction.step_seconds
    (note,) = made["notes"]
    assert planned.topology in note
    assert "--topology" not in note


def test_options_change_the_plans_own_machine(run: Run, found: Found, here: Path, planned: Plan) -> None:
    """What is not named stays as the plan has it: here 100 MB/s without latency, and not a T4 server's."""
    del planned
    toml = "[[level]]\nname = 'node'\nsize = 4\nbandwidth = '100MB/s'\nlatency = '1ms'\n"
    (here / "slow.toml").write_text(toml)
    solved = "solve toy.profile.json --gpus 3 --mini-batch 32 --micro-batches 8 --schedule 1f1b"
    ran = run(*solved.split(), "--topology", "slow.toml", "-o", "slow.plan.json")
    assert ran.status == 0
    made = found("slow.plan.json --latency 0us")
    same = found("slow.plan.json --topology slow.toml --latency 0us")
    other = found("slow.plan.json --bandwidth 100MB/s --latency 0us")
    assert made["step_seconds"] == same["step_seconds"] == other["step_seconds"]
    assert made["step_seconds"] < found("slow.plan.json")["step_seconds"]
    small = found("slow.plan.json --memory 1GiB")
    assert small["step_seconds"] == found("slow.plan.json")["step_seconds"]
    assert {stage["memory_limit_bytes"] for stage in small["stages"]} == {2**30}


def test_a_plan_for_another_machine(found: Found, here: Path, planned: Plan) -> None:
    del planned
    plan = pplan.solve("toy.profile.json", gpus=3, bandwidth=1e8, mini_batch=32, micro_batches=8, pins=ENDS)
    plan.save(here / "toy.plan.json", force=True)
    made = found("toy.plan.json")
    assert made["step_seconds"] == pytest.approx(plan.prediction.step_seconds, rel=1e-12)
    assert made["notes"] == []
    plan.model_copy(update={"machine": ""}).save(here / "toy.plan.json", force=True)
    (note,) = found("toy.plan.json")["notes"]
    assert "name that with `topology`, `gpu`, `bandwidth` or `latency`" in note
    made = found("toy.plan.json --bandwidth 100MB/s")
    assert made["step_seconds"] == pytest.approx(plan.prediction.step_seconds, rel=1e-12)
    assert made["notes"] == []


def test_the_profile_must_be_the_plans(run: Run, here: Path, planned: Plan) -> None:
    del planned
    other = here / "else"
    other.mkdir()
    (here / "toy.profile.json").rename(other / "moved.json")
    ran = run("simulate", "toy.plan.json")
    assert ran.status == 2
    assert ran.lines[0] == ("pplan: toy.plan.json: was made from toy.profile.json, which is not beside it")
    assert "--profile" in ran.lines[1]
    assert run("simulate", "toy.plan.json", "--profile", "else/moved.json").status == 0
    (other / "moved.json").write_text((other / "moved.json").read_text() + " ")
    ran = run("simulate", "toy.plan.json", "--profile", "else/moved.json")
    assert ran.status == 2
    assert ran.lines[0].startswith(
        "pplan: else/moved.json: is not the profile that toy.plan.json was made from (SHA-256 "
    )


def test_a_kind_of_device_with_a_profile_of_its_own(run: Run, here: Path, planned: Plan) -> None:
    """Relative to the topology's file; the one here takes ten times as long."""
    del planned
    folder = here / "machines"
    folder.mkdir()
    (folder / "mixed.toml").write_text(
        '[[device]]\nname = "a"\ncount = 1\n[[device]]\nname = "b"\ncount = 2\nprofile = "b.profile.json"\n'
    )
    ran = run("simulate", "--topology", "machines/mixed.toml", "--json")
    assert ran.status == 2
    assert ran.lines[-2].startswith("pplan: machines/b.profile.json: no such file; the topology says that")
    content = json.loads((here / "toy.profile.json").read_text())
    for layer in content["layers"]:
        for cost in layer["costs"]:
            cost["forward_seconds"] *= 10
            cost["backward_seconds"] *= 10
    (folder / "b.profile.json").write_text(json.dumps(content))
    plain = json.loads(run("simulate", "--json").out)["stages"]
    mixed = json.loads(run("simulate", "--topology", "machines/mixed.toml", "--json").out)["stages"]
    for factor, own, other in zip((1, 10, 10), plain, mixed, strict=True):
        assert other["compute_seconds"] == pytest.approx(factor * own["compute_seconds"])
    slow = pplan.simulate("toy.plan.json", "toy.profile.json", topology="machines/mixed.toml")
    assert slow.busy_seconds == pytest.approx([own["compute_seconds"] for own in mixed])


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("--stages 12", "--stages 12: the allowed cuts make at most 11 parts"),
        ("--micro-batches 5", "--micro-batches 5: does not divide the global batch of 32"),
        ("--schedule chimera", "--stages 3: chimera needs an even number"),
        ("--bandwidth 3", "--bandwidth 3: the unit is missing"),
    ],
)
def test_what_a_plan_cannot_be(run: Run, planned: Plan, options: str, what: str) -> None:
    del planned
    ran = run("simulate", "toy.plan.json", *options.split())
    assert (ran.status, ran.out) == (2, "")
    assert ran.lines[0].startswith(f"pplan: {what}")
    assert len(ran.lines) == 2


def test_nothing_is_written_where_further_micro_batches_hang(run: Run, here: Path) -> None:
    """The first round of WPipe runs with rendezvous; the next, which its steady state needs, does not."""
    options = "--schedule wpipe --stages 4 --micro-batches 4 --forward-ms 1 --backward-ms 2"
    ran = run("simulate", *options.split(), "--transfers", "rendezvous", "--trace", "t.json")
    assert (ran.status, ran.out) == (2, "")
    first, _ = ran.lines
    assert first.startswith("pplan: with rendezvous transfers the stages wait for each other")
    assert list(here.iterdir()) == []


def test_files_are_not_replaced_unasked(run: Run, here: Path) -> None:
    (here / "t.svg").write_text("<svg>mine</svg>")
    ran = run("simulate", *SMALL.split(), "--plot", "t.svg")
    assert (ran.status, ran.out) == (2, "")
    assert ran.lines == [
        "pplan: t.svg exists already",
        "  Give --force to replace it, or another name.",
    ]
    ran = run("simulate", *SMALL.split(), "--plot", "t.svg", "--force")
    assert (ran.status, ran.lines) == (0, ["Wrote t.svg"])
    assert "mine" not in (here / "t.svg").read_text()


def test_a_plan_is_not_replaced_by_its_picture(run: Run, planned: Plan) -> None:
    del planned
    ran = run("simulate", "toy.plan.json", "--trace", "toy.profile.json", "--force")
    assert ran.status == 2
    assert ran.lines[0] == "pplan: toy.profile.json: would overwrite what it is made from"


def test_what_was_found_is_printed_where_a_file_cannot_be_written(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str, *, force: bool) -> None:  # noqa: ARG001 - as write_whole
        if path.suffix == ".svg":
            raise FileError(f"{path}: cannot be written: full", "Name another place with -o.")
        path.write_text(text)

    monkeypatch.setattr("pplan.cli.simulate_tables.write_whole", full)
    ran = run("simulate", *SMALL.split(), "--plot", "t.svg", "--trace", "t.json")
    assert ran.status == 2
    assert ran.out.startswith("1f1b, 4 stages, 6 micro-batches: ")
    assert ran.lines == [
        "Wrote t.json",
        "pplan: t.svg: cannot be written: full",
        "  Name another place with --plot.",
    ]


def test_the_python_api_finds_the_same(here: Path, profile: Profile, run: Run) -> None:
    profile.save(here / "a.profile.json", force=False)
    made = pplan.solve(here / "a.profile.json", gpus=4, schedule="1f1b", mini_batch=16, micro_batches=4)
    made.save(here / "a.plan.json", force=False)
    asked = {"schedule": "zb-h1", "micro_batches": 8, "stages": 2}
    for overrides in ({}, asked, {"schedule": "interleaved", "stages": 2, "virtual_stages": 2}):
        found = pplan.simulate("a.plan.json", "a.profile.json", **overrides)  # type: ignore[arg-type]
        options = [
            word for name, value in overrides.items() for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        printed = json.loads(run("simulate", *options, "--json").out)
        assert found.step_seconds == printed["step_seconds"]
        assert list(found.peak_in_flight) == printed["peak_in_flight"]
    assert pplan.simulate(made, profile).step_seconds == pytest.approx(made.prediction.step_seconds)
    slow = pplan.simulate(made, profile, topology="dgx-a100")
    assert slow.step_seconds != made.prediction.step_seconds

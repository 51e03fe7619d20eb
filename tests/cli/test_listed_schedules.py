"""`pplan simulate --list`: every schedule with what is known of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.cost_models.schedules import SCHEDULES
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]
Golden = Callable[[str, str], None]


@pytest.mark.parametrize("width", [110, 80, 40])
def test_the_table(run: Run, golden: Golden, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    ran = run("simulate", "--list")
    assert (ran.status, ran.err) == (0, "")
    golden(f"schedules_{width}.txt", ran.out)


def test_json(run: Run) -> None:
    made = {own["name"]: own for own in json.loads(run("simulate", "--list", "--json").out)}
    assert list(made) == list(SCHEDULES)
    assert all(own["source"] and own["needs"] and own["bubble"] and own["in_flight"] for own in made.values())
    assert made["1f1b"]["runtimes"] == [
        "deepspeed",
        "torch",
        "megatron",
        "megatron-bridge",
        "torchtitan",
        "nemo-automodel",
    ]
    assert (made["pipedream"]["weight_versions"], made["pipedream"]["staleness"]) == ("p-i", "p-1-i")
    assert (made["pipedream-2bw"]["weight_versions"], made["pipedream-2bw"]["staleness"]) == ("2", "1")
    assert made["chimera"]["copies"] == 2
    assert [name for name, own in made.items() if not own["synchronous"]] == [
        "pipedream",
        "pipedream-2bw",
        "wpipe",
        "xpipe",
    ]
    assert made["interleaved"]["virtual_stages"] == 2


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        ("--list --schedule zbv", "--schedule zbv: not known", "zb-v"),
        (
            "--list --stages 3",
            "simulate --list: both --stages 3 and all",
            "--list --schedule zb-h1 --stages 3",
        ),
        ("--list --text", "simulate --text: of which schedule?", "--list --schedule zb-h1 --text"),
        ("--text", "simulate --text: of which schedule?", "--list --schedule zb-h1 --text"),
        ("--list --schedule zb-h1 --json", "simulate --list --schedule: with --json", "--text"),
        ("--list plan.json", "simulate: both PLAN plan.json and --list", "omit it"),
        ("--list --forward-ms 3", "simulate: both --forward-ms 3 and --list", "omit it"),
        ("--list --gpu h100", "simulate: both --gpu h100 and --list", "omit it"),
        ("--list --plot a.svg", "simulate: both --plot a.svg and --list", "omit it"),
        ("--list --actions", "simulate: both --actions and --list", "omit it"),
    ],
)
def test_other_options_are_refused(run: Run, words: str, what: str, hint: str) -> None:
    ran = run("simulate", *words.split())
    assert (ran.status, len(ran.lines)) == (2, 2)
    assert ran.lines[0].startswith(f"pplan: {what}")
    assert hint in ran.lines[1]


def test_one_is_drawn(run: Run) -> None:
    ran = run("simulate", "--list", "--schedule", "zb-h1", "--stages", "3", "--micro-batches", "4")
    assert (ran.status, ran.err) == (0, "")
    rows = [line.split()[2] for line in ran.out.splitlines() if line.startswith("stage ")]
    words = [re.findall(r"[FBW]\d", row) for row in rows]
    assert words == [[str(action) for action in own] for own in SCHEDULES["zb-h1"].actions(3, 4)]
    assert ran.out.rstrip().endswith("in flight 3, 3, 3.")


def test_the_bubble_of_one_is_that_of_its_formula(run: Run) -> None:
    """ZB-H2's and ZB-V's are 0: no stage is idle between its first and its last action, but they begin one
    after the other."""
    for name, idle in (("zb-h2", "11.8"), ("zb-v", "6.2")):
        out = run("simulate", "--list", "--schedule", name, "--stages", "3", "--micro-batches", "5").out
        line = next(line for line in out.splitlines() if line.startswith("Bubble "))
        assert line.startswith(f"Bubble {idle} % of all stages' time; 0.0 % of the longest span of a stage")


def test_ones_text_starts_an_own_one(run: Run, here: Path) -> None:
    text = run(
        "simulate", "--list", "--schedule", "zb-v", "--stages", "2", "--micro-batches", "4", "--text"
    ).out
    (here / "own.schedule").write_text(text, encoding="utf-8")
    costs = [
        "--stages",
        "2",
        "--micro-batches",
        "4",
        "--forward-ms",
        "1",
        "--backward-ms",
        "1",
        "--weight-ms",
        "1",
        "--json",
    ]
    own, published = (
        json.loads(run("simulate", "--schedule", name, *costs).out) for name in ("own.schedule", "zb-v")
    )
    assert own["schedule"] == "my-zb-v"
    for key in ("step_seconds", "bubble", "stages"):
        assert own[key] == published[key]


@pytest.mark.slow
def test_an_own_one_is_planned_with(run: Run, here: Path, profile: Profile) -> None:
    profile.save(here / "toy.profile.json", force=False)
    (here / "own.schedule").write_text(
        "name: own\ndevice i: F*(p-i) (B F)*m  # 1F1B, one deeper\n", encoding="utf-8"
    )
    ran = run("solve", "--gpus", "2", "--schedule", "own.schedule", "--json")
    plan = json.loads(ran.out)
    assert plan["schedule"] == "own"
    assert plan["order"][0] == "name: own"
    assert len([line for line in plan["order"] if line.startswith("device")]) == len(plan["stages"])

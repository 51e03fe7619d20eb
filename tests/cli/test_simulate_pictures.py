"""The Chrome trace and the figure of a simulated step, read back."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cost_models.program import Action
from pplan.cost_models.schedules import SCHEDULES
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]
Event = dict[str, Any]

COSTS = "--stages 4 --micro-batches 8 --forward-ms 2,3,2,1 --backward-ms 3.1 --weight-ms 1"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def traced(run: Run, here: Path) -> Callable[..., tuple[dict[str, Any], list[Event]]]:
    """The JSON and the events of `pplan simulate` with these arguments."""

    def simulate(arguments: str) -> tuple[dict[str, Any], list[Event]]:
        words = arguments.split()
        ran = run("simulate", *words, "--trace", "t.json", "--force", "--json", "--actions")
        assert (ran.status, ran.lines[-1]) == (0, "Wrote t.json"), ran.err
        content = json.loads((here / "t.json").read_text())
        assert content["displayTimeUnit"] == "ms"
        return json.loads(ran.out), content["traceEvents"]

    return simulate


Traced = Callable[..., tuple[dict[str, Any], list[Event]]]


def _names(events: list[Event], what: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event.get("tid", 0)): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == what
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transfer", ["0", "0.7", "9"])
def test_a_trace_is_what_was_simulated(traced: Traced, schedule: str, transfer: str) -> None:
    made, events = traced(f"--schedule {schedule} {COSTS} --transfer-ms {transfer}")
    threads = _names(events, "thread_name")
    slices = [event for event in events if event["ph"] == "X"]
    computed = [event for event in slices if event["pid"] == 1]
    assert [
        (event["tid"], event["cat"][0].upper(), event["args"]["micro_batch"], event["args"]["chunk"])
        for event in computed
    ] == [(a["stage"], a["kind"], a["micro_batch"], a["chunk"]) for a in made["actions"]]
    for event, action in zip(computed, made["actions"], strict=True):
        assert event["ts"] == pytest.approx(1e6 * action["start_seconds"], abs=1e-3)
        assert event["ts"] + event["dur"] == pytest.approx(1e6 * action["end_seconds"], abs=1e-3)
    sent = [event for event in slices if event["pid"] == 2]
    assert len(sent) == (len(made["transfers"]) if transfer != "0" else 0)
    assert sorted(
        (threads[2, event["tid"]].split(",")[0], event["name"].split()[1], round(event["ts"]))
        for event in sent
    ) == sorted(
        (
            f"{t['stage']} to {t['to_stage']}",
            str(Action(t["kind"], t["micro_batch"], t["chunk"])),
            round(1e6 * t["start_seconds"]),
        )
        for t in made["transfers"]
        if transfer != "0"
    )
    assert all(event["dur"] == pytest.approx(1e3 * float(transfer)) for event in sent)
    by_thread = defaultdict(list)
    for event in slices:
        by_thread[event["pid"], event["tid"]].append(event)
    for own in by_thread.values():
        ordered = sorted(own, key=lambda event: event["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(ordered))
    assert set(by_thread) <= set(threads)


def test_arrows_start_and_end_in_slices(traced: Traced) -> None:
    made, events = traced(f"--schedule interleaved {COSTS} --transfer-ms 0.7")
    slices = [event for event in events if event["ph"] == "X"]

    def lies_in(event: Event) -> Event:
        (found,) = [
            s
            for s in slices
            if (s["pid"], s["tid"]) == (event["pid"], event["tid"])
            and s["ts"] <= event["ts"] < s["ts"] + s["dur"]
        ]
        return found

    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    assert len(flows) == len(made["transfers"])
    for own in flows.values():
        assert [event["ph"] for event in own] == ["s", "t", "f"]
        assert own[2]["bp"] == "e"
        here, between, there = map(lies_in, own)
        assert here["ts"] + here["dur"] <= between["ts"] + 1e-6
        assert between["ts"] + between["dur"] <= there["ts"] + 1e-6
        assert here["args"]["micro_batch"] == between["args"]["micro_batch"] == there["args"]["micro_batch"]
        assert here["cat"] == there["cat"]


def test_counters_show_what_is_in_flight(traced: Traced) -> None:
    made, events = traced(f"--schedule zb-v {COSTS}")
    counts = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counts[event["name"]].append(event)
    assert list(counts) == [f"in flight of stage {stage}" for stage in range(4)]
    for own, peak in zip(counts.values(), made["peak_in_flight"], strict=True):
        levels = [event["args"]["micro-batches"] for event in own]
        assert max(levels) == pytest.approx(peak)
        assert (levels[0], levels[-1]) == (0, 0)
        assert all(a["ts"] <= b["ts"] for a, b in pairwise(own))


def test_counters_of_a_plan_are_bytes(traced: Traced, here: Path, profile: Profile) -> None:
    profile.save(here / "toy.profile.json", force=False)
    plan = pplan.solve("toy.profile.json", gpus=3, mini_batch=32, micro_batches=8, schedule="1f1b")
    plan.save(here / "toy.plan.json", force=False)
    made, events = traced("toy.plan.json")
    for stage, own in enumerate(made["stages"]):
        counted = [event for event in events if event["name"] == f"memory of stage {stage}"]
        levels = [event["args"]["bytes"] for event in counted]
        over_time = own["memory_over_time"]
        assert [second for second, _ in over_time] == pytest.approx(
            [1e-6 * e["ts"] for e in counted], abs=1e-9
        )
        assert [level for _, level in over_time] == pytest.approx(levels)
        assert sum(own["memory"].values()) == own["memory_bytes"]
        assert max(levels) == pytest.approx(own["memory_bytes"], abs=1)
        assert levels[0] == levels[-1] > 0


def test_replicas_reduce_on_threads_of_their_own(traced: Traced, here: Path, profile: Profile) -> None:
    profile.save(here / "toy.profile.json", force=False)
    plan = pplan.solve("toy.profile.json", gpus=2, mini_batch=32)
    assert plan.replicas == [2]
    plan.save(here / "toy.plan.json", force=False)
    made, events = traced("toy.plan.json")
    assert list(_names(events, "thread_name").values()) == ["stage 0", "all-reduce of stage 0"]
    (reduced,) = [event for event in events if event.get("cat") == "all-reduce"]
    assert reduced["ts"] + reduced["dur"] == pytest.approx(1e6 * made["step_seconds"], abs=1e-2)


@pytest.mark.parametrize("ending", ["pdf", "png", "svg"])
def test_a_figure_is_written(run: Run, here: Path, ending: str) -> None:
    costs = "--stages 4 --micro-batches 8 --forward-ms 10 --backward-ms 10 --weight-ms 10"
    words = f"--schedule 1f1b {costs} --plot-schedules gpipe,zb-h1 --title T --size 5x4 --greyscale".split()
    ran = run("simulate", *words, "--plot", f"t.{ending}", "--font-size", "7", "--colour-by", "micro-batch")
    assert (ran.status, ran.err) == (0, f"Wrote t.{ending}\n")
    start = (here / f"t.{ending}").read_bytes()[:10]
    assert start.startswith({"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}[ending])
    if ending == "svg":
        texts = [own.text for own in ET.parse(here / "t.svg").getroot().iter(f"{SVG}text")]
        assert [text for text in texts if text and ": " in text and "bubble" in text] == [
            f"{name}: {seconds}, bubble {bubble}"
            for name, seconds, bubble in (
                ("1f1b", "330 ms", "27.3 %"),
                ("gpipe", "330 ms", "27.3 %"),
                ("zb-h1", "270 ms", "11.1 %"),
            )
        ]
        assert "T" in texts


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--plot t.jpg", "--plot t.jpg: ends in none of .pdf, .png and .svg"),
        ("--plot t", "--plot t: ends in none of .pdf, .png and .svg"),
        ("--greyscale", "options of a figure without --plot"),
        ("--plot t.svg --size 5", "--size"),
        ("--plot t.svg --font-size big", "--font-size big: not a number of points"),
        ("--plot t.svg --font-size 99", "not 3 to 40 points"),
        ("--plot t.svg --colour-by stage", "--colour-by stage: is not one of action, micro-batch"),
        ("--plot t.svg --plot-schedules 1f2b", "1f2b"),
    ],
)
def test_a_figure_that_cannot_be(run: Run, here: Path, words: str, what: str) -> None:
    ran = run("simulate", "--schedule", "1f1b", *COSTS.split(), *words.split())
    assert ran.status == 2
    assert what in ran.err
    assert not list(here.glob("t.*"))


def test_a_figure_needs_matplotlib(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = run("simulate", "--schedule", "1f1b", *COSTS.split(), "--plot", "t.svg")
    assert ran.status == 2
    assert "pip install 'pplan[plot]'" in ran.err
    assert not (here / "t.svg").exists()

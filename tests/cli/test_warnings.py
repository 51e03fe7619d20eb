"""What may make an answer wrong stands right under it and as `warnings` in the file; the rest is a note."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.profiler.profile_file import WAITED, Profile, closing_warning, list_notes, list_warnings

TOPOLOGY = Topology((Group(Device("toy", None), 2),), (Level("node", None, Link(1e9, 0.0)),))

Run = Callable[..., Any]


@pytest.fixture
def doubtful(profile: Profile, here: Path) -> Profile:
    """A profile whose layers do not add up to the model, and whose passes vary."""
    whole = [each.model_copy(update={"closing_ratio": 1.2, "spread": 0.3}) for each in profile.whole]
    notes = [*profile.notes, *(text for each in whole for text in closing_warning(each, []))]
    made = profile.model_copy(update={"whole": whole, "notes": notes})
    made.save(here / "toy.profile.json", force=True)
    return made


def test_they_stand_under_the_answer_and_before_the_tables(doubtful: Profile, run: Run, here: Path) -> None:
    ran = run("solve", "--gpus", "2", "--mini-batch", "16", "--micro-batches", "1")
    plan = pplan.load_plan(here / "toy.plan.json")
    stages = next(n for n, line in enumerate(ran.out.splitlines()) if line.startswith("stage "))
    above = " ".join(" ".join(ran.out.splitlines()[:stages]).split())
    assert len(plan.warnings) == 3
    for warning in plan.warnings:
        assert f"Warning: {warning}" in above
    assert "micro-batch size 4: the layers add up to 1.200 of the whole model" in above
    assert "micro-batch size 4, 8: the measured passes vary by up to 30%" in above
    assert not {*plan.warnings} & {*plan.notes}
    assert "The machine was busy." in plan.notes
    assert doubtful.notes[0] in plan.notes


def test_a_device_that_waited_is_told_no_quiet_machine_helps(profile: Profile) -> None:
    """Whether measured before or after pplan told them apart."""
    whole = profile.whole[0].model_copy(update={"closing_ratio": 0.8})
    waited = f"micro-batch size {whole.micro_batch_size}: {WAITED} in the untouched model"
    whole = whole.model_copy(update={"spread": 0.2})
    (quiet,), (busy,) = closing_warning(whole, []), closing_warning(whole, [waited])
    assert quiet.endswith("5% off; measure again on a quiet machine")
    assert "quiet machine changes little" in busy
    for spread, advice in ((0.01, "repeated passes agree within 5%"), (None, "one pass was measured")):
        (text,) = closing_warning(whole.model_copy(update={"spread": spread}), [])
        assert advice in text
        assert "measure again" not in text
    assert closing_warning(whole, ["micro-batch size 77: " + WAITED]) == [quiet]
    for text in (quiet, busy):
        doubtful = profile.model_copy(update={"whole": [whole], "notes": [waited, text]})
        assert text in list_warnings(doubtful, TOPOLOGY, None)
        assert text not in list_notes(doubtful)
        assert waited in list_notes(doubtful)


@pytest.mark.slow
def test_they_are_in_the_json(doubtful: Profile, run: Run) -> None:
    asked = ("--gpus", "2", "--mini-batch", "16", "--json")
    warnings = json.loads(run("solve", *asked).out)["warnings"]
    assert warnings == pplan.solve(doubtful, gpus=2, mini_batch=16).warnings
    assert warnings


def test_an_extrapolated_size_of_the_plan_is_one(profile: Profile) -> None:
    """Sixteen samples on one device; eight are the most that were measured."""
    plan = pplan.solve(profile, gpus=1, mini_batch=16, micro_batches=1)
    assert "micro-batch size 16 is past the largest measured (8): extrapolated" in plan.warnings
    theirs = pplan.import_plan("6,6", profile, mini_batch=16, micro_batches=1, schedule="gpipe")
    assert plan.warnings[-1] in theirs.warnings
    table = pplan.sweep(profile, {"micro_batches": [1, 2]}, gpus=1, mini_batch=16, jobs=1)
    assert plan.warnings[-1] in table.rows[0].warnings
    assert plan.warnings[-1] in table.warnings
    found = pplan.frontier(profile, gpus=1, mini_batch=16, micro_batches=1, points=1)
    assert plan.warnings[-1] in found.warnings


def test_what_only_a_comparison_extrapolates_is_a_note(profile: Profile) -> None:
    plan = pplan.solve(profile, gpus=2, mini_batch=64)
    told = "micro-batch size 1 is below the smallest measured (4): extrapolated"
    assert told in plan.notes
    assert told not in plan.warnings


def test_an_imported_plan_that_does_not_fit_says_so_first(profile: Profile) -> None:
    plan = pplan.import_plan("6,6", profile, mini_batch=64, memory_bytes=2**20)
    assert plan.warnings[0].startswith("it does not fit")


@pytest.mark.slow
def test_the_default_mini_batch_is_the_second_line(profile: Profile, here: Path, run: Run) -> None:
    profile.save(here / "toy.profile.json", force=True)
    lines = run("solve", "--gpus", "2", "--details").out.splitlines()
    plan = pplan.load_plan(here / "toy.plan.json")
    assert plan.mini_batch == 64
    assert lines[1].startswith("Global batch 64, 32 samples a GPU, as none was given; with 32: ")
    assert plan.default_mini_batch is not None
    assert [other.mini_batch for other in plan.default_mini_batch.others] == [32, 128]
    given = run("solve", "--gpus", "2", "--mini-batch", "64", "--force").out
    assert "as none was given" not in given


@pytest.mark.parametrize("key", ["schedule", "recompute", "micro_batches", "memory_bytes"])
def test_no_two_columns_of_a_sweep_have_one_name(key: str, profile: Profile, here: Path, run: Run) -> None:
    profile.save(here / "toy.profile.json", force=True)
    word = {"memory_bytes": "memory=1GiB,2GiB", "micro_batches": "micro-batches=2,4"}
    swept = word.get(key, f"{key}={'1f1b,gpipe' if key == 'schedule' else 'auto,always'}")
    schedule = [] if key == "schedule" else ["--schedule", "gpipe"]
    options = ["--gpus", "2", "--mini-batch", "16", "--jobs", "1", *schedule]
    ran = run("solve", *options, "--sweep", swept, "--csv", "rows.csv")
    assert ran.status == 0, ran.err
    head, first = (here / "rows.csv").read_text().splitlines()[:2]
    names = head.split(",")
    assert len({*names}) == len(names)
    assert {key, f"plan_{key}"} <= {*names}
    assert len(first.split(",")) == len(names)
    table = next(line for line in ran.out.splitlines() if "samples/s" in line).split()
    assert len({*table}) == len(table)


def test_a_frontier_takes_no_objective(profile: Profile) -> None:
    with pytest.raises(pplan.UsageError, match="objective='memory': a frontier is of step time"):
        pplan.frontier(profile, gpus=2, objective="memory")  # type: ignore[call-arg]


def test_layers_that_were_not_timed_twice_have_no_spread_and_steps_no_interval(run: Run, here: Path) -> None:
    table = "name,forward_ms,backward_ms,activation_bytes,parameter_bytes\na,1,2,40,8\nb,3,6,40,8\n"
    (here / "net.csv").write_text(table)
    profile = pplan.import_profile(here / "net.csv", micro_batch_size=4)
    profile.save(here / "net.profile.json", force=True)
    assert [layer.costs[0].spread for layer in profile.layers] == [None, None]
    assert json.loads(profile.to_json())["layers"][0]["costs"][0].get("spread") is None
    shown = run("show", "net.profile.json").out
    assert "backward" in shown
    assert "spread" not in shown
    plan = pplan.solve(profile, gpus=2, mini_batch=8)
    assert plan.prediction.low_seconds is None


def test_a_size_that_was_timed_once_varies_as_the_others(profile: Profile) -> None:
    content = json.loads(profile.to_json())
    for layer in content["layers"]:
        for cost, spread in zip(layer["costs"], (0.1, None), strict=True):
            cost["spread"] = spread
    chain = Profile.model_validate(content).chain()
    assert chain.spread is not None
    assert chain.spread.tolist() == [[0.1, 0.1]] * 12


@pytest.mark.parametrize(("schedule", "said"), [("zb-h1", True), ("1f1b", False)])
def test_a_backward_in_two_parts_that_takes_too_long_is_one(
    profile: Profile, schedule: str, said: bool
) -> None:
    """Only plans with a schedule that splits the backward warn."""
    content = json.loads(profile.to_json())
    for layer in content["layers"]:
        for cost in layer["costs"]:
            parts = ("backward_input_seconds", 0.5), ("backward_weight_seconds", 0.9)
            cost |= {name: share * cost["backward_seconds"] for name, share in parts}
    plan = pplan.solve(Profile.model_validate(content), gpus=2, mini_batch=16, schedule=schedule)
    warning = "a backward in two parts takes 1.40 times as long as a whole one"
    assert any(warning in text for text in plan.warnings) == said

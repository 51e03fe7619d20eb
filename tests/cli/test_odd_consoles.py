"""Consoles of no width or of few characters, and names that are not UTF-8."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COSTS = "name,forward_ms,backward_ms,output_bytes,parameter_bytes\n{name},1,2,1000,1000\nb,1,2,1000,1000\n"
LOST_BYTE = os.fsdecode(b"\xff")


@pytest.fixture
def profile_of(run: Callable[..., Any], here: Path) -> Callable[[str], None]:
    """Import a profile of two layers, the first of the given name, as `c.profile.json`."""

    def import_costs(name: str) -> None:
        (here / "c.csv").write_text(COSTS.format(name=name), encoding="utf-8")
        assert run("import", "c.csv", "--micro-batch-size", "4").status == 0

    return import_costs


@pytest.mark.parametrize("columns", ["0", "-5", "wide", ""])
def test_a_width_that_is_none_counts_as_not_set(
    run: Callable[..., Any],
    profile_of: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
) -> None:
    profile_of("a")
    monkeypatch.delenv("COLUMNS")
    expected = run("show", "c.profile.json")
    monkeypatch.setenv("COLUMNS", columns)
    assert run("show", "c.profile.json") == expected
    assert "1.00 ms" in expected.out


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize("arguments", [("show",), ("show", "--json"), ("solve", "--gpus", "2", "--json")])
def test_a_console_that_cannot_encode_a_name_gets_it_escaped(
    run: Callable[..., Any],
    profile_of: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    encoding: str,
    arguments: tuple[str, ...],
) -> None:
    profile_of("日\U0001f600")
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        assert run(arguments[0], "c.profile.json", *arguments[1:]).status == 0
        sys.stdout.flush()
        text = written.getvalue().decode(encoding)
    if "--json" in arguments:
        document = json.loads(text)
        names = [layer["name"] for layer in document["layers"]] if "layers" in document else []
        assert "日\U0001f600" in (names or document["layer_names"])
    else:
        assert r"\u65e5\ud83d\ude00" in text


def test_file_names_that_are_not_utf8_are_read_written_and_printed(
    run: Callable[..., Any], profile_of: Callable[[str], None], here: Path
) -> None:
    profile_of("a")
    profile = f"{LOST_BYTE}.profile.json"
    (here / "c.profile.json").rename(here / profile)
    plan = f"{LOST_BYTE}.plan.json"
    solved = run("solve", profile, "--gpus", "2", "--mini-batch", "8", "-o", plan)
    assert (solved.status, r"Wrote \udcff.plan.json" in solved.err) == (0, True)
    document = json.loads((here / plan).read_text(encoding="utf-8"))
    assert document["profile"]["file"] == r"\udcff.profile.json"
    for verb in ("show", "explain", "simulate", "report", "lint"):
        assert run(verb, plan).status == 0
    assert "layer" in run("explain", plan).out
    assert run("solve", plan, "--lost", "1").status == 0
    assert run("export", "torchgpipe", plan, "-o", f"{LOST_BYTE}.json").status == 0
    missing = run("show", f"none{LOST_BYTE}.json")
    assert (missing.status, r"none\udcff.json" in missing.err) == (2, True)


def test_words_in_brackets_stay_in_the_help(run: Callable[..., Any]) -> None:
    assert "[tool.pplan]" in run("config", "--help").out


def test_seconds_at_the_ends_of_their_range_raise_no_warning(
    run: Callable[..., Any], profile_of: Callable[[str], None], here: Path
) -> None:
    """A layer that takes 100 s at four samples and 5e-324 s at one."""
    profile_of("a")
    document = json.loads((here / "c.profile.json").read_text())
    document.pop("made_by")
    for layer in document["layers"]:
        (cost,) = layer["costs"]
        document["scales_with_samples"] = False
        layer["costs"] = [cost | {"micro_batch_size": 1, "forward_seconds": 5e-324}, cost]
        layer["costs"][1]["forward_seconds"] = 100.0
    (here / "odd.profile.json").write_text(json.dumps(document))
    solved = run("solve", "odd.profile.json", "--gpus", "2", "--mini-batch", "8")
    assert (solved.status, "RuntimeWarning" in solved.err) == (0, False), solved.err

"""`pplan schedules`: every schedule with what is known of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pplan.cost_models.schedules import SCHEDULES

Run = Callable[..., Any]
Golden = Callable[[str, str], None]


@pytest.mark.parametrize("width", [110, 80, 40])
def test_the_table(run: Run, golden: Golden, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    ran = run("schedules")
    assert (ran.status, ran.err) == (0, "")
    golden(f"schedules_{width}.txt", ran.out)


def test_json(run: Run) -> None:
    made = {own["name"]: own for own in json.loads(run("schedules", "--json").out)}
    assert list(made) == list(SCHEDULES)
    assert all(own["source"] and own["needs"] and own["bubble"] and own["in_flight"] for own in made.values())
    assert made["1f1b"]["runtimes"] == ["deepspeed", "Schedule1F1B"]
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


def test_arguments_are_refused(run: Run) -> None:
    ran = run("schedules", "zb-h1")
    assert ran.status == 2
    assert ran.lines[0].startswith("pplan: schedules: got unexpected extra argument")

"""`--json`: an error is JSON on standard output too, with the status and the lines that it has without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.cli.app import main
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]


def error_of(ran: Any) -> dict[str, Any]:
    """The object alone on standard output, which says what standard error does."""
    content = json.loads(ran.out)
    assert list(content) == ["error"]
    error: dict[str, Any] = content["error"]
    assert error["status"] == ran.status
    assert f"pplan: {error['message']}" in ran.lines
    return error


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("show", "none.json"), "file"),
        (("solve", "--gpus", "none"), "usage"),
        (("solve", "--gpu", "2"), "usage"),
        (("sovle",), "usage"),
        (("compare",), "file"),
        (("explain", "--replicas", "2"), "usage"),
        (("topology", "none"), "usage"),
        (("simulate", "none.json"), "file"),
        (("check", "none.json"), "file"),
        (("import", "none.csv"), "file"),
    ],
)
def test_every_error(run: Run, arguments: tuple[str, ...], kind: str) -> None:
    ran = run(*arguments, "--json")
    assert ran.status == 2
    error = error_of(ran)
    assert set(error) == {"status", "kind", "message", "advice"}
    assert ran.lines[-1] == f"  {error['advice']}"
    assert error["kind"] in (kind, "file")
    assert run(*arguments).out == ""


def test_no_plan_fits(run: Run, here: Path, profile: Profile) -> None:
    """The tightest stage, its ledger, what is missing and what would fit."""
    profile.save(here / "toy.profile.json", force=False)
    asked = ("solve", "--gpus", "2", "--memory", "20MiB", "--mini-batch", "64")
    ran = run(*asked, "--json")
    assert ran.status == 3
    error = error_of(ran)
    assert error["kind"] == "infeasible"
    assert sum(error["ledger"].values()) == error["stage"]["memory_bytes"]
    assert error["missing_bytes"] == error["stage"]["memory_bytes"] - error["limit_bytes"] > 0
    assert error["limit_bytes"] <= 20 * 2**20
    names = [layer.name for layer in profile.layers]
    stage = error["stage"]
    assert names.index(stage["first_layer"]) <= names.index(stage["last_layer"])
    assert 0 <= stage["number"] < stage["stages"]
    assert error["would_fit"]
    assert error["advice"] == f"What would fit: {'; or '.join(error['would_fit'])}."
    assert not list(here.glob("*.plan.json"))


def test_an_interruption_and_a_defect(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by\x1b")

    monkeypatch.setattr("pplan.cli.output.choose_input", stop)
    ran = run("show", "--json")
    assert (ran.status, error_of(ran)["kind"]) == (130, "interrupted")
    monkeypatch.setattr("pplan.cli.output.choose_input", fail)
    ran = run("show", "--json")
    assert (ran.status, error_of(ran)["kind"]) == (1, "defect")


@pytest.mark.slow
def test_one_object_where_the_result_is_printed_already(run: Run, here: Path, profile: Profile) -> None:
    """A sweep of which no point has a plan prints its rows, with the reasons, and they stay alone."""
    profile.save(here / "toy.profile.json", force=False)
    ran = run("solve", "--sweep", "gpus=1,2", "--memory", "20MiB", "--mini-batch", "64", "--json")
    assert ran.status == 3
    assert json.loads(ran.out)["rows"]


def test_the_arguments_of_main_are_recorded(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["pytest", "-k", "something else"])
    (here / "costs.csv").write_text(
        "name,forward_ms,backward_ms,activation_bytes,parameter_bytes\na,1,2,3,4\n"
    )
    assert main(["import", "costs.csv", "--tp", "2", "--json"]) == 0
    made_by = json.loads(capsys.readouterr().out)["made_by"]
    assert made_by["command"] == "pplan import costs.csv --tp 2 --json"

"""Defaults from pplan.toml and pyproject.toml."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]


@pytest.fixture
def saved(here: Path, profile: Profile) -> Path:
    profile.save(here / "toy.profile.json", force=False)
    return here


@pytest.mark.slow
def test_a_files_defaults_count_where_nothing_is_typed(run: Run, saved: Path) -> None:
    (saved / "pyproject.toml").write_text(
        '[tool.pplan.solve]\ngpus = 2\nmini-batch = 16\nschedule = "gpipe"\n'
    )
    plan = json.loads(run("solve", "--json").out)
    assert (plan["gpus"], plan["mini_batch"], plan["options"]["schedule"]) == (2, 16, "gpipe")
    plan = json.loads(run("solve", "--json", "--gpus", "3", "--force").out)
    assert (plan["gpus"], plan["mini_batch"]) == (3, 16)
    # Nearer files count, and pplan.toml before pyproject.toml; other verbs have none.
    (saved / "pplan.toml").write_text("[solve]\ngpus = 4\n")
    ran = run("config", "--json")
    assert json.loads(ran.out)["defaults"] == {"solve": {"gpus": 4}}
    assert run("config").out.splitlines()[1] == "  pplan solve --gpus 4"
    assert run("machine", "list").status == 0


def test_without_a_file_there_are_none(run: Run) -> None:
    assert run("config").out.startswith("No defaults")
    Path("pyproject.toml").write_text("[project]\nname = 'mine'\n")
    assert run("config").out.startswith("No defaults")


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("[solve]\ngpu-s = 2\n", "solve: there is no option gpu-s", "Did you mean gpus?"),
        ("[solv]\ngpus = 2\n", "[solv]: there is no such verb", "Did you mean solve?"),
        ("gpus = 2\n", "gpus stands outside of a verb's table", "Put it below [solve]"),
        ("[solve\n", "cannot be read", "Mend it"),
        ("[solve]\ngpus = inf\n", "solve: gpus is inf", "finite"),
        ("[solve]\nprice = [1.0, nan]\n", "solve: price is [1.0, nan]", "finite"),
        ("a = " + "[" * 10**5, "cannot be read: nested too deep", "Mend it"),
        ("a = " + "9" * 5000, "cannot be read: Exceeds the limit", "Mend it"),
        ('[profile]\ninput-like = "evil:run"\n', "input-like is not taken from a file", "command line"),
        ('[check]\nmodel = "evil:run"\n', "model is not taken from a file", "command line"),
        ('[solve]\noutput = "x"\n', "output is not taken from a file", "command line"),
    ],
)
def test_what_a_file_may_not_say(run: Run, saved: Path, text: str, what: str, hint: str) -> None:
    (saved / "pplan.toml").write_text(text)
    ran = run("solve", "--gpus", "2")
    assert ran.status == 2
    assert "pplan.toml" in ran.lines[0]
    assert what in ran.lines[0]
    assert hint in ran.lines[1]


@pytest.mark.parametrize("text", ['tool = "x"', "tool = [1]", "a = " + "[" * 10**5, "a = " + "9" * 5000])
def test_another_tools_file_is_left_to_it(run: Run, here: Path, text: str) -> None:
    (here / "pyproject.toml").write_text(text)
    assert run("config").out.startswith("No defaults")


def test_a_wrong_value_is_refused_by_its_option(run: Run, saved: Path) -> None:
    (saved / "pplan.toml").write_text('[solve]\ngpus = "many"\n')
    assert run("solve").lines[-2].startswith("pplan: --gpus many: is not a whole number")

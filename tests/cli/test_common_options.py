"""What every verb has: quiet, verbose, examples and statuses in its help, completion; `python -m pplan`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.cli.usage import list_verbs
from pplan.cli.verb_table import VERBS
from pplan.cli.verbs import root
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]


@pytest.fixture
def saved(here: Path, profile: Profile, plan: Plan) -> None:
    profile.save(here / "toy.profile.json", force=False)
    plan.save(here / "toy.plan.json", force=False)


@pytest.mark.usefixtures("saved")
def test_quiet_prints_results_and_errors_alone(run: Run) -> None:
    usual, quiet = run("show"), run("show", "--quiet")
    assert usual.err.startswith("Using toy.")
    assert (quiet.out, quiet.err) == (usual.out, "")
    assert run("show", "-q", "none.json").err.startswith("pplan: none.json: no such")
    # The next command of the same process speaks again.
    assert run("show").err == usual.err


@pytest.mark.usefixtures("saved")
def test_verbose_tells_versions_and_time(run: Run) -> None:
    first, using, last = run("show", "-v").lines
    assert first.startswith("pplan 0")
    assert using.startswith("Using toy.")
    assert last.startswith("Took ")


def test_the_list_of_verbs_says_what_their_docstrings_say() -> None:
    assert {verb for verb, _ in list_verbs(root)} == set(VERBS)
    for verb, command in list_verbs(root):
        if not command.entry.is_group:
            assert VERBS[verb].summary == command.help.split("\n\n")[0], verb


@pytest.mark.parametrize("group", [(), ("machine",), ("machine", "measure")])
def test_the_list_of_verbs_has_a_line_for_each(
    run: Run, group: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(*group, "--help").out.splitlines()
    prefix = " ".join([*group, ""]) if group else ""
    for verb, entry in VERBS.items():
        name = verb.removeprefix(prefix)
        if verb.startswith(prefix) and " " not in name and entry.panel is not None:
            assert [line for line in lines if line.split() == [name, *entry.summary.split()]], verb


@pytest.mark.slow
def test_every_verb_has_examples_that_parse_and_its_statuses(run: Run) -> None:
    for verb, command in list_verbs(root):
        text = " ".join(run(*verb.split(), "--help").out.split())
        assert "Exit status: 0 done;" in text
        assert command.entry.examples or command.entry.is_group
        for example in command.entry.examples:
            assert f"$ {example}" in text
            words = shlex.split(example)
            words = words[words.index("pplan") + 1 :]
            count = len(verb.split())
            assert words[:count] == verb.split()
            # Raises for an option or an argument that the verb has not.
            command.make_context(verb, words[count:], resilient_parsing=False)


def test_names_that_people_type_are_options(run: Run, here: Path, profile: Profile) -> None:
    profile.save(here / "toy.profile.json", force=False)
    own = run("solve", "--gpus", "2", "--mini-batch", "16", "--micro-batches", "4", "--json")
    other = run("solve", "--gpus", "2", "--batch-size", "16", "--chunks", "4", "--json", "--force")
    strip = [line for line in own.out.splitlines() if '"command"' not in line and "sha256" not in line]
    assert own.status == other.status == 0
    unlike = {line.split(":")[0].strip() for line in set(strip) - set(other.out.splitlines())}
    assert unlike <= {'"time"'}


def completed(here: Path, words: str, position: int) -> list[str]:
    environment = os.environ | {
        "_PPLAN_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(position),
    }
    # As bash calls it: by the name of the program, which `python -m` is not.
    code = "import sys; from pplan.cli.app import main; sys.argv[0] = 'pplan'; sys.exit(main([]))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stderr == ""
    return ran.stdout.split()


@pytest.mark.slow
def test_the_shell_completes_verbs_and_options(here: Path) -> None:
    assert completed(here, "pplan so", 1) == ["solve"]
    assert completed(here, "pplan solve --gpus", 2) == ["--gpus", "--gpus-per-node"]


@pytest.mark.slow
def test_python_runs_it_as_a_module(here: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pplan", "schema"], cwd=here, capture_output=True, text=True, check=True
    )
    assert "plan" in ran.stdout.split()

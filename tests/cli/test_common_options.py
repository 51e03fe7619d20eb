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

from pplan.cli.verbs import EXAMPLES, VERBS, root
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
    for verb, summary in VERBS.items():
        docstring = root.commands[verb].help
        assert summary == docstring.replace("\\[", "[").split("\n\n")[0]


@pytest.mark.slow
def test_every_verb_has_examples_that_parse_and_its_statuses(run: Run) -> None:
    assert set(EXAMPLES) == set(VERBS)
    for verb, examples in EXAMPLES.items():
        text = " ".join(run(verb, "--help").out.split())
        assert "Exit status: 0 done;" in text
        for example in examples:
            assert f"$ {example}" in text
            words = shlex.split(example)
            words = words[words.index("pplan") + 1 :]
            assert words[0] == verb
            # Raises for an option or an argument that the verb has not.
            root.commands[verb].make_context(verb, words[1:], resilient_parsing=False)


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

"""Mutated files and command lines end as documented: those that once did not, and new ones.

`python benchmarks/fuzz.py` runs as many as are asked for, and prints new lines for the corpus.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzing.cases import KINDS, Workspace, case_of
from fuzzing.mutation import edited, random_edits
from fuzzing.reading import Inputs
from fuzzing.running import run
from fuzzing.seeds import make_seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).with_name("corpus")
TOO_LONG = {"configuration"}
"""A search of degrees may take seconds: `benchmarks/fuzz.py --kind configuration` tries them."""
BOUNDED = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A folder with a file of each kind, which is the working directory."""
    made, folder = tmp_path_factory.mktemp("seeds"), tmp_path_factory.mktemp("fuzz")
    before = Path.cwd()
    make_seeds(made)
    os.chdir(folder)
    yield Workspace(folder, {path.name: path.read_bytes() for path in made.iterdir()})
    os.chdir(before)


@pytest.mark.parametrize("name", [pytest.param("first", marks=pytest.mark.slow), "reported"])
def test_what_was_found_once(name: str, workspace: Workspace) -> None:
    for line in (CORPUS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        case = case_of(line)
        found = workspace.run(case)[2]
        assert found is None, f"{found.kind}\n{line[:600]}\n{found.text}"


@pytest.mark.parametrize("kind", KINDS)
def test_readers_alone(kind: str, workspace: Workspace) -> None:
    """Each reads its seed, in which nothing is unlike what was read before when it is read again."""
    inputs = Inputs(workspace.folder, workspace.seeds)
    for file in KINDS[kind]:
        assert inputs.read(file, []) == (True, True, None)
        assert inputs.read(file, []) == (True, False, None)
    for number in range(30):
        file, edits = inputs.edits(97 * number, kind, random.Random(number))
        found = inputs.read(file, edits)[2]
        assert found is None, f"{file}: {found.kind}\n{edits}\n{found.text}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*KINDS, "command line"} - TOO_LONG))
def test_random_mutations(kind: str, workspace: Workspace) -> None:
    @BOUNDED
    @given(st.integers(0, 2**32))
    def end_as_documented(seed: int) -> None:
        case = workspace.random_case(random.Random(seed), kind)
        found = workspace.run(case)[2]
        assert found is None, f"{found.kind}\n{case.as_json()[:600]}\n{found.text}"

    end_as_documented()


def test_the_whole_corpus_is_run() -> None:
    assert {path.stem for path in CORPUS.glob("*.jsonl")} == {"first", "reported"}


def test_without_debug_there_is_no_traceback(workspace: Workspace) -> None:
    """The others run with --debug, which prints where a refusal comes from."""
    for seed in range(20):
        rng = random.Random(seed)
        case = workspace.random_case(rng, rng.choice(list(KINDS)))
        workspace.write(case)
        status, _, err = run(list(case.commands[0]), debug=False)
        assert "Traceback" not in err, err
        assert (status == 2) == err.startswith("pplan: "), err


def test_edits_say_what_they_do() -> None:
    """A mutation that changes nothing would find nothing."""
    text = '{"a": [1, 2], "b": {"c": 0.5}}'
    assert edited(text, [["set", ["b", "c"], 10**400]]) == b'{"a": [1, 2], "b": {"c": 1%s}}' % (b"0" * 400)
    assert edited(text, [["drop", ["a", 0]]]) == b'{"a": [2], "b": {"c": 0.5}}'
    assert edited(text, [["repeat", ["a"], 2]]) == b'{"a": [1, 2, 1, 2], "b": {"c": 0.5}}'
    assert edited(text, [["wrap", ["a"], 3]]) == b'{"a": [[[]]], "b": {"c": 0.5}}'
    assert edited(text, [["twice", "a", 7]]) == b'{"a": [1, 2], "b": {"c": 0.5}, "a": 7}'
    assert edited("x = 1\ny = 2\n", [["word", 2, "nan"], ["line", 1, 2]]) == b"x = nan\ny = 2\ny = 2\n"
    assert edited("ab", [["cut", 1], ["encode", "utf-16-be"]]) == b"\x00a"
    different = {edited(text, random_edits(text, random.Random(seed))) for seed in range(100)}
    assert len(different) > 60

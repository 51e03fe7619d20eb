"""Mutated files and command lines end as documented: those that once did not, and new ones.

`python benchmarks/fuzz.py` runs as many as are asked for, and prints new lines for the corpus.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fuzzing import reading
from fuzzing.cases import KINDS, Case, Workspace, case_of
from fuzzing.channel import Channel, Tallies, findings
from fuzzing.documents import LARGEST, STRUCTURAL
from fuzzing.mutation import edited, random_edits
from fuzzing.reading import Inputs, in_memory, reads
from fuzzing.running import run
from fuzzing.seeds import make_seeds
from fuzzing.small_seeds import MORE_KINDS, shape, small_seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pplan.cost_models import text_files
from pplan.cost_models.errors import FileError

CORPUS = Path(__file__).with_name("corpus")
TOO_LONG = {"configuration"}
"""A search of degrees may take seconds: `benchmarks/fuzz.py --kind configuration` tries them."""
BOUNDED = settings(
    max_examples=6,
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
    workspace = Workspace(folder, {path.name: path.read_bytes() for path in made.iterdir()})
    workspace.write(Case("", [], []))
    yield workspace
    os.chdir(before)


@pytest.fixture(scope="module")
def small(workspace: Workspace) -> dict[str, bytes]:
    """The seeds of readers alone."""
    return small_seeds(workspace.seeds, partial(reads, workspace.folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first", "reported"])
def test_what_was_found_once(name: str, workspace: Workspace) -> None:
    for line in (CORPUS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        case = case_of(line)
        found = workspace.run(case)[2]
        assert found is None, f"{found.kind}\n{line[:600]}\n{found.text}"


def test_what_readers_alone_were_found_to_do(workspace: Workspace, small: dict[str, bytes]) -> None:
    inputs = Inputs(workspace.folder, small)
    for line in (CORPUS / "readers.jsonl").read_text(encoding="utf-8").splitlines():
        case = case_of(line)
        found = inputs.read(case.file, [*case.edits])[2]
        assert found is None, f"{found.kind}\n{line[:600]}\n{found.text}"


@pytest.mark.parametrize("kind", reading.KINDS)
def test_readers_alone(kind: str, workspace: Workspace, small: dict[str, bytes]) -> None:
    """Each reads its seed, in which nothing is unlike what was read before when it is read again."""
    inputs = Inputs(workspace.folder, small)
    for file in reading.KINDS[kind]:
        assert inputs.read(file, []) == (True, True, None)
        assert inputs.read(file, []) == (True, False, None)
    for number in range(30):
        file, edits = inputs.edits(97 * number, kind, random.Random(number))
        found = inputs.read(file, edits)[2]
        assert found is None, f"{file}: {found.kind}\n{edits}\n{found.text}"


PLANTED: dict[str, Callable[[Any], bool]] = {
    "profile": lambda own: any(layer.parameter_bytes > 2**50 for layer in own.layers),
    "plan": lambda own: not own.made_by.time,
    "costs": lambda own: len(own.layers) == 1,
    "topology": lambda own: any(level.link.latency_seconds == 0 for level in own.levels or ()),
    "configuration": lambda own: bool(own.hidden > 2**29),
    "kernels": lambda own: len(own.efficiency) < 5,
    "degrees": lambda own: bool(own.prediction.gap < 0 or own.prediction.gap > 1000),
    "export": lambda own: bool(own.recompute == "always"),
    "partition": lambda own: len(own.ends) == 1,
    "schedule": lambda own: any(len(actions) != 16 for actions in own.actions),
    "defaults": lambda own: "lint" not in own,
    "report": lambda own: getattr(own, "notes", None) == [],
    "roofline": lambda own: len(own.peaks) == 1,
    "calibration": lambda own: own.corrections.latency is None,
    "journal": lambda own: any(counted.parts_left_out for counted in own[0].values()),
}
"""Of what was read, what a reader might not expect."""
ENOUGH = 4000
"""Inputs in which it is found: most are in a tenth of them."""


@pytest.mark.parametrize("kind", PLANTED)
def test_an_error_that_is_planted_is_found(
    kind: str, workspace: Workspace, small: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fuzzer that went blind would find nothing, as one does where all is well."""

    def plant(read: Callable[[Path], object]) -> Callable[[Path], object]:
        def wrong(path: Path) -> object:
            if PLANTED[kind](value := read(path)):
                raise ZeroDivisionError
            return value

        return wrong

    for file in reading.KINDS[kind]:
        monkeypatch.setitem(reading.READERS, file, plant(reading.READERS[file]))
    inputs = Inputs(workspace.folder, small)
    for number in range(ENOUGH):
        found = inputs.read(*inputs.edits(7 * number, kind, random.Random(number)))[2]
        if found is not None:
            assert found.kind.startswith("ZeroDivisionError")
            return
    pytest.fail(f"not found in {ENOUGH} inputs")


def test_small_seeds_lack_nothing_but_size(workspace: Workspace, small: dict[str, bytes]) -> None:
    """All keys with all kinds of values, and every list that had several members still has two."""
    assert set(small) == {*workspace.seeds, *(file for kind in MORE_KINDS.values() for file in kind)}
    for file, content in small.items():
        assert reads(workspace.folder, file, content), file
        if file in workspace.seeds and content[:1] == b"{":
            large = json.loads(workspace.seeds[file])
            assert set(shape(json.loads(content))) == set(shape(large)), file
    for file in ("degrees.json", "plain.profile.json"):
        assert len(small[file]) < 0.6 * len(workspace.seeds[file])


def test_a_file_in_memory_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"on the disk")
    with in_memory({"one": b"in memory"}):
        assert text_files.read_bytes(tmp_path / "one", "file") == b"in memory"
        assert text_files.read_bytes(tmp_path / "other", "file") == b"on the disk"
    with pytest.raises(FileError):
        text_files.read_bytes(tmp_path / "one", "file")


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
    assert {path.stem for path in CORPUS.glob("*.jsonl")} == {"first", "readers", "reported"}


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
    assert edited("x = 1\ny = 2\n", [["at", 5, "z"], ["at", 9, "!"]]) == b"x = 1\nz = !\n"
    assert edited("ab", [["cut", 1], ["encode", "utf-16-be"]]) == b"\x00a"
    different = {edited(text, random_edits(text, random.Random(seed))) for seed in range(100)}
    assert len(different) > 60


def plainly_changed(content: Any, name: str, path: list[Any], value: Any = None) -> None:
    """As the edit says, in the document itself."""
    try:
        for key in path[:-1]:
            content = content[key]
        key = path[-1]
        if name == "set":
            content[key] = deepcopy(value)
        elif name == "drop":
            del content[key]
        elif name == "wrap":
            content[key] = f"<deep {value}>" if value > 2 else [content[key]]
        elif isinstance(content, list):
            content[key:key] = [content[key]] * (value - 1)
        elif isinstance(content[key], list):
            content[key] = content[key] * value
    except (LookupError, TypeError):
        return


def test_what_an_edit_leaves_is_as_json_writes_it(workspace: Workspace) -> None:
    """Copies share it with the seed; here a whole copy is changed and written."""
    texts, compared = {name: content.decode() for name, content in workspace.seeds.items()}, 0
    for seed in range(600):
        rng = random.Random(seed)
        text = texts[rng.choice(["plain.profile.json", "tied.plan.json", "config.json", "plain.torch.json"])]
        edits = [edit for edit in random_edits(text, rng) if edit[0] in STRUCTURAL]
        if not edits or any(edit[0] == "repeat" and edit[2] > 10 for edit in edits):
            continue
        content = json.loads(text)
        for edit in edits:
            plainly_changed(content, *edit)
        plain = json.dumps(content)
        for depth in (50, 500, 20_000):
            plain = plain.replace(f'"<deep {depth}>"', "[" * depth + "]" * depth)
        assert edited(text, edits) == plain.encode(), edits
        compared += 1
    assert compared > 300


@pytest.mark.slow
def test_what_is_repeated_again_and_again_stays_small(workspace: Workspace) -> None:
    text = workspace.seeds["plain.profile.json"].decode()
    edits: list[list[Any]] = [["repeat", ["layers"], 1000], ["repeat", ["layers", 0, "costs"], 1000]]
    assert 10**6 < len(edited(text, edits[:1])) < LARGEST * 3
    assert len(edited(text, [*edits, *edits])) < LARGEST * 3


def dying(numbers: range, channel: Channel) -> None:
    """Finds something in case 1, dies in case 3."""
    for number in numbers:
        channel.begin(number)
        if number == 3:
            os._exit(1)
        channel.end(number, 2, 1, ("odd", "", "") if number == 1 else None)
    channel.close()


def test_a_process_that_dies_has_told_all_before() -> None:
    tallies = Tallies(["a", "b"])
    told = list(findings(dying, range(6), tallies, 0))
    assert [(number, kind) for number, (kind, _, _) in told] == [(1, "odd"), (3, "killed")]
    assert tallies.by_kind == {"a": (3, 6, 3), "b": (3, 4, 2)}

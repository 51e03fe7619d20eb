"""Loops are compiled again where numba cannot keep them, or cannot read what it kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pplan.planner.synthesis import compiled_loops

PROGRAM = """
from pplan.planner.synthesis.compiled_loops import _unreadable, compile_loops


def one_more(number):
    return number + 1


def two_more(number):
    return one_more(one_more(number))


(loop,) = compile_loops((one_more, two_more), 1)
print(loop(5), bool(_unreadable))
"""


def one_more(number: int) -> int:
    return number + 1


def two_more(number: int) -> int:
    return one_more(one_more(number))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process, before and after."""
    monkeypatch.setattr(compiled_loops, "_unreadable", [])
    for cached in (compiled_loops.compile_loops, compiled_loops._compile_again):
        cached.cache_clear()
    yield
    for cached in (compiled_loops.compile_loops, compiled_loops._compile_again):
        cached.cache_clear()


def numba_that(fails: Callable[[bool], None], runs: Callable[[bool], None]) -> tuple[ModuleType, list[str]]:
    """A module in numba's place that compiles nothing, and what it was asked to compile; the two are called
    as a function is compiled, and as it runs, with whether that is kept on disk."""
    module, asked = ModuleType("numba"), list[str]()

    def njit(*, cache: bool, **_: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def compile_one(own: Callable[..., Any]) -> Callable[..., Any]:
            fails(cache)
            asked.append(f"{own.__name__} {'kept' if cache else 'not kept'}")

            def run(*values: Any) -> Any:
                runs(cache)
                return own(*values)

            return run

        return compile_one

    vars(module)["njit"] = njit
    return module, asked


def nothing(kept: bool) -> None:
    """Neither fails."""


def test_loops_call_each_other_and_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = numba_that(nothing, nothing)
    monkeypatch.setitem(sys.modules, "numba", module)
    for _ in range(2):
        own = compiled_loops.compile_loops((one_more, two_more), 2)
        assert (own[0](1), own[1](1)) == (2, 3)
    assert asked == ["one_more kept", "two_more kept"]


def test_no_folder_to_keep_them_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(kept: bool) -> None:
        if kept:
            raise RuntimeError("cannot cache function 'one_more': no locator available for file")

    module, asked = numba_that(fails, nothing)
    monkeypatch.setitem(sys.modules, "numba", module)
    own = compiled_loops.compile_loops((one_more, two_more), 2)
    assert own[1](1) == 3
    assert asked == ["one_more not kept", "two_more not kept"]


def test_a_file_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba reads what it kept as a loop is called for the first time, and raises what the reading raises."""

    def runs(kept: bool) -> None:
        if kept:
            raise ModuleNotFoundError("No module named 'pplan.planner.synthesis.older'")

    module, asked = numba_that(nothing, runs)
    monkeypatch.setitem(sys.modules, "numba", module)
    own = compiled_loops.compile_loops((one_more, two_more), 2)
    assert [own[1](1), own[0](1), own[1](4)] == [3, 2, 6]
    assert asked == ["one_more kept", "two_more kept", "one_more not kept", "two_more not kept"]


def test_the_last_ones_alone_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = numba_that(nothing, nothing)
    monkeypatch.setitem(sys.modules, "numba", module)
    (own,) = compiled_loops.compile_loops((one_more, two_more), 1)
    assert own(1) == 3
    assert len(asked) == 2


@pytest.mark.slow
def test_numbas_own_files(tmp_path: Path) -> None:
    """With numba itself: a second process reads what the first kept, a third one finds it broken."""
    pytest.importorskip("numba")
    script, kept = tmp_path / "own.py", tmp_path / "kept"
    script.write_text(PROGRAM)

    def run() -> str:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(kept)}
        command = [sys.executable, str(script)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert run().split() == ["7", "False"]
    files = {path: path.stat().st_mtime_ns for path in kept.rglob("*.nb?")}
    assert len(files) == 4
    assert run().split() == ["7", "False"]
    assert {path: path.stat().st_mtime_ns for path in kept.rglob("*.nb?")} == files
    for path in files:
        path.write_bytes(b"not what numba wrote")
    assert run().split() == ["7", "True"]

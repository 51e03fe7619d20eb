"""Tests in a process of their own, with one file of a copy of the repository changed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from .operators import Mutant, mutated_code

TIMES, LEAST_SECONDS, MOST_BYTES = 3, 30, 12 * 2**30


class CopyFinder(MetaPathFinder):
    """Imports pplan from a copy of the repository, one file of it changed."""

    def __init__(self, copy: Path, mutant: Mutant | None) -> None:
        self.copy = copy
        self.changed = None if mutant is None else copy / mutant.file
        self.code = None if mutant is None else mutated_code(copy, mutant)

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        """Of modules of pplan."""
        first, *rest = fullname.split(".")
        if first != "pplan":
            return None
        top = self.copy if rest and (self.copy / rest[0]).is_dir() else self.copy / "pplan"
        place = top.joinpath(*rest)
        if place.is_dir():
            file, folders = place / "__init__.py", [str(place)]
        else:
            file, folders = place.with_suffix(".py"), None
        if not file.is_file():
            return None
        loader = _Changed(fullname, str(file), self.code if file == self.changed else None)
        return importlib.util.spec_from_file_location(
            fullname, file, loader=loader, submodule_search_locations=folders
        )


class _Changed(SourceFileLoader):
    def __init__(self, fullname: str, path: str, code: CodeType | None) -> None:
        super().__init__(fullname, path)
        self.code = code

    def get_code(self, fullname: str) -> CodeType | None:
        """The changed code, where there is one."""
        return self.code or super().get_code(fullname)


class Selection:
    """Of the tests that are collected those that are asked for, in their order; a test that takes far longer
    than the seconds that it took ends the process."""

    def __init__(self, tests: Sequence[str], seconds: Mapping[str, float]) -> None:
        self.order = {test: number for number, test in enumerate(tests)}
        self.seconds = seconds

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Called by pytest."""
        signal.setitimer(signal.ITIMER_REAL, LEAST_SECONDS + TIMES * self.seconds.get(nodeid, 0.0))

    def pytest_runtest_logfinish(self) -> None:
        """Called by pytest."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Called by pytest."""
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid]
        )


def run_tests(
    copy: Path, mutant: Mutant | None, tests: Sequence[str], seconds: Mapping[str, float]
) -> tuple[str, str]:
    """How the tests end with the mutant, in a process of its own, and the last of what it printed; `seconds`
    that each takes without it."""
    log = copy.parent / "log.txt"
    limit = LEAST_SECONDS + TIMES * sum(seconds.get(test, 0.0) for test in tests)
    pid = os.fork()
    if not pid:
        _run_child(copy, mutant, tests, seconds, log)
    began = time.monotonic()
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() - began > limit:
            kill_group(pid)
            os.waitpid(pid, 0)
            return "killed by time", ""
        time.sleep(0.05)
    kill_group(pid)  # what a test that was ended left running
    code = os.waitstatus_to_exitcode(ended[1])
    if code == -signal.SIGALRM:
        return "killed by time", ""
    text = log.read_text(errors="replace").strip().splitlines()
    if code == pytest.ExitCode.NO_TESTS_COLLECTED or (mutant is None and code):
        raise AssertionError("\n".join(text[-20:]))
    failures = [line for line in text if line.startswith(("FAILED", "ERROR"))]
    return ("passed" if code == 0 else "killed"), "".join((failures or text)[-1:])[:200]


def kill_group(pid: int) -> None:
    """Of a process that called `setsid`, with what it left running."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _run_child(
    copy: Path, mutant: Mutant | None, tests: Sequence[str], seconds: Mapping[str, float], log: Path
) -> None:
    """Never returns."""
    code = 99
    try:
        os.setsid()
        os.chdir(copy)
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.meta_path.insert(0, CopyFinder(copy, mutant))
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        words = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", *files]
        code = int(pytest.main(words, plugins=[Selection(tests, seconds)]))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)

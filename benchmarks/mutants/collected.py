"""Tests that are imported and collected once: each mutant runs in a fork of that process, in which the code
of its functions is replaced."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from .operators import Mutant, mutated_code
from .running import LEAST_SECONDS, MOST_BYTES, TIMES, kill_group, run_tests

Key = tuple[str, str, int]
"""File, name and first line of a function."""


class Collected:
    """A plugin of pytest that hands the tests on, in place of running them."""

    def __init__(self, copy: Path, work: Callable[[CollectedTests], None]) -> None:
        self.copy, self.work = copy, work

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Called by pytest."""
        capture = session.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            self.work(CollectedTests(self.copy, session.items))
        return True


class CollectedTests:
    """By name, and the functions of the copy of the repository that were imported with them."""

    def __init__(self, copy: Path, items: Sequence[pytest.Item]) -> None:
        self.copy = copy
        self.items = {item.nodeid: item for item in items}
        self.functions: dict[Key, list[FunctionType]] = defaultdict(list)
        gc.collect()
        for own in gc.get_objects():
            if type(own) is FunctionType and own.__code__.co_filename.startswith(str(copy)):
                self.functions[_key(own.__code__)].append(own)
        gc.freeze()

    def replacements(self, code: CodeType) -> Iterator[tuple[FunctionType, CodeType]]:
        """The functions that the code of a module changes, with theirs. Of those inside of others new ones go
        along; those that were made before, at import, are replaced where they look at as many variables."""
        for own in code.co_consts:
            if isinstance(own, CodeType):
                for each in self.functions.get(_key(own), []):
                    seen = len(each.__code__.co_freevars) == len(own.co_freevars)
                    if seen and each.__code__ != own:
                        yield each, own
                yield from self.replacements(own)

    def run(
        self, mutant: Mutant, tests: Sequence[str], seconds: Mapping[str, float]
    ) -> tuple[str, str] | None:
        """How the tests end with the mutant, and the test that failed; None where it changes no function, but
        what is run at import, or where one of the tests was not collected."""
        replaced = list(self.replacements(mutated_code(self.copy, mutant)))
        if not replaced or not set(tests) <= set(self.items):
            return None
        limit = LEAST_SECONDS + TIMES * sum(seconds.get(test, 0.0) for test in tests)
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            self._run_child(replaced, tests, seconds, write)
        os.close(write)
        began, code = time.monotonic(), -signal.SIGALRM
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() - began > limit:
                kill_group(pid)
                os.waitpid(pid, 0)
                break
            time.sleep(0.01)
        else:
            kill_group(pid)
            code = os.waitstatus_to_exitcode(ended[1])
        with os.fdopen(read, encoding="utf-8", errors="replace") as file:
            by = file.read()
        if code == -signal.SIGALRM:
            return "killed by time", ""
        return ("passed" if code == 0 else "killed"), by

    def _run_child(
        self,
        replaced: Sequence[tuple[FunctionType, CodeType]],
        tests: Sequence[str],
        seconds: Mapping[str, float],
        write: int,
    ) -> None:
        """Never returns."""
        code = 99
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            for function, own in replaced:
                function.__code__ = own
            items = [self.items[test] for test in tests]
            reports = _Failures()
            items[0].config.pluginmanager.unregister(name="terminalreporter")
            items[0].config.pluginmanager.register(reports)
            for item, following in zip(items, [*items[1:], None], strict=True):
                signal.setitimer(signal.ITIMER_REAL, LEAST_SECONDS + TIMES * seconds.get(item.nodeid, 0.0))
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if reports.failed:
                    os.write(write, reports.failed[0].encode())
                    break
            code = int(bool(reports.failed))
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(code)


class _Failures:
    """What failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest."""
        if report.failed:
            self.failed.append(report.nodeid)


def _key(code: CodeType) -> Key:
    return code.co_filename, code.co_qualname, code.co_firstlineno


class ColdTests:
    """A process that has imported nothing of pplan, whose forks run tests with a mutant of what is run at
    import."""

    def __init__(self, copy: Path) -> None:
        context = get_context("fork")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(copy, other), daemon=True)
        self.process.start()

    def run(self, mutant: Mutant, tests: Sequence[str], seconds: Mapping[str, float]) -> tuple[str, str]:
        """As `run_tests`."""
        self.connection.send((mutant, tests, {test: seconds.get(test, 0.0) for test in tests}))
        verdict, by = self.connection.recv()
        return verdict, by


def _serve(copy: Path, connection: Connection) -> None:
    while True:
        connection.send(run_tests(copy, *connection.recv()))

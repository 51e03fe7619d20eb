"""Which small changes of cost_models/ and planner/ the tests notice: python benchmarks/mutation.py

Draws mutants at random, each as likely as any other: a comparison, operator, number, condition, loop or call
is changed, or a statement left away. Each runs in a process of its own, in a copy of the repository, against
the tests that run its lines: first those of few files, and where they pass all others, up to `--seconds`. A
mutant is killed where a test fails, or where one takes three times as long as without it and half a minute.
Prints the share killed with its 95 % interval, and the survivors. Takes hours: 10 s a mutant that dies,
minutes where it survives; `--results` keeps what was done, and goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from mutants.covering import Covering
from mutants.operators import Mutant, mutants, mutated_code

ROOT = Path(__file__).parents[1]
FOLDERS = ("cost_models", "planner")
TESTS = ("tests/cost_models", "tests/planner", "tests/verification", "tests/proofs")
WARM = ("numpy", "pydantic", "networkx", "torch", "typer", "rich.console")
"""Imported once; nothing of pplan."""
TIMES, LEAST_SECONDS, MOST_BYTES = 3, 30, 12 * 2**30
FIRST_FILES = 4
"""Test files that are collected first."""


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
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "killed by time", ""
        time.sleep(0.05)
    code = os.waitstatus_to_exitcode(ended[1])
    if code == -signal.SIGALRM:
        return "killed by time", ""
    text = log.read_text(errors="replace").strip().splitlines()
    if code == pytest.ExitCode.NO_TESTS_COLLECTED or (mutant is None and code):
        raise AssertionError("\n".join(text[-20:]))
    failures = [line for line in text if line.startswith(("FAILED", "ERROR"))]
    return ("passed" if code == 0 else "killed"), "".join((failures or text)[-1:])[:200]


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


def judge(copy: Path, mutant: Mutant, covering: Covering, most_seconds: float) -> dict[str, Any]:
    """The verdict on one mutant."""
    began = time.monotonic()
    seconds = 0.0
    chosen: list[str] = []
    for test in covering.tests(mutant):
        seconds += covering.seconds.get(test, 0.0)
        if seconds > most_seconds and chosen:
            break
        chosen.append(test)
    files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))[:FIRST_FILES]
    first = [test for test in chosen if test.partition("::")[0] in files]
    later = [test for test in chosen if test.partition("::")[0] not in files]
    verdict, by = "not covered", ""
    for part in filter(None, (first, later)):
        verdict, by = run_tests(copy, mutant, part, covering.seconds)
        if verdict != "passed":
            break
    verdict = "survived" if verdict == "passed" else verdict
    line = (copy / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
    taken = round(time.monotonic() - began, 1)
    return asdict(mutant) | {
        "verdict": verdict,
        "by": by,
        "source": line,
        "tests": len(chosen),
        "seconds": taken,
    }


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of what git knows of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy = Path(name) / "pplan"
        for file in filter(None, listed.split("\0")):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copy / file, follow_symlinks=False)
        yield copy


def interval(killed: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.96, killed / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return middle - half, middle + half


def report(results: Sequence[dict[str, Any]]) -> None:
    """Prints the table and the survivors."""
    for folder in (*FOLDERS, "all"):
        own = [result for result in results if folder in ("all", result["file"].split("/")[0])]
        if own:
            killed = sum(result["verdict"].startswith("killed") for result in own)
            low, high = interval(killed, len(own))
            share = killed / len(own)
            print(f"{folder:12} {killed:4} of {len(own):4} killed: {share:5.1%} ({low:.1%} to {high:.1%})")
    print(dict(Counter(result["verdict"] for result in results)))
    for result in sorted(results, key=lambda result: (result["file"], result["line"])):
        if not result["verdict"].startswith("killed"):
            print(f"\n{result['file']}:{result['line']}  {result['source']}")
            print(f"    {result['words']}  ({result['verdict']})")


def main() -> None:
    """Draws, runs, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=90, help="of tests a mutant, without it (default: %(default)s)"
    )
    parser.add_argument("--marks", default="not slow", help="the tests (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="a file of one line a mutant, which is gone on with")
    parser.add_argument("--again", action="store_true", help="only run anew what survived in --results")
    parser.add_argument(
        "--file", action="append", help="of these alone, as planner/search/*bound*.py; repeatable"
    )
    parser.add_argument(
        "--covering", type=Path, help="a file that keeps which tests run which lines; read if there"
    )
    arguments = parser.parse_args()
    for name in WARM:
        importlib.import_module(name)
    gc.freeze()
    results = _results(arguments.results)
    with copied() as copy:
        everything = [
            mutant
            for folder in FOLDERS
            for file in sorted((copy / folder).rglob("*.py"))
            if any(fnmatch(str(file.relative_to(copy)), each) for each in arguments.file or ["*"])
            for mutant in mutants(copy, str(file.relative_to(copy)))
        ]
        drawn = random.Random(arguments.seed).sample(everything, min(arguments.mutants, len(everything)))
        python = [sys.executable, "-c", _START, str(Path(__file__).parent), str(copy)]
        covering = Covering.kept(arguments.covering, copy, python, TESTS, arguments.marks)
        for number, mutant in enumerate(drawn):
            known = results.get((mutant.file, mutant.number))
            if known is not None and not (arguments.again and not known["verdict"].startswith("killed")):
                continue
            own = judge(copy, mutant, covering, arguments.seconds)
            results[mutant.file, mutant.number] = own
            print(
                f"{number + 1:4} {own['verdict']:14} {own['seconds']:6} s  {own['file']}:{own['line']}",
                flush=True,
            )
            if arguments.results:
                with arguments.results.open("a") as file:
                    file.write(json.dumps(own) + "\n")
    report(
        [results[mutant.file, mutant.number] for mutant in drawn if (mutant.file, mutant.number) in results]
    )


_START = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from pathlib import Path
import mutation
sys.meta_path.insert(0, mutation.CopyFinder(Path(sys.argv.pop(1)), None))
sys.exit(mutation.pytest.main(sys.argv[1:]))
"""
"""Runs pytest on the copy."""


def _results(path: Path | None) -> dict[tuple[str, int], dict[str, Any]]:
    """What was done before."""
    lines = path.read_text().splitlines() if path is not None and path.is_file() else []
    return {(own["file"], own["number"]): own for own in map(json.loads, lines)}


if __name__ == "__main__":
    main()

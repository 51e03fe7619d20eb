"""Which small changes of cost_models/ and planner/ the tests notice: python benchmarks/mutation.py

Draws mutants at random, each as likely as any other: a comparison, operator, number, condition, loop or call
is changed, or a statement left away. Each runs in a process of its own, in a copy of the repository, against
the tests that run its lines: the quick ones of `OWN`, and where all pass those of the other folders, and with
`--slow` those that are marked slow; of each of these parts up to `--seconds`. The process is forked from one
that has collected all tests, and gets the changed functions; where something is changed that runs at import,
from one that has imported nothing of pplan. A mutant is killed where a test fails, or where one takes three
times as long as without it and half a minute. Prints the share killed with its 95 % interval, and the
survivors. Takes about a second a mutant that dies, and `--seconds` where it survives, first some minutes to
measure which tests run which lines; `--results` keeps what was done, and goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
from mutants.collected import ColdTests, Collected, CollectedTests
from mutants.covering import Covering
from mutants.operators import Mutant, mutants
from mutants.running import CopyFinder

ROOT = Path(__file__).parents[1]
FOLDERS = ("cost_models", "planner")
OWN = ("tests/cost_models", "tests/planner", "tests/verification", "tests/proofs")
OTHERS = (
    *("tests/api", "tests/cli", "tests/fuzz", "tests/security", "tests/runtimes/formats"),
    *("tests/runtimes/reading", "tests/test_docs.py", "tests/test_recipes.py"),
)
PARTS = {
    "own": (OWN, "not slow"),
    "others": (OTHERS, "not slow"),
    "slow": ((*OWN, *OTHERS), "slow"),
}
"""The tests that are run one after the other until one fails, with their marks."""
WARM = ("numpy", "pydantic", "networkx", "torch", "typer", "rich.console")
"""Imported once; nothing of pplan."""


@dataclass(frozen=True)
class Part:
    """Some of the tests, of which it is measured once which run which lines: where the first mutant comes to
    them. `path` keeps it, and is read if it is there."""

    name: str
    copy: Path
    path: Path | None

    @cached_property
    def covering(self) -> Covering:
        """Of its tests."""
        python = [sys.executable, "-c", _START, str(Path(__file__).parent), str(self.copy)]
        return Covering.kept(self.path, self.copy, python, *PARTS[self.name])

    def chosen(self, mutant: Mutant, most_seconds: float) -> list[str]:
        """Tests of the mutant's lines up to so many seconds, at least one."""
        tests = self.covering.tests(mutant) if self.name == "own" else self.covering.tests_of_lines(mutant)
        seconds, chosen = 0.0, list[str]()
        for test in tests if self.name == "own" else sorted(tests, key=self.covering.seconds.__getitem__):
            seconds += self.covering.seconds.get(test, 0.0)
            if seconds > most_seconds and chosen:
                break
            chosen.append(test)
        return chosen

    def run(
        self, mutant: Mutant, tests: Sequence[str], collected: CollectedTests, cold: ColdTests
    ) -> tuple[str, str]:
        """How the tests end with the mutant, and what failed."""
        seconds = self.covering.seconds
        result = None if self.covering.is_imported(mutant) else collected.run(mutant, tests, seconds)
        return cold.run(mutant, tests, seconds) if result is None else result


def judge(
    mutant: Mutant, parts: Sequence[Part], most_seconds: float, collected: CollectedTests, cold: ColdTests
) -> dict[str, Any]:
    """The verdict on one mutant."""
    began = time.monotonic()
    verdict, by, last, tests = "not covered", "", "", 0
    for part in parts:
        chosen = part.chosen(mutant, most_seconds)
        tests += len(chosen)
        if chosen:
            verdict, by = part.run(mutant, chosen, collected, cold)
        last = part.name
        if verdict.startswith("killed"):
            break
    line = (collected.copy / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
    return asdict(mutant) | {
        "verdict": "survived" if verdict == "passed" else verdict,
        "by": by,
        "part": last,
        "source": line,
        "tests": tests,
        "seconds": round(time.monotonic() - began, 1),
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
    killers = (result["part"] for result in results if result["verdict"].startswith("killed"))
    print(dict(Counter(result["verdict"] for result in results)), "killed by", dict(Counter(killers)))
    for result in sorted(results, key=lambda result: (result["file"], result["line"])):
        if not result["verdict"].startswith("killed"):
            print(f"\n{result['file']}:{result['line']}  {result['source']}")
            print(f"    {result['words']}  ({result['verdict']})")


def main() -> None:
    """Draws, runs, prints."""
    arguments = _arguments()
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
        kept = arguments.covering
        parts = [
            Part(name, copy, None if kept is None else kept.with_name(f"{kept.name}.{name}"))
            for name in (PARTS if arguments.slow else list(PARTS)[:2])
        ]
        cold = ColdTests(copy)
        os.chdir(copy)
        sys.meta_path.insert(0, CopyFinder(copy, None))
        work = partial(judge_all, drawn, parts, cold, results, arguments)
        tests = [folder for part in parts for folder in PARTS[part.name][0]]
        words = ["-q", "-p", "no:cacheprovider", *([] if arguments.slow else ["-m", "not slow"])]
        if status := pytest.main([*words, *dict.fromkeys(tests)], plugins=[Collected(copy, work)]):
            raise SystemExit(f"the tests could not be collected: status {status}")
    print(f"of {len(everything)} mutants")
    report(
        [results[mutant.file, mutant.number] for mutant in drawn if (mutant.file, mutant.number) in results]
    )


def judge_all(
    drawn: Sequence[Mutant],
    parts: Sequence[Part],
    cold: ColdTests,
    results: dict[tuple[str, int], dict[str, Any]],
    arguments: argparse.Namespace,
    collected: CollectedTests,
) -> None:
    """Those whose turn it is, and that are not known, until the time is over."""
    turn, turns = map(int, arguments.turn.split("/"))
    end = time.monotonic() + 60 * arguments.minutes
    for number, mutant in enumerate(drawn):
        known = results.get((mutant.file, mutant.number))
        if known is not None and not (arguments.again and not known["verdict"].startswith("killed")):
            continue
        if number % turns != turn - 1 or time.monotonic() > end:
            continue
        own = judge(mutant, parts, arguments.seconds, collected, cold)
        results[mutant.file, mutant.number] = own
        print(
            f"{number + 1:4} {own['verdict']:14} {own['seconds']:6} s  {own['file']}:{own['line']}",
            flush=True,
        )
        if arguments.results:
            with arguments.results.open("a") as file:
                file.write(json.dumps(own) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=90, help="of tests a mutant, without it (default: %(default)s)"
    )
    parser.add_argument("--slow", action="store_true", help="survivors also by tests that are marked slow")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no mutant is begun after them")
    parser.add_argument(
        "--turn", default="1/1", help="2/3: every third mutant from the second on, beside other processes"
    )
    parser.add_argument("--results", type=Path, help="a file of one line a mutant, which is gone on with")
    parser.add_argument("--again", action="store_true", help="only run anew what survived in --results")
    parser.add_argument(
        "--file", action="append", help="of these alone, as planner/search/*bound*.py; repeatable"
    )
    parser.add_argument(
        "--covering", type=Path, help="how files begin that keep which tests run which lines; read if there"
    )
    return parser.parse_args()


_START = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from pathlib import Path
import pytest
from mutants.running import CopyFinder
sys.meta_path.insert(0, CopyFinder(Path(sys.argv.pop(1)), None))
sys.exit(pytest.main(sys.argv[1:]))
"""
"""Runs pytest on the copy."""


def _results(path: Path | None) -> dict[tuple[str, int], dict[str, Any]]:
    """What was done before."""
    lines = path.read_text().splitlines() if path is not None and path.is_file() else []
    return {(own["file"], own["number"]): own for own in map(json.loads, lines)}


if __name__ == "__main__":
    main()

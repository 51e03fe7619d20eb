"""Which tests run which lines, and how long each takes."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coverage.numbits import numbits_to_nums

from .operators import Mutant

TESTS_FAILED = 1
"""Status of pytest. A busy machine may fail a test, which then tells nothing."""
PLUGIN = """
import json, os
SECONDS, FAILED = {}, set()
def pytest_runtest_logreport(report):
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0) + report.duration
    if report.failed:
        FAILED.add(report.nodeid)
def pytest_sessionfinish():
    passed = {test: seconds for test, seconds in SECONDS.items() if test not in FAILED}
    with open(os.environ["MUTATION_SECONDS"], "w") as file:
        json.dump(passed, file)
"""


@dataclass
class Covering:
    """Tests that pass, by file and line, by file alone (what runs at import too), and the seconds of each;
    `imported`: the lines that run outside of tests."""

    seconds: dict[str, float]
    lines: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    files: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    imported: set[tuple[str, int]] = field(default_factory=set)

    @classmethod
    def kept(
        cls, path: Path | None, folder: Path, python: Sequence[str], tests: Sequence[str], marks: str
    ) -> Covering:
        """As it was written to `path`, or measured and written there."""
        if path is not None and path.is_file():
            return cls.load(path)
        covering = cls.measure(folder, python, tests, marks)
        if path is not None:
            covering.save(path)
        return covering

    @classmethod
    def load(cls, path: Path) -> Covering:
        """As `save` wrote it."""
        content = json.loads(path.read_text())
        tests = list(content["seconds"])
        lines = {
            (file, int(line)): {tests[own] for own in numbers} for file, line, numbers in content["lines"]
        }
        files = {file: {tests[own] for own in numbers} for file, numbers in content["files"].items()}
        return cls(content["seconds"], lines, files, {(file, line) for file, line in content["imported"]})

    def save(self, path: Path) -> None:
        """As JSON; tests by their place in `seconds`."""
        numbers = {test: number for number, test in enumerate(self.seconds)}
        rows = [
            [file, line, sorted(numbers[test] for test in own)] for (file, line), own in self.lines.items()
        ]
        files = {file: sorted(numbers[test] for test in own) for file, own in self.files.items()}
        content = {"seconds": self.seconds, "lines": rows, "files": files, "imported": sorted(self.imported)}
        path.write_text(json.dumps(content))

    @classmethod
    def measure(cls, folder: Path, python: Sequence[str], tests: Sequence[str], marks: str) -> Covering:
        """Runs the tests once, in `folder`, a copy of the repository."""
        with tempfile.TemporaryDirectory(prefix="covering-") as name:
            own = Path(name)
            (own / "seconds_of_tests.py").write_text(PLUGIN)
            (own / "coverage.ini").write_text(
                f"[run]\nsource = cost_models,planner\ndata_file = {own / 'data'}\n"
            )
            path = os.pathsep.join(filter(None, [str(own), os.environ.get("PYTHONPATH", "")]))
            ended = subprocess.run(
                [
                    *(*python, "-p", "seconds_of_tests", "-q", "-m", marks),
                    *("--cov=cost_models", "--cov=planner", f"--cov-config={own / 'coverage.ini'}"),
                    *("--cov-context=test", "--cov-report=", *tests),
                ],
                cwd=folder,
                env=os.environ | {"MUTATION_SECONDS": str(own / "seconds"), "PYTHONPATH": path},
                check=False,
            )
            if ended.returncode not in (0, TESTS_FAILED):
                raise RuntimeError(f"the tests ended with status {ended.returncode}")
            return cls.read(folder, own / "data", json.loads((own / "seconds").read_text()))

    @classmethod
    def read(cls, folder: Path, data: Path, seconds: dict[str, float]) -> Covering:
        """From what coverage wrote."""
        covering = cls(seconds)
        rows = sqlite3.connect(data).execute(
            "select path, context, numbits from line_bits join file on file.id = file_id"
            " join context on context.id = context_id"
        )
        for path, context, numbits in rows:
            test = context.partition("|")[0]
            file = str(Path(path).relative_to(folder))
            if not test:
                covering.imported |= {(file, line) for line in numbits_to_nums(numbits)}
            if test in seconds:
                covering.files[file].add(test)
                for line in numbits_to_nums(numbits):
                    covering.lines[file, line].add(test)
        return covering

    def is_imported(self, mutant: Mutant) -> bool:
        """Whether a line of the change runs at import."""
        lines = range(mutant.line, mutant.last_line + 1)
        return any((mutant.file, line) in self.imported for line in lines)

    def tests_of_lines(self, mutant: Mutant) -> set[str]:
        """Those that run a line of the change."""
        lines = range(mutant.line, mutant.last_line + 1)
        return set[str]().union(*(self.lines.get((mutant.file, line), set()) for line in lines))

    def tests(self, mutant: Mutant) -> list[str]:
        """Those that run a line of the change, else (tables of constants are read where they are imported)
        those that run its file and all of its folder: of the module's own test file first, then of its
        folder's tests, the quickest first."""
        own, folder = f"test_{Path(mutant.file).stem}.py::", f"tests/{Path(mutant.file).parent}/"
        return sorted(
            self.tests_of_lines(mutant) or self.files.get(mutant.file, set()) | self._of_folder(mutant.file),
            key=lambda test: (
                own not in test,
                not test.startswith(folder),
                self.seconds.get(test, 0.0),
                test,
            ),
        )

    def _of_folder(self, file: str) -> set[str]:
        parent = f"tests/{Path(file).parent}/"
        return {test for test in self.seconds if test.startswith(parent)}

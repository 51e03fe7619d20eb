"""Kills verbs at random instants: python benchmarks/kills.py [--kills N] [--seed S]

Each kill is a SIGKILL of a verb that replaces a file, at an instant between its start and a little behind its
usual end. Afterwards the file must be the old one or a whole new one. After the last kill each verb runs to
its end, and nothing may lie in the folder that does not belong there. Prints a table; status 1 where a file
was lost or something was left.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from fuzzing.seeds import MACHINE, PLAIN, make_seeds

from pplan.cli.app import main as pplan_main
from pplan.cost_models.text_files import file_kind, is_unchanged

PLAN = "plain.plan.json"
VERBS: Mapping[str, tuple[list[str], str]] = {
    "profile": (["profile", "alexnet", "--device", "analytic:a100-40gb", "-o"], "killed.profile.json"),
    "solve": (["solve", PLAIN, *MACHINE, "--time-limit", "1s", "-o"], "killed.plan.json"),
    "sweep": (["solve", PLAIN, "--sweep", "gpus=1,2", "--jobs", "1", "--csv"], "killed.csv"),
    "simulate": (["simulate", PLAN, "--trace"], "killed.trace.json"),
    "report": (["report", PLAN, "-o"], "killed.html"),
    "degrees": (
        ["solve", "config.json", "--gpus", "8", "--gpu", "h100", "--pp", "2", "-o"],
        "killed.degrees.plan.json",
    ),
    "check": (["check", "checked.plan.json", "--emulate", "--steps", "1", "--save"], "checked.check.json"),
}
"""Command and the file that it replaces, whose name follows it, but of check."""
SLOW, ONE_IN = "check", 25
"""What starts processes of its own, and takes long, is killed once in so many times."""


def run_verb(command: list[str]) -> None:
    """In a process of its own, silently."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):  # noqa: PTH123
        with contextlib.redirect_stderr(nothing):
            status = pplan_main(command)
        os._exit(status)


def start(command: list[str]) -> BaseProcess:
    """The verb, forked from this process, which has imported everything."""
    process = multiprocessing.get_context("fork").Process(target=run_verb, args=(command,))
    process.start()
    return process


def is_whole(target: Path, kind: str) -> bool:
    """Whether the file is one that pplan wrote to its end."""
    text = target.read_text(encoding="utf-8")
    if file_kind(text) != kind:
        return False
    if text.startswith("{"):
        return isinstance(json.loads(text), dict)
    if target.suffix == ".csv":
        return len({len(row) for row in csv.reader(text.splitlines())}) == 1 and text.endswith("\n")
    return is_unchanged(text) or text.rstrip().endswith("</html>")


class Killed:
    """A verb that is killed again and again."""

    def __init__(self, folder: Path, name: str) -> None:
        command, file = VERBS[name]
        self.target, self.folder = folder / file, folder
        self.command = command if name == SLOW else [*command, file, "--force"]
        began = time.monotonic()
        self.finish()
        self.seconds = time.monotonic() - began
        self.kind = file_kind(self.target.read_text(encoding="utf-8"))
        self.kills = self.old = self.new = self.broken = 0

    def finish(self) -> None:
        """Lets it run to its end."""
        process = start(self.command)
        process.join()
        if process.exitcode:
            raise AssertionError(f"{' '.join(self.command)}: status {process.exitcode}")

    def kill(self, rng: random.Random) -> None:
        """Once; half of the kills lie in the last fifth, where the file is written."""
        before = self.target.read_bytes()
        first = rng.choice((0.0, 0.8))
        process = start(self.command)
        time.sleep(rng.uniform(first, 1.1) * self.seconds)
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            self.kills += 1
        process.join()
        same = self.target.is_file() and self.target.read_bytes() == before
        self.old += same
        self.new += not same and is_whole(self.target, self.kind)
        self.broken += not same and not is_whole(self.target, self.kind)


def main() -> int:
    """Prints a table of the verbs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=600, help="of all verbs together (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=60, help="after which no more are (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        make_seeds(folder)
        (folder / "pplan.toml").unlink()
        os.chdir(folder)
        (folder / "checked.plan.json").write_bytes((folder / PLAN).read_bytes())
        (folder / "temporary").mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "temporary")
        verbs = {verb: Killed(folder, verb) for verb in VERBS}
        expected = {path.name for path in folder.iterdir()}
        until = time.monotonic() + 60 * arguments.minutes
        for number in range(arguments.kills):
            if time.monotonic() > until:
                break
            usual = [verb for verb in verbs if verb != SLOW]
            verbs[SLOW if number % ONE_IN == 0 else usual[number % len(usual)]].kill(rng)
        halfway = {path.name for path in folder.iterdir()} - expected
        for killed in verbs.values():
            killed.finish()
        left = {path.name for path in folder.iterdir()} - expected
        # PyTorch makes its compiler's cache where it is imported.
        left |= {path.name for path in (folder / "temporary").glob("pplan*")}
        tempfile.tempdir = None
        os.chdir("/")
    print(f"{'verb':10} {'killed':>7} {'old file':>9} {'new file':>9} {'broken':>7}")
    for verb, own in verbs.items():
        print(f"{verb:10} {own.kills:7} {own.old:9} {own.new:9} {own.broken:7}")
    print(f"\nhalf-written files after the kills: {len(halfway)}, after the next runs: {len(left)}")
    return 1 if left or any(own.broken for own in verbs.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

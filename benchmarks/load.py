"""Time and memory of pplan on large inputs: python benchmarks/load.py

Each line is a command in a process of its own: seconds of processor time, the most memory that it held, and
its status with the refusal, where it is one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from fuzzing.seeds import profile

LAYERS, MICRO_BATCHES, POINTS, LARGE_BYTES = 10_000, 10_000, 1_000, 200_000_000
MACHINE = ["--gpus", "8", "--gpu", "a100-80gb", "--mini-batch", "64"]
RUN = [sys.executable, "-c", "import sys; from pplan.cli.app import main; sys.exit(main())"]
LONGEST = 1200


def long_profile(layers: int) -> dict[str, Any]:
    """Of a chain of so many blocks."""
    content = profile()
    block = content["layers"][1]
    names = [f"transformer.h.{number}" for number in range(layers)]
    content["layers"] = [block | {"name": name} for name in names]
    content["edges"] = [list(pair) for pair in pairwise(names)]
    for whole in content["whole"]:
        for key in ("forward_seconds", "backward_seconds"):
            whole[key] *= layers / 7
    return content | {"tied": []}


def commands(folder: Path) -> list[tuple[str, list[str]]]:
    """What is run, with the words of the table."""
    (folder / "long.profile.json").write_text(json.dumps(long_profile(LAYERS)))
    (folder / "short.profile.json").write_text(json.dumps(profile() | {"tied": []}))
    for name, size in (("large", LARGE_BYTES), ("larger", 2 * LARGE_BYTES)):
        with (folder / f"{name}.profile.json").open("w") as file:
            file.write(json.dumps(profile() | {"tied": []})[:-1])
            file.write(', "padding": "')
            for _ in range(size // 10**6):
                file.write("x" * 10**6)
            file.write('"}')
    most = MICRO_BATCHES // 10
    simulate = ["simulate", "--forward-ms", "1", "--backward-ms", "2", "--stages", "8", "--schedule"]
    split = [*simulate, "zb-h1", "--weight-ms", "1"]
    solve = ["solve", "short.profile.json", "--gpu", "a100-80gb", "--time-limit", "1s"]
    sweep = f"mini-batch={','.join(str(8 * number) for number in range(1, POINTS // 4 + 1))}"
    return [
        (f"show {LAYERS:,} layers", ["show", "long.profile.json"]),
        (
            f"solve {LAYERS:,} layers, 8 GPUs",
            ["solve", "long.profile.json", *MACHINE, "-o", "long.plan.json"],
        ),
        ("report of that plan", ["report", "long.plan.json", "-o", "long.html"]),
        ("lint that plan", ["lint", "long.plan.json"]),
        (f"simulate 1f1b, {MICRO_BATCHES:,} micro-batches", [*simulate, "1f1b", "--micro-batches", "10000"]),
        (
            f"simulate zb-h1, {most:,} micro-batches",
            [*split, "--micro-batches", str(most)],
        ),
        (
            f"sweep of {POINTS:,} points",
            # One process: what others take is not counted where they outlive it.
            [*solve, "--sweep", "gpus=1,2,3,4", "--sweep", sweep, "--jobs", "1", "--csv", "sweep.csv"],
        ),
        ("show a profile of 200 MB", ["show", "large.profile.json"]),
        ("solve a profile of 200 MB", ["solve", "large.profile.json", *MACHINE, "-o", "large.plan.json"]),
        ("show a profile of 400 MB", ["show", "larger.profile.json"]),
    ]


def run(command: list[str], folder: Path) -> tuple[float, float, str]:
    """Seconds of processor time, GiB, and how it ended."""
    with (folder / "output.txt").open("w+") as output:
        began = time.monotonic()
        child = subprocess.Popen([*RUN, *command], cwd=folder, stdout=subprocess.DEVNULL, stderr=output)
        used: resource.struct_rusage | None = None
        while used is None:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                used, child.returncode = usage, os.waitstatus_to_exitcode(status)
            elif time.monotonic() - began > LONGEST:
                child.kill()
            time.sleep(0.05)
        output.seek(0)
        said = [line for line in output.read().splitlines() if line.startswith("pplan: ")]
    ended = "done" if child.returncode == 0 else f"{child.returncode} {''.join(said)[:90]}"
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, ended


def main() -> int:
    """Prints the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        folder = Path(name)
        print(f"{'':38} {'seconds':>8} {'GiB':>6}")
        for words, command in commands(folder):
            seconds, memory, ended = run(command, folder)
            print(f"{words:38} {seconds:8.1f} {memory:6.2f}  {ended}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

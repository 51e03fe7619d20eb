"""Processor seconds of commands, start included: python benchmarks/command_line.py [PROFILE]

Without PROFILE, one of VGG-19 is measured first, on small images and a short budget: `solve` takes as long
for it as for a long one.
"""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

REPEATS = 5
PPLAN = Path(sys.executable).with_name("pplan")


def children_seconds() -> float:
    """Processor seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def processor_seconds(arguments: list[str], folder: Path) -> tuple[float, float]:
    """Processor and wall seconds of one run."""
    used, start = children_seconds(), time.perf_counter()
    subprocess.run([str(PPLAN), *arguments], cwd=folder, check=True, capture_output=True)
    return children_seconds() - used, time.perf_counter() - start


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = folder / "vgg19.profile.json"
        if len(sys.argv) > 1:
            profile.write_text(Path(sys.argv[1]).read_text())
        else:
            measuring = ["profile", "vgg19", "--input", "3x32x32", "--budget", "10s", "--no-cache"]
            subprocess.run([str(PPLAN), *measuring], cwd=folder, check=True, capture_output=True)
        print(f"Python {platform.python_version()}, {REPEATS} runs after one warm-up, medians\n")
        print(f"{'command':<44} {'processor s':>12} {'wall s':>7}")
        for arguments in (
            ["--help"],
            ["solve", "--gpus", "8"],
            ["solve", "--gpus", "16"],
            ["solve", "--gpus", "8", "--mini-batch", "1024", "--memory", "4GiB"],
            ["show"],
            ["simulate"],
            ["report", "-o", "vgg19.html", "--force"],
            ["export", "torchgpipe"],
        ):
            runs = [processor_seconds(arguments, folder) for _ in range(REPEATS + 1)][1:]
            processor, wall = (median(values) for values in zip(*runs, strict=True))
            print(f"{'pplan ' + ' '.join(arguments):<44} {processor:>12.2f} {wall:>7.2f}")


if __name__ == "__main__":
    main()

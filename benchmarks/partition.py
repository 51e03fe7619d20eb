"""Seconds of the exact min-max partition: python benchmarks/partition.py"""

from __future__ import annotations

import platform
import time
from statistics import median

import numpy as np

from pplan.planner.balance import balance

SIZES = ((1_000, 64), (10_000, 1_024))
REPEATS = 5


def seconds(layers: int, stages: int, *, with_cuts: bool) -> list[float]:
    """Seconds of some runs on different random chains."""
    taken = []
    for seed in range(REPEATS):
        rng = np.random.default_rng(seed)
        costs, cuts = rng.random(layers), 2 * rng.random(layers - 1)
        start = time.perf_counter()
        balance(costs, stages, cut_costs=cuts if with_cuts else None)
        taken.append(time.perf_counter() - start)
    return taken


def main() -> None:
    """Prints the table."""
    print(f"Python {platform.python_version()}, numpy {np.__version__}, one core, {REPEATS} random chains\n")
    print(f"{'layers':>8} {'stages':>7} {'costs at cuts':>14} {'median ms':>10} {'worst ms':>9}")
    for layers, stages in SIZES:
        for with_cuts in (False, True):
            taken = seconds(layers, stages, with_cuts=with_cuts)
            word = "yes" if with_cuts else "no"
            print(f"{layers:>8} {stages:>7} {word:>14} {1e3 * median(taken):>10.1f} {1e3 * max(taken):>9.1f}")


if __name__ == "__main__":
    main()

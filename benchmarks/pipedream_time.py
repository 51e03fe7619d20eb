"""Seconds of PipeDream's programme: python benchmarks/pipedream_time.py

Chains of random costs on devices without a memory limit, and with one that half of the layers would fill.
"""

from __future__ import annotations

import platform
import time
from statistics import median

import numpy as np

from pplan.planner.planners.pipedream_planner import Bools, Instance, shortest_bottleneck
from pplan.planner.planners.replica_groups import Tier
from pplan.planner.stage_table import Floats

REPEATS = 3
CASES = (
    (200, (16,), "0.05"),
    (400, (16,), ""),
    (200, (8, 16), "2"),
    (50, (8, 8), ""),
)
"""Layers, machines by level from the innermost, and the seconds that it may take."""


def chain(seed: int, layers: int, machines: tuple[int, ...], *, limited: bool) -> Instance:
    """A random chain whose stages hold bytes for each mini-batch in flight."""
    rng = np.random.default_rng(seed)
    tiers = tuple(Tier(count, 1e10 / 10**level) for level, count in enumerate(machines))
    seconds, weights, held = (between(scale * rng.random(layers)) for scale in (1.0, 1e8, 1.0))
    valid = np.triu(np.ones(seconds.shape, dtype=bool), 1)
    crossing = np.concatenate([[0.0], 1e8 * rng.random(layers - 1), [0.0]])

    def fits(replicas: int, behind: int) -> Bools:
        fitting: Bools = held * (1 + behind) / replicas <= held[0, -1] / 2
        return fitting

    own = fits if limited else None
    return Instance(np.where(valid, seconds, np.inf), weights, crossing, tiers, fits=own)


def between(values: Floats) -> Floats:
    """Sums of the values between two places."""
    running = np.concatenate([[0.0], np.cumsum(values)])
    sums: Floats = np.maximum(running[None, :] - running[:, None], 0.0)
    return sums


def main() -> None:
    """Prints the table."""
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {REPEATS} random chains\n")
    print(f"{'layers':>7} {'machines':>9} {'memory':>8} {'median s':>9} {'worst s':>8}", end=" ")
    print(f"{'wanted':>7}")
    for layers, machines, wanted in CASES:
        for limited in (False, True):
            taken = []
            for seed in range(REPEATS):
                instance = chain(seed, layers, machines, limited=limited)
                start = time.perf_counter()
                shortest_bottleneck(instance)
                taken.append(time.perf_counter() - start)
            levels, memory = " x ".join(map(str, machines)), "limited" if limited else "any"
            times = f"{median(taken):>9.3f} {max(taken):>8.3f}"
            print(f"{layers:>7} {levels:>9} {memory:>8} {times} {wanted:>7}")


if __name__ == "__main__":
    main()

"""Processor seconds of the exact min-max partition, beside torchgpipe's `blockpartition` and DeepSpeed's
`partition_balanced`, as layers and stages grow: python benchmarks/partition.py [--svg FILE]

A tool is given no longer chains once one took longer than `LIMIT`. The last column is its largest stage over
the exact one's, where it solves the same problem. The drawing has logarithmic axes.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from pplan.planner.balance import balance

SIZES = (
    (16, 4),
    (32, 4),
    (64, 8),
    (128, 8),
    (256, 16),
    (512, 32),
    (1_024, 64),
    (4_096, 256),
    (16_384, 1_024),
)
SEEDS = 3
LIMIT = 0.3
COLOURS = {
    "pplan": "#2456b8",
    "torchgpipe": "#b3261e",
    "deepspeed": "#c26a00",
}
LEAST, MOST = 1e-5, 1e2
"""Seconds at the ends of the drawing's axis."""

Partition = Callable[[list[float], int], Sequence[int]]


def partitions() -> dict[str, Partition]:
    """By tool, layer counts of so many stages."""
    from deepspeed.runtime.utils import partition_balanced
    from torchgpipe.balance.blockpartition import solve

    return {
        "pplan": balance,
        "torchgpipe": lambda costs, stages: [len(part) for part in solve(costs, partitions=stages)],
        "deepspeed": lambda costs, stages: np.diff(partition_balanced(costs, stages)).tolist(),
    }


def largest(costs: list[float], counts: Sequence[int]) -> float:
    """What the most expensive stage costs."""
    sums, ends = np.concatenate([[0.0], np.cumsum(costs)]), np.concatenate([[0], np.cumsum(counts)])
    return float(np.diff(sums[ends]).max())


def measure(partition: Partition, layers: int, stages: int) -> tuple[float, float]:
    """Median processor seconds, and the worst ratio of the largest stage to the exact one."""
    taken, ratios = [], []
    for seed in range(SEEDS):
        costs = np.random.default_rng(seed).random(layers).tolist()
        start = time.process_time()
        counts = partition(costs, stages)
        taken.append(time.process_time() - start)
        ratios.append(largest(costs, counts) / largest(costs, balance(costs, stages)))
    return median(taken), max(ratios)


def draw(points: dict[str, list[tuple[int, float]]]) -> str:
    """The seconds over the layers as SVG, both logarithmic."""
    width, height, left = 720, 380, 60

    def x(layers: float) -> float:
        span = math.log(SIZES[-1][0] / SIZES[0][0])
        return left + (width - left - 170) * math.log(layers / SIZES[0][0]) / span

    def y(seconds: float) -> float:
        return 20 + (height - 70) * math.log(MOST / max(seconds, LEAST)) / math.log(MOST / LEAST)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><title>Seconds of a partition over layers</title>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for power in range(round(math.log10(LEAST)), round(math.log10(MOST)) + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{left} {at:.1f}H{width - 170}" stroke="#d3d7de"/>')
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">1e{power} s</text>')
    for layers, stages in SIZES[::2]:
        parts.append(
            f'<text x="{x(layers):.1f}" y="{height - 30}" text-anchor="middle">{layers}/{stages}</text>'
        )
    parts.append(
        f'<text x="{width / 2 - 60:.0f}" y="{height - 10}" text-anchor="middle">layers/stages</text>'
    )
    for name, own in points.items():
        line = " ".join(f"{x(layers):.1f},{y(seconds):.1f}" for layers, seconds in own)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        layers, seconds = own[-1]
        parts.append(
            f'<text x="{x(layers) + 6:.1f}" y="{y(seconds) + 4:.1f}" fill="{COLOURS[name]}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--svg", type=Path, help="also draw it")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {SEEDS} random chains each\n")
    print(f"{'tool':<22} {'layers':>8} {'stages':>7} {'processor ms':>13} {'largest stage':>14}")
    points: dict[str, list[tuple[int, float]]] = {}
    for name, partition in partitions().items():
        for layers, stages in SIZES:
            seconds, ratio = measure(partition, layers, stages)
            points.setdefault(name, []).append((layers, seconds))
            print(f"{name:<22} {layers:>8} {stages:>7} {1e3 * seconds:>13.2f} {ratio:>12.3f} x", flush=True)
            if seconds > LIMIT:
                break
    if options.svg:
        options.svg.write_text(draw(points))


if __name__ == "__main__":
    main()

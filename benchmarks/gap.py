"""How far from the proven bound plans are: python benchmarks/gap.py [--profiles FOLDER] [MODEL ...]

Twelve models on 2, 4, 8 and 16 devices with three speeds of links, each solved as `pplan solve` does. The gap
is the step over the lower bound, less 1. Profiles are estimates for an A100 (see gap_models.py) and are kept
in the folder; without it they are made anew, which takes some minutes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from gap_models import MODELS, profile_of
from verified import verified

import pplan
from pplan import InfeasibleError

GPUS = (2, 4, 8, 16)
LINKS = {"NVLink": 300e9, "PCIe": 16e9, "10 GbE": 1.25e9}
LATENCY = 10e-6


@dataclass(frozen=True)
class Row:
    """A solved case."""

    gap: float
    exact: bool
    deep: bool
    """Whether there are four times as many micro-batches as stages, or more."""
    seconds: float


def solved(profile: pplan.Profile, gpus: int, bandwidth: float) -> Row | None:
    """The case; None where no plan fits."""
    start = time.perf_counter()
    try:
        plan = pplan.solve(
            profile,
            gpus=gpus,
            gpu="a100-80gb",
            gpus_per_node=gpus,
            bandwidth=bandwidth,
            latency=LATENCY,
            optimizer="adam",
            mini_batch=16 * gpus,
        )
    except InfeasibleError:
        return None
    seconds = time.perf_counter() - start
    verified(plan, profile)
    deep = plan.micro_batches >= 4 * len(plan.stages)
    return Row(plan.prediction.gap, plan.prediction.exact, deep, seconds)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--profiles", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        rows = table(options.models, options.profiles or Path(made))
    gaps, deep = [row.gap for row in rows], [row.gap for row in rows if row.deep]
    print(
        f"\n{len(rows)} plans, {sum(row.exact for row in rows)} exact, "
        f"slowest {max(row.seconds for row in rows):.1f} s"
    )
    print(f"gap, all: median {median(gaps):.2%}, worst {max(gaps):.2%}")
    if deep:
        print(
            f"gap, micro-batches >= 4 x stages ({len(deep)}): "
            f"median {median(deep):.2%}, worst {max(deep):.2%}"
        )


def table(models: list[str], folder: Path) -> list[Row]:
    """Prints a line a model and link: the gap by number of devices, `=` where exact."""
    print(
        f"{'model':<14}{'links':<8}"
        + "".join(f"{f'{gpus} GPUs':>10}" for gpus in GPUS)
        + f"{'slowest s':>11}"
    )
    rows = []
    for name in models:
        profile = profile_of(name, folder)
        for link, bandwidth in LINKS.items():
            own = [solved(profile, gpus, bandwidth) for gpus in GPUS]
            cells = "".join(f"{_cell(row):>10}" for row in own)
            made = [row for row in own if row is not None]
            slowest = max((row.seconds for row in made), default=0.0)
            print(f"{name:<14}{link:<8}{cells}{slowest:>11.2f}", flush=True)
            rows += made
    return rows


def _cell(row: Row | None) -> str:
    if row is None:
        return "no plan"
    return f"{row.gap:.2%}" + ("=" if row.exact else "")


if __name__ == "__main__":
    main()

"""What an order of its own gains: python benchmarks/schedules.py [--profiles FOLDER] [--devices N ...] [MODEL
...]

Twelve models (estimates for an A100, see gap_models.py) as pipelines of 4, 8 and 16 devices over NVLink, with
twice as many micro-batches of one sample as devices, so that no stage has replicas; in as much memory as the
best known plan takes where there is enough, and in 0.8 and 0.6 of it. `known`: the fastest of 1F1B, GPipe,
interleaved, ZB-H1, ZB-H2, ZB-V and DualPipeV; `own`: with `schedule="synthesized"`. The gap is to the bound
on all orders, which knows no memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import mean
from unittest import mock

from gap_models import MODELS, profile_of
from verified import verified

import pplan
from pplan import InfeasibleError, Plan, Profile
from pplan.planner import joint_search
from pplan.planner.candidate import ScoredPlan
from pplan.planner.problem import Problem
from pplan.planner.synthesis.synthesize import synthesize

DEVICES = (4, 8, 16)
SHARES = (1.0, 0.8, 0.6)
"""Of the memory of the fastest known plan where there is enough."""
HEAD = (
    f"{'model':<14}{'devices':>8}{'memory':>8}{'known':>13}{'own':>13}{'gain':>8}{'gap':>8}{'s':>7}  schedule"
)


@dataclass(frozen=True)
class Row:
    """Seconds of a step of the fastest known plan, None where none fits, and with an order of its own."""

    known: float | None
    plan: Plan
    seconds: float

    @property
    def gain(self) -> float | None:
        """By how much the known plan's step is longer."""
        return None if self.known is None else self.known / self.plan.prediction.step_seconds - 1


def solve(profile: Profile, devices: int, memory: float | None) -> Row | None:
    """None where no plan fits."""
    known: list[float] = []

    def note_known(problem: Problem, best: ScoredPlan | None) -> list[ScoredPlan]:
        known[:] = [] if best is None else [best.step_seconds]
        return synthesize(problem, best)

    start = time.perf_counter()
    try:
        with mock.patch.object(joint_search, "synthesize", note_known):
            plan = pplan.solve(
                profile,
                gpus=devices,
                gpu="a100-80gb",
                gpus_per_node=devices,
                bandwidth=300e9,
                latency=10e-6,
                optimizer="adam",
                mini_batch=2 * devices,
                micro_batches=2 * devices,
                use_all=True,
                schedule="synthesized",
                memory_limit=memory,
            )
    except InfeasibleError:
        return None
    verified(plan, profile)
    return Row(known[0] if known else None, plan, time.perf_counter() - start)


def rows_of(profile: Profile, devices: int) -> Iterator[tuple[float, Row | None]]:
    """By share of the memory."""
    most: float | None = None
    for share in SHARES:
        row = solve(profile, devices, None if most is None else share * most)
        if row is not None and most is None:
            most = max(stage.memory_bytes for stage in row.plan.stages)
        yield share, row


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--profiles", type=Path, metavar="FOLDER")
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES, metavar="N")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(MODELS)}")
    print(HEAD)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models or MODELS:
            profile = profile_of(name, options.profiles or Path(folder))
            for devices in options.devices:
                for share, row in rows_of(profile, devices):
                    print(f"{name:<14}{devices:>8}{share:>8.1f}{_cells(row)}", flush=True)
                    rows += [] if row is None else [row]
    gains = [row.gain for row in rows if row.gain is not None]
    print(
        f"\n{len(rows)} plans; gain: geometric mean "
        f"{exp(mean(log(1 + gain) for gain in gains)) - 1:.2%}, most {max(gains):.2%}, none in "
        f"{sum(gain <= 0 for gain in gains)}; "
        f"no known plan fits in {sum(row.known is None for row in rows)}; "
        f"gap: most {max(row.plan.prediction.gap for row in rows):.2%}"
    )


def _cells(row: Row | None) -> str:
    if row is None:
        return f"{'no plan':>13}"
    own = row.plan.prediction
    known = "none fits" if row.known is None else f"{1e3 * row.known:.1f} ms"
    gain = "" if row.gain is None else f"{row.gain:.2%}"
    step = f"{1e3 * own.step_seconds:.1f} ms"
    return f"{known:>13}{step:>13}{gain:>8}{own.gap:>8.2%}{row.seconds:>7.1f}  {row.plan.schedule}"


if __name__ == "__main__":
    main()

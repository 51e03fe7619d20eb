"""What cuts and orders of their own gain: python benchmarks/schedules.py [--profiles FOLDER] [--devices N]
[--time-limit S] [MODEL ...]

Twelve models (estimates for an A100, see gap_models.py) as pipelines of 4, 8 and 16 devices over NVLink, with
twice as many micro-batches of one sample as devices, so that no stage has replicas; in as much memory as the
fastest plan takes where there is enough, and in 0.8 and 0.6 of it. `known`: the fastest of the twelve
schedules of `schedule="any"` where all but 1F1B and GPipe have the cuts of the best plan of these two, or
balanced ones; `cuts`: with cuts searched for each; `own`: with `schedule="synthesized"`. Gains are those over
`known`, the gap of `own` is to the bound on all orders. With the default `--time-limit` of 30 seconds all of
it takes an hour or so of processor time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from pathlib import Path
from statistics import mean
from unittest import mock

from gap_models import MODELS, profile_of
from verified import verified

import pplan
from pplan import InfeasibleError, Plan, Profile
from pplan.planner import joint_search
from pplan.planner.candidate import ScoredPlan
from pplan.planner.cut_search.schedule_search import ScheduleResult, search_schedules
from pplan.planner.problem import Problem
from pplan.planner.synthesis.synthesize import synthesize

DEVICES = (4, 8, 16)
SHARES = (1.0, 0.8, 0.6)
"""Of the memory of the fastest known plan where there is enough."""
HEAD = (
    f"{'model':<14}{'devices':>8}{'memory':>8}{'known':>11}{'cuts':>11}{'gain':>8}{'own':>11}{'gain':>8}"
    f"{'gap':>8}{'s':>7}  schedule"
)


@dataclass(frozen=True)
class Row:
    """Seconds of a step of the fastest known plan, and of that with cuts of its own, inf where none fits; the
    plan with an order of its own."""

    known: float
    cuts: float
    plan: Plan
    seconds: float

    @property
    def gains(self) -> tuple[float, float]:
        """By how much the known plan's step is longer than with cuts, and with an order, of its own."""
        return self.known / self.cuts - 1, self.known / self.plan.prediction.step_seconds - 1


def solve(profile: Profile, devices: int, memory: float | None, time_limit: float) -> Row | None:
    """None where no plan fits."""
    known, cuts = [inf], [inf]

    def note_known(
        problem: Problem,
        schedules: Iterable[str],
        limit: float = inf,
        work: float | None = None,
        near: Iterable[ScoredPlan] = (),
    ) -> ScheduleResult:
        known[:] = [min(*known, limit)]
        return search_schedules(problem, schedules, limit, work, near)

    def note_cuts(problem: Problem, best: ScoredPlan | None, plans: Sequence[ScoredPlan]) -> list[ScoredPlan]:
        cuts[:] = [inf if best is None else best.step_seconds]
        return synthesize(problem, best, plans)

    start = time.perf_counter()
    try:
        with (
            mock.patch.object(joint_search, "search_schedules", note_known),
            mock.patch.object(joint_search, "synthesize", note_cuts),
        ):
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
                time_limit=time_limit,
            )
    except InfeasibleError:
        return None
    verified(plan, profile)
    return Row(known[0], cuts[0], plan, time.perf_counter() - start)


def rows_of(profile: Profile, devices: int, time_limit: float) -> Iterator[tuple[float, Row | None]]:
    """By share of the memory."""
    most: float | None = None
    for share in SHARES:
        row = solve(profile, devices, None if most is None else share * most, time_limit)
        if row is not None and most is None:
            most = max(stage.memory_bytes for stage in row.plan.stages)
        yield share, row


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--profiles", type=Path, metavar="FOLDER")
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES, metavar="N")
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="S", help="of each answer")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(MODELS)}")
    print(HEAD)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models or MODELS:
            profile = profile_of(name, options.profiles or Path(folder))
            for devices in options.devices:
                for share, row in rows_of(profile, devices, options.time_limit):
                    print(f"{name:<14}{devices:>8}{share:>8.1f}{_cells(row)}", flush=True)
                    rows += [] if row is None else [row]
    print()
    for index, name in enumerate(("cuts", "own order")):
        gains = [row.gains[index] for row in rows if row.known < inf]
        print(
            f"{name}: gain: geometric mean {exp(mean(log(1 + gain) for gain in gains)) - 1:.2%}, most "
            f"{max(gains):.2%}, none in {sum(gain < 1e-9 for gain in gains)} of {len(gains)}"
        )
    print(
        f"{len(rows)} plans; no known plan fits in {sum(row.known == inf for row in rows)}, none with cuts "
        f"of its own in {sum(row.cuts == inf for row in rows)}; gap: most "
        f"{max(row.plan.prediction.gap for row in rows):.2%}"
    )


def _cells(row: Row | None) -> str:
    if row is None:
        return f"{'no plan':>11}"
    own = row.plan.prediction
    known, cuts, step = (_milliseconds(own) for own in (row.known, row.cuts, own.step_seconds))
    first, second = ("" if row.known == inf else f"{gain:.2%}" for gain in row.gains)
    return (
        f"{known:>11}{cuts:>11}{first:>8}{step:>11}{second:>8}{own.gap:>8.2%}{row.seconds:>7.1f}  "
        f"{row.plan.schedule}"
    )


def _milliseconds(seconds: float) -> str:
    return "none fits" if seconds == inf else f"{1e3 * seconds:.1f} ms"


if __name__ == "__main__":
    main()

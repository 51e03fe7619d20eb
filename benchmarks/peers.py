"""pplan against the planners of others: python benchmarks/peers.py [--jobs N] [--results FILE] [MODEL ...]

Every model on 2, 4, 8, 16 and 64 devices, eight to a node, with three speeds of links inside and between
nodes, and with loose (80 GB) and tight memory. pplan's plans are those of `pplan solve`, which searches 1F1B
and GPipe, and of `pplan solve --schedule any`; the others are the named planners' fastest under the same
simulator and memory (docs/planners.md says what each is, and where it differs from its original). A planner
that knows more schedules than those two may propose them. A ratio is a planner's step over pplan's; cases
that do not fit are counted and left out. torchgpipe's and DeepSpeed's partitions are re-implementations,
compared with the originals in the tests.

All cases take hours: they run in a fixed random order, and after `--minutes` none is begun, and the table is
of those that are done. `--jobs N` runs so many at a time, a process of one thread each; N should not be more
than the cores. Profiles are estimates for an A100 (see peers_models.py), kept in the folder of `--profiles`.
`--results FILE` keeps the cases, a JSON object a line, and leaves out those that it has: a run that was
stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from math import exp, log
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from peers_models import MODELS, profile_of

import pplan
from pplan.api.load import profile_and_reference
from pplan.api.solve import make_problem
from pplan.cost_models.arguments import options_from
from pplan.cost_models.machines import MachineOptions
from pplan.planner.candidate import ScoredPlan
from pplan.planner.joint_search import OUT_OF_TIME, find_best_plan, plan_with
from pplan.planner.plan_file import TIE
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import PLANNERS, find_planner
from pplan.planner.problem import Problem

GPUS = (2, 4, 8, 16, 64)
LINKS = {"NVLink": (300e9, 25e9), "PCIe": (16e9, 12.5e9), "10 GbE": (1.25e9, 1.25e9)}
"""Bytes per second inside a node and between nodes."""
MEMORY = ("loose", "tight")
NODE, LOOSE, TIME_LIMIT = 8, 80e9, 10.0
STATES = 4
"""Copies of the weights that Adam holds: weights, gradients, two moments."""


def memory_bytes(profile: pplan.Profile, gpus: int, memory: str) -> int:
    """Of a device: tight is one and a half times its part of the states, and 2 GB."""
    states = STATES * sum(layer.parameter_bytes for layer in profile.layers)
    return round(LOOSE if memory == "loose" else min(LOOSE, 1.5 * states / gpus + 2e9))


OWN, ANY = "pplan", "pplan --schedule any"
OWN_NAMES = {"auto": OWN, "any": ANY}
"""The two answers of pplan, by the option of the schedule, as the results name them."""
MANY_SCHEDULES = ("torch-partition", "interleaved")
"""Planners that propose the schedules of `--schedule any` that they know."""


def problem_for(
    profile: pplan.Profile, gpus: int, link: str, memory: str, schedule: str, limit: float = TIME_LIMIT
) -> Problem:
    """A case with this option of the schedule, not begun."""
    options: dict[str, Any] = {
        "gpus": gpus,
        "gpus_per_node": min(gpus, NODE),
        "bandwidth": LINKS[link][: 1 + (gpus > NODE)],
        "memory_bytes": memory_bytes(profile, gpus, memory),
        "optimizer": "adam",
        "mini_batch": 16 * gpus,
        "time_limit": limit,
        "schedule": schedule,
    }
    machine, plan_options = options_from(options, MachineOptions, PlanOptions)
    own, reference = profile_and_reference(profile, "", "")
    return make_problem(own, reference, machine, plan_options)


def plans_by_planner(
    profile: pplan.Profile, gpus: int, link: str, memory: str
) -> tuple[dict[str, ScoredPlan | None], dict[str, float]]:
    """pplan's plans and each planner's, None where none fits; and the bounds of pplan's two answers, in
    seconds."""
    by_schedule = {
        schedule: problem_for(profile, gpus, link, memory, schedule) for schedule in ("auto", "any")
    }
    answers = {
        schedule: find_best_plan(problem.with_time_limit()) for schedule, problem in by_schedule.items()
    }
    plans: dict[str, ScoredPlan | str | None] = {
        OWN: answers["auto"].best,
        ANY: answers["any"].best,
        **answers["auto"].by_planner,
    }
    for name in PLANNERS:
        if plans.get(name, OUT_OF_TIME) == OUT_OF_TIME:
            problem = by_schedule["any" if name in MANY_SCHEDULES else "auto"]
            plans[name] = plan_with(find_planner(name), problem.with_time_limit())
    bounds = {name: answers[schedule].result.bound_seconds for schedule, name in OWN_NAMES.items()}
    return {name: plan if isinstance(plan, ScoredPlan) else None for name, plan in plans.items()}, bounds


def print_table(rows: list[dict[str, Any]]) -> None:
    """A row for every planner: its step over each of pplan's two, and how often it is the faster."""
    fitting = [row["steps"] for row in rows if row["steps"][OWN] is not None]
    models = len({row["model"] for row in rows})
    print(f"{len(rows)} cases of {models} models, {len(fitting)} that fit")
    heads = ("planner", "mean", "worst", "faster", "mean of any", "faster than any", "infeasible")
    print("{:<22} {:>6} {:>7} {:>7} {:>12} {:>16} {:>11}".format(*heads))
    for name in (ANY, *PLANNERS):
        ratios, of_any = ratios_to(fitting, name, OWN), ratios_to(fitting, name, ANY)
        if ratios:
            print(
                f"{name:<22} {mean_of(ratios):6.3f} {max(ratios):7.2f} {count_faster(ratios):7} "
                f"{mean_of(of_any):12.3f} {count_faster(of_any):16} {len(fitting) - len(ratios):11}"
            )
    for own in (OWN, ANY):
        print_margin(own, [row for row in rows if row["steps"][own] is not None])


def print_margin(own: str, rows: list[dict[str, Any]]) -> None:
    """How far the best of all other planners in each case is from this answer of pplan, and from the bound
    on all plans that it was allowed: so much faster at the most could any planner be."""
    best = [
        (min(others), row["steps"][own], row["bounds"][own])
        for row in rows
        if (others := [row["steps"][name] for name in PLANNERS if row["steps"].get(name) is not None])
    ]
    if best:
        of_step, of_bound = (mean_of([own[0] / own[which] for own in best]) for which in (1, 2))
        proven = sum(bound >= step * (1 - TIE) for _, step, bound in best)
        print(
            f"the best of all others in each case, over {own}'s step: {of_step:.3f} in the mean, over its "
            f"bound: {of_bound:.3f}; proven to be the fastest: {proven} of {len(best)}"
        )


def ratios_to(cases: list[dict[str, float | None]], name: str, own: str) -> list[float]:
    """Of a planner's step to pplan's, in the cases in which both fit."""
    pairs = [(steps.get(name), steps[own]) for steps in cases]
    return [other / step for other, step in pairs if other is not None and step is not None]


def mean_of(ratios: list[float]) -> float:
    """The geometric mean."""
    return exp(sum(map(log, ratios)) / len(ratios))


def count_faster(ratios: list[float]) -> int:
    """Those below 1, but for rounding."""
    return sum(ratio < 1 - 1e-9 for ratio in ratios)


Case = tuple[str, int, str, str]
"""Model, GPUs, links and memory."""


def run_case(case: Case, *, folder: Path, end: float) -> dict[str, Any] | None:
    """The row of a case; None where it is later than `end`, in seconds of the clock."""
    if time.time() > end:
        return None
    model, gpus, link, memory = case
    begin = time.monotonic()
    plans, bounds = plans_by_planner(profile_of(model, folder), gpus, link, memory)
    return {
        "model": model,
        "gpus": gpus,
        "link": link,
        "memory": memory,
        "steps": {name: None if plan is None else plan.step_seconds for name, plan in plans.items()},
        "configs": {name: None if plan is None else str(plan.config) for name, plan in plans.items()},
        "bounds": bounds,
        "seconds": round(time.monotonic() - begin, 1),
    }


def run_cases(cases: Sequence[Case], folder: Path, seconds: float, jobs: int) -> Iterator[dict[str, Any]]:
    """The rows of the cases that are begun within so many seconds, as they are done."""
    for model in sorted({case[0] for case in cases}):
        profile_of(model, folder)  # before the processes, which would all make it
    one = partial(run_case, folder=folder, end=time.time() + seconds)
    if jobs == 1:
        yield from _rows(map(one, cases))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with get_context("spawn").Pool(jobs) as pool:
        yield from _rows(pool.imap_unordered(one, cases))


def _rows(rows: Iterable[dict[str, Any] | None]) -> Iterator[dict[str, Any]]:
    return (row for row in rows if row is not None)


def read_rows(results: Path | None) -> list[dict[str, Any]]:
    """The rows that a run before left."""
    if results is None or not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def main() -> None:
    """Runs the cases, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    folder = options.profiles or Path(tempfile.mkdtemp(prefix="pplan-peers-"))
    cases = list(product(options.models, GPUS, LINKS, MEMORY))
    random.Random(0).shuffle(cases)
    rows = read_rows(options.results)
    done = {(row["model"], row["gpus"], row["link"], row["memory"]) for row in rows}
    cases = [case for case in cases if case not in done]
    for row in run_cases(cases, folder, 60 * options.minutes, options.jobs):
        rows.append(row)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        case = f"{row['model']}, {row['gpus']} GPUs, {row['link']}, {row['memory']}"
        print(f"{len(rows)} cases done: {case}, {row['seconds']} s", file=sys.stderr, flush=True)
    print_table(rows)


if __name__ == "__main__":
    main()

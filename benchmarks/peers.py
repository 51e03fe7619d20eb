"""pplan against the planners of others: python benchmarks/peers.py [--jobs N] [--results FILE] [MODEL ...]

Every model on 2, 4, 8, 16 and 64 devices, eight to a node, with three speeds of links inside and between
nodes, and with loose (80 GB) and tight memory. pplan's plan is that of `pplan solve`; the others are the
named planners' fastest under the same simulator and memory (docs/planners.md says what each is, and where it
differs from its original). A ratio is a planner's step over pplan's; cases that do not fit are counted and
left out. torchgpipe's and DeepSpeed's partitions are re-implementations, compared with the originals in the
tests; not here are Galvatron's search and the partition of PyTorch's pull request 179212.

All cases take hours: they run in a fixed random order, and after `--minutes` none is begun, and the table is
of those that are done. `--jobs N` runs so many at a time, a process of one thread each; N should not be more
than the cores. Profiles are estimates for an A100 (see gap_models.py), kept in the folder of `--profiles`.
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

from gap_models import MODELS, profile_of

import pplan
from pplan.api.load import profile_and_reference
from pplan.api.options import MachineOptions, PlanOptions, options_from
from pplan.api.solve import make_problem
from pplan.planner.candidate import ScoredPlan
from pplan.planner.joint_search import find_best_plan, plan_with
from pplan.planner.planners import ALWAYS, PLANNERS, find_planner

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


def steps_by_planner(profile: pplan.Profile, gpus: int, link: str, memory: str) -> dict[str, float | None]:
    """Simulated seconds of pplan's plan and of each planner's; None where none fits."""
    options: dict[str, Any] = {
        "gpus": gpus,
        "gpus_per_node": min(gpus, NODE),
        "bandwidth": LINKS[link][: 1 + (gpus > NODE)],
        "memory_bytes": memory_bytes(profile, gpus, memory),
        "optimizer": "adam",
        "mini_batch": 16 * gpus,
        "time_limit": TIME_LIMIT,
    }
    machine, plan_options = options_from(options, MachineOptions, PlanOptions)
    own, reference = profile_and_reference(profile, "", "")
    problem = make_problem(own, reference, machine, plan_options)
    answer = find_best_plan(problem.with_time_limit())
    plans: dict[str, ScoredPlan | str | None] = {"pplan": answer.best, **answer.by_planner}
    for name in PLANNERS:
        if name not in ALWAYS:
            plans[name] = plan_with(find_planner(name), problem.with_time_limit())
    return {name: plan.step_seconds if isinstance(plan, ScoredPlan) else None for name, plan in plans.items()}


def print_table(rows: list[dict[str, Any]]) -> None:
    """A row for every planner."""
    fitting = [row["steps"] for row in rows if row["steps"]["pplan"] is not None]
    models = len({row["model"] for row in rows})
    print(f"{len(rows)} cases of {models} models, {len(fitting)} that fit")
    print(f"{'planner':<20} {'mean':>6} {'worst':>7} {'faster than pplan':>18} {'infeasible':>11}")
    for name in PLANNERS:
        ratios = [own[name] / own["pplan"] for own in fitting if own.get(name) is not None]
        if ratios:
            mean = exp(sum(map(log, ratios)) / len(ratios))
            faster, lacking = sum(ratio < 1 - 1e-9 for ratio in ratios), len(fitting) - len(ratios)
            print(f"{name:<20} {mean:6.2f} {max(ratios):7.2f} {faster:18} {lacking:11}")
    others = [[own[name] for name in own if name != "pplan" and own[name] is not None] for own in fitting]
    best = [min(steps) / own["pplan"] for steps, own in zip(others, fitting, strict=True) if steps]
    if best:
        print(f"the best of all others in each case: {exp(sum(map(log, best)) / len(best)):.3f} in the mean")


Case = tuple[str, int, str, str]
"""Model, GPUs, links and memory."""


def run_case(case: Case, *, folder: Path, end: float) -> dict[str, Any] | None:
    """The row of a case; None where it is later than `end`, in seconds of the clock."""
    if time.time() > end:
        return None
    model, gpus, link, memory = case
    begin = time.monotonic()
    steps = steps_by_planner(profile_of(model, folder), gpus, link, memory)
    seconds = round(time.monotonic() - begin, 1)
    return {"model": model, "gpus": gpus, "link": link, "memory": memory, "steps": steps, "seconds": seconds}


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

"""pplan against the planners of others: python benchmarks/peers.py [--profiles FOLDER] [MODEL ...]

Every model on 2, 4, 8, 16 and 64 devices, eight to a node, with three speeds of links inside and between
nodes, and with loose (80 GB) and tight memory. pplan's plan is that of `pplan solve`; the others are the
named planners' fastest under the same simulator and memory (docs/planners.md says what each is, and where it
differs from its original). A ratio is a planner's step over pplan's; cases that do not fit are counted and
left out. torchgpipe's and DeepSpeed's partitions are re-implementations, compared with the originals in the
tests; not here are Galvatron's search and the partition of PyTorch's pull request 179212.

All cases take hours: they run in a fixed random order, and after `--minutes` the table is of those that are
done. Profiles are estimates for an A100 (see gap_models.py). `--results FILE` keeps the cases, a JSON object
a line, and leaves out those that it has.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from itertools import product
from math import exp, log
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
    best = [
        min(step for name, step in own.items() if name != "pplan" and step is not None) / own["pplan"]
        for own in fitting
    ]
    print(f"the best of all others in each case: {exp(sum(map(log, best)) / len(best)):.3f} in the mean")


def main() -> None:
    """Runs the cases, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    folder = given.profiles or Path(tempfile.mkdtemp(prefix="pplan-peers-"))
    cases = list(product(given.models, GPUS, LINKS, MEMORY))
    random.Random(0).shuffle(cases)
    rows: list[dict[str, Any]] = []
    if given.results and given.results.exists():
        rows = [json.loads(line) for line in given.results.read_text().splitlines()]
    done = {(row["model"], row["gpus"], row["link"], row["memory"]) for row in rows}
    end = time.monotonic() + 60 * given.minutes
    for model, gpus, link, memory in cases:
        if time.monotonic() > end:
            break
        if (model, gpus, link, memory) not in done:
            steps = steps_by_planner(profile_of(model, folder), gpus, link, memory)
            rows.append({"model": model, "gpus": gpus, "link": link, "memory": memory, "steps": steps})
            if given.results:
                with given.results.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()

"""How long solving takes, and how much memory: python benchmarks/solve_time.py [CASE ...]

Every case runs in a process of its own. VGG-19 is the whole command on an estimated profile; the others are
generated chains (generated_chains.py) on DGX A100 servers, solved with everything that stands in a plan file.
The published optimizers are far slower where they do the like: PipeDream's takes 103 s for 410 states of a
graph on two levels of machines, and does not finish on branching models.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from generated_chains import generated_profile
from verified import verified

import pplan
from pplan.cost_models.quantities import parse_bytes

CASES: dict[str, tuple[int, int, int, str, float]] = {
    "50 x 64": (50, 64, 1024, "80GiB", 5),
    "50 x 64, 8 GiB": (50, 64, 1024, "8GiB", 5),
    "200 x 64": (200, 64, 1024, "80GiB", 20),
    "200 x 64, 16 GiB": (200, 64, 1024, "16GiB", 20),
    "1000 x 1024": (1000, 1024, 16384, "80GiB", 60),
}
"""Layers, GPUs, mini-batch, memory of a GPU, and the seconds that it may take."""


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["vgg19", *CASES])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(solved(options.one)))
        return
    print(f"{'layers x GPUs':<20}{'seconds':>9}{'target':>8}{'GiB':>7}{'gap':>9}  plan")
    for name in options.cases:
        row = command() if name == "vgg19" else _in_a_process(name)
        target = 1 if name == "vgg19" else CASES[name][-1]
        gap = f"{row['gap']:.2%}" + ("=" if row["exact"] else "")
        print(
            f"{name:<20}{row['seconds']:>9.2f}{target:>8g}{row['gib']:>7.2f}{gap:>9}  {row['plan']}",
            flush=True,
        )


def _in_a_process(name: str) -> dict[str, object]:
    ran = subprocess.run(
        [sys.executable, __file__, "--one", name], capture_output=True, text=True, check=True
    )
    row: dict[str, object] = json.loads(ran.stdout)
    return row


def solved(name: str) -> dict[str, object]:
    """One case."""
    layers, gpus, mini_batch, memory, _ = CASES[name]
    profile = generated_profile(layers)
    start = time.perf_counter()
    plan = pplan.solve(
        profile,
        gpus=gpus,
        topology="dgx-a100",
        memory_bytes=int(parse_bytes(memory, name="memory")),
        optimizer="adam",
        mini_batch=mini_batch,
    )
    seconds = time.perf_counter() - start
    stages = f"{len(plan.stages)} stages, replicas {'-'.join(map(str, plan.replicas[:12]))}"
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    verified(plan, profile)
    return {
        "seconds": seconds,
        "gib": gib,
        "gap": plan.prediction.gap,
        "exact": plan.prediction.exact,
        "plan": f"{stages}, {plan.micro_batches} x {plan.micro_batch_size}, {plan.schedule}",
    }


def command() -> dict[str, object]:
    """`pplan solve --gpus 8` for VGG-19: the median of five."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PPLAN_CACHE": folder}
        script = str(Path(sys.executable).with_name("pplan"))
        profile = [script, "profile", "vgg19", "--device", "analytic:a100-80gb"]
        subprocess.run(profile, cwd=folder, check=True, capture_output=True, env=environment)
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            ran = subprocess.run(
                [script, "solve", "--gpus", "8", "--gpu", "a100-80gb", "--json"],
                cwd=folder,
                check=True,
                capture_output=True,
                text=True,
            )
            taken.append(time.perf_counter() - start)
        subprocess.run([script, "verify"], cwd=folder, check=True, capture_output=True)
    plan = json.loads(ran.stdout)
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    stages = "-".join(str(stage["replicas"]) for stage in plan["stages"])
    return {
        "seconds": sorted(taken)[2],
        "gib": used,
        "gap": plan["prediction"]["gap"],
        "exact": plan["prediction"]["exact"],
        "plan": f"{len(plan['stages'])} stages, replicas {stages}",
    }


if __name__ == "__main__":
    main()

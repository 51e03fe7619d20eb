"""Time, memory and gap over layers x devices: python benchmarks/scale.py [--quick] [--csv FILE]

Generated chains (generated_chains.py; more than 100 layers take together what 100 do, as operators of a model
of 2 billion parameters) on machines of three levels of links: 8 GPUs of 80 GiB a node, 32 nodes a pod, pods;
of one kind of GPU, or half of them half as fast. The global batch is 256 samples a GPU; the largest case has
4,096 micro-batches, the others any number. Each case runs in a process of its own with a time limit of 20 s:
seconds of processor time of the solving, the most memory of the process, and how far the plan is from the
proven bound. Takes five to six minutes of processor time; `--quick` leaves out what has over 1,024 devices.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from generated_chains import generated_profile

import pplan
from pplan.cost_models.hardware import Device, Group, Level, Link
from pplan.cost_models.machines.topology_text import to_toml
from pplan.cost_models.topology import Topology

CASES = (
    *(
        (layers, gpus, kinds, None)
        for gpus in (64, 1_024, 16_384)
        for layers in (10, 1_000)
        for kinds in (1, 2)
    ),
    (10_000, 16_384, 1, 4_096),
    (10_000, 16_384, 2, 4_096),
)
"""Layers, GPUs, kinds and micro-batches."""
LIMIT = 20.0
SAMPLES = 256
"""Of the global batch, a GPU."""
MOST = 100
"""Layers that more take together as long as."""


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only up to 1,024 devices")
    parser.add_argument("--csv", type=Path, help="a file for the rows, too")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(solved(*CASES[options.one])))
        return
    print(f"{'layers x GPUs':<18}{'kinds':>6}{'CPU s':>8}{'GiB':>7}{'gap':>9}  plan")
    rows = []
    for index, (layers, gpus, kinds, _) in enumerate(CASES):
        if options.quick and gpus > 1_024:
            continue
        command = [sys.executable, __file__, "--one", str(index)]
        row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append({"layers": layers, "gpus": gpus, "kinds": kinds, **row})
        figures = f"{row['seconds']:>8.1f}{row['gib']:>7.2f}{row['gap']:>9.2%}"
        print(f"{f'{layers:,} x {gpus:,}':<18}{kinds:>6}{figures}  {row['plan']}", flush=True)
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def solved(layers: int, gpus: int, kinds: int, micro_batches: int | None) -> dict[str, object]:
    """One case."""
    profile = generated_profile(layers, most=MOST)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.toml"
        path.write_text(to_toml(machine(gpus, kinds)))
        start = time.process_time()
        plan = pplan.solve(
            profile,
            gpus=gpus,
            topology=path,
            optimizer="adam",
            mini_batch=SAMPLES * gpus,
            micro_batches=micro_batches,
            time_limit=LIMIT,
        )
        seconds = time.process_time() - start
    return {
        "seconds": round(seconds, 1),
        "gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "gap": plan.prediction.gap,
        "plan": f"{len(plan.stages)} stages, replicas {'-'.join(map(str, plan.replicas[:4]))}, "
        f"{plan.micro_batches} x {plan.micro_batch_size}, {plan.schedule}",
    }


def machine(gpus: int, kinds: int) -> Topology:
    """Three levels of links, one port of each for every GPU."""
    fast = Device("NVIDIA A100-SXM4-80GB", 80 * 2**30)
    groups: tuple[Group, ...] = (Group(fast, gpus),)
    if kinds == 2:
        groups = (Group(fast, gpus // 2), Group(replace(fast, name="slow", speed=0.5), gpus - gpus // 2))
    levels = (
        Level("node", 8, Link(300e9, 5e-6)),
        Level("pod", 32, Link(25e9, 1e-5)),
        Level("network", None, Link(12.5e9, 2e-5)),
    )
    return Topology(groups, levels)


if __name__ == "__main__":
    main()

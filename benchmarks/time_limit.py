"""What the time limit comes to on large problems: python benchmarks/time_limit.py [--quick]

Generated chains (generated_chains.py) on DGX A100 servers, of one kind of GPU or half of them half as fast,
solved with everything that stands in a plan file. Each case runs in a process of its own: seconds of
processor time of the solving, the most memory of the process, and how far the plan is from the bound that is
proven by then. No more than 1.2 times the limit and a second is allowed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from generated_chains import generated_profile
from verified import verified

import pplan
from pplan.cost_models.machines.topology_options import ProfiledDevice, make_topology
from pplan.cost_models.machines.topology_text import to_toml
from pplan.cost_models.quantities import parse_bytes
from pplan.cost_models.topology import Group

CASES = (
    (200, 64, 1, "16GiB", 1.0),
    (200, 64, 1, "16GiB", 5.0),
    (24, 72, 1, "6GiB", 10.0),
    (24, 256, 1, "6GiB", 30.0),
    (24, 256, 2, "6GiB", 30.0),
    (9, 1_024, 1, "80GiB", 5.0),
    (1_000, 1_024, 2, "80GiB", 10.0),
    (9, 4_096, 1, "8GiB", 5.0),
    (9, 16_384, 1, "80GiB", 1.0),
    (9, 16_384, 2, "8GiB", 5.0),
)
"""Layers, GPUs, kinds, memory of a GPU and the limit in seconds."""


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only limits of up to 5 s")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(solved(*CASES[options.one])))
        return
    print(f"{'layers x GPUs':<16}{'kinds':>6}{'memory':>8}{'limit':>7}{'CPU s':>8}{'GiB':>7}{'gap':>9}  plan")
    for index, (layers, gpus, kinds, memory, limit) in enumerate(CASES):
        if options.quick and limit > 5:
            continue
        command = [sys.executable, __file__, "--one", str(index)]
        row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        late = " LATE" if row["seconds"] > 1.2 * limit + 1 else ""
        print(
            f"{f'{layers} x {gpus}':<16}{kinds:>6}{memory:>8}{limit:>7g}{row['seconds']:>8.1f}"
            f"{row['gib']:>7.2f}{row['gap']:>9.2%}  {row['plan']}{late}",
            flush=True,
        )


def solved(layers: int, gpus: int, kinds: int, memory: str, limit: float) -> dict[str, object]:
    """One case."""
    profile = generated_profile(layers)
    with tempfile.TemporaryDirectory() as folder:
        topology = _topology(Path(folder) / "machine.toml", gpus, kinds, memory)
        start = time.process_time()
        plan = pplan.solve(
            profile, gpus=gpus, topology=topology, optimizer="adam", mini_batch=16 * gpus, time_limit=limit
        )
        seconds = time.process_time() - start
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    verified(plan, profile)
    return {
        "seconds": seconds,
        "gib": gib,
        "gap": plan.prediction.gap,
        "plan": f"{len(plan.stages)} stages, replicas {'-'.join(map(str, plan.replicas[:8]))}, "
        f"{plan.micro_batches} x {plan.micro_batch_size}, {plan.schedule}",
    }


def _topology(path: Path, gpus: int, kinds: int, memory: str) -> Path:
    """The file of the machine."""
    topology = make_topology(
        gpus=gpus,
        file=Path("dgx-a100"),
        memory_bytes=parse_bytes(memory, name="memory"),
        profiled=ProfiledDevice("cuda", "NVIDIA A100-SXM4-80GB", None),
    )
    if kinds == 2:
        fast = topology.groups[0].device
        groups = (Group(fast, gpus // 2), Group(replace(fast, name="slow", speed=0.5), gpus - gpus // 2))
        topology = replace(topology, groups=groups)
    path.write_text(to_toml(topology))
    return path


if __name__ == "__main__":
    main()

"""Large problems, each solved in a process of its own: the table of scale.py and of time_limit.py."""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from generated_chains import generated_profile
from verified import verified

import pplan
from pplan.cost_models.machines.topology_text import to_toml
from pplan.cost_models.topology import Group, Topology


@dataclass(frozen=True)
class LargeCase:
    """A chain of so many layers on so many GPUs of one or two kinds, half of them half as fast, of such a
    memory; `limit` in seconds; `samples` of the global batch for each GPU. More layers than `most` take
    together what so many do. `schedule`: as of `pplan solve`."""

    layers: int
    gpus: int
    kinds: int
    memory: str
    limit: float
    samples: int
    micro_batches: int | None = None
    most: int | None = None
    schedule: str = "auto"


Machine = Callable[[LargeCase], Topology]
"""Of the GPUs of a case, all of one kind."""


def run(
    script: str, doc: str | None, cases: Sequence[LargeCase], quick: Sequence[bool], machine: Machine
) -> None:
    """The command line of a script: its table, with `--quick` of the cases that are `quick`. The hidden
    `--one` solves one, in the process that `script` is started in again."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the cases that take least")
    parser.add_argument("--csv", type=Path, help="a file for the rows, too")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(solve_case(cases[options.one], machine)))
        return
    print(f"{'layers x GPUs':<18}{'kinds':>6}{'memory':>8}{'limit':>7}{'CPU s':>8}{'GiB':>7}{'gap':>9}  plan")
    rows = []
    for index, case in enumerate(cases):
        if options.quick and not quick[index]:
            continue
        command = [sys.executable, script, "--one", str(index)]
        row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append({"layers": case.layers, "gpus": case.gpus, "kinds": case.kinds, **row})
        print(_line(case, row), flush=True)
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def _line(case: LargeCase, row: dict[str, float | str]) -> str:
    late = " LATE" if float(row["seconds"]) > 1.2 * case.limit + 1 else ""
    return (
        f"{f'{case.layers:,} x {case.gpus:,}':<18}{case.kinds:>6}{case.memory:>8}{case.limit:>7g}"
        f"{row['seconds']:>8.1f}{row['gib']:>7.2f}{row['gap']:>9.2%}  {row['plan']}{late}"
    )


def solve_case(case: LargeCase, machine: Machine) -> dict[str, float | str]:
    """Seconds of processor time, the most memory of the process until then, the gap, and the plan in words;
    the plan is verified."""
    profile = generated_profile(case.layers, most=case.most)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.toml"
        path.write_text(to_toml(_of_kinds(machine(case), case)))
        start = time.process_time()
        plan = pplan.solve(
            profile,
            gpus=case.gpus,
            topology=path,
            optimizer="adam",
            mini_batch=case.samples * case.gpus,
            micro_batches=case.micro_batches,
            schedule=case.schedule,
            time_limit=case.limit,
        )
        seconds = time.process_time() - start
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    verified(plan, profile)
    return {
        "seconds": round(seconds, 1),
        "gib": round(gib, 2),
        "gap": round(plan.prediction.gap, 5),
        "plan": f"{len(plan.stages)} stages, replicas {'-'.join(map(str, plan.replicas[:8]))}, "
        f"{plan.micro_batches} x {plan.micro_batch_size}, {plan.schedule}",
    }


def _of_kinds(topology: Topology, case: LargeCase) -> Topology:
    """With the second half of two kinds half as fast."""
    if case.kinds == 1:
        return topology
    fast, half = topology.groups[0].device, case.gpus // 2
    slow = replace(fast, name="slow", speed=0.5)
    return replace(topology, groups=(Group(fast, half), Group(slow, case.gpus - half)))

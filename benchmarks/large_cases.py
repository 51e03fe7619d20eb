"""Large problems, each solved in a process of its own, for problems.py, scale.py and time_limit.py."""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path

from generated_chains import generated_profile, imported_profile
from verified import verified

import pplan
from pplan.cost_models.errors import InfeasibleError
from pplan.cost_models.quantities import parse_bytes
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.cost_models.topology_file import ProfiledDevice, make_topology, to_toml
from pplan.profiler.profile_file import Profile

Row = dict[str, float | str]
GENERATED, TABLE = "generated", "table"
PODS = (
    Level("node", 8, Link(300e9, 5e-6)),
    Level("pod", 32, Link(25e9, 1e-5)),
    Level("network", None, Link(12.5e9, 2e-5)),
)
"""Three levels of links, one port of each for every GPU."""


@dataclass(frozen=True)
class LargeCase:
    """A problem with its time limit.

    Attributes:
        layers: Length of the chain.
        gpus: Number of devices.
        kinds: 1, or 2 if the second half of the devices has half the speed.
        memory: Memory of a device.
        limit: Time limit in seconds.
        samples: Global batch for each device.
        micro_batches: Number of micro-batches, or None if the planner chooses it.
        most: Longer chains cost together what a chain of this length costs.
        schedule: Option of `pplan solve`.
        machine: `dgx-a100`, `pods` (PODS) or a GPU with 8 in a node, as `a100-40gb`.
        profile: `generated`, `table` (both of generated_chains.py) or a model, estimated for an A100.
        name: Name on the command line.
        aim: Gap that must be reached, if one is set; 0 if the plan must be proven optimal.
        aim_seconds: Processor time in which it must be reached, if it is not the time limit.
    """

    layers: int
    gpus: int
    kinds: int
    memory: str
    limit: float
    samples: int
    micro_batches: int | None = None
    most: int | None = None
    schedule: str = "auto"
    machine: str = "dgx-a100"
    profile: str = GENERATED
    name: str = ""
    aim: float | None = None
    aim_seconds: float | None = None

    @property
    def aim_text(self) -> str:
        """Aim as a column of the table."""
        if self.aim is None:
            return ""
        gap = f"{self.aim:.3%}".rstrip("0%").rstrip(".") + " %" if self.aim else "exact"
        return gap if self.aim_seconds is None else f"{gap}, {self.aim_seconds:g} s"

    def is_late(self, row: Row) -> bool:
        """Return whether a row took longer than 1.2 times the time limit and a second."""
        return float(row["seconds"]) > 1.2 * self.limit + 1

    def meets_aim(self, row: Row) -> bool:
        """Return whether a row reaches the aim in time."""
        late = self.is_late(row) if self.aim_seconds is None else float(row["seconds"]) > self.aim_seconds
        return self.aim is not None and float(row["gap"]) <= self.aim and not late

    def topology(self) -> Topology:
        """Devices and links."""
        memory = round(parse_bytes(self.memory, name="memory"))
        if self.machine == "pods":
            groups = (Group(Device("NVIDIA A100-SXM4-80GB", memory), self.gpus),)
            topology = Topology(groups, PODS)
        elif self.machine == "dgx-a100":
            gpu = ProfiledDevice("cuda", "NVIDIA A100-SXM4-80GB", None)
            topology = make_topology(gpus=self.gpus, file=Path("dgx-a100"), memory_bytes=memory, profiled=gpu)
        else:
            gpu = ProfiledDevice("unknown", "", None)
            topology = make_topology(
                gpus=self.gpus, gpu=self.machine, gpus_per_node=8, memory_bytes=memory, profiled=gpu
            )
        if self.kinds == 1:
            return topology
        fast, half = topology.groups[0].device, self.gpus // 2
        slow = replace(fast, name="slow", speed=0.5)
        return replace(topology, groups=(Group(fast, half), Group(slow, self.gpus - half)))


COLUMNS = (
    f"{'name':<8}{'layers x GPUs':<16}{'kinds':>6}{'memory':>8}{'limit':>7}{'CPU s':>7}{'GiB':>6}"
    f"{'step':>10}{'bound':>10}{'gap':>9}{'aim':>13}{'met':>5}  plan"
)


def run(script: str, doc: str | None, cases: Sequence[LargeCase], quick: Sequence[LargeCase]) -> None:
    """Command line of a script: the table of its cases.

    The hidden `--one` solves one case, in the process in which `script` is started again.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these problems, where they have names")
    parser.add_argument("--quick", action="store_true", help="only the cases that take least")
    parser.add_argument("--limit", type=float, default=1.0, help="multiplies all time limits")
    parser.add_argument("--csv", type=Path, help="a file for the rows, too")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [replace(case, limit=options.limit * case.limit) for case in cases]
    if options.one is not None:
        print(json.dumps(solve_case(chosen[options.one])))
        return
    if unknown := set(options.names) - {case.name for case in cases}:
        parser.error(f"no such problem: {', '.join(sorted(unknown))}")
    print(COLUMNS)
    rows = []
    for index, case in enumerate(chosen):
        if (options.names and case.name not in options.names) or (
            options.quick and cases[index] not in quick
        ):
            continue
        row = solve_apart(script, "--one", str(index), "--limit", str(options.limit))
        print(_line(case, row), flush=True)
        rows.append(
            {"layers": case.layers, "gpus": case.gpus, "kinds": case.kinds, "memory": case.memory, **row}
        )
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def solve_apart(script: str, *arguments: str) -> Row:
    """Row that a script prints as JSON in its last line, in a process of its own."""
    command = [sys.executable, script, *arguments]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: Row = json.loads(ran.stdout.splitlines()[-1])
    return row


def _line(case: LargeCase, row: Row) -> str:
    met = "" if case.aim is None else "yes" if case.meets_aim(row) else "NO"
    late = " LATE" if case.is_late(row) else ""
    return (
        f"{case.name:<8}{f'{case.layers:,} x {case.gpus:,}':<16}{case.kinds:>6}{case.memory:>8}"
        f"{case.limit:>7g}{row['seconds']:>7.1f}{row['gib']:>6.2f}{row['step']:>10.6g}{row['bound']:>10.6g}"
        f"{row['gap']:>9.3%}{case.aim_text:>13}{met:>5}  {row['plan']}{late}"
    )


def _profile(case: LargeCase) -> Profile:
    if case.profile == GENERATED:
        return generated_profile(case.layers, most=case.most)
    if case.profile == TABLE:
        return imported_profile()
    return pplan.profile(case.profile, device="analytic:a100-80gb")


def solve_case(case: LargeCase) -> Row:
    """Solve a case in this process, and verify the plan.

    Returns:
        Seconds of processor time, the most memory of the process until then, step, bound and gap, and the
        plan in words; an infinite step if no plan was found.
    """
    profile = _profile(case)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.toml"
        path.write_text(to_toml(case.topology()))
        solve = pplan.solve  # imports what solving needs
        start = time.process_time()
        try:
            plan = solve(
                profile,
                gpus=case.gpus,
                topology=path,
                optimizer="adam",
                mini_batch=case.samples * case.gpus,
                micro_batches=case.micro_batches,
                schedule=case.schedule,
                time_limit=case.limit,
            )
        except InfeasibleError as error:
            plan, words = None, str(error).splitlines()[0]
        seconds = time.process_time() - start
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    row: Row = {"seconds": round(seconds, 1), "gib": round(gib, 2)}
    if plan is None:
        return row | {"step": inf, "bound": nan, "gap": inf, "plan": words}
    verified(plan, profile)
    prediction = plan.prediction
    return row | {
        "step": prediction.step_seconds,
        "bound": prediction.lower_bound_seconds,
        "gap": 0.0 if prediction.exact else max(1e-5, round(prediction.gap, 5)),
        "plan": f"{len(plan.stages)} stages, replicas {'-'.join(map(str, plan.replicas[:8]))}, "
        f"{plan.micro_batches} x {plan.micro_batch_size}, {plan.schedule}",
    }

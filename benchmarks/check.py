"""Predicted against measured steps of torch.distributed.pipelining, and plans against each other, measured:
python benchmarks/check.py [--stages 2 4 8] [--schedules gpipe 1f1b] [--table steps|plans]

Stages wait instead of computing (about 20 ms forward, 40 ms backward of a micro-batch), but are processes
with real transfers, so that eight of them fit on two cores. Every prediction is written to a file before its
case runs. The corrections are fitted to other cases than those that are reported: another set of stages, and
other numbers of micro-batches. Both tables together take about seven minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import torch
from verified import verified

from pplan import profile as measure
from pplan.api.check import PlanInputs
from pplan.cost_models.errors import PplanError
from pplan.cost_models.topology import Device, Link, Topology, two_level_topology
from pplan.planner.build_plan import build_problem, plan_without_comparison
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.profiler.profile_file import Profile
from pplan.runtimes.checking.launching import ProgressCallbacks, run_in_processes
from pplan.runtimes.checking.records import (
    Case,
    CasePrediction,
    CaseResult,
    CheckMeasurements,
    Job,
    StageSeconds,
    StageWaits,
)
from pplan.runtimes.checking.records import CutLink as CutLink
from pplan.runtimes.documents import TorchExport
from pplan.runtimes.torch_actions import action_rows, build_program, device_stages, schedule_class

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}
"""With their virtual stages a device."""
STAGES, MICRO_BATCHES = (2, 4, 8), (4, 8, 16)
CALIBRATED_AT = {2: (6, 10), 4: (12, 20), 8: (12, 24)}
"""Micro-batches of the calibration, by stages: none that is reported."""
FORWARD, BACKWARD = 0.020, 0.040
STEPS, WARM_UPS = 3, 1
MEDIAN_TARGET, WORST_TARGET = 0.05, 0.15
PLANNERS = {"pplan": "best", "even": "even", "DeepSpeed": "parameters", "torchgpipe": "torchgpipe-time"}
MODELS = {"vgg11": (3, 64, 64), "resnet18": (3, 64, 64), "mobilenet_v2": (3, 96, 96)}
"""Torchvision's, with the shape of a sample."""


@dataclass(frozen=True)
class StageSet:
    """Emulated stages: how long each takes, relative to the first sets' usual, and what crosses every cut."""

    name: str
    weights: tuple[float, ...]
    """Repeated along the pipeline."""
    crossing_bytes: int
    backward: float = BACKWARD

    def waits(self, parts: int, virtual_stages: int) -> StageWaits:
        """Of so many parts of the layers."""
        stages = []
        for part in range(parts):
            own = self.weights[part % len(self.weights)] / virtual_stages
            half = own * self.backward / 2
            stages.append(StageSeconds(forward=own * FORWARD, backward=2 * half, input=half, weight=half))
        return StageWaits(stages=stages, crossing_bytes=[self.crossing_bytes] * (parts - 1))


SETS = (
    StageSet("equal", (1.0,), 2**18),
    StageSet("uneven", (1.0, 1.3, 0.8, 1.1), 2**20),
    StageSet("heavy ends", (1.4, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 1.2), 2**19),
)
CALIBRATION = StageSet("calibration", (1.2, 0.9), 2**17, backward=0.05)


def step_case(schedule: str, devices: int, micro_batches: int, stages: StageSet) -> Case:
    """Raises UsageError where the schedule does not run with these numbers."""
    virtual = SCHEDULES[schedule]
    program = build_program(schedule, devices, micro_batches, virtual)
    parts = program.slots
    document = TorchExport(
        runtime="torch",
        model="emulated",
        mini_batch=micro_batches,
        micro_batch_size=1,
        step_seconds=1.0,
        micro_batches=micro_batches,
        order=schedule,
        schedule=schedule_class(schedule, program),
        parts=list(range(parts + 1)),
        stages=device_stages(program),
        replicas=1,
        devices=list(range(devices)),
        recompute=["never"] * parts,
        actions=action_rows(program),
    )
    waits = stages.waits(parts, virtual)
    free = [CutLink(latency=0.0, occupancy=0.0)] * (parts - 1)
    name = f"{schedule}, {devices} stages, {micro_batches} micro-batches, {stages.name}"
    return Case(name=name, document=document, links=free, crossing_bytes=waits.crossing_bytes, waits=waits)


def reported(devices: int, schedules: Sequence[str], numbers: Sequence[int], every: bool) -> Iterator[Case]:
    """The cases of so many devices: the sets take turns, or all of them run every case."""
    turn = count(devices)
    for schedule in schedules:
        for micro_batches in numbers:
            if schedule in ("interleaved", "zb-h1") and micro_batches < devices:
                continue
            for stages in SETS if every else (SETS[next(turn) % len(SETS)],):
                yield step_case(schedule, devices, micro_batches, stages)


def run_steps(
    devices: int, cases: list[Case], schedules: Sequence[str], told: ProgressCallbacks
) -> CheckMeasurements:
    """The cases, after those that the corrections are fitted to."""
    calibration = [
        step_case(own, devices, micro_batches, CALIBRATION)
        for own in schedules
        for micro_batches in CALIBRATED_AT[devices]
        if own != "interleaved" or micro_batches % devices == 0
    ]
    return run_in_processes(
        Job(
            model=None,
            cases=cases,
            steps=STEPS,
            warm_ups=WARM_UPS,
            calibration=calibration,
            link_sizes=[2**10, 2**14, 2**17, 2**18, 2**19, 2**20],
        ),
        told,
    )


def errors(result: CaseResult) -> tuple[float, float]:
    """Raw and calibrated: predicted over measured, less 1."""
    measured = median(result.ran.step_seconds)
    fixed = result.predicted.calibrated_step_seconds
    assert fixed is not None
    return result.predicted.step_seconds / measured - 1, fixed / measured - 1


def print_steps(chosen: argparse.Namespace, told: ProgressCallbacks) -> None:
    """The first table."""
    print(f"{'case':<56} {'raw ms':>8} {'calibr.':>8} {'measured':>9} {'raw':>7} {'calibr.':>8}")
    both: list[tuple[float, float]] = []
    for devices in chosen.stages:
        cases = list(reported(devices, chosen.schedules, chosen.micro_batches, chosen.all))
        if not cases:
            continue
        found = run_steps(devices, cases, chosen.schedules, told)
        for result in found.cases:
            raw, fixed = errors(result)
            both.append((raw, fixed))
            measured = median(result.ran.step_seconds)
            calibrated = result.predicted.calibrated_step_seconds or 0.0
            print(
                f"{result.name:<56} {1e3 * result.predicted.step_seconds:8.1f} {1e3 * calibrated:8.1f} "
                f"{1e3 * measured:9.1f} {raw:+7.1%} {fixed:+8.1%}",
                flush=True,
            )
        assert found.corrections is not None
        print(f"  corrections of {devices} processes: {found.corrections.model_dump_json()}\n", flush=True)
    for name, own in (
        ("raw", [abs(raw) for raw, _ in both]),
        ("calibrated", [abs(each) for _, each in both]),
    ):
        print(f"{name} errors of {len(own)} cases: median {median(own):.1%}, worst {max(own):.1%}")
    print(f"targets, calibrated: median at most {MEDIAN_TARGET:.0%}, worst at most {WORST_TARGET:.0%}\n")


def plans(name: str, devices: int) -> Iterator[tuple[str, Plan | str, Profile, Topology]]:
    """A model's plans by planner, GPipe of eight micro-batches; or why there is none."""
    profile = measure(
        name, input_shape=MODELS[name], classes=10, micro_batch_sizes=[8], budget_seconds=8, device="cpu"
    )
    reference = ProfileReference(file="", sha256="", layers_sha256=profile.layers_sha256)
    topology = two_level_topology(Device("core", None), devices, devices, Link(2e9, 2e-4), Link(2e9, 2e-4))
    for label, planner in PLANNERS.items():
        options = PlanOptions(
            mini_batch=64, micro_batches=8, schedule="gpipe", recompute="never",
            runtime="torchgpipe", planner=planner, use_all=True,
        )  # fmt: skip
        try:
            problem = build_problem(profile.chain(), topology, options, reference, {})
            answer = find_best_plan(problem)
            best = answer.best
            made = "no plan" if best is None else verified(
                plan_without_comparison(problem, best, answer.result, model=name, profile=reference), profile
            )  # fmt: skip
        except PplanError as error:
            made = error.what
        yield label, made, profile, topology


def print_plans(devices: int, told: ProgressCallbacks) -> None:
    """The second table: emulated stages of profiled models, on as many processes."""
    print(
        f"{'model':<14} {'planner':<12} {'balance':<22} {'predicted':>10} {'measured':>9} {'over pplan':>11}"
    )
    for name in MODELS:
        made = list(plans(name, devices))
        cases = [
            PlanInputs(profile.chain(), topology, {}).prepare_case(label, plan, emulate=True)
            for label, plan, profile, topology in made
            if isinstance(plan, Plan) and len(plan.stages) == devices
        ]
        found = run_in_processes(
            Job(model=None, cases=[own.case for own in cases], steps=STEPS, warm_ups=WARM_UPS), told
        )
        steps = {result.name: median(result.ran.step_seconds) for result in found.cases}
        expected = {result.name: result.predicted.step_seconds for result in found.cases}
        for label, plan, _, _ in made:
            if label not in steps or isinstance(plan, str):
                print(f"{name:<14} {label:<12} {plan if isinstance(plan, str) else 'uses fewer devices'}")
                continue
            balance = ",".join(map(str, plan.balance))
            print(
                f"{name:<14} {label:<12} {balance:<22} {1e3 * expected[label]:8.1f}ms "
                f"{1e3 * steps[label]:7.1f}ms {steps[label] / steps['pplan']:10.3f}x",
                flush=True,
            )


def telling(path: Path) -> ProgressCallbacks:
    """Writes every prediction down, a line each, before its case runs."""
    path.write_text("")

    def write(name: str, predicted: CasePrediction) -> None:
        with path.open("a") as file:
            file.write(json.dumps({"case": name, **predicted.model_dump(mode="json")}) + "\n")

    return ProgressCallbacks(predicted=write)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--schedules", nargs="+", default=tuple(SCHEDULES), choices=tuple(SCHEDULES))
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES)
    parser.add_argument(
        "--all", action="store_true", help="every set of stages, which takes three times as long"
    )
    parser.add_argument("--table", choices=("steps", "plans", "both"), default="both")
    parser.add_argument(
        "--predictions", type=Path, help="file of the predictions; default: one in a temporary folder"
    )
    chosen = parser.parse_args()
    predictions = chosen.predictions or Path(tempfile.mkdtemp()) / "check.predictions.jsonl"
    told = telling(predictions)
    print(f"Predictions are written to {predictions}")
    # As the processes of the check have it: a profile of two threads says nothing of one.
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, median of {STEPS} steps\n")
    if chosen.table != "plans":
        print_steps(chosen, told)
    if chosen.table != "steps":
        print_plans(4, told)


if __name__ == "__main__":
    main()

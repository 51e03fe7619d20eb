"""Eight models on two CPU processes of one thread each, predicted and measured, four plans of each:

    python benchmarks/two_processes.py --results FILE [--minutes 40] [--rounds 5] [--runtimes] [MODEL ...]

Needs a quiet machine of two cores. The link is measured first. Then, in rounds, as the speed of a machine is
not the same all the time, a model is profiled and its plans run. It is profiled by two processes at a
time, so that each core is busy with the same work, as it is in training: a profile of one busy core says
nothing of what two share (bandwidth of the memory, cache, clock). Where the sums of the
two differ by more than `ALIKE`, they measure again, `TRIES` times at most: the two that are the most alike
count, layer by layer with their mean. The plans are made from the first round's profile: pplan's, and those
of `even`, `parameters` and `torchgpipe-time`: GPipe, 8 micro-batches of 4 samples, two stages. What a round's
profile predicts of each is written to FILE before any of them runs in that round; then all run in
torch.distributed.pipelining, in an order that turns from round to round, real layers on gloo. A round's step
is the median of its `STEPS`; a plan's error is the median over the rounds of prediction over step. Of two
plans that is faster whose step over the other's is below 1 in the median of the rounds. `--runtimes`:
pplan's plan also in torchgpipe, FairScale (both run all stages in one process on a CPU) and DeepSpeed.

All processes keep the memory that they free (`KEEPS_MEMORY`), as PyTorch's allocator does on a GPU. Else
glibc hands it back, and each step has its pages cleared anew, which a profile of one layer at a time does
not see.

A model's rows are kept in FILE, a JSON object a line, and are not measured again; after `--minutes` no model
is begun. Without `--results` the file is in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from verified import verified

import pplan
from pplan.api.check import PlanInputs, model_spec
from pplan.api.check_options import CheckOptions
from pplan.api.machine import planned_machine
from pplan.cost_models.errors import PplanError
from pplan.runtimes.checking.launching import ProgressCallbacks, run_in_processes
from pplan.runtimes.checking.records import CasePrediction, Job

SIZE, MICRO_BATCHES = 4, 8
STEPS, WARM_UPS, ROUNDS = 3, 1, 5
PROFILE_SECONDS = 8.0
ALIKE, TRIES = 0.05, 2
PLANNERS = {"pplan": "best", "even": "even", "DeepSpeed": "parameters", "torchgpipe": "torchgpipe-time"}
RUNTIMES = ("torchgpipe", "fairscale", "deepspeed")
KEEPS_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
"""For glibc (mallopt(3)): nothing is mapped, and nothing that is freed goes back to the kernel."""
MEDIAN_TARGET, WORST_TARGET, FASTEST_TARGET = 0.05, 0.15, 7
_IMAGES = {"input_shape": (3, 96, 96), "classes": 100}
_TEXTS = {"hidden": 256, "heads": 4, "sequence": 64, "vocabulary": 4096}
MODELS: dict[str, dict[str, Any]] = {
    "vgg11": {"input_shape": (3, 64, 64), "classes": 100},
    "resnet18": _IMAGES,
    "resnet50": _IMAGES,
    "mobilenet_v2": _IMAGES,
    "densenet121": _IMAGES,
    "convnext_tiny": _IMAGES,
    "hf:gpt2": {"settings": {**_TEXTS, "layers": 6, "tie_word_embeddings": False}},
    "hf:bert": {"settings": {**_TEXTS, "layers": 6, "tie_word_embeddings": False}},
}


def measure(name: str, file: Path) -> None:
    """Profiles a model with one thread, and keeps the profile."""
    torch.set_num_threads(1)
    profile = pplan.profile(
        name, micro_batch_sizes=[SIZE], budget_seconds=PROFILE_SECONDS, device="cpu", **MODELS[name]
    )
    profile.save(file, force=True)


def measure_on_both(name: str, folder: Path) -> tuple[pplan.Profile, list[float]]:
    """The mean of what two processes that measure the same at a time found, and at each try how far the
    second's sum of all layers was from the first's."""
    command = [sys.executable, __file__, "--measure", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    files = [folder / f"{name.replace(':', '-')}.{process}.profile.json" for process in range(2)]
    pairs = dict[float, tuple[pplan.Profile, pplan.Profile]]()
    for _ in range(TRIES):
        running = [subprocess.Popen([*command, str(file)], env=environment) for file in files]
        statuses = [process.wait() for process in running]
        if any(statuses):
            raise SystemExit(f"{name}: a process that profiled it failed.")
        first, second = (pplan.Profile.load(file) for file in files)
        difference = sum_of_layers(second) / sum_of_layers(first) - 1
        pairs[difference] = first, second
        if abs(difference) <= ALIKE:
            break
    return mean_profile(*pairs[min(pairs, key=abs)]), list(pairs)


def sum_of_layers(profile: pplan.Profile) -> float:
    """Seconds of the forward and backward passes of all layers."""
    return sum(layer.costs[0].forward_seconds + layer.costs[0].backward_seconds for layer in profile.layers)


def mean_profile(first: pplan.Profile, second: pplan.Profile) -> pplan.Profile:
    """The first, with the mean of both's seconds in each layer and of the whole model."""
    data, other = json.loads(first.to_json()), json.loads(second.to_json())
    for layer, beside in zip(data["layers"], other["layers"], strict=True):
        for cost, own in zip(layer["costs"], beside["costs"], strict=True):
            for part in [part for part in cost if part.endswith("_seconds") and cost[part] is not None]:
                cost[part] = (cost[part] + own[part]) / 2
    for whole, beside in zip(data["whole"], other["whole"], strict=True):
        for way in ("forward", "backward"):
            seconds = (whole[f"{way}_seconds"] + beside[f"{way}_seconds"]) / 2
            layers = sum(layer["costs"][0][f"{way}_seconds"] for layer in data["layers"])
            whole |= {f"{way}_seconds": seconds, f"{way}_closing_ratio": layers / seconds}
    return pplan.Profile.parse(json.dumps(data), "the mean of both")


def measure_link(folder: Path) -> Path:
    """The link between two processes, as a file for `topology`."""
    file = folder / "links.toml"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    own = [*command, "pplan", "machine", "measure", "links", "--output", str(file), "--force", "--quiet"]
    subprocess.run(own, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return file


def solve_for(profile: pplan.Profile, links: Path, planner: str, schedule: str, runtime: str) -> pplan.Plan:
    """A planner's plan of two devices."""
    return pplan.solve(
        profile,
        gpus=2,
        topology=links,
        mini_batch=SIZE * MICRO_BATCHES,
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        recompute="never",
        runtime=runtime,
        planner=planner,
        use_all=True,
    )


def plans_of(profile: pplan.Profile, links: Path) -> dict[str, pplan.Plan | str]:
    """By planner; or why there is none."""
    plans: dict[str, pplan.Plan | str] = {}
    for label, planner in PLANNERS.items():
        try:
            plan = verified(solve_for(profile, links, planner, "gpipe", "torchgpipe"), profile)
            plans[label] = plan if len(plan.stages) == 2 else "not two stages"
        except PplanError as error:
            plans[label] = error.what
    return plans


@dataclass(frozen=True)
class Round:
    """Seconds of a step of every plan: as predicted from the profile of that round, as measured, and as
    predicted from its stages, which the same processes measured alone before."""

    profiles_differ: list[float]
    planned: dict[str, float]
    steps: dict[str, list[float]]
    alone: dict[str, float]

    @property
    def measured(self) -> dict[str, float]:
        """The median of the steps."""
        return {name: median(steps) for name, steps in self.steps.items()}


def run_round(
    plans: dict[str, pplan.Plan], profile: pplan.Profile, differ: list[float], folder: Path, results: Path
) -> Round:
    """Each plan once, in their order; what the profile predicts is written before."""
    cases = []
    for name, plan in plans.items():
        topology, profiles = planned_machine(plan, profile, folder)
        cases.append(PlanInputs(profile.chain(), topology, profiles).prepare_case(name, plan))
    planned = {case.name: case.simulated.timeline.step_seconds for case in cases}
    write_row(results, {"predicted_before": planned, "of": profile.model})
    job = Job(
        model=model_spec(profile, CheckOptions()),
        cases=[case.case for case in cases],
        steps=STEPS,
        warm_ups=WARM_UPS,
        compared_steps=0,
    )
    alone: dict[str, float] = {}

    def note(name: str, predicted: CasePrediction) -> None:
        alone[name] = predicted.step_seconds

    measured = run_in_processes(job, ProgressCallbacks(predicted=note))
    return Round(differ, planned, {case.name: case.ran.step_seconds for case in measured.cases}, alone)


def run_runtimes(plan: pplan.Plan, profile: pplan.Profile, links: Path) -> dict[str, Any]:
    """Predicted and measured step of the plan in other runtimes, or why it was not run; in DeepSpeed of
    pplan's plan of its schedule, 1F1B."""
    found: dict[str, Any] = {}
    for name in RUNTIMES:
        try:
            own = solve_for(profile, links, "best", "1f1b", name) if name == "deepspeed" else plan
            case = pplan.check(own, profile, runtime=name, even=False, steps=STEPS, device="cpu").of_plan
            found[name] = {"predicted": case.predicted_step_seconds, "measured": case.measured_step_seconds}
        except PplanError as error:
            found[name] = error.what
    return found


def run_model(
    name: str, folder: Path, links: Path, results: Path, *, count: int, runtimes: bool
) -> dict[str, Any]:
    """A model's row, of so many rounds; plans of one balance are one measurement."""
    begin = time.monotonic()
    profile, differ = measure_on_both(name, folder)
    made = plans_of(profile, links)
    plans = {label: plan for label, plan in made.items() if isinstance(plan, pplan.Plan)}
    if "pplan" not in plans:
        raise SystemExit(f"{name}: pplan made no plan: {made['pplan']}")
    distinct = {tuple(plan.balance): label for label, plan in reversed(plans.items())}
    names = list(distinct.values())
    rounds = list[Round]()
    for turn in range(count):
        if turn:
            profile, differ = measure_on_both(name, folder)
        place = turn % len(names)
        turned = {label: plans[label] for label in names[place:] + names[:place]}
        rounds.append(run_round(turned, profile, differ, folder, results))
    row: dict[str, Any] = {
        "model": name,
        "closing_ratio": profile.whole[0].closing_ratio,
        "balance": {label: plan.balance for label, plan in plans.items()},
        "same": {label: distinct[tuple(plan.balance)] for label, plan in plans.items()},
        "reasons": {label: plan for label, plan in made.items() if isinstance(plan, str)},
        "rounds": [asdict(own) for own in rounds],
    }
    if runtimes:
        row["runtimes"] = run_runtimes(plans["pplan"], profile, links)
    row["seconds"] = round(time.monotonic() - begin, 1)
    return row


def write_row(results: Path, row: dict[str, Any]) -> None:
    """Adds a line."""
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def print_table(rows: list[dict[str, Any]]) -> None:
    """Of every model and plan, and the errors over all; plans of one balance are one measurement."""
    heads = ("model", "plan", "balance", "planned", "of stages", "measured", "error", "to pplan")
    print("{:<14} {:<11} {:<10} {:>9} {:>9} {:>9} {:>7} {:>8}".format(*heads))
    errors, staged, single, fastest = list[float](), list[float](), list[float](), 0
    for row in rows:
        rounds = [Round(**own) for own in row["rounds"]]
        own = row["same"]["pplan"]
        ratios = {
            name: median(one.measured[name] / one.measured[own] for one in rounds)
            for name in rounds[0].planned
        }
        fastest += min(ratios.values()) >= 1
        for label, name in row["same"].items():
            off = [one.planned[name] / one.measured[name] - 1 for one in rounds]
            if label == name:
                errors.append(median(off))
                staged.append(median(one.alone[name] / one.measured[name] - 1 for one in rounds))
                single += off
            print(
                f"{row['model']:<14} {label:<11} {'-'.join(map(str, row['balance'][label])):<10} "
                f"{1e3 * median(one.planned[name] for one in rounds):7.1f}ms "
                f"{1e3 * median(one.alone[name] for one in rounds):7.1f}ms "
                f"{1e3 * median(one.measured[name] for one in rounds):7.1f}ms "
                f"{median(off):+7.1%} {ratios[name]:8.3f}"
            )
        for runtime, found in row.get("runtimes", {}).items():
            words = found if isinstance(found, str) else (
                f"of stages {1e3 * found['predicted']:.1f}, measured {1e3 * found['measured']:.1f} ms"
            )  # fmt: skip
            print(f"{row['model']:<14} pplan in {runtime}: {words}")
    if not rows:
        return
    for what, found in (
        ("steps predicted from the profile", errors),
        ("steps predicted from the stages measured alone", staged),
        ("single rounds, predicted from the profile", single),
    ):
        sizes = [abs(error) for error in found]
        print(f"{len(found)} {what}: median {median(sizes):.1%}, worst {max(sizes):.1%}")
    print(f"aims: median {MEDIAN_TARGET:.0%}, worst {WORST_TARGET:.0%}")
    print(f"pplan's plan the fastest measured in {fastest} of {len(rows)}, aim {FASTEST_TARGET} of 8")


def read_rows(results: Path) -> list[dict[str, Any]]:
    """The rows that are done."""
    if not results.exists():
        return []
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return [row for row in rows if "rounds" in row]


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--runtimes", action="store_true", help="pplan's plan in the other runtimes, too")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "FILE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        measure(chosen.measure[0], Path(chosen.measure[1]))
        return
    os.environ |= KEEPS_MEMORY
    end = time.monotonic() + 60 * chosen.minutes
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as made:
        results = chosen.results or Path(made) / "two_processes.jsonl"
        rows = read_rows(results)
        done = {row["model"] for row in rows}
        links = measure_link(Path(made))
        for name in chosen.models:
            if name not in done and time.monotonic() < end:
                rows.append(
                    run_model(name, Path(made), links, results, count=chosen.rounds, runtimes=chosen.runtimes)
                )
                write_row(results, rows[-1])
                print(f"{name}: {rows[-1]['seconds']} s", file=sys.stderr, flush=True)
    print_table(rows)


if __name__ == "__main__":
    main()

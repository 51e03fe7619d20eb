"""Eight models on two CPU processes of one thread each, predicted and measured, four plans of each:

    python benchmarks/two_processes.py --results FILE [--minutes 20] [--runtimes] [MODEL ...]

Needs a quiet machine of two cores. The link is measured first. A model is profiled by two processes at a
time, so that each core is busy with the same work, as it is in training: a profile of one busy core says
nothing of what two share (bandwidth of the memory, cache, clock). Where the sums of the
two differ by more than `ALIKE`, they measure again, `TRIES` times at most: the two that are the most alike
count, layer by layer with their mean. The plans are pplan's, and those of
`even`, `parameters` and `torchgpipe-time`: GPipe, 8 micro-batches of 4 samples, two stages. What the profile
predicts of each is written to FILE before any of them runs; then all run in torch.distributed.pipelining,
in `ROUNDS` rounds whose order turns, real layers on gloo, and the median of all steps counts. `--runtimes`:
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
from pathlib import Path
from statistics import median
from typing import Any

import torch
from verified import verified

import pplan
from pplan.api.check import model_spec
from pplan.api.check_cases import prepare_case
from pplan.api.check_options import CheckOptions
from pplan.api.machine import planned_machine
from pplan.cost_models.errors import PplanError
from pplan.runtimes.checking.job import CasePrediction, Job
from pplan.runtimes.checking.launching import ProgressCallbacks, run_in_processes

SIZE, MICRO_BATCHES = 4, 8
STEPS, WARM_UPS, ROUNDS = 3, 1, 2
PROFILE_SECONDS = 15.0
ALIKE, TRIES = 0.05, 4
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
    own = [*command, "pplan", "profile-links", "--output", str(file), "--force", "--quiet"]
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


def run_plans(
    plans: dict[str, pplan.Plan], profile: pplan.Profile, folder: Path
) -> dict[str, dict[str, list[float]]]:
    """By plan the measured steps, and the steps predicted from its stages measured alone in the same
    processes."""
    found: dict[str, dict[str, list[float]]] = {name: {"steps": [], "alone": []} for name in plans}
    names = list(plans)
    for turn in range(ROUNDS):
        cases = []
        for name in names[turn:] + names[:turn]:
            topology, profiles = planned_machine(plans[name], profile, folder)
            cases.append(
                prepare_case(name, plans[name], profile.chain(), topology, profiles, emulate=False).case
            )
        job = Job(
            model=model_spec(profile, CheckOptions()),
            cases=cases,
            steps=STEPS,
            warm_ups=WARM_UPS,
            compared_steps=0,
        )
        alone: dict[str, float] = {}

        def write(name: str, predicted: CasePrediction) -> None:
            alone[name] = predicted.step_seconds  # noqa: B023

        measured = run_in_processes(job, ProgressCallbacks(predicted=write))
        for case in measured.cases:
            found[case.name]["steps"] += case.ran.step_seconds
            found[case.name]["alone"].append(alone[case.name])
    return found


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


def run_model(name: str, folder: Path, links: Path, results: Path, *, runtimes: bool) -> dict[str, Any]:
    """A model's row; its predictions are written first."""
    begin = time.monotonic()
    profile, difference = measure_on_both(name, folder)
    made = plans_of(profile, links)
    plans = {label: plan for label, plan in made.items() if isinstance(plan, pplan.Plan)}
    if "pplan" not in plans:
        raise SystemExit(f"{name}: pplan made no plan: {made['pplan']}")
    row: dict[str, Any] = {
        "model": name,
        "profiles_differ": difference,
        "closing_ratio": profile.whole[0].closing_ratio,
        "balance": {label: plan.balance for label, plan in plans.items()},
        "reasons": {label: plan for label, plan in made.items() if isinstance(plan, str)},
        "planned": {label: plan.prediction.step_seconds for label, plan in plans.items()},
    }
    write_row(results, {"predicted_before": row})
    distinct = {tuple(plan.balance): label for label, plan in reversed(plans.items())}
    ran = run_plans({label: plans[label] for label in distinct.values()}, profile, folder)
    own = {label: ran[distinct[tuple(plan.balance)]] for label, plan in plans.items()}
    row["measured"] = {label: median(found["steps"]) for label, found in own.items()}
    row["steps"] = {label: found["steps"] for label, found in own.items()}
    row["from_stages"] = {label: median(found["alone"]) for label, found in own.items()}
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
    heads = ("model", "plan", "balance", "planned", "of stages", "measured", "error")
    print("{:<14} {:<11} {:<10} {:>9} {:>9} {:>9} {:>7}".format(*heads))
    errors, staged, fastest = list[float](), list[float](), 0
    for row in rows:
        least = min(row["measured"].values())
        fastest += row["measured"].get("pplan") == least
        seen = set[tuple[int, ...]]()
        for label, step in row["measured"].items():
            balance, planned = tuple(row["balance"][label]), row["planned"][label]
            if balance not in seen:
                errors.append(planned / step - 1)
                staged.append(row["from_stages"][label] / step - 1)
            seen.add(balance)
            print(
                f"{row['model']:<14} {label:<11} {'-'.join(map(str, balance)):<10} {1e3 * planned:7.1f}ms "
                f"{1e3 * row['from_stages'][label]:7.1f}ms {1e3 * step:7.1f}ms {planned / step - 1:+7.1%}"
            )
        for runtime, found in row.get("runtimes", {}).items():
            words = found if isinstance(found, str) else (
                f"of stages {1e3 * found['predicted']:.1f}, measured {1e3 * found['measured']:.1f} ms"
            )  # fmt: skip
            print(f"{row['model']:<14} pplan in {runtime}: {words}")
    if not rows:
        return
    for what, own in (("profile", errors), ("stages measured alone", staged)):
        sizes = [abs(error) for error in own]
        print(
            f"{len(own)} steps predicted from the {what}: median {median(sizes):.1%}, worst {max(sizes):.1%}"
        )
    print(f"aims: median {MEDIAN_TARGET:.0%}, worst {WORST_TARGET:.0%}")
    print(f"pplan's plan the fastest measured in {fastest} of {len(rows)}, aim {FASTEST_TARGET} of 8")


def read_rows(results: Path) -> list[dict[str, Any]]:
    """The rows that are done."""
    if not results.exists():
        return []
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return [row for row in rows if "measured" in row]


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
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
                rows.append(run_model(name, Path(made), links, results, runtimes=chosen.runtimes))
                write_row(results, rows[-1])
                print(f"{name}: {rows[-1]['seconds']} s", file=sys.stderr, flush=True)
    print_table(rows)


if __name__ == "__main__":
    main()

"""Eight models on two CPU processes of one thread each, predicted and measured:

    python benchmarks/two_processes.py --results FILE [--minutes 9] [--rounds 2] [--profilers 2] [MODEL ...]

Needs a quiet machine of two cores, and takes under 10 minutes. The link is measured first. Then, in rounds,
as the speed of a machine is not the same all the time, a model is profiled and its plans run: 1F1B, 8
micro-batches of 4 samples, two stages, real layers on gloo in torch.distributed.pipelining. The cuts are made
from the first round's profile: pplan's, and those of the `--planners`. A round's prediction, with its
interval, is from its own profile and written to FILE before any plan runs in that round. All plans then run
in an order that turns from round to round. A round's step is the median of its `STEPS`; a plan's error is the
median over the rounds of prediction over step. Coverage is the share of rounds whose step lies inside the
interval.

A user profiles with one process while the other cores idle (`--profilers 1`). With 2, two processes profile
at a time, so that each core is busy with the same work, as in training; the mean counts layer by layer, and
where the two sums differ by more than `ALIKE`, they measure once more. Comparing both shows what processes
that share memory bandwidth, cache and clock take from each other.

All processes keep the memory that they free (`KEEPS_MEMORY`), as PyTorch's allocator does on a GPU. Else
glibc hands it back, and each step has its pages cleared anew, which a profile of one layer at a time does
not see.

A round of a model is a line of FILE, and is not measured again; after `--minutes` none is begun. Without
`--results` the file is in a temporary folder.
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

import pplan
from pplan.api.check import PlanInputs, model_spec
from pplan.api.check_options import CheckOptions
from pplan.api.machine import planned_machine
from pplan.cost_models.errors import PplanError
from pplan.runtimes.checking.launching import run_in_processes
from pplan.runtimes.checking.records import Job

SIZE, MICRO_BATCHES = 4, 8
STEPS, WARM_UPS = 3, 1
PROFILE_SECONDS = 6.0
ALIKE, TRIES = 0.05, 2
PLANNERS = {"pplan": "best", "even": "even", "DeepSpeed": "parameters", "torchgpipe": "torchgpipe-time"}
KEEPS_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
"""For glibc (mallopt(3)): nothing is mapped, and nothing that is freed goes back to the kernel."""
MEDIAN_TARGET, WORST_TARGET, COVERAGE_TARGET = 0.05, 0.15, 0.8
SETTING: dict[str, Any] = {
    "gpus": 2,
    "mini_batch": SIZE * MICRO_BATCHES,
    "micro_batches": MICRO_BATCHES,
    "schedule": "1f1b",
    "recompute": "never",
    "runtime": "torch",
}
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


def measure_round(name: str, folder: Path, profilers: int) -> pplan.Profile:
    """The profile of one process, or the mean of two that measure the same at a time."""
    command = [sys.executable, __file__, "--measure", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    files = [folder / f"{name.replace(':', '-')}.{process}.profile.json" for process in range(profilers)]
    trials = dict[float, list[pplan.Profile]]()
    for _ in range(TRIES):
        running = [subprocess.Popen([*command, str(file)], env=environment) for file in files]
        statuses = [process.wait() for process in running]
        if any(statuses):
            raise SystemExit(f"{name}: a process that profiled it failed.")
        profiles = [pplan.Profile.load(file) for file in files]
        sums = [sum_of_layers(profile) for profile in profiles]
        difference = max(sums) / min(sums) - 1
        trials[difference] = profiles
        if difference <= ALIKE:
            break
    best = trials[min(trials)]
    return best[0] if profilers == 1 else mean_profile(*best)


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


def cut(profile: pplan.Profile, links: Path, planners: list[str]) -> dict[str, list[int]]:
    """Balances of two stages by planner; equal ones are one plan."""
    balances: dict[str, list[int]] = {}
    for label in planners:
        try:
            plan = pplan.solve(profile, topology=links, planner=PLANNERS[label], use_all=True, **SETTING)
        except PplanError as error:
            print(f"{profile.model}, {label}: {error.what}", file=sys.stderr)
            continue
        if len(plan.stages) == 2 and plan.balance not in balances.values():
            balances[label] = plan.balance
    return balances


def run_round(
    name: str, number: int, balances: dict[str, list[int]] | None, options: argparse.Namespace, links: Path
) -> dict[str, Any]:
    """A line: each plan once, in an order that turns; what the profile predicts is written before."""
    begin = time.monotonic()
    profile = measure_round(name, links.parent, options.profilers)
    if balances is None:
        balances = cut(profile, links, options.planners)
    turn = number % max(len(balances), 1)
    order = list(balances)[turn:] + list(balances)[:turn]
    plans = {
        label: pplan.import_plan(",".join(map(str, balances[label])), profile, topology=links, **SETTING)
        for label in order
    }
    predicted = {
        label: {
            "step": plan.prediction.step_seconds,
            "interval": plan.prediction.interval,
        }
        for label, plan in plans.items()
    }
    row = {"model": name, "round": number, "balances": balances, "predicted": predicted}
    write_row(options.results, row)
    cases = []
    for label, plan in plans.items():
        topology, profiles = planned_machine(plan, profile, links.parent)
        cases.append(PlanInputs(profile.chain(), topology, profiles).prepare_case(label, plan).case)
    job = Job(
        model=model_spec(profile, CheckOptions()),
        cases=cases,
        steps=STEPS,
        warm_ups=WARM_UPS,
        compared_steps=0,
        measures_memory=False,
    )
    measured = run_in_processes(job)
    row["steps"] = {case.name: case.ran.step_seconds for case in measured.cases}
    row["closing_ratio"] = profile.whole[0].closing_ratio
    row["seconds"] = round(time.monotonic() - begin, 1)
    return row


def write_row(results: Path, row: dict[str, Any]) -> None:
    """Add a line."""
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print each model and plan, the errors over all, and the coverage of the interval."""
    heads = ("model", "plan", "balance", "predicted", "interval", "measured", "error", "inside")
    print("{:<14} {:<11} {:<8} {:>9} {:>15} {:>9} {:>7} {:>6}".format(*heads))
    errors, inside, ratios = list[float](), list[bool](), list[float]()
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        for label, balance in own[0]["balances"].items():
            rounds = [(row["predicted"][label], median(row["steps"][label])) for row in own]
            error = median(predicted["step"] / step - 1 for predicted, step in rounds)
            known = [(predicted["interval"], step) for predicted, step in rounds if predicted["interval"]]
            hits = [low <= step <= high for (low, high), step in known]
            errors.append(error)
            inside += hits
            ratios += [step / predicted["step"] for predicted, step in rounds]
            low, high = (median(own[end] for own, _ in known) if known else 0.0 for end in (0, 1))
            print(
                f"{name:<14} {label:<11} {'-'.join(map(str, balance)):<8} "
                f"{1e3 * median(predicted['step'] for predicted, _ in rounds):7.1f}ms "
                f"{f'{1e3 * low:.0f} to {1e3 * high:.0f}ms':>15} "
                f"{1e3 * median(step for _, step in rounds):7.1f}ms {error:+7.1%} "
                f"{f'{sum(hits)}/{len(hits)}':>6}"
            )
    if not rows:
        return
    sizes = [abs(error) for error in errors]
    print(
        f"{len(sizes)} plans: error {median(sizes):.1%} in the median (aim {MEDIAN_TARGET:.0%}), "
        f"{max(sizes):.1%} at most (aim {WORST_TARGET:.0%})"
    )
    ratios.sort()
    tenth = [ratios[round(share * (len(ratios) - 1))] for share in (0.1, 0.5, 0.9)]
    print("measured over predicted, single rounds: 10 % {:.2f}, median {:.2f}, 90 % {:.2f}".format(*tenth))
    print(
        f"inside the 80 % interval: {sum(inside)} of {len(inside)} rounds, "
        f"{sum(inside) / max(len(inside), 1):.0%} (aim {COVERAGE_TARGET:.0%})"
    )


def read_rows(results: Path) -> list[dict[str, Any]]:
    """The rounds that are done."""
    if not results.exists():
        return []
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return [row for row in rows if "steps" in row]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profilers", type=int, default=1, choices=[1, 2])
    parser.add_argument("--planners", nargs="+", default=["pplan", "even"], choices=list(PLANNERS))
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], Path(options.measure[1]))
        return
    os.environ |= KEEPS_MEMORY
    end = time.monotonic() + 60 * options.minutes
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        options.results = options.results or Path(folder) / "two_processes.jsonl"
        rows = read_rows(options.results)
        links = measure_link(Path(folder))
        for number in range(options.rounds):
            for name in options.models:
                own = [row for row in rows if row["model"] == name]
                if any(row["round"] == number for row in own) or time.monotonic() > end:
                    continue
                row = run_round(name, number, own[0]["balances"] if own else None, options, links)
                write_row(options.results, row)
                rows.append(row)
                print(f"{name}, round {number}: {row['seconds']} s", file=sys.stderr, flush=True)
    print_table(rows)


if __name__ == "__main__":
    main()

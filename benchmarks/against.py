"""This version against another: python benchmarks/against.py --other PYTHON [--problems N] [--cache FILE]

Random problems that both versions read: chains of 8 to 66 uneven layers on 2 to 8 devices, with loose or
tight memory, 4 to 32 micro-batches or any number, with or without replicas, under 1F1B or GPipe, on fast and
slow links. Every seventh has 12 layers, 8 devices, 32 micro-batches, 1F1B, loose memory and replicas. Both
versions run the command `pplan solve` in turn, start included, with a time limit of 20 s. PYTHON is the
interpreter of an environment in which the other version is installed. `--cache` keeps its results, so that
only this version runs the next time: compare seconds only on one machine under one load.

Prints processor seconds, step and proof of both for each problem (`=`: exact; inf: nothing fits), then the
median ratio of seconds, the answers that are slower here, and the proofs that are lost. Ends with status 1 if
there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from statistics import median

import numpy as np
from command_line import children_seconds
from generated_chains import generated_profile

LIMIT = 20
START = "import sys; from pplan.cli.app import main; sys.exit(main())"
NO_PLAN = 3
"""Exit status if no plan fits."""


@dataclass(frozen=True)
class Problem:
    """A profile file and the options that both versions accept."""

    name: str
    profile: str
    options: tuple[str, ...]

    @property
    def key(self) -> str:
        """Hash of what is solved, for the cache."""
        return sha256("\n".join([self.profile, *self.options]).encode()).hexdigest()


@dataclass(frozen=True)
class Answer:
    """Processor seconds, step and proof of a command; an infinite step and a proof if no plan fits."""

    seconds: float
    step: float
    exact: bool


def random_problem(seed: int, number: int) -> Problem:
    """Problem of a number; the same for the same seed."""
    rng = np.random.default_rng([seed, number])
    fixed = number % 7 == 0
    layers = 12 if fixed else int(rng.integers(8, 67))
    gpus = 8 if fixed else int(rng.choice([2, 3, 4, 6, 8]))
    micro_batches = 32 if fixed else int(rng.choice([0, 4, 8, 16, 32]))
    replicas = fixed or micro_batches == 0 or bool(rng.integers(2))
    # Replicas share the samples of a micro-batch: none are possible where it is one sample.
    size = int(rng.choice([2, 3, 4, 8])) if replicas else 1
    samples = size * (micro_batches or 16)
    schedule = "1f1b" if fixed else str(rng.choice(["1f1b", "gpipe"]))
    profile = generated_profile(layers, seed=1_000 * seed + number, spread=float(rng.choice([0.5, 1, 2])))
    content = json.loads(profile.model_dump_json(exclude_defaults=True, exclude_none=True))
    scales = size == 3 or bool(rng.integers(2))
    weights = int(rng.choice([1, 5, 20]))
    for layer in content["layers"]:
        layer["parameter_bytes"] *= weights
        layer["costs"] = layer["costs"][:1] if scales else layer["costs"]
    states = 2.5 * sum(layer["parameter_bytes"] for layer in content["layers"]) / gpus
    saved = size * sum(layer["costs"][0]["saved_bytes"] for layer in content["layers"]) / gpus
    tight = 0.6e9 + 1.4 * states + rng.uniform(0.15, 0.9) * saved * min(gpus, micro_batches or 16)
    memory = "900GB" if fixed or rng.integers(2) else f"{tight / 1e9:.2f}GB"
    bandwidth = str(rng.choice(["300GB/s", "12GB/s", "3GB/s", "50GB/s,3GB/s"]))
    nodes = ("--gpus-per-node", "4") if "," in bandwidth else ()
    words = f"{layers} x {gpus}, {memory}, {samples} = {micro_batches or 'any'}, {schedule}, {bandwidth}"
    options = ("--gpus", str(gpus), "--memory", memory, "--bandwidth", bandwidth, *nodes)
    options += ("--mini-batch", str(samples), "--micro-batches", str(micro_batches or "auto"))
    # An optimizer whose step both versions give the same memory.
    options += ("--schedule", schedule, "--optimizer", "adamw-8bit", "--time-limit", f"{LIMIT}s")
    return Problem(
        f"{number:>3} {words}",
        json.dumps({"schema": 1, "scales_with_samples": scales} | content),
        options,
    )


def solve(python: str, problem: Problem, folder: Path) -> Answer:
    """Run the command of one version."""
    path = folder / "problem.profile.json"
    path.write_text(problem.profile)
    command = [
        python,
        "-c",
        START,
        "solve",
        path.name,
        *problem.options,
        "--json",
        "-o",
        "plan.json",
        "--force",
    ]
    # As an installation has it: with compiled bytecode.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    used = children_seconds()
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    seconds = children_seconds() - used
    if ran.returncode == NO_PLAN:
        return Answer(seconds, inf, True)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}: status {ran.returncode}\n{ran.stderr}")
    prediction = json.loads(ran.stdout)["prediction"]
    return Answer(seconds, prediction["step_seconds"], prediction["exact"])


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", required=True, metavar="PYTHON", help="interpreter of the other version")
    parser.add_argument("--problems", type=int, default=70, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, metavar="FILE", help="results of the other version")
    options = parser.parse_args()
    cache = json.loads(options.cache.read_text()) if options.cache and options.cache.exists() else {}
    print(
        f"{'layers x GPUs, memory, batch, schedule, links':<64}{'CPU s':>7}{'other':>7}{'ratio':>7}"
        "  step: here, other"
    )
    ratios, slower, unproven = [], [], []
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.problems):
            problem = random_problem(options.seed, number)
            if problem.key not in cache:
                cache[problem.key] = vars(solve(options.other, problem, Path(name)))
                if options.cache:
                    options.cache.write_text(json.dumps(cache, indent=1))
            other, here = Answer(**cache[problem.key]), solve(sys.executable, problem, Path(name))
            ratios.append(here.seconds / other.seconds)
            is_slower, is_lost = here.step > other.step * (1 + 1e-9), other.exact and not here.exact
            slower += [problem.name] if is_slower else []
            unproven += [problem.name] if is_lost else []
            print(
                f"{problem.name:<64}{here.seconds:>7.2f}{other.seconds:>7.2f}{ratios[-1]:>7.2f}"
                f"  {here.step:.6g}{'=' if here.exact else ' '} {other.step:.6g}{'=' if other.exact else ' '}"
                f"{' SLOWER' if is_slower else ''}{' PROOF LOST' if is_lost else ''}",
                flush=True,
            )
    print(f"\n{len(ratios)} problems: processor seconds, here / other: median {median(ratios):.2f}")
    print(f"{len(slower)} answers slower, {len(unproven)} proofs lost")
    return 1 if slower or unproven else 0


if __name__ == "__main__":
    sys.exit(main())

"""What profiling costs beside the plain model: python benchmarks/profiling_time.py [MODEL] [--device cuda]

Profiles the model at four micro-batch sizes, so many rounds each, and then runs the plain model forward and
backward as many times at every size as the profile's passes were, counting, warm-up and backward in two parts
among them. Prints the seconds of both and their ratio: it should be 1.5 at the most.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

import pplan
from pplan.profiler import size_run
from pplan.profiler.clocks import Clock, CpuClock, CudaClock
from pplan.profiler.local_machine import parse_device
from pplan.profiler.measure import profile_model
from pplan.profiler.models import load_model
from pplan.profiler.passes import OutputGradients, run_whole
from pplan.profiler.profile_options import ProfileOptions
from pplan.profiler.user_model import LoadedModel, ModelInput

PASSES = ("run_layers", "run_whole", "run_parts")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="resnet50")
    parser.add_argument("--device")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    loaded, device = load_model(options.model), parse_device(options.device)
    profiled, steps = profile_seconds(loaded, device, options.sizes, options.rounds)
    plain = plain_seconds(loaded, device, steps)
    print(f"{'size':>5} {'passes':>7} {'plain s':>9}")
    for size, seconds in plain.items():
        print(f"{size:>5} {steps[size]:>7} {seconds:>9.2f}")
    total = sum(plain.values())
    print(f"profile {profiled:.2f} s, plain {total:.2f} s, ratio {profiled / total:.2f}")


def profile_seconds(
    loaded: LoadedModel, device: torch.device, sizes: list[int], rounds: int
) -> tuple[float, Counter[int]]:
    """Seconds of the whole profile, and the passes it made by micro-batch size."""
    steps: Counter[int] = Counter()

    def counting(plain: Callable[..., Any], model: Any, given: Any, *rest: Any, **options: Any) -> Any:
        steps[ModelInput.of(given).batch] += 1
        return plain(model, given, *rest, **options)

    begun = perf_counter()
    with ExitStack() as stack:
        for name in PASSES:
            stack.enter_context(patch.object(size_run, name, partial(counting, getattr(size_run, name))))
        profile_model(loaded, ProfileOptions(device=str(device), micro_batch_sizes=sizes), rounds=rounds)
    return perf_counter() - begun, steps


def plain_seconds(loaded: LoadedModel, device: torch.device, steps: Counter[int]) -> dict[int, float]:
    """Seconds of so many steps of the plain model, by micro-batch size."""
    model, gradients = loaded.module.to(device), OutputGradients(0)
    clock: Clock = CudaClock(device) if device.type == "cuda" else CpuClock()
    seconds = {}
    for size, count in sorted(steps.items()):
        begun = perf_counter()
        for _ in range(count):
            run_whole(model, loaded.example_input_for(size).to(device), gradients, clock)
        seconds[size] = perf_counter() - begun
    return seconds


if __name__ == "__main__":
    print(f"pplan {pplan.__version__}, torch {torch.__version__}")
    main()

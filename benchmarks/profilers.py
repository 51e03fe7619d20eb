"""pplan's profile beside other profilers, on the same models: python benchmarks/profilers.py [--minutes 5]

Needs a quiet machine; one thread. Each tool profiles a sequential model forward and backward, three times at
every budget, until the three sums over the layers lie within 2 %: pplan, torchgpipe's `profile_times` (a copy
of every layer, in turn), and torch.profiler (the processor time of all operations, whose backward it does not
divide into layers). Printed are the seconds of a run at that budget, the spread, and the closing ratio: the
sum over the untouched model's median step, measured beside it. Then the bytes that a training step holds for
its backward, by pplan's profile and by torchinfo (weights, gradients and the outputs of all layers), over
those counted on live storages (counted_training.py). torchgpipe's `profile_sizes` needs CUDA.

The minutes are shared equally by models and tools; after its share a tool begins no further budget. Tools
that are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from counted_training import Setup, held_bytes
from torch import Tensor, nn
from torchvision import models

import pplan

BATCH, REPEATS, PLAIN_STEPS = 8, 3, 15
BUDGETS = (0.5, 1.0, 2.0, 4.0, 8.0)
SPREAD = 0.02
Model = Callable[[], tuple[nn.Sequential, Tensor]]
Profiler = Callable[[nn.Sequential, Tensor, float], float]
"""Seconds of all layers, forward and backward, within so many seconds of measuring."""


def vgg11() -> tuple[nn.Sequential, Tensor]:
    """Its layers one after another."""
    own = models.vgg11(num_classes=100)
    return nn.Sequential(*own.features, own.avgpool, nn.Flatten(), *own.classifier), torch.randn(
        BATCH, 3, 64, 64
    )


def resnet18() -> tuple[nn.Sequential, Tensor]:
    """Its blocks one after another."""
    own = models.resnet18(num_classes=100)
    blocks = [*own.layer1, *own.layer2, *own.layer3, *own.layer4]
    stem = (own.conv1, own.bn1, own.relu, own.maxpool)
    return nn.Sequential(*stem, *blocks, own.avgpool, nn.Flatten(), own.fc), torch.randn(BATCH, 3, 96, 96)


def transformer() -> tuple[nn.Sequential, Tensor]:
    """Six encoder layers, 256 wide, on 128 positions."""
    layers = (nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True) for _ in range(6))
    return nn.Sequential(*layers, nn.Linear(256, 1000)), torch.randn(BATCH, 128, 256)


MODELS: dict[str, Model] = {"vgg11": vgg11, "resnet18": resnet18, "transformer": transformer}


def prepared(name: str) -> tuple[nn.Sequential, Tensor]:
    """The model and its input, the same for all tools: torchgpipe's takes no operation in place."""
    torch.manual_seed(0)
    model, given = MODELS[name]()
    for part in model.modules():
        if isinstance(part, nn.ReLU):
            part.inplace = False
    return model, given


def run_step(model: nn.Module, given: Tensor) -> None:
    """Forward and backward."""
    output = model(given)
    output.backward(torch.ones_like(output))


def plain_seconds(model: nn.Sequential, given: Tensor) -> float:
    """The untouched model's median step."""
    own, seconds = deepcopy(model), list[float]()
    for _ in range(PLAIN_STEPS + 2):
        begin = time.perf_counter()
        run_step(own, given)
        seconds.append(time.perf_counter() - begin)
    return median(seconds[2:])


def by_pplan(model: nn.Sequential, given: Tensor, budget: float) -> float:
    """The layers' seconds of a profile."""
    profile = pplan.profile(
        model, given, micro_batch_sizes=[BATCH], budget_seconds=budget, device="cpu", loss="none"
    )
    return sum(layer.costs[0].forward_seconds + layer.costs[0].backward_seconds for layer in profile.layers)


def by_torchgpipe(model: nn.Sequential, given: Tensor, budget: float) -> float:
    """Its sums over all passes, by the number of passes, which the first layer counts."""
    from torchgpipe.balance.profile import profile_times

    passes = list[int]()
    own = deepcopy(model)
    own[0].register_forward_hook(lambda *_: passes.append(1))
    return float(sum(profile_times(own, given, budget, torch.device("cpu")))) / 1e6 / len(passes)


def by_torch_profiler(model: nn.Sequential, given: Tensor, budget: float) -> float:
    """Of all operations, a step."""
    own, steps, begin = deepcopy(model), 0, time.perf_counter()
    run_step(own, given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        while time.perf_counter() - begin < budget or not steps:
            run_step(own, given)
            steps += 1
    return float(sum(event.self_cpu_time_total for event in profiler.key_averages())) / 1e6 / steps


TOOLS: dict[str, tuple[str, Profiler]] = {
    "pplan": ("pplan", by_pplan),
    "torchgpipe": ("torchgpipe", by_torchgpipe),
    "torch.profiler": ("torch", by_torch_profiler),
}


def time_rows(name: str, share: float) -> Iterator[str]:
    """Of each tool the first budget whose runs agree, or the last that was begun within its `share` of
    seconds."""
    model, given = prepared(name)
    for label, (package, profiler) in TOOLS.items():
        if importlib.util.find_spec(package) is None:
            yield f"{name:<12} {label:<15} not installed"
            continue
        row, end = "", time.monotonic() + share
        for budget in BUDGETS:
            if row and time.monotonic() > end:
                break
            plain, begin = plain_seconds(model, given), time.perf_counter()
            sums = [profiler(model, given, budget) for _ in range(REPEATS)]
            seconds = (time.perf_counter() - begin) / REPEATS
            spread = (max(sums) - min(sums)) / median(sums)
            row = f"{name:<12} {label:<15} {seconds:8.1f} s {spread:7.1%} {median(sums) / plain:8.3f}"
            if spread < SPREAD:
                break
        yield row


def memory_rows(name: str) -> Iterator[str]:
    """Bytes of a step by each tool over those that are held."""
    model, given = prepared(name)
    real = held_bytes(deepcopy(model), given, Setup("fp32", "sgd", recompute=False))
    profile = pplan.profile(
        model, given, micro_batch_sizes=[BATCH], budget_seconds=1, device="cpu", loss="none"
    )
    weights = sum(layer.parameter_bytes for layer in profile.layers)
    buffers = sum(layer.buffer_bytes for layer in profile.layers)
    own = 2 * weights + buffers + sum(layer.costs[0].saved_bytes for layer in profile.layers)
    yield f"{name:<12} {'pplan':<15} {own / real - 1:+8.1%}"
    if importlib.util.find_spec("torchinfo") is None:
        yield f"{name:<12} {'torchinfo':<15} not installed"
        return
    torchinfo: Any = importlib.import_module("torchinfo")
    found = torchinfo.summary(deepcopy(model), input_data=given, mode="train", verbose=0)
    other = 2 * found.total_param_bytes + found.total_output_bytes + found.total_input
    yield f"{name:<12} {'torchinfo':<15} {other / real - 1:+8.1%}"


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--minutes", type=float, default=5.0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    share = 60 * chosen.minutes / (len(chosen.models) * len(TOOLS))
    print(f"{'model':<12} {'tool':<15} {'a run':>10} {'spread':>7} {'closing':>8}")
    for name in chosen.models:
        for row in time_rows(name, share):
            print(row, flush=True)
    print(f"\n{'model':<12} {'tool':<15} {'memory':>8}")
    for name in chosen.models:
        for row in memory_rows(name):
            print(row, flush=True)


if __name__ == "__main__":
    main()

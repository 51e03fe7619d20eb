"""What pplan says of a CUDA device, against that device: python benchmarks/gpu.py [MODEL ...] [--parts P ...]

`layers`: the profile's sum of the layers over the untouched model, forward and backward, and the memory of a
step, predicted over measured, at every micro-batch size. Sizes at which the device waited for its host in the
untouched model are marked with *: there the sum is the better figure.
`estimate`: seconds that are estimated for the same GPU (`--device analytic:...`) over the measured ones.
`stages`: torchgpipe's balance by time on four devices, 8 micro-batches, AdamW, nothing recomputed. The stages
run one after another on this device, each alone, all forwards before all backwards: seconds of those and the
most bytes allocated in a whole step, predicted over measured, at the largest size; and the seconds at the
smallest, which are the longer of what the host and the device take. Models with tied weights are left out.
`--profiles FOLDER` keeps the profiles.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measured_models import built
from torch import Tensor, nn

import pplan
from pplan.cost_models.machines import match_device
from pplan.planner.plan_file import Plan, PlannedStage
from pplan.profiler.estimate import parse_analytic_device
from pplan.profiler.layers import as_sequential, build_chain
from pplan.profiler.losses import Loss, load_loss
from pplan.profiler.measure import profile_model
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_options import ProfileOptions
from pplan.profiler.torch_private import sleep_on_gpu, tree_leaves, tree_map_only
from pplan.profiler.user_model import LoadedModel

Autocast = Callable[[], AbstractContextManager[Any]]

CASES: dict[str, tuple[list[int], dict[str, str]]] = {
    "vgg19": ([1, 8, 64], {}),
    "resnet50": ([1, 8, 64], {}),
    "resnet50 bf16": ([1, 8, 64], {"amp": "bf16"}),
    "densenet121": ([1, 8, 64], {}),
    "vit_b_16": ([1, 8, 64], {}),
    "vit_b_16 bf16": ([1, 8, 64], {"amp": "bf16"}),
    "transformer": ([1, 4, 16], {}),
    "transformer bf16": ([1, 4, 16], {"amp": "bf16"}),
    "hf:gpt2": ([1, 4, 8], {}),
}
"""Micro-batch sizes, and how the model is computed."""
STAGES, MICRO_BATCHES = 4, 8
HOLD = 100_000_000
"""Cycles: some fiftieth of a second."""
PARTS = ("layers", "estimate", "stages")
ROUNDS = 5
HEADS = ("size", "whole ms", "launch ms", "forward", "backward", "both", "peak")
FIGURES = ("forward_seconds", "backward_seconds", "forward_host_seconds", "backward_host_seconds")


@dataclass(frozen=True)
class StageRun:
    """Of one stage: seconds of a step's forwards and backwards, and the most bytes allocated in a step."""

    seconds: float
    peak_bytes: int


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--profiles", type=Path)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in options.models:
        sizes, how = CASES[name]
        loaded = built(name.split()[0])
        profile = measured(loaded, sizes, how)
        if options.profiles is not None:
            profile.save(options.profiles / profile_file(name), force=True)
        print(f"\n{name}: {len(profile.layers)} layers, {profile.dtype}, amp {profile.amp}")
        if "layers" in options.parts:
            print_layers(profile)
        if "estimate" in options.parts:
            print_estimate(profile, loaded, sizes, how)
        if "stages" in options.parts and not profile.tied:
            print_stages(profile, loaded, how)


def profile_file(name: str) -> str:
    """What a case's profile is kept as."""
    return f"{name.replace(' ', '-').replace(':', '-')}.profile.json"


def measured(loaded: LoadedModel, sizes: Sequence[int], how: dict[str, str]) -> Profile:
    """On the device, `ROUNDS` times each size."""
    options = ProfileOptions(device="cuda", micro_batch_sizes=list(sizes), cache=False, **how)  # type: ignore[arg-type]
    return profile_model(loaded, options, rounds=ROUNDS)


def print_layers(profile: Profile) -> None:
    """A row for each size."""
    waited = [note for note in profile.notes if "in the untouched model, " in note]
    print("  {:>5} {:>9} {:>9} {:>8} {:>8} {:>7} {:>7}".format(*HEADS))
    for position, whole in enumerate(profile.whole):
        size = whole.micro_batch_size
        costs = [layer.costs[position] for layer in profile.layers]
        launch = sum((cost.forward_host_seconds or 0) + (cost.backward_host_seconds or 0) for cost in costs)
        mark = "*" * any(note.startswith(f"micro-batch size {size}:") for note in waited)
        ratios = (whole.forward_closing_ratio, whole.backward_closing_ratio, whole.closing_ratio)
        peaks = whole.predicted_peak_bytes, whole.peak_bytes
        peak = f"{peaks[0] / peaks[1]:.3f}" if peaks[0] and peaks[1] else "-"
        shown = " ".join(f"{ratio or 0:>8.3f}" for ratio in ratios)
        seconds = 1e3 * (whole.forward_seconds + whole.backward_seconds)
        print(f"  {size:>5} {seconds:>9.2f} {1e3 * launch:>9.2f} {shown}{mark:1} {peak:>6}", flush=True)


def print_estimate(profile: Profile, loaded: LoadedModel, sizes: Sequence[int], how: dict[str, str]) -> None:
    """Layers' sums, estimated over measured: of the device and of the host."""
    gpu = match_device(torch.cuda.get_device_name())
    if gpu is None:
        raise SystemExit(f"There are no figures of {torch.cuda.get_device_name()}.")
    options = ProfileOptions(micro_batch_sizes=list(sizes), **how)  # type: ignore[arg-type]
    estimate = profile_model(loaded, options, estimate_for=parse_analytic_device(f"analytic:{gpu.name}"))
    both = profile, estimate
    for position, size in enumerate(profile.micro_batch_sizes):
        ratios = []
        for kind in FIGURES:
            real, guess = (sum(getattr(own.costs[position], kind) for own in one.layers) for one in both)
            ratios.append(f"{kind.removesuffix('_seconds').replace('_', ' ')} {guess / real:.2f}")
        print(f"  estimate at {size}: {', '.join(ratios)}", flush=True)


def print_stages(profile: Profile, loaded: LoadedModel, how: dict[str, str]) -> None:
    """Each stage: predicted over measured."""
    layers = as_sequential(build_chain(loaded.module, loaded.example_input_for(1), verify=False))
    loss = load_loss(loaded.loss)
    autocast = partial(torch.autocast, "cuda", torch.bfloat16, enabled="amp" in how)
    sizes = profile.micro_batch_sizes
    plan = plan_for(profile, sizes[-1])
    values = [
        loaded.example_input_for(size).to(torch.device("cuda")).layer_input for size in (sizes[0], sizes[-1])
    ]
    for index, stage in enumerate(plan.stages):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        module = layers[stage.first_layer : stage.last_layer + 1].to("cuda")
        own_loss = loss if index == len(plan.stages) - 1 else None
        small = run_stage(module, values[0], autocast, own_loss, trained=index > 0, hold=0)
        torch.cuda.empty_cache()
        large = run_stage(module, values[1], autocast, own_loss, trained=index > 0, hold=HOLD)
        print(f"  stage {index}: {ratios_of(profile, plan, stage, small, large, before)}", flush=True)
        with torch.no_grad(), autocast():
            values = [module(tree_map_only(Tensor, torch.clone, value)) for value in values]
        module.to("cpu")


def plan_for(profile: Profile, size: int) -> Plan:
    """Four stages by torchgpipe's rule."""
    return pplan.solve(
        profile,
        gpus=STAGES,
        mini_batch=size * MICRO_BATCHES,
        micro_batches=MICRO_BATCHES,
        schedule="gpipe",
        recompute="never",
        optimizer="adamw",
        planner="torchgpipe-time",
    )


def ratios_of(
    profile: Profile, plan: Plan, stage: PlannedStage, small: StageRun, large: StageRun, before: int
) -> str:
    """Predicted over measured, and what was measured; `before`: bytes that were allocated all along."""
    predicted = sum(size for term, size in stage.memory.items() if term not in ("reserve", "context"))
    measured = large.peak_bytes - before
    seconds = plan.micro_batches * (stage.forward_seconds + stage.backward_seconds)
    costs = [layer.costs[0] for layer in profile.layers[stage.first_layer : stage.last_layer + 1]]
    device, host = (
        plan.micro_batches * sum(getattr(cost, forward) + (getattr(cost, backward) or 0.0) for cost in costs)
        for forward, backward in zip(FIGURES[::2], FIGURES[1::2], strict=True)
    )
    return (
        f"layers {stage.first_layer}-{stage.last_layer}, bytes {predicted / measured:.3f} of "
        f"{measured / 2**30:.3f} GiB, seconds {seconds / large.seconds:.3f} of {1e3 * large.seconds:.1f} ms, "
        f"at the smallest size {max(device, host) / small.seconds:.2f} of {1e3 * small.seconds:.1f} ms "
        f"(device {1e3 * device:.1f}, host {1e3 * host:.1f})"
    )


def run_stage(
    module: nn.Module, given: Any, autocast: Autocast, loss: Loss | None, *, trained: bool, hold: int
) -> StageRun:
    """Steps on this device alone, all forwards first. `given`: what a forward takes; `loss`: what ends the
    last stage; `trained`: whether an earlier stage needs its gradient; `hold`: cycles that the device is kept
    busy before, so that its host is ahead."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    seconds, peaks = [], []
    if loss is not None:
        with torch.no_grad(), autocast():
            loss.prepare(module(tree_map_only(Tensor, torch.clone, given)).requires_grad_())
    for _ in range(6):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if hold:
            sleep_on_gpu(hold)
        start.record()
        held = [forward(module, given, autocast, loss, trained=trained) for _ in range(MICRO_BATCHES)]
        while held:
            backward(held.pop())
        end.record()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
        peaks.append(torch.cuda.max_memory_allocated())
    return StageRun(median(seconds[2:]), max(peaks[1:]))


def forward(
    module: nn.Module, given: Any, autocast: Autocast, loss: Loss | None, *, trained: bool
) -> tuple[Any, Any]:
    """What came in, as from another device, and what goes out."""
    received = tree_map_only(Tensor, partial(_received, trained=trained), given)
    with autocast():
        output = module(received)
        return received, output if loss is None else loss.of(output)


def backward(held: tuple[Any, Any]) -> None:
    """With gradients as from another device."""
    tensors = [leaf for leaf in tree_leaves(held[1]) if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def _received(tensor: Tensor, *, trained: bool) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_(trained and tensor.is_floating_point())


if __name__ == "__main__":
    main()

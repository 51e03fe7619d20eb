"""The ledger of each device of a pipeline, against the peak that `pplan check` measures in its process:

    python benchmarks/pipeline_memory.py [--models mlp ...] [--processes 2 4] [--optimizer adam]

Real models on CPU processes, with 1F1B and GPipe, 8 micro-batches of 4 samples, never and always recomputed.
The ledger is compared without its reserve. Ends with status 1 where it is below a measured peak by more than
1 %. Memory does not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import pplan
from pplan.cost_models.errors import PplanError
from pplan.planner.balance import balance

SIZE, MICRO_BATCHES = 4, 8
TOLERANCE = 0.01
NAME = "pipeline_memory"


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Wide linear layers: weights are most of its memory."""
    blocks = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Linear(512, 10)), torch.randn(2, 512)


def vgg() -> tuple[nn.Module, torch.Tensor]:
    """Convolutions with in-place activations: the first layers' activations are most of its memory."""
    layers: list[nn.Module] = []
    for channels, out in ((3, 16), (16, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10)), torch.randn(2, 3, 64, 64)


MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"name": f"{NAME}:mlp"},
    "vgg": {"name": f"{NAME}:vgg"},
    "resnet18": {"name": "resnet18", "input_shape": (3, 64, 64), "classes": 10},
    "transformer": {
        "name": "hf:gpt2",
        "settings": {"hidden": 128, "heads": 4, "layers": 4, "sequence": 64, "vocabulary": 1024},
    },
}


def rows(name: str, processes: int, schedule: str, recompute: str, optimizer: str) -> list[Any]:
    """The devices of a checked plan."""
    options = dict(MODELS[name])
    model = options.pop("name")
    profile = pplan.profile(
        model, micro_batch_sizes=[SIZE], device="cpu", budget_seconds=1.0, loss="cross-entropy", **options
    )
    weights = np.array([layer.parameter_bytes + 1.0 for layer in profile.layers])
    counts = balance(weights, processes, cut_after=profile.chain().cut_after)
    plan = pplan.import_plan(
        ",".join(map(str, counts)),
        profile,
        mini_batch=SIZE * MICRO_BATCHES,
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        recompute=recompute,
        optimizer=optimizer,
        runtime="torch",
    )
    named = {"model": model} if ":" in model and not model.startswith("hf:") else {}
    return pplan.check(plan, profile, device="cpu", even=False, steps=1, **named).of_plan.devices


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"])
    parser.add_argument("--recompute", nargs="+", default=["never", "always"])
    parser.add_argument("--optimizer", default="adam")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    torch.set_num_threads(1)  # as each process of a check: kernels take more memory with more threads
    too_low = False
    print(f"{'model':<12} {'schedule':<8} {'recompute':<9} {'device':>6} {'ledger':>9} {'measured':>9} error")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in options.models:
            for processes in options.processes:
                for schedule in options.schedules:
                    for recompute in options.recompute:
                        try:
                            devices = rows(name, processes, schedule, recompute, options.optimizer)
                        except PplanError as error:
                            print(f"{name:<12} {schedule:<8} {recompute:<9} {processes}: {error.what}")
                            continue
                        for device in devices:
                            print(
                                f"{name:<12} {schedule:<8} {recompute:<9} {device.device + 1:>2} of "
                                f"{processes} {device.expected_bytes / 2**20:>8.2f}M"
                                f" {device.measured_bytes / 2**20:>8.2f}M {device.error:+.1%}",
                                flush=True,
                            )
                            too_low |= device.error < -TOLERANCE
    sys.exit(too_low)


if __name__ == "__main__":
    main()

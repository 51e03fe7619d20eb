"""ResNet-101 on two GPUs, pipelines and data parallelism: python benchmarks/resnet101.py [PROFILE]

A published study trained torchvision's ResNet-101, flattened into 370 layers, on two GPUs with torchgpipe and
with data parallelism. Its order, the fastest first: data parallelism; balanced by time; cut by hand after
layer 140 of 370; balanced by size, by a wide margin. Here the profile is an estimate for an A100, with images
of 224 x 224, of 345 layers with cuts inside ResNet's blocks as well; layer 140 of the study is the first ReLU
of the thirteenth block (a stem of four layers, eleven layers a block). GPipe, NVLink at 300 GB/s, for several
global batches and numbers of micro-batches, of which the study's are not known; data parallelism accumulates
as is best. Then data parallelism by other means, by their own time models.
"""

from __future__ import annotations

import argparse
from typing import Any

import pplan

MACHINE: dict[str, Any] = {"gpus": 2, "bandwidth": (300e9,)}
BATCHES = ((128, 2), (256, 4), (512, 8), (128, 4), (128, 8))
"""Global batches, and micro-batches of each: of 64 samples, for which the device takes longer than one
process to launch, and of 32 and 16, for which it does not."""
BY_HAND = "layer3.5.relu"


def pipelines(profile: pplan.Profile, mini_batch: int, micro_batches: int) -> dict[str, pplan.Plan]:
    """The plans that the study compares, in its order, the fastest first."""
    names = [layer.name for layer in profile.layers]
    hand = 1 + names.index(BY_HAND)
    batch: dict[str, Any] = {**MACHINE, "mini_batch": mini_batch}
    pipeline: dict[str, Any] = {**batch, "schedule": "gpipe", "micro_batches": micro_batches}
    return {
        "data parallelism": pplan.solve(profile, planner="data-parallel", **batch),
        "by time": pplan.solve(profile, planner="torchgpipe-time", use_all=True, **pipeline),
        "by hand, 140/230": pplan.import_plan(f"{hand},{len(names) - hand}", profile, **pipeline),
        "by size": pplan.solve(profile, planner="torchgpipe-size", use_all=True, **pipeline),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("profile", nargs="?")
    path = parser.parse_args().profile
    profile = (
        pplan.load_profile(path)
        if path
        else pplan.profile(
            "resnet101",
            input_shape=(3, 224, 224),
            device="analytic:a100-80gb",
            micro_batch_sizes=(4, 16, 32, 64, 128),
            granularity="fine",
        )
    )
    for mini_batch, micro_batches in BATCHES:
        print(f"global batch {mini_batch}, {micro_batches} micro-batches")
        for name, plan in pipelines(profile, mini_batch, micro_batches).items():
            balance = ":".join(map(str, plan.balance))
            print(f"  {name:<20} {balance:>8} {plan.prediction.step_seconds * 1e3:7.1f} ms")
    print("other methods, global batch 128")
    for other in pplan.data_parallel(profile, mini_batch=128, **MACHINE):
        if other.step_seconds is not None:
            bound = "at most " if other.staleness_bounded else ""
            print(
                f"  {other.name:<29} {other.step_seconds * 1e3:7.1f} ms, staleness {bound}{other.staleness:g}"
            )


if __name__ == "__main__":
    main()

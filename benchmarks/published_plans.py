"""Our planners on published profiles, beside published figures: python benchmarks/published_plans.py FOLDER

FOLDER holds the profiles under the names in `PROFILES`: PipeDream's `graph.txt` of VGG-16 (mini-batch 128),
and DAPPLE's of VGG-19 (micro-batch 32).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.objectives.throughput import plan_asynchronous
from pplan.planner.planners.dapple_planner import find_dapple_plan
from pplan.planner.planners.pipedream_planner import PAPER, PUBLISHED
from pplan.planner.planners.replica_groups import CutPlan, MicroBatchChoice
from pplan.planner.search.space import Space
from pplan.profiler.imports import import_profile
from pplan.profiler.profile_options import ProfileImportOptions

PROFILES = {"pipedream-vgg16": "pipedream-vgg16-graph.txt", "dapple-vgg19": "dapple-vgg19-batch32.txt"}


@dataclass(frozen=True)
class Row:
    """A plan of ours beside the published one."""

    planner: str
    model: str
    devices: int
    ours: str
    published: str


def imported(folder: Path, name: str, micro_batch_size: int) -> Chain:
    """The chain of a published profile, an operation a layer."""
    options = ProfileImportOptions(micro_batch_size=micro_batch_size, granularity="fine")
    return import_profile(folder / PROFILES[name], options).chain()


def one_level(devices: int, bytes_per_second: float) -> Topology:
    """Devices without memory limits, each joined to each."""
    level = Level("machine", None, Link(bytes_per_second, 0.0))
    return Topology((Group(Device("any", None), devices),), (level,))


PIPEDREAM = (
    ("pipedream-published", PUBLISHED, 4, "205.5 ms, 3-1"),
    ("pipedream-published", PUBLISHED, 8, "103.8 ms, 7-1"),
    ("pipedream-published", PUBLISHED, 16, "56.5 ms, 13-2-1"),
    ("pipedream", PAPER, 4, "205.5 ms, 3-1"),
    ("pipedream", PAPER, 8, "100.9 ms, 7-1"),
    ("pipedream", PAPER, 16, "100.9 ms, 7-8-1"),
)
"""Milliseconds of a mini-batch, and replicas by stage, on one level at 1e9 bytes/s with all machines used."""


def pipedream(folder: Path) -> Iterator[Row]:
    """VGG-16 by the recurrences of the code and of the paper."""
    chain = imported(folder, "pipedream-vgg16", 128)
    for name, recurrence, devices, published in PIPEDREAM:
        space = Space(chain, one_level(devices, 1e9), "sgd")
        plan, smallest = (
            plan_asynchronous(space, 128, recurrence=recurrence, use_all=use_all) for use_all in (True, False)
        )
        assert plan is not None
        assert smallest is not None
        replicas = "-".join(map(str, plan.replicas))
        fewest = sum(smallest.replicas)
        enough = f" ({fewest} devices are enough)" if fewest < devices else ""
        ours = f"{1e3 * (plan.estimate_seconds or 0.0):.1f} ms, {replicas}{enough}"
        yield Row(name, "VGG-16", devices, ours, published)


PARTS = 720_720
"""Into which DAPPLE's micro-batch of 32 samples is divided here: 1 to 16 replicas share them equally, as its
planner has it."""
MICRO_BATCHES = 2048 // 32


def two_machines() -> Topology:
    """DAPPLE's configuration A: two of 8 V100, NVLink inside, one adapter of 25 Gbps for each."""
    inside, between = Link(130e9, 0.0, "NVLink"), Link(25e9 / 8, 0.0, "Ethernet")
    levels = (Level("node", 8, inside), Level("network", None, between, devices_per_port=8))
    return Topology((Group(Device("V100", None), 16),), levels)


def dapple(folder: Path) -> Iterator[Row]:
    """VGG-19, global batch 2048: with as many stages as DAPPLE's published planner tries, and with any."""
    chain = imported(folder, "dapple-vgg19", PARTS)
    space, trial = (
        Space(chain, two_machines(), "sgd"),
        MicroBatchChoice("1f1b", MICRO_BATCHES, PARTS, ("never",)),
    )
    for limit, most in ((", <= 2 stages", 2), ("", None)):
        found = find_dapple_plan(space, trial, space.topology.gpus, most)
        ours = "none" if found is None else in_words(found, chain)
        yield Row(f"dapple{limit}", "VGG-19", space.topology.gpus, ours, "15:1 after conv5_2")


def in_words(found: CutPlan, chain: Chain) -> str:
    """Replicas, the last layers before the cuts, and the latency."""
    replicas = ":".join(str(len(own)) for own in found.devices)
    cuts = ", ".join(chain.names[end - 1] for end in found.ends[:-1])
    return f"{replicas} after {cuts}, {1e3 * found.seconds:.1f} ms"


SOURCES = (pipedream, dapple)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(f"{'planner':<20} {'model':<8} {'devices':>7}  {'published':<18} ours")
    for source in SOURCES:
        for row in source(folder):
            print(f"{row.planner:<20} {row.model:<8} {row.devices:>7}  {row.published:<18} {row.ours}")


if __name__ == "__main__":
    main()

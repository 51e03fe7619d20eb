"""The first link and the first stage's all-reduce, bounded together, against every assignment of devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.search.family import Family
from pplan.planner.search.first_link import FirstLink
from pplan.planner.search.pipelines import build_pipelines
from pplan.planner.search.placements import list_placements
from pplan.planner.search.space import Space
from pplan.planner.search.stage_figures import make_stage_figures

from .test_memory_bound import random_chain

SLACK = 1 + 1e-9


def random_nodes(rng: np.random.Generator) -> Topology:
    """Two nodes of two to four devices, or three of two; the last perhaps with one less. Links in a node are
    fast. A network adapter belongs to one device or to all of a node."""
    node = int(rng.integers(2, 5))
    nodes = 3 if node == 2 and rng.random() < 0.5 else 2
    gpus = nodes * node - int(rng.integers(2))
    inside = Link(float(rng.choice([1e10, 1e11, inf])), float(rng.choice([0, 1e-4])))
    between = Link(float(rng.choice([1e8, 1e9])), float(rng.choice([0, 1e-3])))
    levels = (Level("node", node, inside), Level("network", None, between, int(rng.choice([1, node]))))
    return Topology((Group(Device("gpu", None), gpus),), levels)


def assignments(topology: Topology) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Devices of two stages: every number of each in every node, whose devices are alike."""
    node, gpus = topology.gpus_per_node, topology.gpus
    nodes = [range(first, min(first + node, gpus)) for first in range(0, gpus, node)]
    splits = [[(a, b) for a in range(len(own) + 1) for b in range(len(own) + 1 - a)] for own in nodes]
    for numbers in product(*splits):
        each = list(zip(nodes, numbers, strict=True))
        first = tuple(rank for own, (a, _) in each for rank in own[:a])
        second = tuple(rank for own, (a, b) in each for rank in own[a : a + b])
        if first and second:
            yield first, second


@pytest.mark.parametrize("seed", range(12))
def test_no_devices_have_a_faster_first_link_and_all_reduce(seed: int) -> None:
    """Two stages with every number of replicas, on all devices in any order. Some devices are as fast as the
    bound, where it exceeds those on the link and on the all-reduce alone."""
    rng = np.random.default_rng([seed, 7])
    topology, chain = random_nodes(rng), random_chain(rng, 2)
    chain = replace(chain, cut_after=np.array([True, False]), trainable_bytes=chain.parameter_bytes + 1e7)
    space = Space(chain=chain, topology=topology, optimizer="sgd", past_largest=True)
    config = PipelineConfig("1f1b", "never", 2, int(rng.choice([8, 9, 12])))
    family = Family(config, list_placements(topology)[0], tuple(range(1, topology.gpus + 1)), any_count=True)
    figures = make_stage_figures(space, family, inf)
    assert figures is not None
    link, counts = FirstLink(topology, figures.choices), [choice.counts for choice in figures.choices]
    choice_of = {n: at for at, own in enumerate(counts) for n in range(own.fewest, own.most + 1)}
    best = dict[tuple[int, int], float]()
    for devices in assignments(topology):
        pair = choice_of[len(devices[0])], choice_of[len(devices[1])]
        shuffled = [tuple(rng.permutation(ranks).tolist()) for ranks in devices]
        for orders in (devices, tuple(shuffled)):
            plan = build_pipelines(space, [Proposal(config, (1, 2), orders)], [("never", "never")])
            seconds = 2 * (plan.occupancy + plan.latency)[0, 0] + plan.exposed_allreduce[0, 0]
            best[pair] = min(best.get(pair, inf), float(seconds))
    exceeded = tight = 0
    for (first, second), seconds in best.items():
        row = np.flatnonzero((figures.choice == first) & (figures.start == 0) & (figures.end == 1))
        apart = float((2 * figures.cut[row] + figures.exposed_allreduce[row])[0])
        extra = link.extra_seconds(1, first, np.array([second]), float(figures.cut[row][0]), 2)
        together = apart + float(extra[0])
        assert together <= seconds * SLACK
        exceeded += together > 1.01 * apart
        tight += together > 1.01 * apart and together >= 0.99 * seconds
    assert exceeded
    assert tight

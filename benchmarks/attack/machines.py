"""Random machines: one level of links or two, uneven nodes, shared ports, kinds of devices in any order."""

from __future__ import annotations

from math import inf

import numpy as np

from pplan.cost_models.topology import Device, Group, Level, Link, Topology

MANY = (65, 130)
"""Devices of a large machine, fewest and most."""
OWN = "own.profile.json"


def random_topology(rng: np.random.Generator, kind: str, gpus: int) -> Topology:
    """The machine for a kind of problem."""
    two = kind in ("levels", "ports") or (kind not in ("plain", "many") and rng.random() < 0.4)
    if kind == "many":
        two = bool(rng.random() < 0.3)
    levels = _two(rng, gpus, shared=kind == "ports") if two else (Level("node", None, _link(rng, 20)),)
    mixed = kind == "kinds" or (kind in ("runtimes", "cost", "options", "memory") and rng.random() < 0.3)
    groups = _mixed(rng, gpus) if mixed and gpus > 1 else (Group(Device("toy", None), gpus),)
    return Topology(groups, levels)


def _link(rng: np.random.Generator, bandwidth: float) -> Link:
    latency = float(rng.choice([0.0, 0.05, 0.5]))
    return Link(inf if rng.random() < 0.1 else bandwidth * float(2 ** rng.uniform(-2, 2)), latency)


def _two(rng: np.random.Generator, gpus: int, *, shared: bool) -> tuple[Level, ...]:
    """Nodes, the last with fewer devices where they do not divide, and what joins them."""
    each = 8 if gpus > 16 else int(rng.integers(1, max(2, gpus)))
    each = max(each, 2) if shared and gpus > 1 else each
    divisors = [count for count in range(1, each + 1) if each % count == 0]
    port = int(rng.choice(divisors[1:] or divisors)) if shared else 1
    return Level("node", each, _link(rng, 40)), Level("network", None, _link(rng, 10), port)


def _mixed(rng: np.random.Generator, gpus: int) -> tuple[Group, ...]:
    """Two or three kinds, of which a run may come back."""
    kinds = [
        Device("toy", None),
        Device("fast", None, float(rng.uniform(0.4, 3))),
        Device("own", None, profile=OWN),
    ]
    order = rng.permutation(3)
    chosen = [kinds[index] for index in order][: int(rng.integers(2, 4))]
    drawn = [chosen[int(rng.integers(len(chosen)))] for _ in range(gpus)]
    if len(set(drawn)) == 1:
        drawn[0] = next(kind for kind in chosen if kind != drawn[0])
    if rng.random() < 0.6:
        drawn.sort(key=lambda device: chosen.index(device))
    made: list[Group] = []
    for device in drawn:
        if made and made[-1].device == device:
            made[-1] = Group(device, made[-1].number + 1)
        else:
            made.append(Group(device, 1))
    return tuple(made)

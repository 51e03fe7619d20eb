"""Random chains and topologies for the planner's tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Link, Topology, two_level_topology

MakeChain = Callable[..., Chain]


@pytest.fixture
def make_chain() -> MakeChain:
    """A function of (seed, layers, *, sizes, traffic, cuts, adding): layers whose costs grow by lines with
    the micro-batch size; `traffic` scales what crosses cuts, `cuts` is the share of allowed ones, `adding`
    that of the shortest backward, at the most, which the first of a step does not take."""
    return _chain


def _chain(
    seed: int,
    layers: int,
    *,
    sizes: tuple[int, ...] = (1, 2, 4),
    traffic: float = 1.0,
    cuts: float = 0.8,
    adding: float = 0.0,
) -> Chain:
    rng = np.random.default_rng(seed)
    per_sample = np.array(sizes, dtype=np.float64)

    def line(slope: float, start: float = 0.0) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        return slope * rng.random((layers, 1)) * per_sample + start * rng.random((layers, 1))

    made = Chain(
        names=tuple(f"layer{i}" for i in range(layers)),
        sizes=sizes,
        parameter_bytes=(parameters := 100 * rng.random(layers)),
        trainable_bytes=parameters * (rng.random(layers) < 0.9),
        buffer_bytes=rng.random(layers),
        cut_after=np.append(rng.random(layers - 1) < cuts, False),
        input_bytes_per_sample=5.0,
        forward_seconds=line(1, 0.3),
        backward_seconds=line(2, 0.3),
        output_bytes=traffic * line(50),
        saved_bytes=line(100),
        saved_input_bytes=line(20),
        workspace_bytes=line(5),
        forward_host_seconds=line(0, 0.3),
        backward_host_seconds=line(0, 0.3),
    )
    return replace(made, accumulation_seconds=adding * rng.random(layers) * made.backward_seconds.min(axis=1))


@pytest.fixture
def make_topology() -> Callable[..., Topology]:
    """A function of (gpus, *, per_node, memory, latency): 20 B/s inside a node, 5 B/s between."""

    def make(gpus: int, *, per_node: int = 8, memory: int | None = None, latency: float = 0.0) -> Topology:
        inside, between = Link(20.0, latency), Link(5.0, 4 * latency)
        return two_level_topology(Device("toy", memory), gpus, per_node, inside, between)

    return make


@pytest.fixture
def toy_profile(tmp_path: Path) -> Path:
    """The file of a profile of ten layers at two sizes."""
    layers = [
        {
            "name": f"layers.{index}",
            "kind": "Linear",
            "parameter_bytes": 2**20 * (1 + index % 3),
            "buffer_bytes": 0,
            "cut_after": index != 4,
            "costs": [
                {
                    "micro_batch_size": size,
                    "forward_seconds": 1e-3 * (size + 1) * (12 - index),
                    "backward_seconds": 2e-3 * (size + 1) * (12 - index),
                    "output_bytes": 2**18 * size,
                    "saved_bytes": 2**19 * size,
                }
                for size in (4, 8)
            ],
        }
        for index in range(10)
    ]
    path = tmp_path / "toy.profile.json"
    path.write_text(json.dumps({"schema": 1, "model": "toy", "device": "cuda:0", "layers": layers}))
    return path

"""Numbers of more digits than Python reads as one, where texts have numbers in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pplan
from pplan.cost_models.errors import PplanError
from pplan.profiler.local_machine import parse_device
from pplan.profiler.profile_options import read_shape
from pplan.profiler.torchrun_env import read_torchrun_env

LONG = "9" * 5000
"""Python refuses `int` of more than 4,300 digits."""


def profile_with(name: str) -> pplan.Profile:
    """Six layers, one of this name."""
    seconds = {"micro_batch_size": 1, "forward_seconds": 1e-3, "backward_seconds": 2e-3}
    cost = seconds | {"output_bytes": 100, "saved_bytes": 100}
    names = ["layers.0", "layers.1", name, "layers.3", "layers.4", "layers.5"]
    layers = [{"name": own, "kind": "B", "parameter_bytes": 8, "costs": [cost]} for own in names]
    content = {"schema": 1, "model": "m", "device": "cpu", "device_name": "c", "dtype": "float32"}
    return pplan.Profile.parse(json.dumps(content | {"layers": layers}), "test")


@pytest.mark.parametrize("name", [f"layers.{LONG}", f"layers.{LONG}.attn", f"blocks_{LONG}"])
def test_in_the_names_of_layers(name: str) -> None:
    """Also where they say which layers are transformer blocks."""
    profile = profile_with(name)
    for planner in ("best", "megatron"):
        plan = pplan.solve(profile, gpus=2, mini_batch=4, planner=planner)
        assert sum(plan.balance) == 6


def test_in_a_graphs_nodes(tmp_path: Path) -> None:
    costs = "forward_compute_time=1.0, backward_compute_time=2.0, activation_size=4.0, parameter_size=8.0"
    file = tmp_path / "graph.txt"
    nodes = [f"node{number} -- Linear() -- {costs}" for number in (1, LONG, 3)]
    file.write_text("\n".join([*nodes, f"\tnode1 -- node{LONG}", f"\tnode{LONG} -- node3"]) + "\n")
    assert len(pplan.import_profile(file, micro_batch_size=1).layers) >= 1


def test_in_options_and_the_environment() -> None:
    with pytest.raises(PplanError, match="not the shape of one sample"):
        read_shape(f"3x{LONG}", "--input-shape")
    with pytest.raises(PplanError, match="is not known"):
        parse_device(f"cuda:{LONG}")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    with pytest.raises(PplanError, match="not a whole number"):
        read_torchrun_env(dict.fromkeys(names, LONG), "machine measure links", 2)

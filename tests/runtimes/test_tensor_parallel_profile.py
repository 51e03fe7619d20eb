"""Profiles of layers that two processes share, and plans whose devices are groups of two."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cost_models.errors import ExportError, UsageError
from pplan.cost_models.topology import Device, Group, Level, Link, Topology, two_level_topology
from pplan.profiler.profile_file import LayerMeasurement, Profile, ProfiledLayer
from pplan.runtimes.exports import export

RunProcesses = Callable[..., None]
WORKER = Path(__file__).with_name("tensor_worker.py")


@pytest.mark.slow
def test_bytes_and_seconds_of_one_of_two(run_processes: RunProcesses, tmp_path: Path) -> None:
    """Plain blocks and a small Llama by its own plan, both processes the same; the bytes counted by hand."""
    pytest.importorskip("transformers")
    run_processes(tmp_path, 2, str(WORKER), "profile")
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for kind in ("blocks", "llama"):
        profiles = [Profile.model_validate(own[kind]) for own in (first, second)]
        assert profiles[0].layers == profiles[1].layers
        assert profiles[0].tensor_parallel == 2
        for layer in profiles[0].layers:
            assert [cost.micro_batch_size for cost in layer.costs] == [1, 2]
            assert all(cost.forward_seconds > 0 and cost.backward_seconds >= 0 for cost in layer.costs)
        # Without an interval of repeats no plan knows how its step varies.
        assert any(cost.spread for layer in profiles[0].layers for cost in layer.costs)

    blocks, width = Profile.model_validate(first["blocks"]).layers, 16
    halves = 2 * (width * 2 * width) // 2 + 2 * width // 2
    assert [layer.parameter_bytes for layer in blocks[:-1]] == [4 * (halves + width + 2 * width)] * 2
    assert blocks[-1].parameter_bytes == 4 * (width * 4 + 4)
    assert blocks[0].largest_parameter_bytes == 4 * width * width
    # Of two samples of 8 tokens: what norm and its result keep, and the half of what is up.
    token, tokens = 4 * width, 2 * 8
    saved = blocks[1].costs[1].saved_bytes
    assert token * tokens * 2 <= saved + blocks[1].costs[1].saved_input_bytes <= token * tokens * 4
    llama = {layer.name: layer.parameter_bytes for layer in Profile.model_validate(first["llama"]).layers}
    hidden, inner, key_values = 16, 32, 8
    matrices = 2 * hidden * hidden + 2 * hidden * key_values + 3 * hidden * inner
    assert llama["model.layers.1"] == 4 * (matrices // 2 + 2 * hidden)
    assert llama["model.embed_tokens"] == 4 * 40 * hidden


def test_processes_are_those_that_share(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="torchrun did not start"):
        pplan.profile("vgg11", tensor_parallel=2)
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "WORLD_SIZE")
    for name, value in zip((*names, "MASTER_ADDR"), ("0", "0", "3", "1", "3", "localhost"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="there are 3 processes"):
        pplan.profile("vgg11", tensor_parallel=2)


NAMES = ("model.embed_tokens", *(f"model.layers.{n}" for n in range(6)), "model.norm", "lm_head")


def solved(tensor_parallel: int, gpus: int, gpus_per_node: int = 4) -> Any:
    cost = LayerMeasurement(
        micro_batch_size=1,
        forward_seconds=1e-3,
        backward_seconds=2e-3,
        output_bytes=10**6,
        saved_bytes=10**6,
    )
    profile = Profile(
        model="decoder",
        device="cuda",
        scales_with_samples=True,
        tensor_parallel=tensor_parallel,
        layers=[ProfiledLayer(name=name, parameter_bytes=10**6, costs=[cost]) for name in NAMES],
    )
    return pplan.solve(
        profile, gpus=gpus, gpu="a100-80gb", mini_batch=8, gpus_per_node=gpus_per_node, max_stages=2
    )


def test_a_plan_for_groups_is_one_for_half_the_devices() -> None:
    """Of eight devices in two nodes; links inside a group are not the pipeline's."""
    grouped, single = solved(2, 8), solved(1, 4, gpus_per_node=2)
    assert grouped.prediction.step_seconds == single.prediction.step_seconds
    assert (grouped.gpus, grouped.gpus_per_node) == (4, 2)
    assert any("a group of 2 neighbours" in text for text in grouped.warnings)
    with pytest.raises(UsageError, match="3 devices: cannot be grouped by 2"):
        solved(2, 3)


def test_exports_say_how_many_share_a_layer() -> None:
    plan = solved(2, 4)
    runtimes = ("torch", "megatron", "torchtitan", "nemo-automodel")
    made: dict[str, Any] = {name: export(name, plan)[0] for name in runtimes}
    assert [made[name].processes for name in runtimes[1:]] == [4, 4, 4]
    for name, flag in (
        ("megatron", "--tensor-model-parallel-size"),
        ("torchtitan", "--parallelism.tensor_parallel_degree"),
    ):
        words = made[name].arguments
        assert words[words.index(flag) + 1] == "2"
    assert made["nemo-automodel"].sections["distributed"]["tp_size"] == 2
    assert len(made["torch"].devices) == 2
    with pytest.raises(ExportError, match="deepspeed does not share layers"):
        export("deepspeed", plan)


def test_groups_of_devices() -> None:
    """A port that four devices share serves each of two groups with a half of what the two in it have."""
    device, inside, between = Device("GPU", None), Link(8e9, 1e-6), Link(4e9, 1e-5)
    plain = two_level_topology(device, 8, 4, inside, between).in_groups(2)
    assert (plain.gpus, plain.gpus_per_node) == (4, 2)
    assert (plain.link(0, 1), plain.link(0, 2)) == (inside, between)
    levels = (Level("node", 4, inside), Level("network", None, between, devices_per_port=4))
    shared = Topology((Group(device, 8),), levels).in_groups(2)
    assert shared.levels[1].devices_per_port == 2
    assert shared.link(0, 2) == replace(between, bandwidth_bytes_per_second=2e9)
    with pytest.raises(UsageError, match="4 node: cannot be grouped by 8"):
        two_level_topology(device, 8, 4, inside, between).in_groups(8)

"""Layers between measured sizes, and the memory of a device, added up by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pplan.cost_models.errors import FileError, UsageError
from pplan.verification.device_ledger import PartBytes, compute_ledger, part_bytes
from pplan.verification.documents import Table
from pplan.verification.layer_costs import Layers, read_layers
from pplan.verification.orders import make_order
from pplan.verification.stated_training import StatedTraining


def layer(name: str, costs: list[tuple[int, float, int]], **more: Any) -> dict[str, Any]:
    """Costs: size, seconds of the forward, bytes."""
    made = [
        {
            "micro_batch_size": size,
            "forward_seconds": seconds,
            "backward_seconds": 2 * seconds,
            "output_bytes": count,
            "saved_bytes": 2 * count,
        }
        for size, seconds, count in costs
    ]
    return {"name": name, "parameter_bytes": 100, "costs": made} | more


def read(*layers: dict[str, Any], **more: Any) -> Layers:
    return read_layers(Table({"schema": 1, "layers": list(layers)} | more, "profile"))


def test_between_and_outside_the_measured_sizes() -> None:
    layers = read(layer("a", [(2, 1.0, 10), (4, 3.0, 20), (8, 4.0, 20)]))
    forward = {size: float(layers.at(size)["forward_seconds"][0]) for size in (1, 2, 3, 6, 8, 16)}
    # At 1 the line gives 0, half of the smallest's more; past 8 the line of 4 and 8 goes on. From 2 to 4 the
    # seconds are in proportion to the size to the power log2(3), from 4 to 8 they have a fixed part.
    assert forward == pytest.approx({1: 0.5, 2: 1.0, 3: 3 ** math.log2(1.5), 6: 3.5, 8: 4.0, 16: 6.0})
    assert float(layers.at(16)["output_bytes"][0]) == 20


def test_one_size_alone_and_in_proportion() -> None:
    one = layer("a", [(4, 1.0, 10)])
    with pytest.raises(UsageError, match="no costs at micro-batch size 8, only at 4"):
        read(one).at(8)
    assert float(read(one, scales_with_samples=True).at(8)["forward_seconds"][0]) == 2.0


def test_the_loss_and_the_parts_of_the_backward() -> None:
    cost = {"micro_batch_size": 4, "forward_seconds": 0.5, "backward_seconds": 0.25, "output_bytes": 1}
    loss = {"name": "loss", "costs": [cost | {"saved_bytes": 3}]}
    layers = read(layer("a", [(4, 1.0, 10)]), layer("b", [(4, 1.0, 10)], trainable_bytes=0), loss=loss)
    made = layers.at(4)
    assert made["forward_seconds"].tolist() == [1.0, 1.5]
    assert made["saved_bytes"].tolist() == [20, 23]
    assert made["backward_weight_seconds"].tolist() == [1.0, 0.0]
    assert made["backward_input_seconds"].tolist() == [1.0, 2.25]


def test_layers_of_different_sizes() -> None:
    with pytest.raises(FileError, match=r"layers\.1: costs must be at the micro-batch sizes of the first"):
        read(layer("a", [(4, 1.0, 10)]), layer("b", [(8, 1.0, 10)]))
    with pytest.raises(FileError, match="layers of different names"):
        read(layer("a", [(4, 1.0, 10)]), layer("a", [(4, 1.0, 10)]))


PART = PartBytes(
    parameters=1000, trainable=800, buffers=7, waiting=100, input=10, received=10, sent=20, workspace=5
)


def test_stages_of_1f1b_by_hand() -> None:
    """Adam in float32, two replicas; stage 0 of 3 holds three micro-batches."""
    made = compute_ledger(
        make_order("1f1b", 3, 8, 1),
        0,
        [PART],
        StatedTraining("adam", 4, 4),
        recompute="never",
        replicas=2,
        weight_versions=[1],
        copies=1,
        context_bytes=50,
    )
    terms = {"weights": 1007, "gradients": 800, "optimizer": 1600, "weight_versions": 0}
    # Stage 0 receives nothing; the replicas' buckets hold the gradients once more.
    terms |= {"activations": 300, "stage_inputs": 0, "communication": 20 + 800, "workspace": 5}
    assert made.terms == pytest.approx(terms | {"reserve": 0.05 * sum(terms.values()), "context": 50})


@pytest.mark.parametrize(
    ("schedule", "recompute", "device", "activations", "inputs"),
    [
        ("1f1b", "always", 0, 100, 30),
        ("1f1b", "always", 2, 100, 10),
        ("gpipe", "never", 1, 400, 0),
        ("gpipe", "always", 1, 100, 40),
        # The last micro-batch saves everything, and goes backwards first: then the other inputs wait.
        ("gpipe", "except_last", 1, 100, 30),
        # W waits for two more B on the last of three: what they built again stays.
        ("zb-h1", "always", 2, 300, 30),
        ("naive", "never", 1, 100, 0),
    ],
)
def test_what_comes_and_goes(
    schedule: str, recompute: str, device: int, activations: float, inputs: float
) -> None:
    made = compute_ledger(
        make_order(schedule, 3, 4, 1),
        device,
        [PART],
        StatedTraining("sgd", 4, 4),
        recompute=recompute,
        replicas=1,
        weight_versions=[1],
        copies=1,
        context_bytes=0,
    )
    assert (made.terms["activations"], made.terms["stage_inputs"]) == (activations, inputs)


def test_the_workspace_of_a_part() -> None:
    """Layer a needs 90 while it has saved 20, layer b 10 with 40: 70 above all that both save."""
    one = layer("a", [(4, 1.0, 10)])
    one["costs"][0]["workspace_bytes"] = 90
    other = layer("b", [(4, 1.0, 10)])
    other["costs"][0]["workspace_bytes"] = 10
    assert part_bytes(read(one, other), 0, 2, 4).workspace == 70


def test_optimizers() -> None:
    assert StatedTraining("adamw-8bit", 2, 2).state == pytest.approx(2 * (1 + 4 / 256))
    assert StatedTraining("momentum", 2, 2).state == 2
    assert StatedTraining("adamw", 2, 4, master=4).state == 8
    with pytest.raises(UsageError, match="optimizer 'x' is unknown"):
        StatedTraining("x", 4, 4)


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "master", "states", "exchanged"),
    [
        (0, 1007, 1600, 1600, 3200, 1600),
        (1, 1007, 1600, 400, 800, 0),  # reduced where they lie
        (2, 1007, 400, 400, 800, 2 * 300),
        (3, 257, 400, 400, 800, 2 * 300 + 300),
    ],
)
def test_what_zero_spreads(
    zero: int, weights: float, gradients: float, master: float, states: float, exchanged: float
) -> None:
    """bf16 weights, float32 gradients and master weights, Adam; over four replicas."""
    made = compute_ledger(
        make_order("1f1b", 1, 1, 1),
        0,
        [replace(PART, neighbours=300)],
        StatedTraining("adam", 2, 4, 4, zero),
        recompute="never",
        replicas=4,
        weight_versions=[1],
        copies=1,
        context_bytes=0,
    ).terms
    assert (made["weights"], made["gradients"], made["master_weights"]) == (weights, gradients, master)
    assert (made["optimizer"], made["communication"]) == (states, exchanged)


@pytest.mark.slow
def test_solved_with_little_memory(make_profile: Callable[..., Any], solve_files: Callable[..., Any]) -> None:
    """Every term of the file is compared: each a hundred bytes more is found."""
    solved = solve_files(
        make_profile(2, 6), gpus=2, mini_batch=8, bandwidth=1e9, latency=0.0, runtime="torch"
    )
    for name in solved.plan["stages"][0]["memory"]:
        plan = solved.plan | {"stages": [dict(stage) for stage in solved.plan["stages"]]}
        stage = plan["stages"][0]
        stage["memory"] = stage["memory"] | {name: stage["memory"][name] + 100}
        line = solved.verified(plan).line("memory of stages")
        assert (line.state, line.detail) == ("differs", f"{name} of stage 0")

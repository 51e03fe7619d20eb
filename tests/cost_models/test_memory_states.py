"""Weights, gradients and optimizer state against published figures: optimizers, mixed precision, ZeRO."""

from __future__ import annotations

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.memory import StageBytes, Training, ledger
from pplan.cost_models.optimizers import (
    FLOAT32,
    MIXED,
    MIXED_FLOAT32_GRADIENTS,
    Precision,
    find_optimizer,
)
from pplan.cost_models.precision import training_precision

GB = 1e9
BILLION = 1e9


def model(parameters: float, bytes_each: float, *, gathered: float | None = None) -> StageBytes:
    """A whole model as one stage; its activations are none of the tests' business."""
    weights = parameters * bytes_each
    return StageBytes(weights, weights, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, gathered)


def states(stage: StageBytes, training: Training) -> float:
    return sum(float(amount) for amount in training.states(stage).values())


# ZeRO, SC 2020, figure 1 and table 1: per-device gigabytes of the model states, mixed precision with Adam.
PUBLISHED = [
    (7.5, 1, (120, 120, 120, 120)),
    (7.5, 4, (120, 52.5, 41.3, 30)),
    (7.5, 16, (120, 35.6, 21.6, 7.5)),
    (7.5, 64, (120, 31.4, 16.6, 1.88)),
    (7.5, 1024, (120, 30.1, 15.1, 0.12)),
    (128, 64, (2048, 536, 284, 32)),
    (1000, 1024, (16000, 4011, 2013, 15.6)),
]


@pytest.mark.parametrize(("billions", "replicas", "gigabytes"), PUBLISHED)
def test_zero_as_published(billions: float, replicas: int, gigabytes: tuple[float, ...]) -> None:
    stage = model(billions * BILLION, 2)
    for zero, published in enumerate(gigabytes):
        found = states(stage, Training("adam", MIXED, replicas, zero)) / GB
        # Published in three or four digits, the last one cut off or rounded.
        assert found == pytest.approx(
            published, abs=0.006 if published < 10 else 0.1 if published < 100 else 1
        )


def test_gpt2_with_adam_in_mixed_precision_needs_24_gb() -> None:
    """ZeRO, section 3.1: the 3 GB of GPT-2's weights in 16 bits take at least 24 GB to train."""
    assert states(model(1.5 * BILLION, 2), Training("adam", MIXED)) == 24 * GB


@pytest.mark.parametrize(
    ("optimizer", "precision", "bytes_a_parameter"),
    [
        ("sgd", FLOAT32, 4 + 4),
        ("momentum", FLOAT32, 4 + 4 + 4),
        ("adam", FLOAT32, 4 + 4 + 8),
        ("adamw", FLOAT32, 4 + 4 + 8),
        ("adam", Precision(2, 2), 2 + 2 + 4),
        ("adam", MIXED, 2 + 2 + 4 + 8),
        ("momentum", MIXED, 2 + 2 + 4 + 4),
        ("sgd", MIXED, 2 + 2 + 4),
        ("adamw", MIXED_FLOAT32_GRADIENTS, 2 + 4 + 4 + 8),
        ("adamw-8bit", FLOAT32, 4 + 4 + 2 + 2 * 4 / 256),
        ("adamw-8bit", Precision(2, 2), 2 + 2 + 2 + 2 * 4 / 256),
        ("adam", Precision(8, 8), 8 + 8 + 16),
    ],
)
def test_bytes_of_a_parameter(optimizer: str, precision: Precision, bytes_a_parameter: float) -> None:
    stage = model(1024, precision.weight)
    assert states(stage, Training(optimizer, precision)) == 1024 * bytes_a_parameter


def test_8_bit_states_are_what_the_blocks_of_a_tensor_hold() -> None:
    """Counted block by block: a byte a parameter and one float32 scale, twice."""
    parameters = 3 * 256
    blocks = [range(start, start + 256) for start in range(0, parameters, 256)]
    counted = 2 * sum(len(block) + 4 for block in blocks)
    assert Training("adamw-8bit").states(model(parameters, 4))["optimizer"] == counted


def test_frozen_parameters_have_neither_gradients_nor_states() -> None:
    stage = StageBytes(4000.0, 0.0, 12.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert Training("adamw-8bit").states(stage) == {"weights": 4012, "gradients": 0, "optimizer": 0}


def test_buffers_are_never_spread() -> None:
    stage = StageBytes(4000.0, 4000.0, 12.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert Training("sgd", FLOAT32, 4, 3).states(stage)["weights"] == 1012


@pytest.mark.parametrize(
    ("zero", "exchanged"),
    [
        (0, 2000),  # buckets with all gradients
        (1, 0),
        (2, 300),  # the gradients of two layers
        (3, 600),  # and their parameters
    ],
)
def test_what_replicas_exchange(zero: int, exchanged: float) -> None:
    stage = model(1000, 2, gathered=300.0)
    assert Training("adam", MIXED, 8, zero).exchange_bytes(stage) == exchanged
    assert Training("adam", MIXED, 1, zero).exchange_bytes(stage) == 0
    terms = ledger(
        stage, in_flight=1, recompute="never", optimizer="adam", replicas=8, zero=zero, precision=MIXED
    )
    assert terms["communication"] == exchanged


def test_layers_that_nobody_counted_are_gathered_together() -> None:
    assert Training("adam", FLOAT32, 8, 3).exchange_bytes(model(1000, 4)) == 8000


def test_gradients_in_float32_are_exchanged_so() -> None:
    assert Training("adam", MIXED_FLOAT32_GRADIENTS, 2).exchange_bytes(model(1000, 2)) == 4000


def test_zero_spreads_older_versions_too() -> None:
    assert Training("sgd", FLOAT32, 4, 3).versions(model(1000, 4), 3) == 2000


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [({"zero": 4}, "zero 4"), ({"replicas": 0}, "replicas 0"), ({"optimizer": "lion"}, "'lion'")],
)
def test_what_cannot_be_is_named(arguments: dict[str, object], seen: str) -> None:
    with pytest.raises(UsageError, match=seen):
        Training(**arguments)  # type: ignore[arg-type]


def test_precisions_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="weight of 0 bytes"):
        Precision(weight=0, gradient=2)
    with pytest.raises(UsageError, match="master of nan bytes"):
        Precision(weight=2, gradient=2, master=float("nan"))
    with pytest.raises(UsageError, match="'int8' is unknown"):
        training_precision("int8")


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("sgd", FLOAT32, 4 + 2 * 4),
        ("momentum", FLOAT32, 4 + 2 * 4 + 2 * 4),
        ("adamw", FLOAT32, 4 + 2 * 4 + 2 * 8),
        ("adamw", Precision(2, 2), 2 + 2 * 2 + 2 * 4),
        ("adam", MIXED, 2 + 2 * 4 + 2 * 8 + 2),
        ("adam", MIXED_FLOAT32_GRADIENTS, 4 + 2 * 4 + 2 * 8 + 2),
        ("adamw-8bit", FLOAT32, 4 + 2 * 4 + 2 * (2 + 8 / 256)),
    ],
)
def test_an_update_reads_and_writes(name: str, precision: Precision, expected: float) -> None:
    """The gradient read, what is updated and the states read and written, 16-bit weights written."""
    assert find_optimizer(name).update_bytes(precision) == expected

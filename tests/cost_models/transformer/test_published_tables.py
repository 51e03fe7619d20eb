"""Published throughputs against what is predicted with no constant fitted to them (the figures and their
sources: benchmarks/published_tables.py)."""

from __future__ import annotations

import pytest
from published_tables import (
    MEGATRON,
    ZERO_BUBBLE,
    ZERO_BUBBLE_MODELS,
    MegatronRow,
    predict_megatron,
    predict_zero_bubble,
    unfused_attention_seconds,
)


@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: f"{row.parameters:g}")
def test_parameters_of_the_published_models(row: MegatronRow) -> None:
    """Without biases and positions."""
    assert row.shape.parameters() / 1e9 == pytest.approx(row.parameters, rel=0.04)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.slow] * (row.parameters > 20)) for row in MEGATRON[:-1]],
    ids=lambda row: f"{row.parameters:g}",
)
def test_steps_of_all_models_but_the_largest(row: MegatronRow) -> None:
    """To 12 %. With TP 1 and 2 the step is too short, by 0.67 of 3.53 s and 0.48 of 3.70 s.

    Attention took more to write and read its scores, 1.22 and 1.02 s, which is not costed. With these passes
    TP 1, 2 and 4 would all be 14 to 16 % too slow: they explain the difference between the rows. The cause of
    the rest is open.
    """
    step = predict_megatron(row).estimate.step_seconds
    measured = row.flops / row.teraflops / row.gpus / 1e12
    if row.tensor < 4:
        assert step < measured < step + unfused_attention_seconds(row)
    else:
        assert measured == pytest.approx(step, rel=0.12)


@pytest.mark.parametrize(
    ("model", "micro_batches", "schedule", "measured"),
    [
        (*own, schedule, samples)
        for own, by_schedule in ZERO_BUBBLE.items()
        for schedule, samples in by_schedule.items()
    ],
)
def test_throughputs_of_zero_bubble(model: str, micro_batches: int, schedule: str, measured: float) -> None:
    """From the paper's seconds of F, B and W, without an update: never slower by more than 1 %."""
    own = next(each for each in ZERO_BUBBLE_MODELS if each.model == model)
    predicted = predict_zero_bubble(own, micro_batches, schedule)
    assert 0.99 * measured < predicted < 1.08 * measured

"""Layouts that a plan's file may have: those that search, lint and import accept."""

from __future__ import annotations

from itertools import product

import pytest

from pplan.cost_models.transformer.pipeline_layout import layout_problems, stage_letters
from pplan.planner.plan_degrees import Degrees, TransformerTraining

TRAINING = TransformerTraining(blocks=3, sequence=64, parameters=1000, active_parameters=1000)


@pytest.mark.parametrize(("predictors", "offset"), [(0, 0), (1, 0), (1, 1), (1, 2), (2, 3)])
def test_a_plan_has_the_layouts_that_lint_accepts(predictors: int, offset: int) -> None:
    """Of all divisions of up to three blocks over two devices with two virtual stages each."""
    training = TRAINING.model_copy(update={"predictors": predictors})
    degrees = Degrees(pipeline=2, predictor_offset=offset)
    accepted = 0
    for blocks in product(range(4), repeat=4):
        balance = [n + (slot in (0, 3)) for slot, n in enumerate(blocks)]
        balance[-1 - offset] += predictors
        problems = layout_problems(stage_letters(blocks, predictors, offset), 2, 3, predictors)
        if not problems:
            degrees.check(training, balance, 2, samples=1)
            accepted += 1
            continue
        with pytest.raises(ValueError, match="degrees: balance"):
            degrees.check(training, balance, 2, samples=1)
    assert bool(accepted) == (offset < 2)

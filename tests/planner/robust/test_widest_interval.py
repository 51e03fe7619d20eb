"""The interval of a step: the widest of what is known of its error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import asinh, exp
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Prediction, ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.robust import SHARED_MEMORY

MakeChain = Callable[..., Chain]
SIZES = (1, 2, 4)


@pytest.fixture
def predict(make_chain: MakeChain, make_topology: Callable[..., Topology]) -> Callable[..., Prediction]:
    """A prediction of two stages of layers that hardly vary by themselves."""

    def make(device: str, whole_spread: float | None = None, **options: Any) -> Prediction:
        chain = replace(
            make_chain(3, 6, cuts=1.1),
            spread=np.full((6, 3), 1e-6),
            whole_spread=None if whole_spread is None else np.full(3, whole_spread),
            uncertainty=np.zeros(3),
        )
        asked = PlanOptions(mini_batch=8, use_all=True, **options)
        problem = Problem(chain, make_topology(2), asked, device=device)
        reference = ProfileReference(file="", sha256="")
        return solve_objective(
            Objective(), problem, model="toy", profile=reference, compared=False
        ).prediction

    return make


def shares(prediction: Prediction) -> tuple[float, float]:
    """Both ends over the step."""
    assert prediction.interval is not None
    low, high = prediction.interval
    return low / prediction.step_seconds, high / prediction.step_seconds


def test_processes_of_a_processor_share_its_memory(predict: Callable[..., Prediction]) -> None:
    """On GPUs, with one process, or where GPUs are planned with its seconds, nothing is shared."""
    assert shares(predict("cpu")) == pytest.approx((1, 1 + SHARED_MEMORY), abs=1e-4)
    for options in ({"device": "cuda"}, {"device": "cpu", "seconds_of": "cpu"}):
        assert shares(predict(**options)) == pytest.approx((1, 1), abs=1e-4)


def test_noise_that_all_layers_share_does_not_average_out(predict: Callable[..., Prediction]) -> None:
    """A whole model with quartiles 10 % apart is off by 9.9 % or more in two of ten passes."""
    factor = exp(asinh(0.1 / 2) / 0.67449 * 1.28155)
    assert shares(predict("cuda", 0.1)) == pytest.approx((1 / factor, factor), abs=1e-4)
    assert shares(predict("cpu", 0.02)) == pytest.approx((0.981, 1 + SHARED_MEMORY), abs=1e-3)


def test_the_closing_error_counts_where_no_spread_is_known(predict: Callable[..., Prediction]) -> None:
    prediction = predict("cuda")
    unknown: dict[str, Any] = {"low_seconds": None, "high_seconds": None}
    off = prediction.model_copy(update=unknown | {"uncertainty": 0.25})
    assert shares(off) == pytest.approx((0.75, 1.25))
    assert prediction.model_copy(update=unknown | {"uncertainty": 0.0}).interval is None
    wide = prediction.model_copy(update={"uncertainty": 0.25})
    assert shares(wide) == pytest.approx((0.75, 1.25))

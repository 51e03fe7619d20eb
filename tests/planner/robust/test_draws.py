"""The draws have the spread that the profile measured, and are the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.planner.robust.draws import SAMPLES, make_draws

MANY = 40_000


def test_quartiles_are_those_of_the_spread(make_chain: Callable[..., Chain]) -> None:
    """The interquartile range of the drawn seconds over their median is the spread again."""
    own = np.array([[0.0], [0.01], [0.2], [1.5]])
    chain = replace(make_chain(0, 4, sizes=(2,)), spread=own)
    costs = chain.at(2)
    drawn = make_draws(4, MANY).factors(costs) * costs.forward_seconds
    low, middle, high = np.percentile(drawn, (25, 50, 75), axis=0)
    assert (high - low) / middle == pytest.approx(own[:, 0], rel=0.03)
    assert middle == pytest.approx(costs.forward_seconds, rel=0.02)
    correlation = np.corrcoef(np.log(drawn[:, 1:]).T)
    assert np.abs(correlation - np.eye(3)).max() < 0.02


def test_the_closing_error_is_common_to_all_layers(make_chain: Callable[..., Chain]) -> None:
    chain = make_chain(0, 5, sizes=(2,))
    costs = replace(chain, spread=np.zeros((5, 1)), uncertainty=np.array([0.05])).at(2)
    factors = make_draws(5, MANY).factors(costs)
    assert (factors == factors[:, :1]).all()
    assert np.std(np.log(factors[:, 0])) == pytest.approx(np.log(1.05), rel=0.02)
    assert make_draws(5).factors(replace(costs, uncertainty=None)) == pytest.approx(np.ones((SAMPLES, 5)))


def test_every_process_draws_the_same() -> None:
    code = (
        "from pplan.planner.robust.draws import make_draws; d = make_draws(7, 3);"
        "print(d.layers.tobytes().hex(), d.common.tobytes().hex())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = make_draws(7, 3)
    assert ran.stdout.split() == [own.layers.tobytes().hex(), own.common.tobytes().hex()]


def test_a_part_is_the_first_of_all() -> None:
    whole = make_draws(3, 10)
    part = whole.part(2, 5)
    assert len(part) == 3
    assert (part.layers == whole.layers[2:5]).all()
    assert (part.common == whole.common[2:5]).all()

"""Curves that are known are found again from the seconds they make."""

from __future__ import annotations

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.profiler.estimate import Curves, Efficiency, OperationWork, fit_efficiency

LAUNCH = 4e-6


def layers(seed: int, *, products: bool = True) -> list[OperationWork]:
    random = np.random.default_rng(seed)
    made = []
    for count in random.integers(1, 9, size=40):
        compute = 10 ** random.uniform(-7, -2, size=count) * (random.random(count) < 0.6) * products
        made.append(OperationWork(compute, 10 ** random.uniform(-7, -3, size=count)))
    return made


def seconds(works: list[OperationWork], curves: Curves) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([work.seconds(curves, LAUNCH) for work in works])


def test_seconds_by_hand() -> None:
    curves = Curves(Efficiency(0.5, 2e-6), Efficiency(0.8, 4e-6))
    work = OperationWork(np.array([8e-6, 1e-6, 0.0]), np.array([1e-6, 12e-6, 4e-6]))
    assert work.is_bound_by_compute(curves).tolist() == [True, False, False]
    assert work.seconds(curves, 3e-6) == pytest.approx(20e-6 + 20e-6 + 10e-6 + 9e-6)


def test_half_of_the_highest_efficiency_at_half() -> None:
    curve = Efficiency(0.6, 5e-6)
    assert 5e-6 / curve.seconds(np.array([5e-6]))[0] == pytest.approx(0.3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "known",
    [
        Curves(Efficiency(0.6, 5e-6), Efficiency(0.9, 2e-6)),
        Curves(Efficiency(0.35, 1e-6), Efficiency(0.5, 8e-6)),
        Curves(Efficiency(0.9, 0.0), Efficiency(0.7, 0.0)),
    ],
)
def test_known_curves_are_found_again(seed: int, known: Curves) -> None:
    works = layers(seed)
    found = fit_efficiency(works, seconds(works, known), LAUNCH)
    for own, other in ((found.compute, known.compute), (found.memory, known.memory)):
        assert own.highest == pytest.approx(other.highest, rel=1e-6)
        assert own.half_seconds == pytest.approx(other.half_seconds, rel=1e-6, abs=1e-12)


def test_noise_moves_them_little() -> None:
    known = Curves(Efficiency(0.6, 5e-6), Efficiency(0.9, 2e-6))
    works = layers(1)
    noise = np.random.default_rng(0).normal(1, 0.02, size=len(works))
    found = fit_efficiency(works, seconds(works, known) * noise, LAUNCH)
    assert found.compute.highest == pytest.approx(0.6, rel=0.05)
    assert found.memory.highest == pytest.approx(0.9, rel=0.05)


def test_what_nothing_is_bound_by_stays_as_it_was() -> None:
    works = layers(2, products=False)
    known = Curves(memory=Efficiency(0.5, 3e-6))
    found = fit_efficiency(works, seconds(works, known), LAUNCH)
    assert found.compute == Curves().compute
    assert found.memory.highest == pytest.approx(0.5)


def test_seconds_that_no_efficiency_explains() -> None:
    works = layers(3)
    with pytest.raises(UsageError, match="no efficiency"):
        fit_efficiency(works, np.full(len(works), 1e-9), LAUNCH)
    with pytest.raises(UsageError, match="no efficiency"):
        fit_efficiency([], np.array([]), LAUNCH)

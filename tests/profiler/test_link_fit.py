"""The fitted line against links whose latency and bandwidth are known."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.profiler.measured_links import fit_link

SIZES = [2**10 * 4**power for power in range(8)]


def exactly(latency: float, bandwidth: float) -> list[float]:
    return [latency + size / bandwidth for size in SIZES]


@pytest.mark.parametrize("latency", [0.0, 1e-7, 5e-6, 1e-3])
@pytest.mark.parametrize("bandwidth", [1e8, 25e9, 450e9])
def test_an_exact_link_is_found(latency: float, bandwidth: float) -> None:
    fit = fit_link(SIZES, exactly(latency, bandwidth))
    assert fit.latency_seconds == pytest.approx(latency, rel=1e-6, abs=1e-12)
    assert fit.bandwidth_bytes_per_second == pytest.approx(bandwidth, rel=1e-6)
    assert fit.deviation < 1e-6
    assert fit.seconds(2**20) == pytest.approx(latency + 2**20 / bandwidth)


@pytest.mark.parametrize("seed", range(20))
def test_noise_moves_it_little(seed: int) -> None:
    noise = np.random.default_rng(seed).uniform(0.95, 1.05, len(SIZES))
    fit = fit_link(SIZES, list(np.array(exactly(20e-6, 10e9)) * noise))
    assert fit.latency_seconds == pytest.approx(20e-6, rel=0.06)
    assert fit.bandwidth_bytes_per_second == pytest.approx(10e9, rel=0.06)
    assert 0 < fit.deviation < 0.12


@pytest.mark.parametrize("spoilt", range(len(SIZES)))
def test_one_spoilt_size_does_not_count(spoilt: int) -> None:
    seconds = exactly(20e-6, 10e9)
    seconds[spoilt] *= 50
    fit = fit_link(SIZES, seconds)
    assert fit.latency_seconds == pytest.approx(20e-6, rel=1e-6)
    assert fit.bandwidth_bytes_per_second == pytest.approx(10e9, rel=1e-6)
    assert fit.deviation == pytest.approx(0.98)


def test_large_sizes_that_are_slower_count() -> None:
    """Half the bandwidth for the two largest: the fitted one lies between."""
    seconds = exactly(20e-6, 10e9)
    seconds[-2:] = [20e-6 + size / 5e9 for size in SIZES[-2:]]
    fit = fit_link(SIZES, seconds)
    assert 5e9 < fit.bandwidth_bytes_per_second < 8e9


def test_the_order_of_sizes_does_not_matter() -> None:
    seconds = exactly(20e-6, 10e9)
    seconds[3] *= 1.2
    assert fit_link(SIZES[::-1], seconds[::-1]).latency_seconds == pytest.approx(
        fit_link(SIZES, seconds).latency_seconds
    )


def test_a_latency_is_never_negative() -> None:
    fit = fit_link([1000, 2000, 4000], [1e-6, 2.2e-6, 4.8e-6])
    assert fit.latency_seconds == 0.0
    assert 8e8 < fit.bandwidth_bytes_per_second < 1e9


def test_noise_that_falls_for_a_while_does_not_matter() -> None:
    fit = fit_link([1024, 4096, 2**24], [30e-6, 20e-6, 1e-2])
    assert 20e-6 <= fit.latency_seconds <= 30e-6
    assert fit.bandwidth_bytes_per_second == pytest.approx(2**24 / 1e-2, rel=0.03)


@pytest.mark.parametrize("seconds", [[1e-6, 1e-6], [2e-6, 1e-6]])
def test_seconds_that_do_not_rise_are_far_from_the_line(seconds: list[float]) -> None:
    fit = fit_link([1024, 2048], seconds)
    assert fit.latency_seconds == 0.0
    assert 0 < fit.bandwidth_bytes_per_second < 1e10
    assert fit.deviation >= 0.5


@pytest.mark.parametrize(
    ("sizes", "seconds", "what"),
    [
        ([1024], [1e-6], "1 sizes"),
        ([1024, 1024], [1e-6, 2e-6], "1 sizes"),
        ([1024, 2048], [0.0, 1e-6], "not above 0"),
        ([0, 2048], [1e-6, 2e-6], "not above 0"),
        ([1024, 2048], [1e-6, float("inf")], "not above 0"),
    ],
)
def test_what_shows_no_link_is_refused(sizes: list[int], seconds: list[float], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        fit_link(sizes, seconds)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, pplan.profiler.measured_links, pplan.profiler.torchrun_env\n"
        "sys.exit('torch was loaded' if 'torch' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

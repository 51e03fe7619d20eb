"""Costs between, below and past the measured micro-batch sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain, list_cut_points


def chain(sizes: tuple[int, ...], seconds: list[list[float]], cut_after: list[bool] | None = None) -> Chain:
    table = np.array(seconds, dtype=np.float64)
    zeros = np.zeros_like(table)
    return Chain(
        names=tuple(f"layer{i}" for i in range(len(table))),
        sizes=sizes,
        parameter_bytes=np.zeros(len(table)),
        trainable_bytes=np.zeros(len(table)),
        buffer_bytes=np.zeros(len(table)),
        cut_after=np.array(cut_after if cut_after is not None else [True] * (len(table) - 1) + [False]),
        input_bytes_per_sample=3.0,
        forward_seconds=table,
        backward_seconds=2 * table,
        output_bytes=zeros,
        saved_bytes=zeros,
        saved_input_bytes=zeros,
        workspace_bytes=zeros,
        forward_host_seconds=zeros,
        backward_host_seconds=zeros,
    )


MEASURED = chain((2, 4, 16), [[10.0, 12.0, 36.0], [1.0, 5.0, 5.0]])


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (2, [10, 1]),
        (4, [12, 5]),
        (3, [11, 3]),
        (10, [24, 5]),
        (1, [9, 0.5]),  # the line through 2 and 4 gives 9 and -1; a half of the samples costs at least a half
        (0.5, [8.5, 0.25]),
    ],
)
def test_straight_lines(size: float, expected: list[float]) -> None:
    costs = MEASURED.at(size)
    assert costs.forward_seconds.tolist() == pytest.approx(expected)
    assert costs.backward_seconds.tolist() == pytest.approx([2 * value for value in expected])
    assert costs.input_bytes == 3 * size
    assert bool(costs.outside) == (size < 2)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 8.0), 8**0.5),  # twice the samples of the smaller size: the power 1.5 of it
        ((1.0, 4.0), 2.0),  # in proportion: both curves
        ((1.0, 3.0), 5 / 3),  # a fixed part: the line
        ((1.0, 16.0), 4.0),  # the square
        ((1.0, 17.0), 19 / 3),  # more than that is noise: the line
        ((0.0, 3.0), 1.0),
    ],
)
def test_seconds_that_grow_faster_than_the_samples_follow_a_power(
    seconds: tuple[float, float], expected: float
) -> None:
    measured = chain((2, 8), [list(seconds)])
    assert measured.at(4).forward_seconds.tolist() == pytest.approx([expected])
    assert measured.at(4).output_bytes.tolist() == pytest.approx([measured.output_bytes[0].mean()])


def test_past_the_largest_only_when_asked() -> None:
    with pytest.raises(UsageError, match=r"size 32 lies outside the measured sizes \(2, 4, 16\)") as caught:
        MEASURED.at(32)
    assert "micro_batch_sizes='2,4,16,32'" in caught.value.hint
    costs = MEASURED.at(32, past_largest=True)
    assert costs.forward_seconds.tolist() == pytest.approx([68, 5])
    assert costs.outside == "micro-batch size 32 is past the largest measured (16): extrapolated"


def test_one_measured_size_is_never_scaled() -> None:
    single = chain((8,), [[1.0]])
    assert single.reaches(8)
    for size in (4, 16):
        assert not single.reaches(size)
        with pytest.raises(UsageError, match="outside the measured"):
            single.at(size, past_largest=True)


def test_one_size_that_scales_with_the_samples() -> None:
    single = chain((8,), [[1.0], [4.0]])
    launches = np.array([[0.5], [0.25]])
    scaling = replace(
        single,
        scales_with_samples=True,
        output_bytes=single.forward_seconds * 80,
        saved_input_bytes=single.forward_seconds * 16,
        forward_host_seconds=launches,
        backward_input_seconds=single.forward_seconds,
        backward_weight_seconds=single.forward_seconds,
    )
    for size in (1, 2.5, 8, 32):
        costs = scaling.at(size)
        expected = np.array([1.0, 4.0]) * size / 8
        assert scaling.reaches(size)
        assert costs.forward_seconds == pytest.approx(expected)
        assert costs.backward_seconds == pytest.approx(2 * expected)
        assert costs.backward_input_seconds == pytest.approx(expected)
        assert costs.output_bytes == pytest.approx(80 * expected)
        assert costs.saved_input_bytes == pytest.approx(16 * expected)
        assert costs.input_bytes == 3 * size
        # A launch takes as long whatever it launches.
        assert costs.forward_host_seconds.tolist() == [0.5, 0.25]
    assert scaling.at(8).outside == ""
    assert scaling.at(2.5).outside == (
        "micro-batch size 2.5: scaled with the samples from the one measured, 8"
    )
    with pytest.raises(UsageError, match="must be above 0"):
        scaling.at(0)


def test_sizes_below_one_sample_are_refused() -> None:
    with pytest.raises(UsageError, match="must be above 0"):
        MEASURED.at(0)


def test_blocks_and_stages() -> None:
    parted = chain((1,), [[1.0]] * 5, [True, False, False, True, False])
    assert list_cut_points(parted) == (0, 1, 4, 5)
    assert parted.max_stages == 3


def test_uncertainty_is_that_of_the_sizes_around() -> None:
    known = replace(MEASURED, uncertainty=np.array([0.04, 0.01, 0.02]))
    at = {1: 0.04, 2: 0.04, 3: 0.04, 4: 0.01, 8: 0.02, 16: 0.02, 32: 0.02}
    assert {size: known.uncertainty_at(size) for size in at} == at
    assert MEASURED.uncertainty_at(4) is None


@pytest.mark.parametrize(
    ("size", "expected"),
    [(2, [0.1, 0.0]), (3, [0.2, 0.1]), (10, [0.2, 0.6]), (1, [0.1, 0.0]), (40, [0.1, 1.0])],
)
def test_spread_lies_between_the_measured_ones(size: float, expected: list[float]) -> None:
    measured = replace(MEASURED, spread=np.array([[0.1, 0.3, 0.1], [0.0, 0.2, 1.0]]))
    found = measured.at(size, past_largest=True).spread
    assert found is not None
    assert found.tolist() == pytest.approx(expected)


def test_spread_of_one_size_is_that_of_any() -> None:
    one = replace(chain((4,), [[1.0], [2.0]]), scales_with_samples=True)
    assert one.at(8).spread is None
    assert one.at(8).uncertainty is None
    known = replace(one, spread=np.array([[0.1], [0.2]]), uncertainty=np.array([0.03])).at(8)
    assert known.spread is not None
    assert known.spread.tolist() == [0.1, 0.2]
    assert known.uncertainty == 0.03

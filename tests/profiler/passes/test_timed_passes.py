"""What the passes at one size come to, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pplan.profiler.passes import LayerTimes, PassTimes
from pplan.profiler.timed_passes import PartTimes, TimedPasses, link_sizes, spread


def rounds() -> TimedPasses:
    made = TimedPasses()
    for forward, backward, whole in [(1.0, 10.0, 12.0), (5.0, 20.0, 20.0), (2.0, 60.0, 40.0)]:
        made.layers.append(LayerTimes(np.array([forward, 1]), np.array([backward, 2])))
        made.whole.append(PassTimes(whole, 2 * whole))
    return made


def test_medians_and_spread_by_hand() -> None:
    made = rounds()
    assert made.medians("forward").tolist() == [2, 1]
    assert made.medians("backward").tolist() == [20, 2]
    assert made.host_medians("forward") == [None, None]
    assert made.whole_medians() == (20, 40)
    # Sums 11, 25, 62: quartiles half way to the median, 18 and 43.5.
    assert made.spreads() == [(43.5 - 18) / 25, 0]
    assert made.whole_spread() == (90 - 48) / 60
    once = TimedPasses(made.layers[:1], made.whole[:1])
    assert (once.spreads(), once.whole_spread(), once.uncertainty()) == ([None, None], None, 0)


def test_uncertainty_falls_with_the_root_of_the_rounds() -> None:
    made = rounds()
    # Sums 14, 28, 65: quartiles 21 and 46.5; the whole's spread is 0.7.
    one = 1.2533 / 1.349 * max((46.5 - 21) / 28, 0.7) / np.sqrt(3)
    assert made.uncertainty() == pytest.approx(one)
    many = TimedPasses(made.layers * 40, made.whole * 40)
    # Of 120 sums the quartiles are 14 and 65.
    assert many.uncertainty() == pytest.approx(1.2533 / 1.349 * (65 - 14) / 28 / np.sqrt(120))


def test_the_parts_against_the_whole_backward() -> None:
    made = rounds()
    assert made.part_medians("input") == [None, None]
    assert made.backward_parts_ratio() is None
    for seconds in (1.0, 3.0, 2.0):
        made.parts.append(PartTimes(np.array([0, seconds]), np.array([4 * seconds, 10])))
    assert made.part_medians("input") == [0, 2]
    assert made.part_medians("weight") == [8, 10]
    assert made.backward_parts_ratio() == (2 + 8 + 10) / 40
    made.cut_to(2)
    assert [len(passes) for passes in (made.layers, made.whole, made.parts)] == [2, 2, 2]


def test_where_the_host_is_the_limit() -> None:
    one, two = np.array([1.0, 2]), np.array([3.0, 4])
    assert TimedPasses([LayerTimes(one, two)]).host_bound() is None
    assert TimedPasses([LayerTimes(one, two, one, two)]).host_bound() is None
    assert TimedPasses([LayerTimes(one, two, two, two)] * 3).host_bound() == (14, 10)


def test_spread_of_nothing_is_none() -> None:
    assert spread(np.zeros((4, 1))).tolist() == [0]


def launched(device: float, host: list[float], loss: float = 0.0) -> TimedPasses:
    """Two layers; the device takes `device` for each, either way."""
    both, seconds = np.array(host), np.full(2, device)
    return TimedPasses([LayerTimes(seconds, seconds, both, both, PassTimes(device, device, loss, loss))] * 3)


def test_a_host_that_may_have_waited_is_told_from_the_next_smaller_size() -> None:
    sizes = [
        launched(1.0, [3, 4], 2.0),
        launched(5.0, [3.5, 6], 2.5),
        launched(9.0, [2.5, 9], 7.0),
    ]
    link_sizes(sizes)
    assert [size.host_medians("forward") for size in sizes] == [[3, 4], [3, 4], [2.5, 4]]
    assert [size.host_medians("backward") for size in sizes] == [[3, 4], [3, 4], [2.5, 4]]
    losses = [size.loss_medians() for size in sizes]
    assert [loss.forward_host for loss in losses if loss] == [2, 2, 2]
    assert [loss.forward for loss in losses if loss] == [1, 5, 9]


def test_where_the_host_is_the_limit_its_seconds_are_its_own() -> None:
    sizes = [launched(1.0, [3, 4]), launched(2.0, [5, 6])]
    link_sizes(sizes)
    assert sizes[1].host_medians("forward") == [5, 6]
    assert sizes[1].host_bound() == (22, 8)


def test_share_of_the_device_by_hand() -> None:
    one, two, six = (np.array([value, value]) for value in (1.0, 2.0, 6.0))
    assert TimedPasses([LayerTimes(one, two)]).device_share == 1
    assert TimedPasses([LayerTimes(one, two, six, six)]).device_share == 6 / 24
    assert TimedPasses([LayerTimes(six, six, one, two)]).device_share == 1
    assert TimedPasses([LayerTimes(one, two, 0 * one, 0 * one)]).device_share == 1

"""The bytes of a stage against its layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import LayerCosts
from pplan.cost_models.memory import StageBytes
from tests.stage_bytes import neighbours, stage_bytes

INPUT = 6.0


def measured() -> LayerCosts:
    """Six layers."""
    numbers = np.arange(1.0, 7)
    return LayerCosts(
        size=1,
        input_bytes=INPUT,
        parameter_bytes=1000 * numbers,
        trainable_bytes=900 * numbers,
        buffer_bytes=numbers,
        forward_seconds=numbers,
        backward_seconds=numbers,
        output_bytes=10 + numbers,
        saved_bytes=20 + numbers,
        saved_input_bytes=np.zeros(6),
        workspace_bytes=numbers[::-1] ** 2,
        forward_host_seconds=numbers,
        backward_host_seconds=numbers,
    )


def test_the_bytes_of_a_stage_by_hand() -> None:
    costs = measured()
    costs = replace(costs, saved_bytes=np.full(6, 10.0), saved_input_bytes=np.arange(6.0))
    out = costs.output_bytes
    assert stage_bytes(costs, 2, 4) == StageBytes(
        parameters=3000 + 4000 + 5000,
        trainable=2700 + 3600 + 4500,
        buffers=3 + 4 + 5,
        saved=30,
        saved_input=2,
        input=out[1],
        received=out[1],
        sent=out[4],
        workspace=4,  # 16, 9 and 4 while 10, 20 and 30 are saved: at most 34, of which 30 are saved
        gathered=4000 + 5000,
        largest=4500,
        pending=13 + 14 + 15,  # which are handed on, more than is saved
        output=out[4],
        released=0,
        layer_workspace=16,
        working=14 + 10,  # of the last, with what it is handed
        working_peak=13 + 10 + 9,
    )


def test_what_is_not_given_is_nothing() -> None:
    left = list(vars(StageBytes(*(1.0,) * 9)).values())[9:]
    assert [own or 0.0 for own in left] == [0.0] * len(left)


def test_a_backward_in_two_parts() -> None:
    """The first stage's has one part in PyTorch; the last stage's first frees its loss and its output."""
    costs = replace(measured(), pending_gradient_bytes=np.arange(6.0), loss_saved_bytes=np.full(6, 7.0))
    assert stage_bytes(costs, 2, 4).pending == 2 + 3 + 4
    first, last = stage_bytes(costs, 0, 2), stage_bytes(costs, 3, 5)
    assert (first.pending, first.released, first.output) == (0, 0, costs.output_bytes[2])
    assert (last.pending, last.released, last.sent) == (3 + 4 + 5, 7 + costs.output_bytes[5], 0)
    whole = stage_bytes(costs, 0, 5)
    assert (whole.pending, whole.released) == (0, 0)


def test_the_ends_of_the_model_have_no_cut() -> None:
    costs = measured()
    whole = stage_bytes(costs, 0, 5)
    assert (whole.input, whole.received, whole.sent, whole.gathered) == (INPUT, 0, 0, 5000 + 6000)


def test_neighbours_of_one_layer_is_itself() -> None:
    assert neighbours([7.0]) == 7
    assert neighbours([1.0, 5.0, 2.0, 4.0]) == 7


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (3, 2), (0, 6)])
def test_layers_that_are_no_stage(first: int, last: int) -> None:
    with pytest.raises(UsageError, match=f"layers {first} to {last} of 6"):
        stage_bytes(measured(), first, last)

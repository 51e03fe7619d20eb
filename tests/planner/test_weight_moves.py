"""What weights move from device to device, against every way to give the stages out, and by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pplan.planner.device_loss import Replan
from pplan.planner.weight_moves import (
    WeightMove,
)


def test_bytes_that_moves_add_up_to() -> None:
    moves = (WeightMove(1, 0, 0, 1, 5), WeightMove(None, 2, 1, 1, 7), WeightMove(None, 0, 2, 2, 4))
    own: Replan[Any] = Replan(SimpleNamespace(), moves, 1.0, 1.0, complete=True, any_devices=True)
    assert (own.moved_bytes, own.checkpoint_bytes) == (16, 11)

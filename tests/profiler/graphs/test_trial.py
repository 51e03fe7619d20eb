"""A picture that is too small for a model: the error names the smallest that is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import ModelError
from pplan.profiler.layers import build_chain


class Clips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv3d(3, 4, (1, 3, 3)), nn.MaxPool3d((5, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.first(x)).mean((2, 3, 4))  # type: ignore[no-any-return]


def runs(model: nn.Module, shape: tuple[int, ...]) -> bool:
    try:
        model(torch.zeros(2, *shape))
    except RuntimeError:
        return False
    return True


def test_the_smallest_picture_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 5, stride=3), nn.Conv2d(4, 4, 4), nn.MaxPool2d(3))
    smallest = next(side for side in range(1, 100) if runs(model, (3, side, side)))
    assert smallest > 9
    with pytest.raises(ModelError, match="Kernel size can") as caught:
        build_chain(model, torch.zeros(2, 3, 9, 9))
    assert caught.value.hint == f"Give larger ones: it runs from input_shape=(3, {smallest}, {smallest}) on."


def test_a_clip_may_need_more_frames() -> None:
    with pytest.raises(ModelError) as caught:
        build_chain(Clips(), torch.zeros(2, 3, 3, 8, 8))
    assert caught.value.hint == "Give larger ones: it runs from input_shape=(3, 6, 8, 8) on."


def test_what_no_size_helps_is_told_as_before() -> None:
    with pytest.raises(ModelError) as caught:
        build_chain(nn.Sequential(nn.Conv2d(4, 4, 3)), torch.zeros(2, 3, 8, 8))
    assert "larger" not in caught.value.hint

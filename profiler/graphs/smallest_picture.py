"""The smallest pictures, or clips, that a model takes: what to give instead of some that are too small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from ...cost_models.errors import ModelError
from ..user_model.failures import OTHER_INPUT, OTHER_SHAPE
from ..user_model.loaded_model import ModelInput
from .trial import runs_on_meta

_LARGEST_SIDE = 1024
_LONGEST = 64
"""Frames of a clip."""


@contextmanager
def naming_larger_pictures(model: nn.Module, given: ModelInput, name: str) -> Iterator[None]:
    """Where the model fails on its input, the error's hint names pictures that are large enough, if that is
    it."""
    try:
        yield
    except ModelError as error:
        larger = larger_pictures(model, given, name) if error.hint in (OTHER_SHAPE, OTHER_INPUT) else ""
        if larger:
            raise ModelError(error.what, larger) from error
        raise


def larger_pictures(model: nn.Module, given: ModelInput, name: str) -> str:
    """A hint that names the smallest square pictures that the model runs on, tried on the meta device; empty
    where the input is no picture, or where its size does not help."""
    shape = tuple(given.tensors[0].shape)
    if len(given.tensors) != 1 or len(shape) not in (4, 5) or given.is_token_ids:
        return ""
    before, side = shape[1:-2], min(shape[-2:])
    frames = [before]
    while len(shape) == 5 and frames[-1][-1] < _LONGEST:
        frames.append((*before[:-1], 2 * frames[-1][-1]))
    for start in frames:

        def runs(side: int, start: tuple[int, ...] = start) -> bool:
            return runs_on_meta(model, _resized(given, (*start, side, side)), name)

        smallest = _smallest(side, runs)
        if smallest is not None:
            return f"Give larger ones: it runs from input_shape={(*start, smallest, smallest)} on."
    return ""


def _smallest(side: int, runs: Callable[[int], bool]) -> int | None:
    """The first side, from `side` on, that runs; taken that all larger ones do."""
    fails, works = side - 1, side
    while not runs(works):
        fails, works = works, 2 * works
        if works > _LARGEST_SIDE:
            return None
    while works - fails > 1:
        middle = (fails + works) // 2
        fails, works = (fails, middle) if runs(middle) else (middle, works)
    return works


def _resized(given: ModelInput, shape: tuple[int, ...]) -> ModelInput:
    return given.mapped(lambda tensor: tensor.new_empty((max(2, len(tensor)), *shape), device="meta"))

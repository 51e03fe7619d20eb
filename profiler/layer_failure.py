"""The error of a layer that fails on what it is given."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from ..cost_models.errors import ModelError
from .user_code import at_user_line, first_line

_OTHER_DTYPE = r"dtype|scalar type|Input type .* should be the same|not implemented for '|desired output type"
"""How torch says that a layer takes another dtype."""


def layer_failure(name: str, kind: str, given: object, error: BaseException) -> ModelError:
    """The error that says which layer failed on what: a tensor, or a tuple of them."""
    several = isinstance(given, tuple)
    shapes = ", ".join(_described(part) for part in given) if isinstance(given, tuple) else _described(given)
    return ModelError(
        f"layer {name} ({kind}) failed on {'inputs of shapes' if several else 'an input of shape'} {shapes}, "
        f"batch first: {first_line(error)}{at_user_line(error)}",
        _hint(str(error)),
    )


def _described(given: Any) -> str:
    if not isinstance(given, Tensor):
        return type(given).__name__
    shape = "x".join(str(side) for side in given.shape)
    return f"{shape} ({str(given.dtype).removeprefix('torch.')})"


def _hint(said: str) -> str:
    """What may mend a layer's failure, by torch's words."""
    if "more than 1 value per channel" in said:
        return "Name micro-batch sizes of 2 or more, as in micro_batch_sizes=(2, 4, 8)."
    if "device meta" in said or "register_meta function" in said or "on meta tensors" in said:
        return (
            "The meta device has shapes and no values: measure for real, as in device='cpu'; a tensor that "
            "forward reads must be a parameter or a registered buffer."
        )
    if re.search(_OTHER_DTYPE, said):
        return (
            "Give an input of the dtype that the layer takes (a factory may return one with its module), "
            "or name another `dtype`."
        )
    return "Give the shape of one sample, without the batch, as in input_shape=(3, 224, 224)."

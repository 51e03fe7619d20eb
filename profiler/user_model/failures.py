"""Errors of the user's model and of allocators: what failed, and at which line of the user's code."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...cost_models.errors import MachineError, ModelError

_OURS = Path(__file__).resolve().parents[2]
_NOT_THE_USERS = (
    Path(torch.__file__).resolve().parent,
    Path(sysconfig.get_path("stdlib")).resolve(),
    *(_OURS / folder for folder in ("pplan", "profiler", "runtimes", "cli")),
)
_PACKAGES = tuple(Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib"))


def user_line(error: BaseException) -> str:
    """`file:line, in function: code` of the innermost frame outside torch, pplan and the standard library.

    Empty where no such frame is in the traceback. A syntax error names the line that does not parse.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_filename(error.filename)}:{error.lineno}: {(error.text or '').strip()}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{short_filename(last.filename)}:{last.lineno}, in {last.name}: {(last.line or '').strip()}"


def first_line(error: BaseException) -> str:
    """`Type: message`, the message cut to its first line and 200 characters."""
    text = str(error).strip().split("\n", 1)[0].strip()
    text = text[:200] + ("…" if len(text) > 200 else "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def at_user_line(error: BaseException) -> str:
    """` (file:line, in function: code)`, or nothing: to be put behind a message."""
    line = user_line(error)
    return f" ({line})" if line else ""


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if any(path.is_relative_to(folder) for folder in _PACKAGES):
        return not any(path.is_relative_to(folder) for folder in (_NOT_THE_USERS[0], *_NOT_THE_USERS[2:]))
    return not any(path.is_relative_to(folder) for folder in _NOT_THE_USERS)


def short_filename(filename: str) -> str:
    """The path, relative to the working directory where it lies in that."""
    path = Path(filename)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


OTHER_SHAPE = "Give the shape of one sample, without the batch, as in input_shape=(3, 224, 224)."
OTHER_INPUT = "Give an input that the model takes."
"""Hints where the input may be at fault."""
_OTHER_DTYPE = r"dtype|scalar type|Input type .* should be the same|not implemented for '|desired output type"
"""How torch says that a layer takes another dtype."""


def layer_failure(name: str, kind: str, inputs: object, error: BaseException) -> ModelError:
    """The error that says which layer failed on what: a tensor, or a tuple of them."""
    several = isinstance(inputs, tuple)
    shapes = (
        ", ".join(_described(part) for part in inputs) if isinstance(inputs, tuple) else _described(inputs)
    )
    return ModelError(
        f"layer {name} ({kind}) failed on {'inputs of shapes' if several else 'an input of shape'} {shapes}, "
        f"batch first: {first_line(error)}{at_user_line(error)}",
        _hint(str(error)),
    )


def _described(inputs: Any) -> str:
    if not isinstance(inputs, Tensor):
        return type(inputs).__name__
    shape = "x".join(str(side) for side in inputs.shape)
    return f"{shape} ({str(inputs.dtype).removeprefix('torch.')})"


def _hint(message: str) -> str:
    """What may mend a layer's failure, by torch's words."""
    if "more than 1 value per channel" in message:
        return "Name micro-batch sizes of 2 or more, as in micro_batch_sizes=(2, 4, 8)."
    if "device meta" in message or "register_meta function" in message or "on meta tensors" in message:
        return (
            "The meta device has shapes and no values: measure for real, as in device='cpu'; a tensor that "
            "forward reads must be a parameter or a registered buffer."
        )
    if re.search(_OTHER_DTYPE, message):
        return (
            "Give an input of the dtype that the layer takes (a factory may return one with its module), "
            "or name another `dtype`."
        )
    return OTHER_SHAPE


class DoesNotFit(MachineError):
    """The model, or its smallest micro-batch, is too large for the device."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's or the CPU's allocator refused."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text
        or "not enough memory" in text
        or "out of memory" in text
        or "STATUS_ALLOC_FAILED" in text
    )


def refusal(error: BaseException) -> str:
    """What the allocator said first: which memory ran out, and what it was asked for."""
    return str(error).split("\n", 1)[0].split(" GPU ", 1)[0][:300] or type(error).__name__

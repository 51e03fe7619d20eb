"""Batch sizes that a graph of torch.export holds for: all, else the line of the model that asks for some.

Micro-batches have other sizes than the example, so a forward that makes a plain number of its batch is
refused, or the module that does so is left whole.
"""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from ...cost_models.errors import ModelError
from ..user_model.loaded_model import ModelInput

_LEAST, MOST_SAMPLES = 2, 128
"""Batch sizes for which branches are looked at; torch.export takes no size of 0 or 1 for one that varies."""
CUT_AROUND = (
    "Give granularity='module:PATTERN' with modules around what cannot be traced, "
    "or make the model an nn.Sequential of its layers."
)


class SomeBatchSizes(ModelError):
    """What the forward does holds for some batch sizes only."""

    place: traceback.FrameSummary | None = None
    """Of the code that makes it so."""


def refuse_some_batch_sizes(
    inputs: tuple[fx.Node, ...], program: torch.export.ExportedProgram, example: ModelInput, name: str
) -> None:
    """Raises SomeBatchSizes unless the batch of `inputs` may have any size."""
    first, place = inputs[0].meta["val"], None
    size = first.shape[0]
    if is_concrete_int(size):
        place = _specializing_place(first)
        sizes, line = f"{example.batch} samples only", f" ({_frame_line(place)})" if place else ""
    else:
        span = program.range_constraints.get(size.node.expr)
        endless = span is not None and bool(span.upper > 2**62)
        sizes, place = _sizes_of_branches(first, size.node.expr)
        line = f" ({_frame_line(place)})" if place else ""
        if span is not None and not (endless and span.lower <= _LEAST):
            most = "more" if endless else span.upper
            sizes = f"{span.lower} to {most} samples only"
        if not sizes:
            return
    refusal = SomeBatchSizes(
        f"{name}: what its forward does holds for {sizes}{line}",
        "Micro-batches have other sizes than the example: compute with x.shape[0], not int(...), "
        "and let no loop run over the samples. " + CUT_AROUND,
    )
    refusal.place = place if isinstance(place, traceback.FrameSummary) else None
    raise refusal


def _sizes_of_branches(value: Tensor, size: Any) -> tuple[str, Any]:
    """The batch sizes for which the traced forward takes the branches that it took, in words, and the line of
    one that it does not take for all; nothing where it is one forward for all sizes.

    A branch on a multiple of the batch size, as on the numbers in a tensor, does not show in the range that
    torch.export states.
    """
    shapes = getattr(getattr(value, "fake_mode", None), "shape_env", None)
    replacements = getattr(shapes, "replacements", {})
    sizes = list(range(_LEAST, MOST_SAMPLES + 1))
    place: Any = None
    for guard in getattr(shapes, "guards", ()):
        branch = guard.expr.xreplace(replacements)
        if branch.free_symbols != {size}:
            continue
        where = guard.sloc.maybe_user_loc or guard.sloc.framework_loc
        if _is_of_an_operator(where):
            continue
        holds = [samples for samples in sizes if branch.xreplace({size: samples}) != False]  # noqa: E712
        if holds != sizes:
            sizes, place = holds, where
    if place is None:
        return "", None
    return (f"{sizes[0]} to {sizes[-1]} samples only" if sizes else "the example only"), place


def _is_of_an_operator(place: Any) -> bool:
    """Whether a branch is inside torch's own operators, which compute the same on either side of it; modules
    and functions of torch.nn may not."""
    if not isinstance(place, traceback.FrameSummary):
        return False
    own = Path(torch.__file__).parent
    return Path(place.filename).is_relative_to(own) and not Path(place.filename).is_relative_to(own / "nn")


def module_at(model: nn.Module, place: traceback.FrameSummary | None) -> str:
    """A module inside `model` of whose class that line is; "" where there is none."""
    path: str
    for path, module in model.named_modules() if place else ():
        for function in (own for kind in type(module).__mro__ for own in vars(kind).values()):
            code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
            is_there = place and code and (code.co_filename, code.co_name) == (place.filename, place.name)
            if path and is_there:
                return path
    return ""


def _specializing_place(value: Tensor) -> Any:
    """Where the batch size became a plain number, as far as torch tells."""
    shapes = getattr(getattr(value, "fake_mode", None), "shape_env", None)
    places = getattr(shapes, "replacements_slocs", {})
    for symbol, size in getattr(shapes, "replacements", {}).items():
        if symbol in places and size == value.shape[0]:
            return places[symbol].maybe_user_loc or places[symbol].framework_loc
    return None


def _frame_line(place: Any) -> str:
    if not isinstance(place, traceback.FrameSummary):
        return str(place or "")
    return f"{place.filename}:{place.lineno}, in {place.name}: {(place.line or '').strip()}"

"""Error texts where layers differ from their model: the first layer and tensor that do, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals import has_hooks, tree_leaves
from ..user_model.failures import at_user_line, first_line
from .differences import Difference, describe_difference
from .side_by_side import LayersDiffer, SideBySide
from .training_pass import Trainee, plain_attributes

_NAME = "Name the module around that part a layer, which is then run as it is: granularity='module:PATTERN'."
_GRADIENTS = (
    "Does forward run a part without gradients (torch.no_grad(), detach(), requires_grad_(False)), or change "
    "gradients by hooks? Set requires_grad of parameters outside of forward. "
)
_RANDOM = (
    "Does forward draw random numbers in Python, or decide by one? Draw with torch, and choose with "
    "torch.where. "
)
_STATE = (
    "Does forward keep a number or a tensor in Python from call to call? Keep it in a registered buffer. "
)
_SIZE = "Does forward decide by the batch size? Compute with x.shape[0]. "
_OTHER_WAY = (
    "Does forward decide in Python by a type, an exception or a value, or run a part under autocast? "
)


def describe(side: SideBySide, error: LayersDiffer, layer_names: Sequence[str]) -> tuple[str, str]:
    """What differed, and what to do."""
    when = f"on a batch of {error.batches[-1]}"
    if len(error.batches) > 1:
        when = f"in pass {len(error.batches)}, {when}" + (" again" if len(error.batches) == 2 else "")
    if error.failure is not None:
        failure = error.failure
        return f"its layers fail {when}: {first_line(failure)}{at_user_line(failure)}", _OTHER_WAY + _NAME
    random = any(each.kind == "random state" for each in error.differences)
    kinds = [each for each in error.differences if each.kind != "random state"]
    gradients = [each for each in kinds if each.kind == "gradient"]
    lost = [each for each in gradients if each.expected is None or each.actual is None]
    if not kinds:
        return _random_state(error, when), _RANDOM + _NAME
    if kinds[0].kind in ("output", "structure of the output"):
        where = _layer_of_output(side, error, layer_names)
        what = f"{describe_difference(kinds[0])} is not the model's {when}{_by(kinds[0])}{where}"
        return what, _hint(error, random) + _NAME
    if lost:
        return _gradients(lost, side, when, layer_names), _GRADIENTS + _NAME
    first = gradients[-1] if gradients else kinds[0]
    layer = _holder(first, side, layer_names)
    what = f"{describe_difference(first)} is not the model's {when}{_by(first)}{layer}"
    return what, (_GRADIENTS if first.kind == "gradient" else _hint(error, random)) + _NAME


def suspects(side: SideBySide, error: LayersDiffer) -> Iterator[str]:
    """Modules inside the model that do what a graph loses: a buffer that they leave differs, they change
    attributes in Python, or have hooks."""
    owners = [each.name.rpartition(".")[0] for each in error.differences if each.kind == "buffer"]
    before = plain_attributes(side.model)
    changed = [name for name, value in side.attributes.items() if before.get(name) != value]
    hooked = [path for path, module in side.model.named_modules() if has_hooks(module)]
    for path in (*owners, *(name.rpartition(".")[0] for name in changed), *hooked):
        if path:
            yield path


def _hint(error: LayersDiffer, random: bool) -> str:
    """In which pass: the first, the same again, one on a larger batch, or later ones of the first size."""
    if random:
        return _RANDOM
    return {1: _OTHER_WAY, 3: _SIZE}.get(len(error.batches), _STATE)


def _random_state(error: LayersDiffer, when: str) -> str:
    generators = " and ".join(each.name for each in error.differences)
    return f"its layers draw other random numbers than the model, of {generators}, {when}"


def _gradients(lost: Sequence[Difference], side: SideBySide, when: str, layer_names: Sequence[str]) -> str:
    """Text on parameters that get a gradient in the layers only, or in the model only."""
    first = lost[0]
    more = f" (and {len(lost) - 1} more parameters)" if len(lost) > 1 else ""
    has, lacks = ("layers", "model") if first.expected is None else ("model", "layers")
    layer = _holder(first, side, layer_names)
    return f"{first.name}{more} gets a gradient in the {has} and none in the {lacks} {when}{layer}"


def _by(difference: Difference) -> str:
    """How far off, of finite tensors."""
    expected, actual = difference.expected, difference.actual
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return f" ({_format(actual)} instead of {_format(expected)})"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f" ({_format(actual)} instead of {_format(expected)})"
    if not difference.may_be_rounding:
        return ""
    largest = float(expected.detach().abs().nan_to_num(0, 0, 0).max())
    share = difference.size / largest if largest else math.inf
    return f" (off by {share:.2g} of the largest element)"


def _format(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{'x'.join(map(str, value.shape))} {str(value.dtype).removeprefix('torch.')}"
    return value.__name__ if isinstance(value, type) else repr(value)[:60]


def _holder(difference: Difference, side: SideBySide, layer_names: Sequence[str]) -> str:
    """The first layer that uses the parameter or buffer."""
    if difference.kind not in ("gradient", "buffer", "parameter"):
        return ""
    layered = side.layered()
    tensors = dict((*layered.model.named_parameters(), *layered.model.named_buffers()))
    own = tensors.get(difference.name)
    for name, layer in zip(layer_names, layered.layers, strict=True):
        if own is not None and any(tensor is own for tensor in (*layer.parameters(), *layer.buffers())):
            return f", in layer {name}"
    return ""


_OutputMarks = dict[tuple[str, int], tuple[float, ...]]
"""By the name of a module and the number of its call: what tells one output from another."""


def _layer_of_output(side: SideBySide, error: LayersDiffer, layer_names: Sequence[str]) -> str:
    """The first module that returns something else, and the layer it is in."""
    try:
        expected, _ = _record(side.plain(), side, error.batches)
        actual, layers = _record(side.layered(), side, error.batches)
    except Exception:  # It is known already that something differs.
        return ""
    for key, value in actual.items():
        if not _alike(value, expected.get(key)):
            name = layer_names[layers[key]]
            module = "" if key[0] == name else f" ({key[0]})"
            return f"; the first that differs is layer {name}{module}"
    return f"; no module differs up to layer {layer_names[max(layers.values())]}" if layers else ""


def _record(
    trainee: Trainee, side: SideBySide, batches: Sequence[int]
) -> tuple[_OutputMarks, dict[Any, int]]:
    """Of the last pass."""
    for batch in batches[:-1]:
        trainee.train_once(side.example(batch), side.seed)
    marks: _OutputMarks = {}
    layers: dict[tuple[str, int], int] = {}
    with _recording(trainee, marks, layers):
        trainee.train_once(side.example(batches[-1]), side.seed)
    return marks, layers


@contextmanager
def _recording(trainee: Trainee, marks: _OutputMarks, layers: dict[tuple[str, int], int]) -> Iterator[None]:
    counts: dict[str, int] = {}
    current = [0]

    def entered(index: int) -> Any:
        return lambda *_: current.__setitem__(0, index)

    def returned(path: str) -> Any:
        def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
            key = (path, counts.setdefault(path, 0))
            counts[path] += 1
            marks[key], layers[key] = _marks(output), current[0]

        return note

    with ExitStack() as stack:
        for index, layer in enumerate(trainee.layers):
            stack.callback(layer.register_forward_pre_hook(entered(index)).remove)
        for path, module in trainee.model.named_modules():
            if path:
                stack.callback(module.register_forward_hook(returned(path)).remove)
        yield


def _marks(output: Any) -> tuple[float, ...]:
    """A few sums of all elements, weighted differently."""
    marks: list[float] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_quantized:
            flat = torch.view_as_real(leaf.detach()) if leaf.is_complex() else leaf.detach()
            flat = flat.flatten().double()
            weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=flat.dtype)
            marks += [
                float(flat.numel()),
                float(flat.sum()),
                float(flat.abs().sum()),
                float((flat / weights).sum()),
            ]
    return tuple(marks)


def _alike(actual: tuple[float, ...], expected: tuple[float, ...] | None) -> bool:
    if expected is None or len(actual) != len(expected):
        return expected is None
    return all(
        math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(actual, expected, strict=True)
    )

"""A forward and backward pass of a model, or of its layers, and how two of them differ."""

from __future__ import annotations

import io
import itertools
import math
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .trial import leave_vmap
from .user_model import ModelInput, flat, normal_like, random_states, repeatable_seeds, reseed

# A forward and backward pass of a model, or of its layers, and every value that it leaves.

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(eq=False)
class Trainee:
    """A copy of a model, and what is run on its parameters: the copy itself, or layers bound to it."""

    model: nn.Module
    run: Callable[[ModelInput], Any]
    layers: tuple[nn.Module, ...] = ()
    _passes: int = field(default=0, init=False)

    def train_once(self, inputs: ModelInput, seed: int) -> PassResult:
        """Forward, and backward from random gradients, which add up to those of the passes before.

        The weights change after the first pass, as by an optimizer's step: what forward computed of them once
        and kept is then another. `inputs` is worked on: in place, and for gradients of what needs them.
        """
        if self._passes == 1:
            _step(self.model)
        self._passes += 1
        result = PassResult(self.model)
        # torch.fx prints where in the code of a graph an operation failed.
        with (
            torch.enable_grad(),
            leave_vmap(),
            repeatable_seeds(),
            warnings.catch_warnings(),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            reseed(seed)
            result.output, result.structure = flat(self.run(inputs))
            starts = [leaf for leaf in result.output if isinstance(leaf, Tensor) and leaf.requires_grad]
            if starts:
                gradients = [normal_like(leaf, seed + index) for index, leaf in enumerate(starts)]
                torch.autograd.backward(starts, gradients)
            result.random = random_states()
        result.inputs = inputs.tensors
        return result

    def forward_once(self, inputs: ModelInput, seed: int) -> PassResult:
        """Without gradients: the output alone."""
        result = PassResult(self.model)
        with torch.no_grad(), leave_vmap(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reseed(seed)
            result.output, result.structure = flat(self.run(inputs))
        return result


def _step(model: nn.Module) -> None:
    """Changes every other element of each parameter by a few per cent, in place and without a copy."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.is_floating_point() and parameter.layout is torch.strided:
                elements = parameter.detach()
                elements = elements.view(-1)[::2] if elements.is_contiguous() else elements
                elements.mul_(0.99 - 0.01 * (index % 5) / 5)


@dataclass(eq=False)
class PassResult:
    """What is there after a pass. Gradients and buffers are the model's own, so later passes change them."""

    model: nn.Module
    output: list[Any] = field(default_factory=list)
    structure: object = None
    inputs: tuple[Tensor, ...] = ()
    random: dict[str, Any] = field(default_factory=dict)

    def values(self) -> Iterator[tuple[str, str, Any]]:
        """Kind, name and value of all that can be told apart, outputs first; None: no gradient."""
        for index, leaf in enumerate(self.output):
            value = leaf.detach() if isinstance(leaf, Tensor) else leaf
            yield "output", str(index), value if isinstance(value, (Tensor, *_PLAIN)) else type(value)
        for index, leaf in enumerate(self.output):
            if isinstance(leaf, Tensor):
                yield "need of a gradient", str(index), leaf.requires_grad
        for name, parameter in self.model.named_parameters():
            yield "gradient", name, _dense(parameter.grad)
        for index, tensor in enumerate(self.inputs):
            if tensor.requires_grad and tensor.is_leaf:
                yield "gradient of input", str(index), tensor.grad
        for name, buffer in self.model.named_buffers():
            yield "buffer", name, buffer.detach()
        for name, parameter in self.model.named_parameters():
            yield "parameter", name, parameter.detach()
        for name, state in self.random.items():
            yield "random state", name, state
        yield from (("random state", name, state) for name, state in own_generators(self.model))


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Embeddings may have sparse ones."""
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def own_generators(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The states of random number generators that modules hold, by dotted name."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Generator):
                yield _dotted(path, name), value.get_state()
            elif isinstance(value, random.Random):
                yield _dotted(path, name), value.getstate()
            elif type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
                yield _dotted(path, name), repr(value.bit_generator.state)


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """What modules keep in Python, by dotted name: numbers, words, counters, and lists, dicts and objects of
    them."""
    return {
        _dotted(path, name): plain
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE and (plain := _plain(value)) is not _OTHER
    }


def class_attributes(model: nn.Module) -> dict[str, Any]:
    """What the classes of its modules keep, by the class and the name: all copies of the model share it."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    return {
        f"{kind.__qualname__}.{name}": plain
        for kind in classes
        if kind.__module__.partition(".")[0] not in ("torch", "builtins", "pplan")
        for name, value in vars(kind).items()
        if not name.startswith("__") and (plain := _plain(value)) is not _OTHER
    }


_OTHER = object()
"""What is neither plain nor made of plain values."""
_DEEPEST = 3
"""Objects in objects that are looked into."""


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy to compare with later ones; of what is not plain in it, nothing."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, list | tuple | set | deque):
        values = list(value)
    elif isinstance(value, dict):
        values = [part for pair in value.items() for part in pair]
    elif isinstance(value, (Tensor, nn.Module, type, FunctionType, ModuleType)) or not hasattr(
        value, "__dict__"
    ):
        return _OTHER
    else:
        values = list(vars(value).values())
    plain = [_plain(part, depth + 1) for part in values] if depth < _DEEPEST else []
    return _OTHER if values and all(part is _OTHER for part in plain) else plain


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# Differences between the values that two passes leave, and which of them may be rounding.

_LAST_BITS = 16
"""Units in the last place, of the largest value of a kind, that another order of sums may cost, also where
large terms cancel out, as in the gradient of a bias before batch norm."""
_AMPLIFIED = 8
"""Times what a change of the last bit of every parameter and input makes of a value."""
_NOISE = 0.5
"""Where a change of the last bits changes so much of a value, nothing is known of it."""
_SMALL = 1e-2
"""A gradient that is small beside the largest of its pass is a difference of large ones."""


@dataclass(frozen=True)
class Difference:
    """One value that the layers leave another than the model does."""

    kind: str
    name: str
    expected: Any
    """The model's value."""
    actual: Any
    """The layers' value."""

    @property
    def may_be_rounding(self) -> bool:
        """Whether both are floating tensors of one shape, with NaN and infinity in the same places."""
        a, b = self.expected, self.actual
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or not _comparable(a, b):
            return False
        finite = torch.isfinite(a)
        same = torch.equal(finite, torch.isfinite(b)) and _equal(a[~finite], b[~finite])
        return same and (a.is_floating_point() or a.is_complex())

    @property
    def size(self) -> float:
        """The largest difference of two finite elements."""
        return _distance(self.expected, self.actual)


def differences(expected: PassResult, actual: PassResult) -> list[Difference]:
    """In the order of `PassResult.values`; none: equal bit for bit."""
    if expected.structure != actual.structure or len(expected.output) != len(actual.output):
        return [Difference("structure of the output", "", expected.structure, actual.structure)]
    own = {(kind, name): value for kind, name, value in actual.values()}
    return [
        Difference(kind, name, value, own.get((kind, name)))
        for kind, name, value in expected.values()
        if not _same(value, own.get((kind, name)))
    ]


def split_by_cause(
    several: list[Difference], expected: PassResult, variants: Sequence[PassResult]
) -> tuple[list[Difference], list[Difference]]:
    """The differences too large for rounding; and those that rounding alone may explain.

    `variants`: of the model with the last bit of every parameter and input changed, a change as large as any
    operation's rounding, in another direction each. The most that they make of a value tells how much the
    model amplifies rounding; sums in another order may cost a few times that. Where it reaches half of a
    dtype's digits (batch norm of two samples, say), it may hide any difference.
    """
    own = [{(kind, name): value for kind, name, value in varied.values()} for varied in variants]
    scales = _scales(expected)
    real: list[Difference] = []
    unsure: list[Difference] = []
    for difference in several:
        if not difference.may_be_rounding:
            real.append(difference)
            continue
        value: Tensor = difference.expected
        epsilon, scale = torch.finfo(value.dtype).eps, scales[difference.kind]
        key = difference.kind, difference.name
        change = max((_change(value, varied.get(key)) for varied in own), default=0.0)
        is_noise = change >= _NOISE * _largest(value) > 0
        if not (is_noise or difference.size <= max(_AMPLIFIED * change, _LAST_BITS * epsilon * scale)):
            real.append(difference)
        elif difference.size > math.sqrt(epsilon) * max(_largest(value), _SMALL * scale):
            unsure.append(difference)
    return real, unsure


def _change(value: Tensor, varied: Any) -> float:
    if not isinstance(varied, Tensor) or not _comparable(value, varied):
        return 0.0
    return _distance(value, varied)


def relative_size(several: list[Difference], expected: PassResult) -> float:
    """The largest difference, in parts of the largest value of its kind."""
    scales = _scales(expected)
    return max(each.size / max(scales[each.kind], 1e-300) for each in several)


def _scales(result: PassResult) -> Mapping[str, float]:
    """The largest value of each kind."""
    scales: dict[str, float] = {}
    for kind, _, value in result.values():
        largest = _largest(value) if isinstance(value, Tensor) else 0.0
        scales[kind] = max(scales.get(kind, 0.0), largest)
    return scales


def not_finite(result: PassResult) -> Iterator[str]:
    """What of the output holds NaN or infinity, in words."""
    for index, leaf in enumerate(result.output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            value = leaf.detach()
            kinds = [word for word, has in (("NaN", value.isnan()), ("infinity", value.isinf())) if has.any()]
            if kinds:
                yield f"{' and '.join(kinds)} in {output_name(index, len(result.output))}"


def output_name(index: int, count: int) -> str:
    """The name of a tensor of the model's output."""
    return "the output" if count == 1 else f"output {index}"


def describe_difference(difference: Difference) -> str:
    """Its kind and name, as an error says them."""
    if difference.kind == "output":
        return output_name(int(difference.name), 1 if difference.name == "0" else 2)
    if difference.kind in ("gradient", "need of a gradient"):
        return f"the {difference.kind} of {difference.name}"
    return f"the {difference.kind} {difference.name}".rstrip()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _comparable(a, b) and _equal(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return type(a) is type(b) and bool(a == b or a != a)


def _comparable(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.layout == b.layout and a.device == b.device


def _equal(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN."""
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()) or a.layout is not torch.strided:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _distance(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    size = (a.detach() - b.detach()).abs()
    return float(torch.where(torch.isfinite(size), size, 0).max())


def _largest(value: Tensor) -> float:
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    size = value.detach().abs()
    return float(torch.where(torch.isfinite(size), size, 0).max())

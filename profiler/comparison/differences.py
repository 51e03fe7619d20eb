"""Differences between the values that two passes leave, and which of them may be rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .training_pass import PassResult

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

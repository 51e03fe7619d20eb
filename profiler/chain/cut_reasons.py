"""Why no stage may end with a layer: tensors overwritten or shared behind it, and the user's pins."""

from __future__ import annotations

from collections.abc import Container, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, fx, nn

from ..graphs.cutting import refuse_unmatched
from ..graphs.flow import Flow
from ..graphs.segments import GraphSegment
from ..user_model.shared_parameters import tensors_used

Reasons = list[str | None]
"""Of each layer, why no stage may end with it."""


def first_reasons(*reasons: Reasons) -> Reasons:
    """Of each layer, the first reason that there is."""
    return [next((own for own in each if own), None) for each in zip(*reasons, strict=True)]


def overwriting_reasons(
    model: nn.Module, segments: Sequence[GraphSegment], names: Sequence[str], flow: Flow
) -> Reasons:
    """No cut that a tensor crosses which is overwritten behind it."""
    layers = layer_numbers(segments)
    reasons: Reasons = [None] * len(segments)
    for index, segment in enumerate(segments[:-1]):
        node = flow.first_overwriting(segment.part.after)
        if node is not None:
            by = layers[node]
            reasons[index] = _overwritten(segments[by], names[by], model, is_next=by == index + 1)
    return reasons


def _overwritten(segment: GraphSegment, name: str, model: nn.Module, *, is_next: bool) -> str:
    if segment.is_composite:
        # Its kind is that of the module which gives it its name, and need not be what works in place.
        return f"an in-place operation in {name} {'follows' if is_next else 'overwrites it'}"
    kind = segment.kind(model)
    return f"in-place {kind} follows" if is_next else f"in-place {kind} {name} overwrites it"


class TensorUsers(NamedTuple):
    """A parameter or buffer, its name, and the positions of the modules that use it, ascending."""

    name: str
    tensor: Tensor
    layers: list[int]
    overlaps: bool
    """Whether another parameter or buffer lies in the same memory."""

    is_written: bool
    """Whether a run of the model changed it."""

    @property
    def is_tied(self) -> bool:
        """Whether each of several users may have a copy of its own, which trains like the others."""
        return len(self.layers) > 1 and isinstance(self.tensor, nn.Parameter) and not self.overlaps

    @property
    def is_read_only(self) -> bool:
        """Whether it is a buffer of which each of several users may have a copy of its own, which stays the
        same."""
        is_shared = len(self.layers) > 1 and not isinstance(self.tensor, nn.Parameter)
        return is_shared and not (self.overlaps or self.is_written or self.tensor.requires_grad)


def find_tensor_users(
    model: nn.Module,
    modules: Sequence[nn.Module],
    aliases: Sequence[Sequence[str]],
    written: Container[int] = (),
) -> list[TensorUsers]:
    """Of each parameter and buffer that modules use. Tensors that lie in the same memory are one, by the name
    of the first."""
    paths: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        paths.setdefault(id(tensor), name)
    first_of = {name: group[0] for group in aliases for name in group}
    users: dict[str | int, TensorUsers] = {}
    for index, module in enumerate(modules):
        for key, tensor in {id(tensor): tensor for tensor in tensors_used(module)}.items():
            path = paths.get(key)
            one = key if path is None else first_of.get(path, path)
            name = one if isinstance(one, str) else "a tensor"
            new = TensorUsers(name, tensor, [], path in first_of, key in written)
            positions = users.setdefault(one, new).layers
            positions.extend([index] if index not in positions else [])
    return list(users.values())


def sharing_reasons(tensors: Sequence[TensorUsers], names: Sequence[str]) -> Reasons:
    """No cut between the first and the last user of a buffer that is written, nor of parameters that overlap
    in memory."""
    reasons: Reasons = [None] * len(names)
    for shared in tensors:
        users = shared.layers
        may_part = shared.is_tied or shared.is_read_only
        for index in range(users[0], users[-1]) if not may_part else ():
            word = f"{names[users[0]]} and {names[users[-1]]} share {shared.name}"
            reasons[index] = reasons[index] or word
    return reasons


def pin_reasons(patterns: Sequence[str], names: Sequence[str], model_name: str) -> Reasons:
    """The user's pins: no cut between the first and the last layer of a pattern."""
    refuse_unmatched(patterns, names, "layer", model_name)
    reasons: Reasons = [None] * len(names)
    for pattern in patterns:
        matching = [index for index, name in enumerate(names) if fnmatchcase(name, pattern)]
        for index in range(matching[0], matching[-1]):
            reasons[index] = reasons[index] or f"kept together: {pattern}"
    return reasons


def layer_numbers(segments: Sequence[GraphSegment]) -> dict[fx.Node, int]:
    """The position of each node's layer."""
    return {node: index for index, segment in enumerate(segments) for node in segment.part.nodes}

"""A module as a chain of layers, and the cuts between them that must not be made."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf
from typing import NamedTuple

from torch import Tensor, fx, nn

from ...cost_models.errors import ModelError
from ..comparison.model_check import Comparison, ModelCheck
from ..graphs.cutting import Granularity, parts, refuse_unmatched
from ..graphs.flow import Flow
from ..graphs.frontends import ELEMENTS, is_plain_sequential, trace_model
from ..graphs.graph import TracedGraph
from ..graphs.remodule import attribute
from ..graphs.segments import GraphSegment
from ..graphs.trial import Trial, naming_larger_pictures
from ..user_model.failures import layer_failure as layer_failure
from ..user_model.loaded_model import ModelInput, refuse_lazy_or_sparse
from ..user_model.seeding import fixed_seed
from .layer_sequential import LayerSequential, model_name, registered_once
from .shared_parameters import storage_aliases, tensors_used


@dataclass(frozen=True, eq=False)
class Layer:
    """The smallest thing that may sit alone on a stage.

    Takes one tensor or one tuple of tensors, and returns the same for the next; the last returns what the
    model does.
    """

    name: str
    kind: str
    module: nn.Module
    """Runs the layer with the model's own modules and parameters."""
    path: str | None
    """Where the model keeps `module`; None where it was put together from several or from functions."""
    parameters: tuple[nn.Parameter, ...]
    """Those that no earlier layer uses."""
    buffers: tuple[Tensor, ...]
    cut_reason: str | None
    """Why no stage may end with this layer."""
    crossing: int = 1
    """Tensors that it hands to the next layer, each once."""

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)

    @property
    def trainable_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters if parameter.requires_grad)

    @property
    def largest_parameter_bytes(self) -> int:
        """Of the trainable ones."""
        return max((own.nbytes for own in self.parameters if own.requires_grad), default=0)

    @property
    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True, eq=False)
class LayerChain:
    """The layers in the order they run; each feeds the next."""

    model_name: str
    layers: tuple[Layer, ...]
    overwrites_input: bool
    """Whether a layer changes the model's input in place."""
    granularity: str = "block"
    edges: tuple[tuple[int, int], ...] = ()
    """Which layer makes a tensor, and which uses it: those of neighbours, and those that skip layers."""
    keep_together: tuple[str, ...] = ()
    """The user's pins: patterns of layer names."""
    aliases: tuple[tuple[str, ...], ...] = ()
    """Names of different parameters and buffers that lie in the same memory."""
    drops_checkpoints: bool = False
    """Whether the model recomputes parts of itself (torch.utils.checkpoint), which its layers do not."""
    tool: str = "torch.fx"
    """What drew the graph that was cut."""
    comparison: Comparison | None = None
    """With the model, by value; None: not asked for."""
    unused: tuple[str, ...] = ()
    """Parameters and buffers of the model that no layer uses, by name."""
    users: tuple[TensorUsers, ...] = ()
    """Of each parameter and buffer."""
    own_modes: tuple[str, ...] = ()
    """Modules with a `train` of their own, the model itself by its class."""

    def __len__(self) -> int:
        return len(self.layers)


def build_chain(
    model: nn.Module,
    given: object,
    *,
    name: str | None = None,
    granularity: str = "block",
    keep_together: Sequence[str] = (),
    aliases: tuple[tuple[str, ...], ...] | None = None,
    verify: bool = False,
    verify_seconds: float = inf,
    tool: str | None = None,
) -> LayerChain:
    """Takes `model` apart into layers; deterministic, and without changing it.

    An nn.Sequential is its elements, nested ones taken apart too (`features.0`); everything else is traced,
    and so is an nn.Sequential that is to be cut otherwise. `granularity`: `block` cuts where one tensor alone
    leads on, `fine` after every operation that computes something, `module:PATTERN[,PATTERN...]` around the
    calls of the modules so named. The input, as `ModelInput.of` takes it, is only looked at for its shapes
    and dtypes where the model runs on torch's meta device; its sizes except for the batch may be taken for
    constants.

    A cut is refused where a later layer overwrites a tensor that crosses it (version counters tell, through
    views too), between the users of a shared buffer or of parameters that overlap in memory, and between the
    first and the last layer whose names match a pattern of `keep_together`; not between those of one
    parameter, of which stages may have copies. `aliases`: the names of parameters and buffers that lie
    in the same memory, for a copy of a model, which has parted them; None: as `storage_aliases` finds them.

    `verify`: layers and model are run on copies, forward and backward, and must leave the same outputs,
    gradients, buffers and random state (see `ModelCheck`); on a difference another tool traces the model.
    `verify_seconds`: that more than one pass of both may take.
    `tool`: the only one to trace it, as the chain of another copy of this model names it.

    Raises ModelError: not traceable (with the line), with hooks of its own, lazy, failing on this input, or a
    pattern that nothing matches; with `verify` also where all tools' layers differ from the model, or where
    it fails in training; UsageError for an unknown granularity.
    """
    wanted = Granularity.parse(granularity)
    name = name or model_name(model)
    example = ModelInput.of(given, name)
    refuse_lazy_or_sparse(name, model)
    told = str(wanted)
    if isinstance(model, LayerSequential) and wanted.kind != "module":
        # Its elements are the layers that it was made of.
        wanted, told = Granularity("block"), model.granularity
    segments, flow, comparison = _segments(
        model, example, name, wanted, verify_seconds=verify_seconds if verify else None, tool=tool
    )
    modules = [segment.bind(model) for segment in segments]
    names = _names(model, segments)
    reasons = _overwritten_reasons(model, segments, names, flow)
    aliases = storage_aliases(model) if aliases is None else aliases
    users = find_tensor_users(model, modules, aliases, _written(model, flow, comparison))
    _add(reasons, _shared_reasons(users, names))
    pins = (*_remembered(model, segments), *keep_together)
    _add(reasons, _kept_together(pins, names, name))
    firsts = _first_users(modules)
    layers = tuple(
        Layer(
            names[i],
            segments[i].kind(model),
            modules[i],
            segments[i].path,
            *firsts[i],
            reasons[i],
            segments[i].crossing,
        )
        for i in range(len(segments))
    )
    return LayerChain(
        name,
        layers,
        flow.overwrites_input,
        told,
        _edges(segments, flow),
        pins,
        aliases,
        flow.traced.recomputes,
        flow.traced.tool,
        comparison,
        _unused(model, modules),
        tuple(users),
        tuple(_own_modes(model)),
    )


def _own_modes(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        own = type(module).train
        if own is not nn.Module.train and not (own.__module__ or "").startswith(("torch.", "pplan.")):
            yield path or type(module).__name__


def _unused(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    used = {id(tensor) for module in modules for tensor in tensors_used(module)}
    kept = model.state_dict(keep_vars=True)
    own = (*model.named_parameters(), *model.named_buffers())
    return tuple(name for name, tensor in own if name in kept and id(tensor) not in used)


def _segments(
    model: nn.Module,
    given: ModelInput,
    name: str,
    granularity: Granularity,
    *,
    verify_seconds: float | None,
    tool: str | None,
) -> tuple[list[GraphSegment], Flow, Comparison | None]:
    check = None if verify_seconds is None else ModelCheck(model, given, name, verify_seconds)

    def compared(traced: TracedGraph, trial: Trial) -> tuple[list[GraphSegment], Flow, Comparison | None]:
        segments, flow = _cut(traced, trial, name, granularity)
        if check is None:
            return segments, flow, None
        if traced.tool == ELEMENTS and not _any_shared([segment.bind(model) for segment in segments]):
            # The model does nothing else than to call these modules.
            return segments, flow, check.look()

        def bound_to(copy: nn.Module) -> nn.Sequential:
            modules = [segment.bind(copy) for segment in segments]
            return nn.Sequential(*registered_once(modules, on_clone=flow.overwrites_input))

        return segments, flow, check.compare(bound_to, _names(model, segments), traced.tool)

    if check is not None and not (is_plain_sequential(model) and granularity.kind == "block"):
        check.run_once()
    with fixed_seed(0), naming_larger_pictures(model, given, name):
        return trace_model(model, given, name, granularity, compared, tool)


def _any_shared(modules: Sequence[nn.Module]) -> bool:
    """Whether a parameter or buffer is in several of them."""
    found = [{id(tensor) for tensor in tensors_used(module)} for module in modules]
    return len(frozenset[int]().union(*found)) < sum(map(len, found))


def _cut(
    traced: TracedGraph, trial: Trial, name: str, granularity: Granularity
) -> tuple[list[GraphSegment], Flow]:
    flow = Flow(traced, trial)
    if not flow.reaches_output:
        raise ModelError(
            f"{name}: its output does not depend on its input", "Return what is computed from the input."
        )
    if not flow.order:
        raise ModelError(f"{name} has no layers", "Give a model that computes something.")
    return [GraphSegment(flow, part, granularity.kind) for part in parts(flow, granularity)], flow


def _names(model: nn.Module, segments: Sequence[GraphSegment]) -> list[str]:
    """An nn.Sequential that was made of a model's layers keeps their names: it is the same chain."""
    kept = model.layer_names if isinstance(model, LayerSequential) else ()
    return list(kept) if len(kept) == len(segments) else _unique([segment.name for segment in segments])


def _remembered(model: nn.Module, segments: Sequence[GraphSegment]) -> tuple[str, ...]:
    """The pins of the chain that an nn.Sequential was made of."""
    if isinstance(model, LayerSequential) and len(model.layer_names) == len(segments):
        return model.keep_together
    return ()


def _unique(names: Sequence[str]) -> list[str]:
    taken: set[str] = set()
    given = set(names)
    counts: dict[str, int] = {}
    unique: list[str] = []
    for name in names:
        candidate, count = name, counts.get(name, 0)
        while candidate in taken or (count and candidate in given):
            count += 1
            candidate = f"{name}_{count}"
        counts[name] = count
        taken.add(candidate)
        unique.append(candidate)
    return unique


_Reasons = list[str | None]
"""Of each layer, why no stage may end with it."""


def _add(reasons: _Reasons, more: _Reasons) -> None:
    """The first reason found stays."""
    reasons[:] = [first or second for first, second in zip(reasons, more, strict=True)]


def _overwritten_reasons(
    model: nn.Module, segments: Sequence[GraphSegment], names: Sequence[str], flow: Flow
) -> _Reasons:
    """No cut that a tensor crosses which is overwritten behind it."""
    layers = _layers_of(segments)
    reasons: _Reasons = [None] * len(segments)
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


def _layers_of(segments: Sequence[GraphSegment]) -> dict[fx.Node, int]:
    return {node: index for index, segment in enumerate(segments) for node in segment.part.nodes}


def _edges(segments: Sequence[GraphSegment], flow: Flow) -> tuple[tuple[int, int], ...]:
    layers = _layers_of(segments)
    last = len(segments) - 1
    found = {
        (maker, layers.get(user, last))
        for node, maker in layers.items()
        for user in node.users
        if flow.holds_tensors(node)
        and maker != layers.get(user, last)
        and not flow.tables.is_made_again(node)
    }
    return tuple(sorted(found))


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


def _written(model: nn.Module, flow: Flow, comparison: Comparison | None) -> set[int]:
    """Identities of the buffers that a run of the model was seen to change."""
    names = flow.trial.writes.union(comparison.written if comparison else ())
    return {id(attribute(model, name)) for name in names}


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
            found = users.setdefault(one, new).layers
            found.extend([index] if index not in found else [])
    return list(users.values())


def _shared_reasons(tensors: Sequence[TensorUsers], names: Sequence[str]) -> _Reasons:
    """No cut between the first and the last user of a buffer that is written, nor of parameters that overlap
    in memory."""
    reasons: _Reasons = [None] * len(names)
    for shared in tensors:
        users = shared.layers
        may_part = shared.is_tied or shared.is_read_only
        for index in range(users[0], users[-1]) if not may_part else ():
            word = f"{names[users[0]]} and {names[users[-1]]} share {shared.name}"
            reasons[index] = reasons[index] or word
    return reasons


def _kept_together(patterns: Sequence[str], names: Sequence[str], model_name: str) -> _Reasons:
    """The user's pins: no cut between the first and the last layer of a pattern."""
    refuse_unmatched(patterns, names, "layer", model_name)
    reasons: _Reasons = [None] * len(names)
    for pattern in patterns:
        matching = [index for index, name in enumerate(names) if fnmatchcase(name, pattern)]
        for index in range(matching[0], matching[-1]):
            reasons[index] = reasons[index] or f"kept together: {pattern}"
    return reasons


def _first_users(
    modules: Sequence[nn.Module],
) -> list[tuple[tuple[nn.Parameter, ...], tuple[Tensor, ...]]]:
    seen: set[int] = set()

    def fresh(tensor: Tensor) -> bool:
        return id(tensor) not in seen and not seen.add(id(tensor))  # type: ignore[func-returns-value]

    return [
        (tuple(p for p in module.parameters() if fresh(p)), tuple(b for b in module.buffers() if fresh(b)))
        for module in modules
    ]

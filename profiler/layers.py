"""A module as a chain of layers, or as an nn.Sequential of them, and the cuts that must not be made."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import inf
from typing import Any

from torch import Tensor, fx, nn

from ..cost_models.errors import ModelError
from .comparison import ModelCheck
from .cutting import (
    Granularity,
    GraphSegment,
    cheapest_cut,
    find_calls,
    parts,
    parts_between,
    refuse_unmatched,
    same_segment,
)
from .exported_graph import attribute
from .flow import Flow, Position, output_forms
from .graph import GraphRun, TracedGraph, is_inside
from .layer import (
    BatchFaults,
    CloneInput,
    Comparison,
    Layer,
    LayerChain,
    LayerSequential,
    ModeLayer,
    ModeVariants,
    OutputShapes,
    Sharing,
    TensorUsers,
    find_tensor_users,
    list_unused,
    model_name,
    register_once,
    storage_aliases,
    tensors_used,
)
from .tracing import ELEMENTS, is_plain_sequential, trace_model
from .trial import NoCuts, Trial, suggest_larger_pictures
from .user_model import ModelInput, copy_modules, fixed_seed, refuse_reading_sparse, refuse_unusable

MODES = {True: "training", False: "evaluation"}


class _CannotAlignError(Exception):
    """The layers of the one mode have no counterparts in the other."""


@dataclass(frozen=True, eq=False)
class ModeTracer:
    """Traces a model in the modes that it is not in.

    `segments`, `flow`: of the trace in its own. `verify_seconds`: as of `build_chain`; None: not compared.
    """

    model: nn.Module
    example: ModelInput
    name: str
    granularity: Granularity
    segments: Sequence[GraphSegment]
    flow: Flow
    layer_names: Sequence[str]
    verify_seconds: float | None

    def variants(self) -> ModeVariants | None:
        """The layers in the other modes; None where no code in the graph reads a mode that they change."""
        reads = self.flow.traced.fixed_modes
        modules: dict[bool, tuple[nn.Module | None, ...]] = {}
        refusals: dict[bool, str] = {}
        for mode, word in MODES.items() if reads else ():
            switched = copy_modules(self.model, self.name).train(mode)
            before, after = dict(self.model.named_modules()), dict(switched.named_modules())
            if all(before[path].training == after[path].training for path in self.flow.traced.modes):
                continue
            try:
                segments = self._segments(switched)
            except (ModelError, _CannotAlignError) as error:
                what = error.what if isinstance(error, ModelError) else str(error)
                path, line = next(iter(reads.items()))
                refusals[mode] = (
                    f"the layers of {self.name} have no {word} mode: {what}. "
                    f"{path or self.name} reads its mode at {line}"
                )
                continue
            if any(segment is not None for segment in segments):
                modules[mode] = tuple(
                    None if segment is None else segment.bind(self.model) for segment in segments
                )
        if not modules and not refusals:
            return None
        return ModeVariants(modules, refusals, self._places(reads))

    def _places(self, reads: Mapping[str, str]) -> tuple[bool, ...]:
        """Mark each layer with code that reads the mode, or all traced layers if none shows it."""
        traced = [segment.path is None for segment in self.segments]
        reading = [
            is_traced and any(is_inside(path, reads) or "" in reads for path in self._paths(segment))
            for is_traced, segment in zip(traced, self.segments, strict=True)
        ]
        return tuple(next(filter(any, (reading, traced)), [True] * len(traced)))

    def _paths(self, segment: GraphSegment) -> list[str]:
        paths = self.flow.traced.paths
        return [paths.get(node, "").partition("@")[0] for node in segment.part.nodes]

    def _segments(self, switched: nn.Module) -> list[Any]:
        """For each layer the segment of the other mode; None where it is the same."""

        def cut(traced: TracedGraph, trial: Trial) -> list[Any]:
            return self._matched(Flow(traced, trial), switched)

        with fixed_seed(0):
            for tool in (self.flow.traced.tool, None):
                try:
                    return trace_model(switched, self.example, self.name, self.granularity, cut, tool)
                except ModelError:
                    if tool is None:
                        raise
        raise AssertionError

    def _matched(self, flow: Flow, switched: nn.Module) -> list[Any]:
        kind = self.granularity.kind
        plain = [GraphSegment(flow, part, kind) for part in parts(flow, self.granularity)]
        if len(plain) == len(self.segments) and all(map(same_segment, self.segments, plain)):
            return [None] * len(plain)
        aligned: list[GraphSegment | PassOn] = [*plain]
        if [segment.name for segment in plain] != [segment.name for segment in self.segments]:
            bounds = _Alignment(self.segments, flow).bounds()
            pieces = parts_between(flow, bounds)
            aligned = [PassOn() if part is None else GraphSegment(flow, part, kind) for part in pieces]
        self._compare(aligned, flow, switched)
        return [
            None if isinstance(own, GraphSegment) and same_segment(first, own) else own
            for first, own in zip(self.segments, aligned, strict=True)
        ]

    def _compare(self, segments: Sequence[Any], flow: Flow, switched: nn.Module) -> None:
        if self.verify_seconds is None:
            return

        def bind(copy: nn.Module) -> nn.Sequential:
            modules = [segment.bind(copy) for segment in segments]
            return nn.Sequential(*register_once(modules, on_clone=flow.overwrites_input))

        check = ModelCheck(switched, self.example, self.name, self.verify_seconds)
        check.compare(bind, self.layer_names, flow.traced.tool)


class PassOn:
    """A segment without operations: its layer does nothing in this mode."""

    def bind(self, model: nn.Module) -> nn.Module:
        """A module that returns what it is given."""
        module = nn.Identity()
        module.training = model.training
        return module


class _Alignment:
    """Places in a graph of one mode that correspond to the cuts between the segments of another."""

    def __init__(self, segments: Sequence[GraphSegment], flow: Flow) -> None:
        self._count, self._flow = len(segments), flow
        self._owners: dict[str, list[int]] = {}
        for index, segment in enumerate(segments):
            paths = segment.flow.traced.paths
            for name in dict.fromkeys(key for node in segment.part.nodes for key in _names_used(node, paths)):
                self._owners.setdefault(name, []).append(index)

    def bounds(self) -> list[Position | int]:
        """For each cut a position, or the number of operations where it lies at an end of the graph."""
        layers = self._layers()
        end = len(layers)
        bounds: list[Position | int] = []
        before = 0
        for cut in range(self._count - 1):
            first = 1 + max((i for i, own in enumerate(layers) if own is not None and own <= cut), default=-1)
            last = min((i for i, own in enumerate(layers) if own is not None and own > cut), default=end)
            position = cheapest_cut(self._flow, max(first, before), last)
            if position is not None:
                bounds.append(position)
                before = position.index
            elif last == end or max(first, before) == 0:
                before = end if last == end else 0
                bounds.append(before)
            else:
                node = self._flow.order[first - 1]
                raise _CannotAlignError(
                    f"it cannot be cut behind {self._flow.traced.paths.get(node) or node.name}"
                )
        return bounds

    def _layers(self) -> list[int | None]:
        """For each operation the layer that it belongs to; None for one that tells nothing.

        Parameters and buffers decide; what only one layer calls tells more where it fits between.
        """
        layers = list(self._by_tensors())
        nexts: list[int] = []
        for layer in reversed(layers):
            nexts.append(
                min(nexts[-1] if nexts else self._count - 1, self._count if layer is None else layer)
            )
        current = 0
        for index, (node, most) in enumerate(zip(self._flow.order, reversed(nexts), strict=True)):
            if layers[index] is None:
                single = [self._owners.get(name, []) for name in self._names(node)]
                fitting = [own[0] for own in single if len(own) == 1 and current <= own[0] <= most]
                layers[index] = min(fitting, default=None)
            current = max(current, layers[index] or 0)
        return layers

    def _by_tensors(self) -> Iterator[int | None]:
        current = 0
        for node in self._flow.order:
            owners = [self._owners.get(name, []) for name in self._names(node) if self._has_tensors(name)]
            later = [next((layer for layer in own if layer >= current), -1) for own in owners if own]
            if -1 in later:
                raise _CannotAlignError(f"{node.target} runs after modules that it ran before")
            current = max([current, *later])
            yield current if later else None

    def _names(self, node: fx.Node) -> list[str]:
        return _names_used(node, self._flow.traced.paths)

    def _has_tensors(self, name: str) -> bool:
        if name.startswith(_FUNCTION):
            return False
        value: object = self._flow.trial.module(name)
        if isinstance(value, nn.Module):
            return any(True for _ in (*value.parameters(), *value.buffers()))
        return isinstance(value, Tensor)


_FUNCTION = "function "


def _names_used(node: fx.Node, paths: Mapping[fx.Node, str]) -> list[str]:
    """Names of the module or function that it calls, and of the parameters and buffers that it reads."""
    names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    if node.op == "call_module":
        return [*names, str(node.target)]
    path = paths.get(node, "").partition("@")[0]
    return [*names, f"{_FUNCTION}{path} {getattr(node.target, '__name__', node.target)}"]


# Why no stage may end with a layer: tensors overwritten or shared behind it, and the user's pins.

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


# A module as a chain of layers, and the cuts between them that must not be made.

_ENOUGH_SIZES = 2
"""Batch sizes that tell which dimension of a tensor is the batch's."""


def build_chain(
    model: nn.Module,
    example_input: object,
    *,
    name: str | None = None,
    granularity: str = "block",
    keep_together: Sequence[str] = (),
    aliases: tuple[tuple[str, ...], ...] | None = None,
    verify: bool = False,
    verify_seconds: float = inf,
    tool: str | None = None,
    every_mode: bool = False,
) -> LayerChain:
    """Takes `model` apart into layers; deterministic, and without changing it.

    An nn.Sequential is its elements, nested ones taken apart too (`features.0`); everything else is traced,
    and so is an nn.Sequential that is to be cut otherwise. `granularity`: `block` cuts where one tensor alone
    leads on, and where few do inside a layer with too much of the work; `fine` after every operation that
    computes something; `module:PATTERN[,PATTERN...]` around the calls of the modules so named.

    The input, as `ModelInput.of` takes it, is only looked at for its shapes
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
    `every_mode`: where code of the model reads `self.training`, it is traced in the other mode, too.

    Raises ModelError: not traceable (with the line), with hooks of its own, lazy, failing on this input, or a
    pattern that nothing matches; with `verify` also where all tools' layers differ from the model, or where
    it fails in training; UsageError for an unknown granularity.
    """
    cut_by = Granularity.parse(granularity)
    name = name or model_name(model)
    example = ModelInput.of(example_input, name)
    refuse_unusable(name, model)
    granularity_text = str(cut_by)
    if isinstance(model, LayerSequential) and cut_by.kind != "module":
        # Its elements are the layers that it was made of.
        cut_by, granularity_text = Granularity("block"), model.granularity
    seconds = verify_seconds if verify else None
    try:
        segments, flow, comparison = _segments(
            model, example, name, cut_by, verify_seconds=seconds, tool=tool
        )
    except ModelError as error:
        refuse_reading_sparse(name, model, error.what)
        raise
    modules = [segment.bind(model) for segment in segments]
    names = _names(model, segments)
    variants: ModeVariants | None = None
    if every_mode:
        variants = ModeTracer(model, example, name, cut_by, segments, flow, names, seconds).variants()
    aliases = storage_aliases(model) if aliases is None else aliases
    users = find_tensor_users(model, modules, aliases, _written(model, flow, comparison))
    pins = (*_remembered(model, segments), *keep_together)
    reasons = first_reasons(
        overwriting_reasons(model, segments, names, flow),
        sharing_reasons(users, names),
        pin_reasons(pins, names, name),
    )
    firsts = _first_users(modules)
    shapes, faults = _output_shapes(segments, names, flow)
    layers = tuple(
        Layer(
            names[i],
            segments[i].kind(model),
            modules[i],
            segments[i].path,
            *firsts[i],
            reasons[i],
            segments[i].crossing,
            shapes[i],
        )
        for i in range(len(segments))
    )
    return LayerChain(
        name,
        layers,
        flow.overwrites_input,
        granularity_text,
        _edges(segments, flow),
        pins,
        aliases,
        flow.traced.recomputes,
        flow.traced.tool,
        comparison,
        list_unused(model, [*modules, *(variants.all_modules if variants else ())]),
        tuple(users),
        tuple(_own_modes(model)),
        faults,
        variants,
        output_forms(flow),
    )


def _own_modes(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        own = type(module).train
        if own is not nn.Module.train and not (own.__module__ or "").startswith(("torch.", "pplan.")):
            yield path or type(module).__name__


def _segments(
    model: nn.Module,
    example: ModelInput,
    name: str,
    granularity: Granularity,
    *,
    verify_seconds: float | None,
    tool: str | None,
) -> tuple[list[GraphSegment], Flow, Comparison | None]:
    check = None if verify_seconds is None else ModelCheck(model, example, name, verify_seconds)

    def compared(traced: TracedGraph, trial: Trial) -> tuple[list[GraphSegment], Flow, Comparison | None]:
        segments, flow = _cut(traced, trial, name, granularity)
        if check is None:
            return segments, flow, None

        def bound_to(copy: nn.Module) -> nn.Sequential:
            modules = [segment.bind(copy) for segment in segments]
            return nn.Sequential(*register_once(modules, on_clone=flow.overwrites_input))

        names = _names(model, segments)
        if traced.tool == ELEMENTS and not _any_shared([segment.bind(model) for segment in segments]):
            # The model does nothing else than to call these modules.
            return segments, flow, check.check_output(bound_to, names, traced.tool)
        return segments, flow, check.compare(bound_to, names, traced.tool)

    if check is not None and not (is_plain_sequential(model) and granularity.kind == "block"):
        check.run_once()
    with fixed_seed(0), suggest_larger_pictures(model, example, name):
        return trace_model(model, example, name, granularity, compared, tool)


def _output_shapes(
    segments: Sequence[GraphSegment], names: Sequence[str], flow: Flow
) -> tuple[list[OutputShapes | None], BatchFaults]:
    """The shapes that each layer hands on, None where they are not known, and what is wrong with them."""
    sizes = flow.trial.several_samples
    runs = [(size, run) for size in sizes if (run := flow.trial.run_at(size)) is not None]
    shapes = [
        OutputShapes(layer, tuple((size, segment.output_shapes(run)) for size, run in runs))
        for layer, segment in zip(names, segments, strict=True)
    ]
    several = _first_difference(segments, shapes, *runs[0]) if len(runs) >= _ENOUGH_SIZES else ""
    if several or len(runs) < _ENOUGH_SIZES:
        return [None] * len(segments), BatchFaults(any_size=several)
    single = flow.trial.run_at(1)
    single_fault = "" if single is None else _first_difference(segments, shapes, 1, single)
    return [*shapes], BatchFaults(single=single_fault)


def _first_difference(
    segments: Sequence[GraphSegment], shapes: Sequence[OutputShapes], size: int, run: GraphRun
) -> str:
    pairs = zip(segments, shapes, strict=True)
    differences = (own.difference(size, segment.output_shapes(run)) for segment, own in pairs)
    return next(filter(None, differences), "")


def _any_shared(modules: Sequence[nn.Module]) -> bool:
    """Whether a parameter or buffer is in several of them."""
    identities = [{id(tensor) for tensor in tensors_used(module)} for module in modules]
    return len(frozenset[int]().union(*identities)) < sum(map(len, identities))


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
    between = parts(flow, granularity)
    if granularity.kind == "module":
        _refuse_no_cuts(flow, granularity, len(between), name)
    return [GraphSegment(flow, part, granularity.kind) for part in between], flow


def _refuse_no_cuts(flow: Flow, granularity: Granularity, layers: int, name: str) -> None:
    """Raises NoCuts unless every pattern has calls in the graph, and there is a cut."""
    where = f"{name}: granularity='module:{{}}' makes no cut"
    for pattern in granularity.patterns:
        modules = Granularity("module", (pattern,))
        if any(True for _ in find_calls(flow, modules.outermost)):
            continue
        path = next(path for path in flow.trial.module_names if modules.outermost(path))
        called = [str(node.target) for node in flow.order if node.op == "call_module"]
        around = next((module for module in called if is_inside(path, [module])), None)
        if around is None:
            raise NoCuts(
                f"{where.format(pattern)}: no operation of forward runs in {path}", "Leave out that pattern."
            )
        error = NoCuts(
            f"{where.format(pattern)}: {path} is inside {around}, which is run as a whole",
            f"Name {around}, or modules around what cannot be traced.",
        )
        error.is_whole = True
        raise error
    if layers == 1:
        raise NoCuts(
            f"{where.format(','.join(granularity.patterns))}: forward does nothing before or behind their "
            "calls, or what crosses there cannot be handed over",
            "Name modules inside, or use granularity='fine'.",
        )


def _names(model: nn.Module, segments: Sequence[GraphSegment]) -> list[str]:
    """An nn.Sequential that was made of a model's layers keeps their names: it is the same chain."""
    own_names = model.layer_names if isinstance(model, LayerSequential) else ()
    return (
        list(own_names)
        if len(own_names) == len(segments)
        else _unique([segment.name for segment in segments])
    )


def _remembered(model: nn.Module, segments: Sequence[GraphSegment]) -> tuple[str, ...]:
    """The pins of the chain that an nn.Sequential was made of."""
    if isinstance(model, LayerSequential) and len(model.layer_names) == len(segments):
        return model.keep_together
    return ()


def _unique(names: Sequence[str]) -> list[str]:
    used: set[str] = set()
    originals = set(names)
    counts: dict[str, int] = {}
    unique: list[str] = []
    for name in names:
        candidate, count = name, counts.get(name, 0)
        while candidate in used or (count and candidate in originals):
            count += 1
            candidate = f"{name}_{count}"
        counts[name] = count
        used.add(candidate)
        unique.append(candidate)
    return unique


def _edges(segments: Sequence[GraphSegment], flow: Flow) -> tuple[tuple[int, int], ...]:
    layers = layer_numbers(segments)
    last = len(segments) - 1
    edges = {
        (maker, layers.get(user, last))
        for node, maker in layers.items()
        for user in node.users
        if flow.holds_tensors(node)
        and maker != layers.get(user, last)
        and not flow.tables.is_made_again(node)
    }
    return tuple(sorted(edges))


def _written(model: nn.Module, flow: Flow, comparison: Comparison | None) -> set[int]:
    """Identities of the buffers that a run of the model was seen to change."""
    names = flow.trial.writes.union(comparison.written if comparison else ())
    return {id(attribute(model, name)) for name in names}


def _first_users(
    modules: Sequence[nn.Module],
) -> list[tuple[tuple[nn.Parameter, ...], tuple[Tensor, ...]]]:
    counted: set[int] = set()

    def fresh(tensor: Tensor) -> bool:
        return id(tensor) not in counted and not counted.add(id(tensor))  # type: ignore[func-returns-value]

    return [
        (tuple(p for p in module.parameters() if fresh(p)), tuple(b for b in module.buffers() if fresh(b)))
        for module in modules
    ]


# A module as an nn.Sequential of exactly the layers that a profile counts.


def sequential(
    model: nn.Module,
    example_input: object,
    *,
    granularity: str = "block",
    keep_together: Sequence[str] = (),
    verify: bool = True,
) -> LayerSequential:
    """`model` as an nn.Sequential of one element for each layer of its profile, whose names it knows.

    It takes the model's input, or where that has several tensors the tuple of all, in the order of the
    arguments; the elements hand each other a tensor, or a tuple of all that cross the cut; and it returns
    what the model does.

    The elements are the model's own modules, or run them: parameters and buffers are shared, so training the
    one trains the other. Each parameter is registered once, with the first layer that uses it: a module that
    an earlier layer uses too is run through a `ReusedModule`, and a module that shares some parameters with
    an earlier one (tied weights) is a copy without those. Runtimes give each stage a copy of a parameter that
    layers of several stages share.
    A buffer that two modules register stays with both, as in the model. Where the model overwrites its
    input, the first element works on a clone.

    `example_input` is an input of the model: a tensor of shape (batch, ...), a tuple of forward's arguments,
    or a dict of its keyword arguments; it and the options are `build_chain`'s. The model is not changed.
    Where its code reads `self.training` (`F.dropout`, auxiliary heads), it is traced in both modes: train()
    and eval() of the layers, or of one of them, switch to the trace of that mode, or raise ModelError where
    there is none. Sizes that are used far from the tensor they were asked of keep the example's, the batch
    excepted. Parts that the model
    recomputes in backward (torch.utils.checkpoint) are not recomputed, unless they lie inside one module that
    is taken whole: recomputation is the plan's to decide.

    `verify`: model and layers are run once more, on copies, and must leave the same outputs, gradients,
    buffers and random state; where that is too large or too slow to be run, a warning says so.

    A warning names a layer that hands on another shape for one sample (`squeeze()`), or one of which more
    than the batch dimension changes with the batch: runtimes refuse such micro-batches.

    Raises ModelError as `build_chain` does.
    """
    chain = build_chain(
        model,
        example_input,
        granularity=granularity,
        keep_together=keep_together,
        verify=verify,
        every_mode=True,
    )
    for note in (*(chain.comparison.notes if chain.comparison else ()), *filter(None, [chain.faults.note])):
        warnings.warn(f"{chain.model_name}: {note}", UserWarning, stacklevel=2)
    return as_sequential(chain)


def as_sequential(chain: LayerChain) -> LayerSequential:
    """The layers of `chain`, in order."""
    modules = [layer.module for layer in chain.layers]
    children = register_once(modules, on_clone=chain.overwrites_input, with_modes=partial(_with_modes, chain))
    layers = LayerSequential(*children)
    layers.model_name = chain.model_name
    layers.layer_names = tuple(layer.name for layer in chain.layers)
    layers.granularity, layers.keep_together = chain.granularity, chain.keep_together
    layers.unused_names, layers.faults = chain.unused, chain.faults
    read_only = {id(own.tensor) for own in chain.users if own.is_read_only}
    layers.read_only_buffers = tuple(name for name, own in layers.named_buffers() if id(own) in read_only)
    written = {id(own.tensor) for own in chain.users if own.is_written}
    layers.written_buffers = tuple(name for name, own in layers.named_buffers() if id(own) in written)
    layers.own_modes = chain.own_modes
    return layers


def _with_modes(chain: LayerChain, children: list[nn.Module], sharing: Sharing) -> list[nn.Module]:
    """`children`, those that differ between modes with what they run in each."""
    variants = chain.variants
    if variants is None:
        return children
    none = (None,) * len(children)
    in_training, in_evaluation = (variants.modules.get(mode, none) for mode in (True, False))
    switching: list[nn.Module] = []
    for index, child in enumerate(children):
        training, evaluation = in_training[index], in_evaluation[index]
        refusals = variants.refusals if variants.places[index] else {}
        if training is None and evaluation is None and not refusals:
            switching.append(child)
            continue
        switching.append(
            ModeLayer(
                child,
                None if training is None else sharing.own(training),
                None if evaluation is None else sharing.own(evaluation),
                refusals,
                training=chain.layers[index].module.training,
            )
        )
    return switching


def state_dict_names(
    model: nn.Module, example_input: object, *, granularity: str = "block"
) -> dict[str, str]:
    """Names in `model.state_dict()` -> names in that of `sequential(model, example_input, granularity=...)`.

    Every name of the latter is led to, so that checkpoints move both ways:

        layers.load_state_dict({name: from_model[old] for old, name in names.items()})
        model.load_state_dict({old: from_layers[name] for old, name in names.items()})

    A tensor that the model knows by several names is in the nn.Sequential once: the second names lead to the
    same place as the first. What no layer uses is left out: see `LayerSequential.unused_names`.
    """
    chain = build_chain(model, example_input, granularity=granularity, verify=True, every_mode=True)
    own = model.state_dict(keep_vars=True)
    names: dict[str, str] = {}
    places: dict[int, str] = {}
    for index, (layer, child) in enumerate(zip(chain.layers, as_sequential(chain), strict=True)):
        around = ""
        while isinstance(child, CloneInput | ModeLayer):
            child, around = child.layer, f"{around}layer."
        for inner, value in child.state_dict(keep_vars=True).items():
            key = around + inner
            name = inner if layer.path is None else f"{layer.path}.{inner}"
            if name in own and (own[name] is value or not isinstance(value, Tensor)):
                names[name] = f"{index}.{key}"
            places.setdefault(id(value), f"{index}.{key}")
    for name, value in own.items():
        if id(value) in places:
            names.setdefault(name, places[id(value)])
    return names

"""A module as a chain of layers, and the cuts between them that must not be made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from torch import Tensor, nn

from ...cost_models.errors import ModelError
from ..comparison.model_check import Comparison, ModelCheck
from ..graphs.cutting import Granularity, parts
from ..graphs.flow import Flow
from ..graphs.frontends import ELEMENTS, is_plain_sequential, trace_model
from ..graphs.graph import TracedGraph
from ..graphs.graph_run import GraphRun
from ..graphs.model_output import OutputForm, output_forms
from ..graphs.output_shapes import BatchFaults, OutputShapes
from ..graphs.remodule import attribute
from ..graphs.segments import GraphSegment
from ..graphs.trial import Trial, suggest_larger_pictures
from ..user_model.loaded_model import ModelInput, refuse_unusable
from ..user_model.seeding import fixed_seed
from ..user_model.shared_parameters import storage_aliases, tensors_used
from .cut_reasons import (
    TensorUsers,
    find_tensor_users,
    first_reasons,
    layer_numbers,
    overwriting_reasons,
    pin_reasons,
    sharing_reasons,
)
from .layer_sequential import LayerSequential, model_name, register_once
from .mode_variants import ModeTracer, ModeVariants

_ENOUGH_SIZES = 2
"""Batch sizes that tell which dimension of a tensor is the batch's."""


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
    shapes: OutputShapes | None = None
    """Shapes of these, or of the model's output, at several batch sizes; None: not known."""

    def check_shapes(self, size: int, output: object) -> None:
        """Raise ShapeDependsOnBatch where the output of `size` samples has another shape than others."""
        if self.shapes is not None:
            self.shapes.check(size, output)

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
    """The comparison with the model by value; None: not asked for."""
    unused: tuple[str, ...] = ()
    """Parameters and buffers of the model that no layer uses, by name."""
    users: tuple[TensorUsers, ...] = ()
    """The users of each parameter and buffer."""
    own_modes: tuple[str, ...] = ()
    """Modules with a `train` of their own, the model itself by its class."""
    faults: BatchFaults = BatchFaults()
    variants: ModeVariants | None = None
    """Code of the layers in other modes. None if it is the same, or was not asked for."""
    outputs: tuple[OutputForm, ...] = ()
    """The tensors that the model returns."""

    def __len__(self) -> int:
        return len(self.layers)


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
    segments, flow, comparison = _segments(
        model, example, name, cut_by, verify_seconds=verify_seconds if verify else None, tool=tool
    )
    modules = [segment.bind(model) for segment in segments]
    names = _names(model, segments)
    variants: ModeVariants | None = None
    if every_mode:
        seconds = verify_seconds if verify else None
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


def list_unused(model: nn.Module, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """Names of the model's parameters and buffers that none of the modules uses."""
    used = {id(tensor) for module in modules for tensor in tensors_used(module)}
    state = model.state_dict(keep_vars=True)
    own = (*model.named_parameters(), *model.named_buffers())
    return tuple(name for name, tensor in own if name in state and id(tensor) not in used)


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
    return [GraphSegment(flow, part, granularity.kind) for part in parts(flow, granularity)], flow


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

"""torch.export: the graph of a model that torch.fx cannot trace."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import itertools
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from ..cost_models.errors import ModelError
from .exported_graph import (
    CannotBeOpaque,
    ExportedModule,
    OpaqueCalls,
    ValueReads,
    alias_leaf_inputs,
    attribute,
    rebuild_graph,
)
from .graph import AROUND, TracedGraph, is_inside
from .torch_private import tree_flatten, tree_leaves
from .trial import (
    NoOtherGraph,
    lengths_that_vary,
    masks_as_in_training,
    notice_checkpoints,
    notice_modes,
    refuse_custom_functions,
    trial_run,
)
from .user_model import (
    FlatOutput,
    ModelInput,
    copy_model,
    copy_to_meta,
    failing_as,
    first_line,
    is_out_of_memory,
    user_line,
)

# Batch sizes that a graph of torch.export holds for: all, else the line of the model that asks for some.
#
# Micro-batches have other sizes than the example, so a forward that makes a plain number of its batch is
# refused, or the module that does so is left whole.

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


# torch.export: the graph of a model that torch.fx cannot trace, made to look like one of torch.fx.
#
# What torch.export gives are operations of ATen with everything else baked in. Here calls of leaf modules are
# made whole again (exported_graph.py), parts that ran without gradients or under autocast are one call,
# sizes that follow the batch stay symbolic, and a device that was the tensors' own is asked of a tensor
# (`device_of` of graph.py; any tensor of the graph will do). Every node's `meta["value_kind"]` is
# "tensor", "size" (a number), "device" or "other" (a tuple of tensors, say): only tensors may cross cuts,
# graph.py finds sizes and devices again.
#
# The mode is baked where no leaf module holds it: `F.dropout(x, p, self.training)`, the dropout of
# `scaled_dot_product_attention`, an nn.LSTM's; layers.py traces the other mode. So are dtypes:
# convert the model first.


def export_around(model: nn.Module, example: ModelInput, name: str, whole: Sequence[str] = ()) -> TracedGraph:
    """As `export_graph` on the model's own device; each call of a module is one, and is not gone into, of the
    modules `whole`, of those that cannot be traced, and of all others of their classes.

    The graph's tool names them. Raises as `export_graph` does.
    """
    paths: list[str] = []
    for path in whole:
        paths = _with_its_class(model, path, paths)
    while True:
        inside: list[str] = []
        try:
            graph = rebuild_graph(model, _exported_around(model, example, name, paths, inside), paths)
            if not paths:
                raise NoOtherGraph(f"{name}: no module is taken whole", CUT_AROUND)
            return dataclasses.replace(graph, tool=AROUND + ", ".join(paths))
        except NoOtherGraph:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            modules = [module_at(model, error.place)] if isinstance(error, SomeBatchSizes) else inside
            failed = next((path for path in reversed(modules) if path and not is_inside(path, paths)), "")
            if not failed:
                raise _as_model_error(error, name) from error
            paths = _with_its_class(model, failed, paths)


def _with_its_class(model: nn.Module, path: str, paths: Sequence[str]) -> list[str]:
    """`paths` and that of a module, and of all others of its class; outermost ones only."""
    kind = type(model.get_submodule(path))
    every = [*paths, *(other for other, part in model.named_modules() if other and type(part) is kind)]
    return [
        one for one in dict.fromkeys(every) if not is_inside(one, [each for each in every if each != one])
    ]


def _exported_around(
    model: nn.Module, example: ModelInput, name: str, paths: list[str], inside: list[str]
) -> ExportedModule:
    """`inside`: takes the modules that were being called when it failed."""
    calls = OpaqueCalls(paths)
    if paths:
        watched, some, _ = _for_real(model, example, name)
        calls.watch(watched, [some, some.repeated(some.batch + 1)])
    return _exported(*_for_real(model, example, name), calls, inside)


def export_with_whole_blocks(
    model: nn.Module, example: ModelInput, name: str, blocks: Sequence[str]
) -> TracedGraph:
    """As `export_graph` on a meta copy, where each call of one of the `blocks` is not gone into.

    For many blocks, which take long to trace. Raises ModelError where they may do more than to return what
    they compute: where they recompute parts of themselves, or keep tensors in attributes.
    """
    with failing_as(lambda error: _as_model_error(error, name)):
        calls = OpaqueCalls(blocks)
        watched, some, _ = _on_meta(model, example, name)
        before = _tensor_attributes(watched)
        with notice_checkpoints() as noticed, trial_run(some), _masks(example):
            calls.watch(watched, [some, some.repeated(some.batch + 1)])
        if noticed or _tensor_attributes(watched) != before:
            raise CannotBeOpaque("its blocks do more than to return what they compute")
        export = _exported(*_on_meta(model, example, name), calls)
        _refuse_no_values(export, example)
        return rebuild_graph(model, export, blocks)


def export_with_checks(
    model: nn.Module, example: ModelInput, name: str, *, of_the_input: bool = False
) -> TracedGraph:
    """As `export_graph` on the model's own device; numbers that forward takes out of tensors are the
    example's, which the layers check.

    `of_the_input`: also of tensors that depend on the samples. Raises as `export_graph` does, and
    NoOtherGraph where forward takes none.
    """
    reads = ValueReads(of_the_input=of_the_input)
    with failing_as(lambda error: _as_model_error(error, name)):
        watched, some, _ = _for_real(model, example, name)
        with trial_run(some, gradients=True), _masks(example):
            reads.watch(watched, [some, some.repeated(some.batch + 1), _of_other_values(some)])
        return rebuild_graph(model, _exported(*_for_real(model, example, name), reads=reads))


def _of_other_values(example: ModelInput) -> ModelInput:
    """As many samples with other signs and sizes; those that are no floating numbers in another order."""

    def other(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != example.batch:
            return tensor
        return tensor * -10 if tensor.is_floating_point() else tensor.flip(0)

    return example.mapped(other)


def _tensor_attributes(model: nn.Module) -> dict[tuple[str, str], list[int]]:
    """Identities of all tensors that its modules keep, by module and attribute."""
    return {
        (path, attribute): [id(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for path, module in model.named_modules()
        for attribute, value in vars(module).items()
    }


def _masks(example: ModelInput) -> contextlib.AbstractContextManager[None]:
    return masks_as_in_training(one_text_a_row="position_ids" not in example.kwargs)


def export_graph(model: nn.Module, example: ModelInput, name: str, *, for_real: bool = False) -> TracedGraph:
    """The graph of `model` called with `example`, for any batch size.

    Traced on a meta copy, or where that fails or `for_real` on a real one (models may compute otherwise on
    the device that they are on), in the mode (`training`) that each module is in.
    Raises ModelError with the line of the model's code that cannot be traced or holds for one batch size
    only; where memory runs out, what the allocator raises.
    """
    failures: list[Exception] = []
    for place in (_for_real,) if for_real else (_on_meta, _for_real):
        try:
            export = _exported(*place(model, example, name))
            if place is _on_meta:
                _refuse_no_values(export, example)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failures.append(error)
        else:
            return rebuild_graph(model, export)
    # On the meta device much fails that is not the model's fault.
    raise _as_model_error(failures[-1], name) from failures[-1]


def _as_model_error(failure: Exception, name: str) -> ModelError:
    if isinstance(failure, ModelError):
        return failure
    return ModelError(
        f"{name} cannot be traced by torch.export: {first_line(failure)}{_at(_stopping_line(failure))}",
        CUT_AROUND,
    )


def _on_meta(model: nn.Module, example: ModelInput, name: str) -> tuple[nn.Module, ModelInput, str]:
    return copy_to_meta(model, name), _several(example).to("meta"), name


def _for_real(model: nn.Module, example: ModelInput, name: str) -> tuple[nn.Module, ModelInput, str]:
    device = next((tensor.device for tensor in model.parameters()), example.tensors[0].device)
    return copy_model(model, name), _several(example).to(device).clone(), name


def _several(example: ModelInput) -> ModelInput:
    """torch.export takes a size of one for a constant; what is no batch must not look like one."""
    others = {len(tensor) for tensor in example.tensors if tensor.dim() and len(tensor) != example.batch}
    return example.repeated(next(n for n in itertools.count(max(2, example.batch)) if n not in others))


def _exported(
    model: nn.Module,
    example: ModelInput,
    name: str,
    calls: OpaqueCalls | None = None,
    inside: list[str] | None = None,
    reads: ValueReads | None = None,
) -> ExportedModule:
    calls, reads = calls or OpaqueCalls(()), reads or ValueReads()
    no_tensors = alias_leaf_inputs(model)
    if inside is not None:
        _note_calls(model, inside)
    output = FlatOutput(model)
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in example.tensors:
        if tensor.dim() and len(tensor) == example.batch:
            shapes[tensor] = {0: torch.export.Dim.AUTO}
    with (
        _silence(),
        _masks(example),
        lengths_that_vary(model),
        output.flattened(),
        refuse_custom_functions(),
        calls.inside(model),
        reads.inside(),
        notice_modes(model) as modes,
    ):
        _spell_keywords_out(model, example)
        program = torch.export.export(
            model, example.args, example.kwargs, dynamic_shapes=shapes, strict=False
        )
        module = program.module()
    inputs = _placeholders(module, program, example)
    refuse_some_batch_sizes(inputs, program, example, name)
    if inside is not None:
        inside.clear()
    device = example.tensors[0].device
    with_samples = zip(inputs, example.tensors, strict=True)
    batches = {node for node, tensor in with_samples if tensor.dim() and len(tensor) == example.batch}
    return ExportedModule(
        module, model, device, inputs, output.finish, no_tensors, calls, reads, batches, modes
    )


def _note_calls(model: nn.Module, inside: list[str]) -> None:
    """While `model` runs, `inside` are the modules that are being called, innermost last."""

    def leave(*_: Any) -> None:
        inside.pop()

    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            # They take no hooks.
            continue
        module.register_forward_pre_hook(lambda *_, path=path: inside.append(path))
        module.register_forward_hook(leave)


def _spell_keywords_out(model: nn.Module, example: ModelInput) -> None:
    """In place, for those that forward takes as `**any`: torch 2.11 cannot let sizes of such tensors vary."""
    signature = inspect.signature(model.forward)
    parameters = {
        key: value for key, value in signature.parameters.items() if value.kind is not value.VAR_KEYWORD
    }
    for key in example.kwargs:
        parameters.setdefault(key, inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY))
    model.forward.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """torch.export logs and prints what it fails at, and the model may print each time it is called."""
    disabled = logging.root.manager.disable
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


def _placeholders(
    module: fx.GraphModule, program: torch.export.ExportedProgram, example: ModelInput
) -> tuple[fx.Node, ...]:
    """Of each tensor of `example`; torch.export puts keywords in the order of forward's signature."""
    spec = program.call_spec.in_spec
    keywords = spec.child(1).context if spec is not None else list(example.kwargs)
    leaves, _ = tree_flatten((example.args, {key: example.kwargs[key] for key in keywords}))
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    places = {id(leaf): node for node, leaf in zip(nodes, leaves, strict=True) if isinstance(leaf, Tensor)}
    return tuple(places[id(tensor)] for tensor in example.tensors)


def _refuse_no_values(export: ExportedModule, example: ModelInput) -> None:
    """A tensor that forward makes of numbers on its input's device has none left when that is meta."""
    if example.tensors[0].is_meta:
        return
    for node in export.module.graph.nodes:
        value = attribute(export.module, str(node.target)) if node.op == "get_attr" else None
        own = attribute(export.traced, str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, Tensor) and value.is_meta and own is None:
            raise ValueError(f"the constant {node.target} has no values")


def _at(line: str) -> str:
    return f" ({line})" if line else ""


def _stopping_line(error: BaseException) -> str:
    """Of the innermost exception that comes from the user's own code."""
    line, current = "", error
    visited: set[int] = set()
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        line = line or user_line(current)
        current = current.__cause__ or current.__context__  # type: ignore[assignment]
    return line

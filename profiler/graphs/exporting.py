"""torch.export: the graph of a model that torch.fx cannot trace, made to look like one of torch.fx.

What torch.export gives are operations of ATen with everything else baked in. Here calls of leaf modules are
made whole again (remodule.py), parts that ran without gradients or under autocast are one call (regions.py),
sizes that follow the batch stay symbolic, and a device that was the tensors' own is asked of a tensor
(`device_of` of size_recovery.py; any tensor of the graph will do). Every node's `meta["value_kind"]` is
"tensor", "size" (a number), "device" or "other" (a tuple of tensors, say): only tensors may cross cuts,
size_recovery.py finds sizes and devices again.

The mode is baked where no leaf module holds it: `F.dropout(x, p, self.training)`, the dropout of
`scaled_dot_product_attention`, an nn.LSTM's; chain/mode_variants.py traces the other mode. So are dtypes:
convert the model first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import itertools
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...cost_models.errors import ModelError
from ..torch_internals import tree_flatten, tree_leaves
from ..user_model.failures import first_line, is_out_of_memory, user_line
from ..user_model.flat_output import FlatOutput
from ..user_model.loaded_model import ModelInput, copy_model, copy_to_meta
from .exported_graph import ExportedModule, rebuild_graph
from .graph import AROUND, TracedGraph, is_inside
from .opaque_calls import CannotBeOpaque, OpaqueCalls
from .remodule import (
    alias_leaf_inputs,
    attribute,
)
from .tracing_patches import (
    lengths_that_vary,
    masks_as_in_training,
    notice_checkpoints,
    notice_modes,
    refuse_custom_functions,
)
from .trial import trial_run
from .varying_batch import CUT_AROUND, SomeBatchSizes, module_at, refuse_some_batch_sizes


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
            return dataclasses.replace(graph, tool=AROUND + ", ".join(paths))
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
    try:
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
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _as_model_error(error, name) from error


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
) -> ExportedModule:
    calls = calls or OpaqueCalls(())
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
    return ExportedModule(module, model, device, inputs, output.finish, no_tensors, calls, modes)


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

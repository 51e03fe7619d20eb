"""Which tool traces a model: none for a plain nn.Sequential, else torch.fx, else torch.export."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from torch import fx, nn

from ...cost_models.errors import ModelError
from ..torch_internals import child_modules, has_hooks
from ..user_model.failures import first_line, is_out_of_memory
from ..user_model.loaded_model import ModelInput
from .cutting import Granularity, refuse_unmatched
from .graph import AROUND, TracedGraph
from .module_row import IN_A_ROW, call_in_a_row
from .tracing import INSTEAD, bind_example, container_paths, trace_symbolically
from .tracing_patches import notice_checkpoints
from .trial import NotTheModel, Trial, refuse_failing, runs_on_meta

_Frontend = Callable[[nn.Module, ModelInput, str], TracedGraph]
_Result = TypeVar("_Result")


_HIGHER = 2
"""Modules around those that cannot be traced that are tried, where what these keep is changed from there."""
MANY = 6
"""From so many blocks on, to look into each takes too long."""
_CACHE = "Cache'> in output"
"""What torch.export says of a model of transformers that returns its keys and values."""
ELEMENTS = "its elements"
"""The `tool` of a plain nn.Sequential's graph, which is not traced."""


def refuse_hooks(model: nn.Module, name: str) -> None:
    """Raises ModelError where the model has hooks."""
    if has_hooks(model):
        raise ModelError(
            f"{name} has hooks of its own, which running its layers one by one would leave out",
            "Remove the hook, or wrap the model: nn.Sequential(model) keeps it, as one layer.",
        )


def trace_model(
    model: nn.Module,
    example: ModelInput,
    name: str,
    granularity: Granularity,
    make: Callable[[TracedGraph, Trial], _Result],
    tool: str | None = None,
) -> _Result:
    """What `make` makes of the graph of `model` by the first tool whose graph runs as the model does.

    `make` is called with a graph and its trial, and raises NotTheModel where that is another model's. `tool`:
    the only one to be tried, as a graph of another copy of this model names it.

    Raises ModelError: no tool can draw it (with the lines of the model that stopped them), it fails on this
    input, a pattern matches no module, `example` does not fit forward, or the model has hooks; and what
    `make` raises.
    """
    refuse_hooks(model, name)
    modules = [path for path, _ in model.named_modules() if path]
    refuse_unmatched(granularity.patterns, modules, "module", name)
    failures: list[ModelError] = []
    if is_plain_sequential(model) and granularity.kind == "block":
        elements = sequential_graph(model, example, name)
        try:
            return make(elements, Trial(elements, model, example, name))
        except NotTheModel as error:
            failures.append(error)
    bind_example(model, example, name)
    suspects: list[str] = []
    around: list[str] = []
    for words, frontend in _frontends(model, granularity, tool, suspects, around):
        try:
            with notice_checkpoints() as noticed:
                traced = frontend(model, example, name)
            if traced.tool == AROUND:
                # With nothing taken whole it is the graph that failed before.
                continue
            around[:] = _whole_modules(traced.tool) or around
            tool_used = traced.tool if traced.tool.startswith(AROUND) else words
            traced = dataclasses.replace(traced, recomputes=bool(noticed), tool=tool_used)
        except ModelError as error:
            failures.append(error)
            continue
        try:
            trial = Trial(traced, model, example, name)
            trial.check_against_model(name)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failure = _as_model_error(error, words, name)
            if not runs_on_meta(model, example, name):
                raise failure from error
            failures.append(failure)
            continue
        try:
            return make(traced, trial)
        except NotTheModel as error:
            failures.append(error)
            suspects += error.suspects
    refuse_failing(model, example, name)
    raise _combined(failures, name)


def _as_model_error(error: Exception, words: str, name: str) -> ModelError:
    if isinstance(error, ModelError):
        return error
    return ModelError(f"{name} cannot be traced by {words}: {first_line(error)}", INSTEAD)


def _frontends(
    model: nn.Module,
    granularity: Granularity,
    only: str | None,
    suspects: Sequence[str],
    around: Sequence[str],
) -> Iterator[tuple[str, _Frontend]]:
    """Each with its name. Where there is none of the name `only`, as on the meta device, it is all.

    `suspects` grows meanwhile: modules for the later ones to take whole. `around`: those that were.
    """
    if only is None:
        yield from _all_frontends(model, granularity, suspects, around)
        return
    if only.startswith(AROUND):
        from .exporting import export_around

        yield AROUND, partial(export_around, whole=_whole_modules(only))
        return
    every = list(_all_frontends(model, granularity, suspects, around))
    yield from [pair for pair in every if pair[0] == only] or every


def _all_frontends(
    model: nn.Module, granularity: Granularity, suspects: Sequence[str], around: Sequence[str]
) -> Iterator[tuple[str, _Frontend]]:
    yield "torch.fx", trace_symbolically
    matched = [path for path, _ in model.named_modules() if path and granularity.outermost(path) == path]
    if matched:
        yield "torch.fx around these modules", _with_leaves(matched)
    if is_plain_sequential(model) and granularity.kind != "block":
        yield ELEMENTS, sequential_graph
        return

    from .exporting import export_around, export_graph, export_with_whole_blocks

    blocks = _repeated(model, matched)
    if blocks:
        yield "torch.export with blocks taken whole", partial(export_with_whole_blocks, blocks=blocks)
    yield "torch.export", export_graph
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        yield "torch.export on its device", partial(export_graph, for_real=True)
        yield AROUND, partial(export_around, whole=suspects)
        for _ in range(_HIGHER):
            wider = [_caller(model, path) or path for path in around]
            if set(wider) <= set(around):
                break
            yield AROUND, partial(export_around, whole=wider)
    if matched:
        yield IN_A_ROW, lambda model, example, name: call_in_a_row(model, example, name, matched)
    containers = container_paths(model)
    if containers:
        yield "torch.fx around modules of torch.nn", _with_leaves([*matched, *containers])
    for words, leaves in (("the entries of its lists", _entries(model)), ("its children", _children(model))):
        if leaves and not matched:
            yield f"torch.fx around {words}", _with_leaves(leaves)


def _whole_modules(tool: str) -> list[str]:
    """The modules that a graph's tool names, which were taken whole."""
    return [path for path in tool.removeprefix(AROUND).split(", ") if path] if tool.startswith(AROUND) else []


_LISTS = nn.ModuleList | nn.ModuleDict | nn.Sequential


def _entries(model: nn.Module) -> list[str]:
    """Modules in a list, of the outermost lists, and what has none inside."""
    paths: list[str] = []
    parts = dict(model.named_modules(remove_duplicate=False))  # `get_submodule` is not there once scripted
    for path in _children(model):
        lists = [inner for inner, part in parts[path].named_modules() if isinstance(part, _LISTS)]
        outermost = [inner for inner in lists if not any(inner.startswith(f"{o}.") for o in lists)]
        inside = [f"{path}.{inner}" if inner else path for inner in outermost]
        for place in inside:
            paths += [f"{place}.{key}" for key in child_modules(parts[place])]
        paths += [] if inside else [path]
    return paths if paths != _children(model) else []


def _children(model: nn.Module) -> list[str]:
    """Of a list, its entries."""
    paths: list[str] = []
    for key, child in child_modules(model).items():
        if child is not None:
            inside = child_modules(child) if isinstance(child, _LISTS) else {}
            paths += [f"{key}.{inner}" for inner in inside] or [key]
    return paths


def _caller(model: nn.Module, path: str) -> str:
    """The module around it that calls it: no list; "" where that is the model."""
    parent = path.rpartition(".")[0]
    while parent and isinstance(model.get_submodule(parent), nn.ModuleList | nn.ModuleDict):
        parent = parent.rpartition(".")[0]
    return parent


def _repeated(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Those of the modules that have a class of which there are many."""
    classes = {path: type(model.get_submodule(path)) for path in paths}
    counts = Counter(classes.values())
    return [path for path in paths if counts[classes[path]] >= MANY]


def _with_leaves(leaves: list[str]) -> _Frontend:
    return lambda model, example, name: trace_symbolically(model, example, name, leaves)


def _combined(failures: list[ModelError], name: str) -> ModelError:
    """What stopped torch.fx, then the others where they say something else."""
    prefix = f"{name} cannot be traced by "
    tools: dict[str, list[str]] = {}
    for failure in failures:
        tool, _, why = failure.what.removeprefix(prefix).partition(": ")
        tools.setdefault(why, []).append(tool)
    parts = [", ".join(dict.fromkeys(which)) + (why and f": {why}") for why, which in tools.items()]
    parts[0] = (prefix if failures[0].what.startswith(prefix) else "") + parts[0]
    differs = next((failure for failure in failures if isinstance(failure, NotTheModel)), None)
    hint = INSTEAD if differs is None else differs.hint
    if any(_CACHE in failure.what for failure in failures):
        hint = "The output holds keys and values for generating text: set model.config.use_cache = False."
    return ModelError("; nor by ".join(parts), hint)


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether running the elements one after another is all that the module does."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
        and type(module).__iter__ is nn.Sequential.__iter__
        and type(module).__call__ is nn.Module.__call__
        and not has_hooks(module)
    )


def sequential_graph(model: nn.Module, example: ModelInput, name: str) -> TracedGraph:
    """The graph of a plain nn.Sequential, whose nested ones are taken apart too: nothing is traced.

    Several tensors of the input are handed to the first element as one tuple. Raises ModelError where there
    is no element.
    """
    paths = _elements(model, "")
    if not paths:
        raise ModelError(f"{name} has no layers", "Give a model that computes something.")
    graph = fx.Graph()
    count = len(example.tensors)
    inputs = tuple(graph.placeholder("input" if count == 1 else f"input_{i}") for i in range(count))
    value: fx.Node | tuple[fx.Node, ...] = inputs[0] if count == 1 else inputs
    placed: dict[fx.Node, str] = {}
    for path in paths:
        value = graph.call_module(path, (value,))
        placed[value] = path
    graph.output(value)
    return TracedGraph(graph, inputs, nn.Module(), placed, tool=ELEMENTS)


def _elements(module: nn.Module, prefix: str) -> list[str]:
    paths: list[str] = []
    for key, child in child_modules(module).items():
        if child is not None:
            path = prefix + key
            paths += _elements(child, path + ".") if is_plain_sequential(child) else [path]
    return paths

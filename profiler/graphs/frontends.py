"""Which tool draws a model's graph: none for an nn.Sequential; torch.fx; torch.export where fx cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from torch import nn

from ...cost_models.errors import ModelError
from ..torch_internals import has_hooks
from ..user_model.loaded_model import ModelInput
from .granularity import Granularity, refuse_unmatched
from .graph import TracedGraph
from .sequential_graph import is_plain_sequential, sequential_graph
from .tracing import INSTEAD, called_with, container_paths, trace_symbolically
from .tracing_patches import notice_checkpoints
from .trial import Trial, runs_on_meta

_Frontend = Callable[[nn.Module, ModelInput, str], TracedGraph]


def trace_model(
    model: nn.Module, given: ModelInput, name: str, granularity: Granularity
) -> tuple[TracedGraph, Trial]:
    """The graph of `model`, by the first tool whose graph runs as the model does, and its trial.

    Raises ModelError: no tool can draw it (with the lines of the model that stopped them), it fails on this
    input, a pattern matches no module, `given` does not fit forward, or the model has hooks.
    """
    if has_hooks(model):
        raise ModelError(
            f"{name} has hooks of its own, which running its layers one by one would leave out",
            "Remove the hook, or wrap the model: nn.Sequential(model) keeps it, as one layer.",
        )
    modules = [path for path, _ in model.named_modules() if path]
    refuse_unmatched(granularity.patterns, modules, "module", name)
    if is_plain_sequential(model) and granularity.kind == "block":
        elements = sequential_graph(model, given, name)
        return elements, Trial(elements, model, given, name)
    called_with(model, given, name)
    failures: list[ModelError] = []
    for frontend in _frontends(model, granularity):
        try:
            with notice_checkpoints() as noticed:
                traced = frontend(model, given, name)
            traced = dataclasses.replace(traced, recomputes=bool(noticed))
        except ModelError as error:
            failures.append(error)
            continue
        try:
            trial = Trial(traced, model, given, name)
            trial.check_against_model(name)
            return traced, trial
        except ModelError as error:
            if not runs_on_meta(model, given, name):
                raise
            failures.append(error)
    raise _combined(failures, name)


def _frontends(model: nn.Module, granularity: Granularity) -> Iterator[_Frontend]:
    yield trace_symbolically
    matched = [path for path, _ in model.named_modules() if path and granularity.outermost(path) == path]
    if matched:
        yield _with_leaves(matched)
    if is_plain_sequential(model):
        yield sequential_graph
        return

    from .exporting import export_graph

    yield export_graph
    containers = container_paths(model)
    if containers:
        yield _with_leaves([*matched, *containers])


def _with_leaves(leaves: list[str]) -> _Frontend:
    return lambda model, given, name: trace_symbolically(model, given, name, leaves)


def _combined(failures: list[ModelError], name: str) -> ModelError:
    """What stopped torch.fx, then the others where they say something else."""
    told = list(dict.fromkeys(failure.what for failure in failures))
    prefix = f"{name} cannot be traced by "
    parts = [told[0], *(what.removeprefix(prefix) for what in told[1:])]
    return ModelError("; nor by ".join(parts), INSTEAD)

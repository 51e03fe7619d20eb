"""An nn.Sequential is a chain as it stands: its elements, each called with what the one before returned."""

from __future__ import annotations

from torch import fx, nn

from ...cost_models.errors import ModelError
from ..torch_internals import children_of, has_hooks
from ..user_model.loaded_model import ModelInput
from .graph import TracedGraph

ELEMENTS = "its elements"
"""The tool of a graph that was not traced."""


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether running the elements one after another is all that the module does."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and type(module).__call__ is nn.Module.__call__
        and not has_hooks(module)
    )


def sequential_graph(model: nn.Module, given: ModelInput, name: str) -> TracedGraph:
    """The graph of a plain nn.Sequential, whose nested ones are taken apart too: nothing is traced.

    Several tensors of the input are handed to the first element as one tuple. Raises ModelError where there
    is no element.
    """
    paths = _elements(model, "")
    if not paths:
        raise ModelError(f"{name} has no layers", "Give a model that computes something.")
    graph = fx.Graph()
    count = len(given.tensors)
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
    for key, child in children_of(module).items():
        if child is not None:
            path = prefix + key
            paths += _elements(child, path + ".") if is_plain_sequential(child) else [path]
    return paths

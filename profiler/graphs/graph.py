"""A model's computation as one graph, whichever tool traced it, and a module that runs such a graph."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from ..torch_internals import is_persistent, make_transient

AROUND = "torch.export around "
"""What `TracedGraph.tool` begins with where modules are taken whole; their names follow."""


@dataclass(frozen=True, eq=False)
class TracedGraph:
    """The graph of a model's forward; its nodes stand in the order they run.

    What the nodes name (`get_attr`, `call_module`) are the model's own dotted names, or names in `constants`,
    so that a part of the graph can be bound to the model or to any copy of it.
    """

    graph: fx.Graph
    inputs: tuple[fx.Node | None, ...]
    """The placeholder of each tensor of the input, in the order of `ModelInput.tensors`; None: unused."""
    constants: nn.Module
    """Holds the tensors and modules that tracing itself made, which the model lacks."""
    paths: dict[fx.Node, str]
    """The innermost module whose forward each operation ran in ("": the model's own); a second call of a
    module ends with `@1`."""
    finish: Callable[[Any], Any] | None = None
    """Makes what the model returns of the output node's value; None: that is it."""
    recomputes: bool = False
    """Whether the model recomputes parts of itself (torch.utils.checkpoint), which the graph does not."""
    tool: str = "torch.fx"
    """What drew it, in words."""
    parts: Callable[[nn.Module], nn.Module] | None = None
    """Makes `constants` of the modules of a model, where they run some."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """Modules whose `training` was read while it was drawn, or whose forward read it, with the line."""

    @property
    def fixed_modes(self) -> dict[str, str]:
        """Entries of `modes` with code in the graph, which computes as in the traced mode."""
        called = [str(node.target) for node in self.graph.nodes if node.op == "call_module"]
        return {path: line for path, line in self.modes.items() if not (path and is_inside(path, called))}

    def constants_of(self, model: nn.Module) -> nn.Module:
        """`constants` for a copy of the model."""
        return self.constants if self.parts is None else self.parts(model)


def is_inside(path: str, modules: Iterable[str]) -> bool:
    """Whether a module is one of `modules`, or inside one of them; by their names."""
    return any(f"{path}.".startswith(f"{module}.") for module in modules)


def module_around(traced: TracedGraph, node: fx.Node) -> str:
    """The innermost module that the operation ran in by the way that the model called it: what several blocks
    share goes by one name, and ran in each of them."""
    around = ""
    for path in node.meta.get("modules_around") or _stack(node):
        if around and not is_inside(path, [around]):
            break
        around = path or around
    return around or traced.paths.get(node, "").partition("@")[0]


def _stack(node: fx.Node) -> list[str]:
    """As torch.fx writes it down."""
    return [key.partition("@")[0] for key in node.meta.get("nn_module_stack", {})]


def graph_module(graph: fx.Graph, *sources: nn.Module, name: str = "GraphModule") -> fx.GraphModule:
    """Runs `graph` with what it names, each taken from the first of `sources` that has it.

    A buffer is part of the state where it is part of its source's. The mode is the first source's. In
    `graph`, which is the module's own from then on, names that a GraphModule keeps to itself are others.
    """
    naming = [node for node in graph.nodes if node.op in ("get_attr", "call_module")]
    targets = {node: str(node.target) for node in naming}
    having = {
        top: _first_having(top, sources) for top in (each.partition(".")[0] for each in targets.values())
    }
    root = nn.Module()
    root.training = sources[0].training
    for top, source in having.items():
        setattr(root, _allowed(top, having), getattr(source, top))
    for node, target in targets.items():
        top, dot, rest = target.partition(".")
        node.target = _allowed(top, having) + dot + rest
    module = fx.GraphModule(root, graph, name)
    for node, target in targets.items():
        if node.op == "get_attr":
            _keep_persistence(module, str(node.target), having[target.partition(".")[0]], target)
    return module


_OF_GRAPH_MODULES = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph()))).difference(dir(nn.Module()))
"""Such as `code` and `graph`, which a model may call modules of its own."""


def _allowed(top: str, used: Container[str]) -> str:
    """The name itself, or with underscores behind it."""
    if top in _OF_GRAPH_MODULES:
        top += "_"
        while top in used or top in _OF_GRAPH_MODULES:
            top += "_"
    return top


def find_attribute(target: str, *sources: nn.Module) -> Any:
    """The module or tensor of this dotted name, of the first of `sources` that has it."""
    value: Any = _first_having(target.partition(".")[0], sources)
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _first_having(top: str, sources: tuple[nn.Module, ...]) -> nn.Module:
    return next((source for source in sources if hasattr(source, top)), sources[-1])


def _keep_persistence(module: nn.Module, target: str, source: nn.Module, own_target: str) -> None:
    """GraphModule registers every tensor that is no parameter as a buffer of the state."""
    path, _, field = target.rpartition(".")
    own_path, _, own_field = own_target.rpartition(".")
    owner, of_source = module.get_submodule(path), source.get_submodule(own_path)
    if owner is not of_source and not is_persistent(of_source, own_field):
        make_transient(owner, field)

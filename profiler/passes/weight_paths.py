"""Where, in an autograd graph, the paths to the parameters branch off the path to the inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ..memory.live_bytes import storages
from ..torch_internals import sequence_number, storage_key


@dataclass(eq=False)
class Branch:
    """An operation from which ways lead off to parameters, beside the way to the inputs.

    Or the tensors of a layer that no input's gradient goes through: everything behind them is for parameters.
    """

    ways: list[GradientEdge]
    """The first steps off; for such tensors, themselves."""
    node: Node | None
    """The operation; None for such tensors."""
    on: list[Node]
    """The operation's next ones on the way to the inputs."""
    parameters: list[Tensor] = field(default_factory=list)
    is_shared: bool = False
    """Whether a way, or a parameter at its end, is another branch's too."""
    edges: list[GradientEdge] = field(default_factory=list)
    caught: list[Tensor] = field(default_factory=list)

    def catch(self, gradients: tuple[Tensor | None, ...]) -> None:
        """What arrives at the operation, before it runs."""
        for index, gradient in enumerate(gradients):
            if gradient is not None and self.node is not None:
                self.edges.append(GradientEdge(self.node, index))
                self.caught.append(gradient)

    def run(self) -> None:
        """Accumulates the parameters' gradients from what was caught; what it held is free afterwards."""
        edges, caught = self.edges, self.caught
        self.edges, self.caught = [], []
        if not edges:
            return
        if self.node is None or not self.is_shared:
            _accumulate(edges, caught, self.parameters, keep=self.is_shared)
            return
        # A parameter that is used again further on: asked for it by name, autograd would go there as well.
        ways = list(dict.fromkeys(self.ways))
        with _nothing_through(self.on):
            gradients = torch.autograd.grad(edges, ways, caught, retain_graph=True, allow_unused=True)
        arrived = [
            (way, gradient) for way, gradient in zip(ways, gradients, strict=True) if gradient is not None
        ]
        _accumulate(*_columns(arrived), self.parameters, keep=True)


def _columns(arrived: list[tuple[GradientEdge, Tensor]]) -> tuple[list[GradientEdge], list[Tensor]]:
    return [edge for edge, _ in arrived], [gradient for _, gradient in arrived]


def _accumulate(
    edges: list[GradientEdge], gradients: list[Tensor], parameters: list[Tensor], *, keep: bool
) -> None:
    """`keep`: another branch goes part of the way too, so its operations keep what they saved."""
    for edge, gradient in zip(edges, gradients, strict=True):
        parameter = _parameter(edge.node)
        if parameter is not None:
            # A clone: what was caught may be another branch's too.
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
    pairs = zip(edges, gradients, strict=True)
    roots, starts = _columns([(edge, start) for edge, start in pairs if _parameter(edge.node) is None])
    if roots:
        torch.autograd.backward(roots, starts, retain_graph=keep, inputs=parameters)


@contextmanager
def _nothing_through(nodes: Sequence[Node]) -> Iterator[None]:
    """Has operations be handed no gradient: they and what follows have nothing to compute."""
    with ExitStack() as stack:
        for node in nodes:
            handle = node.register_prehook(lambda gradients: (None,) * len(gradients))
            stack.callback(handle.remove)
        yield


def _parameter(node: Node) -> Tensor | None:
    """The parameter that ends here; None for an operation."""
    return getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None


class WeightPaths:
    """Where the ways to the parameters leave the way to the inputs, found in the graph that a forward left.

    `targets`: what the input gradients are asked towards: tensors of the input that need a gradient, and
    those that a layer made of parameters alone. `first`: the layers that made only such. `branches`: of each
    layer, in the order that backward comes by.
    """

    def __init__(self, layers: int, inputs: Sequence[Tensor] = ()) -> None:
        self.targets = [get_gradient_edge(tensor) for tensor in inputs if tensor.requires_grad]
        self.first: set[int] = set()
        self.branches: list[list[Branch]] = [[] for _ in range(layers)]
        self._input_count = len(self.targets)
        self._leads_on: dict[Node, bool] = {edge.node: True for edge in self.targets}
        """Of every operation seen, whether it lies on the way to a target."""
        self._next: dict[Node, list[GradientEdge]] = {}
        self._to_weights: dict[Node, bool] = {edge.node: False for edge in self.targets}
        """Of every operation seen, whether it leads to a parameter."""
        self._edges: list[list[GradientEdge]] = [[] for _ in range(layers)]
        self._sources: list[Branch] = []

    def add_layer(self, index: int, edges: list[GradientEdge]) -> None:
        """Tells the tensors that layer `index` made, right after it has."""
        self._edges[index] = edges

    def find(self) -> None:
        """Walks through the graph once."""
        for layer, edges in enumerate(self._edges):
            self._find_in(layer, edges)
        self._share()

    def _find_in(self, layer: int, edges: list[GradientEdge]) -> None:
        sources: list[GradientEdge] = []
        visited: list[Node] = []
        # In the order of their making: one that was made of another source lies on the way to that.
        for edge in sorted(edges, key=lambda edge: sequence_number(edge.node)):
            visited += self._walk(edge.node)
            if not self._leads_on[edge.node] or any(edge.node is source.node for source in sources):
                sources.append(edge)
                self._leads_on[edge.node] = True
        ends = {edge.node for edge in sources}
        for node in reversed(visited):
            off = [] if node in ends else self._off(node)
            if off and self._leads_on[node]:
                self.branches[layer].append(Branch(off, node, self._on(node)))
        if sources:
            branch = Branch(sources, None, [])
            self.branches[layer].append(branch)
            self._sources += [branch] * len(sources)
            self.targets += sources
            inside = set(visited)
            if all(after in inside for node in visited if node not in ends for after in self._on(node)):
                self.first.add(layer)

    def _on(self, node: Node) -> list[Node]:
        return [edge.node for edge in self._next[node] if self._leads_on[edge.node]]

    def _off(self, node: Node) -> list[GradientEdge]:
        """The steps from `node` that lead to a parameter, and not on."""
        return [
            edge
            for edge in self._next.get(node, ())
            if self._to_weights[edge.node] and not self._leads_on[edge.node]
        ]

    def _walk(self, root: Node) -> list[Node]:
        """The operations not seen before, each behind all that it leads to."""
        nodes_to_inputs: list[Node] = []
        stack = [(root, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                after = self._next[node]
                self._leads_on[node] = any(self._leads_on[edge.node] for edge in after)
                self._to_weights[node] = any(self._to_weights[edge.node] for edge in after) or (
                    not after and _parameter(node) is not None
                )
                nodes_to_inputs.append(node)
            elif node not in self._leads_on and node not in self._next:
                after = [GradientEdge(to, index) for to, index in node.next_functions if to is not None]
                self._next[node] = after
                stack.append((node, True))
                stack += [(edge.node, False) for edge in after if edge.node not in self._leads_on]
        return nodes_to_inputs

    def _share(self) -> None:
        """Finds each branch's parameters, and which of them meet on their ways."""
        behind: list[tuple[Branch, set[Node]]] = []
        users: dict[Node, int] = {}
        for branch in (branch for of_layer in self.branches for branch in of_layer):
            nodes = self._behind(branch)
            behind.append((branch, nodes))
            for node in nodes:
                users[node] = users.get(node, 0) + 1
        for branch, nodes in behind:
            parameters = (_parameter(node) for node in nodes)
            branch.parameters = [parameter for parameter in parameters if parameter is not None]
            branch.is_shared = any(users[node] > 1 for node in nodes)

    def _behind(self, branch: Branch) -> set[Node]:
        """All operations off the way that the branch leads through."""
        nodes = {edge.node for edge in branch.ways}
        stack = list(nodes)
        while stack:
            for edge in self._off(stack.pop()):
                if edge.node not in nodes:
                    nodes.add(edge.node)
                    stack.append(edge.node)
        return nodes

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Inside, the branches catch the gradients that come by."""
        with ExitStack() as stack:
            for branch in (branch for of_layer in self.branches for branch in of_layer):
                if branch.node is not None:
                    stack.callback(branch.node.register_prehook(branch.catch).remove)
            yield

    def pending_bytes(self) -> list[int]:
        """By layer, bytes of what its branches caught, each storage once: with the last layer that did."""
        counted: set[int] = set()
        rows = []
        for branches in reversed(self.branches):
            own = storages(gradient for branch in branches for gradient in branch.caught)
            rows.append(sum(one.nbytes() for one in own if storage_key(one) not in counted))
            counted.update(map(storage_key, own))
        return rows[::-1]

    def catch_targets(self, gradients: Sequence[Tensor | None]) -> None:
        """The gradients of `targets`, as autograd returned them."""
        sources = zip(
            self._sources, self.targets[self._input_count :], gradients[self._input_count :], strict=True
        )
        for branch, edge, gradient in sources:
            if gradient is not None:
                branch.edges.append(edge)
                branch.caught.append(gradient)

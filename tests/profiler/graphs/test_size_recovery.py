"""What is no tensor is found again from tensors: by what it was at several batch sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from pplan.profiler.exporting import export_graph
from pplan.profiler.graph import TrialValues, describe_tensors, device_of, graph_module, recover_sizes
from pplan.profiler.user_model import ModelInput

BATCHES = (2, 3, 7)


class _Sees(fx.Interpreter):
    values: dict[fx.Node, Any]

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n] = describe_tensors(result)
        return result


def values_of(module: fx.GraphModule, example: Tensor) -> TrialValues:
    runs = []
    for batch in BATCHES:
        sees = _Sees(module)
        sees.values = {}
        sees.run(ModelInput.of(example).repeated(batch).tensors[0])
        runs.append(sees.values)
    return {node: tuple(values[node] for values in runs) for node in runs[0]}


def again(node: fx.Node, available: fx.Node, values: TrialValues) -> Callable[[Tensor], Any] | None:
    """A function from a value of `available` to the value of `node`."""
    graph = fx.Graph()
    found = recover_sizes(node, [available], graph, copies := {available: graph.placeholder("given")}, values)
    if found is None:
        assert node not in copies
        return None
    assert copies[node] is found
    graph.output(found)
    graph.lint()
    return fx.GraphModule(nn.Module(), graph)


def traced(forward: Callable[[Tensor], Any], example: Tensor) -> tuple[fx.Node, fx.Node, TrialValues]:
    """The node of the second value `forward` returns, that of the first, and all values."""
    module = fx.symbolic_trace(forward)
    output = next(node for node in module.graph.nodes if node.op == "output")
    available, wanted = output.args[0]
    return wanted, available, values_of(module, example)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: (x * 2, x.size(0)),
        lambda x: (x * 2, x.shape),
        lambda x: (x * 2, x.size()),
        lambda x: (x * 2, x.shape[0] * 4 + 1),
        lambda x: (x.flatten(), x.shape[0]),
        lambda x: (x.flatten(), x.shape[0] * 3 - 2),
        lambda x: (torch.cat([x, x, x[:1]]), x.shape[0]),
        lambda x: (x * 2, x.numel()),
        lambda x: (x * 2, x.shape[1] ** -0.5),
        lambda x: (x * 2, 1.0 / x.shape[0]),
        lambda x: (x * 2, (x.shape[0] - 1) * x.shape[0] // 2),
        lambda x: (x * 2, x.shape[-2:]),
        lambda x: (x * 2, x.dtype),
        lambda x: (x * 2, x.device),
        lambda x: (x * 2, x.dim()),
        lambda x: (x * 2, x.shape[0] > 2),
    ],
)
def test_found_again_at_sizes_never_seen(forward: Callable[[Tensor], Any]) -> None:
    wanted, available, values = traced(forward, torch.randn(2, 4))
    function = again(wanted, available, values)
    assert function is not None
    for batch in (1, 2, 5, 11):
        given, expected = forward(torch.randn(batch, 4))
        assert function(given) == expected
        assert type(function(given)) is type(expected)


def test_what_tensors_hold_is_not_found() -> None:
    wanted, available, values = traced(lambda x: (x * 2, (x * 0).sum().item()), torch.ones(2, 4))
    assert len(set(values[wanted])) == 1
    assert again(wanted, available, values) is None


def test_a_size_that_no_dimension_moves_with_is_not_found() -> None:
    wanted, available, values = traced(lambda x: (x.sum(0), x.shape[0]), torch.ones(2, 4))
    assert again(wanted, available, values) is None


def test_devices_and_dtypes_are_those_of_the_tensors_at_hand() -> None:
    wanted, available, values = traced(
        lambda x: (x * 2, (x.device, x.dtype)[0]), torch.ones(2, 4, device="meta")
    )
    function = again(wanted, available, values)
    assert function is not None
    assert function(torch.ones(1)) == torch.device("cpu")
    wanted, available, values = traced(lambda x: (x * 2, x.dtype), torch.ones(2, 4))
    function = again(wanted, available, values)
    assert function is not None
    assert function(torch.ones(1, dtype=torch.float64)) is torch.float64


def test_nodes_of_torch_export() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, given: Tensor) -> Tensor:
            rows = torch.arange(given.shape[0] * 2, device=given.device)
            output: Tensor = self.linear(given)
            return output + rows[: given.shape[0], None]

    model, example = Body(), torch.randn(2, 4)
    graph = export_graph(model, ModelInput.of(example), "Body")
    module = graph_module(graph.graph, model, graph.constants)
    values = values_of(module, example)
    nodes = {node.name: node for node in values}
    linear = nodes["linear"]
    numbers = [node for node in values if isinstance(values[node][0], int)]
    assert len(numbers) == 2
    for node in numbers:
        function = again(node, linear, values)
        assert function is not None
        factor = values[node][0] / BATCHES[0]
        assert math.isclose(function(torch.ones(9, 4)), 9 * factor)
    device = next(node for node in values if node.target is device_of)
    function = again(device, linear, values)
    assert function is not None
    assert function(torch.ones(1, device="meta")).type == "meta"


def test_a_node_is_found_once() -> None:
    wanted, available, values = traced(lambda x: (x * 2, x.shape[0]), torch.randn(2, 4))
    graph = fx.Graph()
    copies = {available: graph.placeholder("given")}
    first = recover_sizes(wanted, [available], graph, copies, values)
    assert recover_sizes(wanted, [available], graph, copies, values) is first
    assert len(graph.nodes) == 2

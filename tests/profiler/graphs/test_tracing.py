"""Which tool draws a model's graph, with which inputs, and what is said when none can."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import ModelError
from pplan.profiler.layers import build_chain, sequential
from pplan.profiler.tracing import trace_symbolically
from pplan.profiler.user_model import ModelInput


class Arguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(
        self, one: Tensor, times: int = 2, two: Tensor | None = None, *, three: Tensor | None = None
    ) -> Tensor:
        value: Tensor = self.inner(one) if three is None else self.inner(one) * three
        for _ in range(times):
            value = self.inner(value)
        return value if two is None else value + two


def test_placeholders_come_in_the_order_of_the_inputs_tensors() -> None:
    given = ModelInput((), {"three": torch.ones(1), "two": torch.ones(1, 4), "one": torch.ones(1, 4)})
    traced = trace_symbolically(Arguments(), given, "model")
    assert [node.target for node in traced.inputs if node is not None] == ["three", "two", "one"]
    same = torch.ones(1, 4)
    traced = trace_symbolically(Arguments(), ModelInput((same, 1, same), {}), "model")
    assert [node.target for node in traced.inputs if node is not None] == ["one", "two"]


def test_paths_tell_the_module_and_its_call() -> None:
    traced = trace_symbolically(Arguments(), ModelInput.of(torch.ones(1, 4)), "model")
    paths = [path for node, path in traced.paths.items() if node.op == "call_module"]
    assert paths == [f"inner.{name}{call}" for call in ("", "@1", "@2") for name in ("0", "1")]


def test_leaves_are_not_gone_into() -> None:
    traced = trace_symbolically(Arguments(), ModelInput.of(torch.ones(1, 4)), "model", ["inner"])
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["inner"] * 3


@pytest.mark.parametrize("example", [(torch.ones(1, 4), 2, None, 3), {"four": torch.ones(1, 4)}])
def test_an_input_that_does_not_fit_forward_is_refused(example: object) -> None:
    with pytest.raises(ModelError, match=r"does not fit forward\(one, times=2, two=None, \*, three=None\)"):
        build_chain(Arguments(), example)


class Sums(nn.Module):
    """Takes what torch.fx does not: any number of tensors, or a dict of them."""

    def forward(self, *many: Tensor, **named: dict[str, Tensor]) -> Tensor:
        parts = [*many, *(tensor for tensors in named.values() for tensor in tensors.values())]
        return torch.tanh(sum(parts[1:], parts[0] * 2))


def test_what_fx_does_not_take_is_exported() -> None:
    one, two, three = torch.randn(3, 2, 4)
    given = ModelInput((one, two), {"more": {"three": three}})
    layers = sequential(Sums(), given)
    assert torch.equal(layers(given.layer_input), given.call(Sums()))


class AsksForTensors(nn.Module):
    """torch.fx takes the wrong way without noticing."""

    def forward(self, given: Tensor) -> Tensor:
        if isinstance(given, Tensor):
            return torch.cat([given, given])
        return given


def test_a_graph_that_is_not_the_models_is_found_out() -> None:
    given = torch.randn(3, 4)
    assert torch.equal(sequential(AsksForTensors(), given)(given), torch.cat([given, given]))


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2)

    def forward(self, given: Tensor) -> Tensor:
        return self.head(self.encoder(given))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_the_layers_of_a_transformer_encoder_are_told_apart() -> None:
    chain = build_chain(Encodes(), torch.randn(2, 3, 8), granularity="fine")
    names = {layer.name for layer in chain.layers}
    assert {"encoder.layers.0.norm1", "encoder.layers.1.norm2", "head"} <= names
    chain = build_chain(Encodes(), torch.randn(2, 3, 8))
    assert [layer.name for layer in chain.layers] == ["encoder.layers.0", "encoder.layers.1", "head"]
    chain = build_chain(Encodes(), torch.randn(2, 3, 8), granularity="module:encoder.layers.*")
    assert [layer.name for layer in chain.layers] == ["encoder.layers.0", "encoder.layers.1", "head"]


class AsksParameters(nn.Module):
    """What tracing does with parameters of their own values, or of their device, must be the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.full((4,), 3.0))])

    def forward(self, given: Tensor) -> Tensor:
        first = next(iter(self.parameters()))
        table = torch.arange(4.0, device=first.device)
        return torch.tanh(given * table) + 1


def test_the_device_of_the_traced_copy_is_not_in_the_graph() -> None:
    model, given = AsksParameters(), torch.randn(2, 4)
    assert torch.equal(sequential(model, given)(given), model(given))


class Decides(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        count = int(given.shape[0])
        if given.sum() > 0:
            return given * count
        return -given


def test_all_lines_that_stopped_the_tools_are_named() -> None:
    with pytest.raises(ModelError) as caught:
        build_chain(Decides(), torch.ones(2, 2))
    fx, _, export = caught.value.what.partition("; nor by ")
    assert "torch.fx: TypeError" in fx
    assert "count = int(given.shape[0])" in fx
    assert export.startswith("torch.export: ")
    assert "if given.sum() > 0:" in export
    assert "module:PATTERN" in caught.value.hint
    assert "a module of its own" in caught.value.hint


class EncoderDecoderCache:
    """As the class of transformers, no tensor that torch.export knows."""


def test_a_model_that_returns_its_cache_is_told_how_not_to() -> None:
    class Generates(nn.Module):
        def forward(self, given: Tensor) -> tuple[Tensor, EncoderDecoderCache]:
            return given * int(given.shape[0]), EncoderDecoderCache()

    with pytest.raises(ModelError, match="Cache'> in output") as caught:
        build_chain(Generates(), torch.ones(2, 2))
    assert caught.value.hint.endswith("set model.config.use_cache = False.")

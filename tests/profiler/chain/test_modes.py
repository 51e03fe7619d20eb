"""Layers whose code differs between training and evaluation compute in either mode what the model does."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

import pplan
from pplan.cost_models.errors import ModelError
from pplan.profiler import layers as layers_module
from pplan.profiler import tracing
from pplan.profiler.layers import state_dict_names
from pplan.profiler.torch_private import tree_leaves


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return self.c(self.b(self.change(self.a(x))))

    def change(self, x: Tensor) -> Tensor:
        return x


class LabelDrop(Three):
    def change(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[0], 1) > 0.3).to(x.dtype) if self.training else x


class DropConnect(Three):
    def change(self, x: Tensor) -> Tensor:
        return x.div(0.7) * torch.empty(x.shape[0], 1).bernoulli_(0.7) if self.training else x


class Scale(Three):
    def change(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


class Noise(Three):
    def change(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) if self.training else x


class Dropout(Three):
    def change(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.3, self.training)


class Auxiliary(Three):
    """A second output in training, of the input of the last layer."""

    def forward(self, x: Tensor) -> Any:
        x = self.b(self.a(x))
        return (self.c(x), x) if self.training else self.c(x)


class ModeOfLayer(Three):
    """Reads the mode of a layer that is called whole."""

    def change(self, x: Tensor) -> Tensor:
        return x + 1 if self.a.training else x


class Heads(nn.Module):
    """Blocks, and a head in the middle that only training uses, as GoogLeNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))
        self.auxiliary, self.head = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        auxiliary = None
        for index, block in enumerate(self.blocks):
            x = x + block(x)
            if index == 1 and self.training:
                auxiliary = self.auxiliary(x)
        return {"out": self.head(x), "auxiliary": auxiliary} if self.training else {"out": self.head(x)}


class Depth(nn.Module):
    """Residual blocks with stochastic depth, standard modules, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        self.depth, self.drop = torchvision.ops.StochasticDepth(0.5, "row"), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.depth(self.drop(torch.relu(block(x))))
        return functional.linear(x, next(self.blocks.parameters()))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.encoder(x.unsqueeze(1)))
        return output


MODELS = [LabelDrop, DropConnect, Scale, Noise, Dropout, Auxiliary, ModeOfLayer, Heads, Depth, Encoder]


def layers_of(model: nn.Module, **options: Any) -> nn.Sequential:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pplan.sequential(model, torch.randn(4, 8), **options)


def assert_same(model: Callable[[Tensor], Any], layers: Callable[[Tensor], Any]) -> None:
    """Outputs are equal bit for bit, from the same random state."""
    given, outputs = torch.randn(4, 8), []
    for run in (model, layers):
        torch.manual_seed(1)
        outputs.append(run(given))
    expected, actual = outputs
    assert type(actual) is type(expected)
    pairs = list(zip(tree_leaves(expected), tree_leaves(actual), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
    assert [type(a) for a, _ in pairs] == [type(b) for _, b in pairs]


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_layers_switch_with_the_mode(kind: type[nn.Module], traced: bool) -> None:
    model = kind().train(traced)
    layers = layers_of(model)
    names = [name for name, _ in model.named_parameters()]
    assert len(list(layers.parameters())) == len(names)
    for mode in (traced, not traced, traced):
        model.train(mode), layers.train(mode)
        # Statistics of batch norms change once a pass.
        assert_same(copy.deepcopy(model), copy.deepcopy(layers))


def test_each_layer_switches_for_itself() -> None:
    """torchgpipe and FairScale switch the layers of each partition, and directly set flags are followed."""
    model = Auxiliary()
    layers = layers_of(model)
    for layer in layers:
        layer.train(False)
    assert_same(model.eval(), layers)
    for part in (*layers.modules(), *model.modules()):
        part.training = True
    assert_same(model, layers)


def test_copies_and_states_keep_both_modes() -> None:
    model = Depth()
    layers = layers_of(model)
    stored = io.BytesIO()
    torch.save(layers, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    for twin in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers)), loaded):
        twin.load_state_dict({name: value + 0.5 for name, value in twin.state_dict().items()})
        changed = copy.deepcopy(model)
        changed.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()})
        assert_same(changed.eval(), twin.eval())
        assert_same(copy.deepcopy(changed.train()), copy.deepcopy(twin.train()))
    names = state_dict_names(model, torch.randn(4, 8))
    assert set(names.values()) == set(layers.state_dict())
    assert set(names) == set(model.state_dict())


def test_a_part_in_another_mode_follows_when_it_is_switched() -> None:
    """A block that is frozen in evaluation stays so until train() is called, as in the model."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Scale(), Scale()

        def forward(self, x: Tensor) -> Any:
            return self.second(self.first(x))

    model = Two().train()
    model.first.eval()
    layers = layers_of(model)
    assert_same(model, layers)
    assert_same(model.train(), layers.train())
    assert_same(model.eval(), layers.eval())


class Reorders(Three):
    def forward(self, x: Tensor) -> Any:
        if self.training:
            return self.c(self.b(self.a(x)))
        return self.c(self.a(self.b(x)))


class Decides(Three):
    def change(self, x: Tensor) -> Tensor:
        if self.training:
            return x * 2
        return x if float(x.detach().sum()) > 0 else -x


@pytest.mark.parametrize("kind", [Reorders, Decides])
def test_a_mode_that_cannot_be_traced_is_refused_with_the_place(kind: type[nn.Module]) -> None:
    layers = layers_of(kind())
    before = layers(torch.ones(2, 8))
    with pytest.raises(
        ModelError, match=rf"the layers of {kind.__name__} have no evaluation mode: "
    ) as caught:
        layers.eval()
    assert "test_modes.py:" in caught.value.what
    assert "granularity='module:PATTERN'" in (caught.value.hint or "")
    with pytest.raises(ModelError, match="evaluation mode"):
        nn.ModuleList(layers).eval()
    assert torch.equal(layers.train()(torch.ones(2, 8)), before)


def test_models_that_do_not_ask_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[object] = []
    trace = tracing.trace_model

    def counted(model: nn.Module, *others: Any) -> Any:
        traces.append(model)
        return trace(model, *others)

    monkeypatch.setattr(layers_module, "trace_model", counted)
    layers = layers_of(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)), granularity="fine")
    assert len(traces) == 1
    assert [type(layer) for layer in layers] == [nn.Linear, nn.Dropout, nn.Linear]


def test_unchanged_layers_stay_the_models_own() -> None:
    model = Scale()
    assert [layer in list(model.children()) for layer in layers_of(model)] == [True, False, True, True]

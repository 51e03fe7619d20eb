"""The nn.Sequential of a model: same numbers, same parameters, same layers as the profile."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torchvision.models.resnet import BasicBlock, ResNet

from pplan.cost_models.errors import ModelError
from pplan.profiler.layer import LayerSequential
from pplan.profiler.layers import build_chain, sequential, state_dict_names
from pplan.profiler.user_model import ModelInput


def nested() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.3))),
        nn.Flatten(),
        nn.Linear(4 * 30 * 30, 5),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet10": lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5),
    "nested": nested,
}


@pytest.fixture(params=["vgg11", pytest.param("resnet10", marks=pytest.mark.slow), "nested"])
def model(request: pytest.FixtureRequest, small_vgg: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return {"vgg11": small_vgg, **MODELS}[request.param]().double()


def outcome(module: nn.Module, weights: Sequence[Tensor], given: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    torch.manual_seed(4)
    output = module(given.clone())
    return output, torch.autograd.grad(output.square().sum(), weights)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_same_outputs_and_gradients_bit_for_bit(model: nn.Module, training: bool) -> None:
    model.train(training)
    given = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    weights = list(model.parameters())
    output, gradients = outcome(model, weights, given)
    same_output, same_gradients = outcome(sequential(model, given, verify=False), weights, given)
    assert torch.equal(same_output, output)
    assert len(gradients) == len(weights) > 4
    assert all(torch.equal(a, b) for a, b in zip(same_gradients, gradients, strict=True))


def test_same_layers_as_the_profile_and_the_models_own_parameters(model: nn.Module) -> None:
    given = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    chain, children = build_chain(model, given), sequential(model, given, verify=False)
    assert len(children) == len(chain)
    assert [type(child) for child in children if not isinstance(child, torch.fx.GraphModule)] == [
        type(layer.module) for layer in chain.layers if layer.path is not None
    ]
    assert len({id(child) for child in children}) == len(children)
    assert {id(p) for p in children.parameters()} == {id(p) for p in model.parameters()}
    assert list(dict(children.named_children())) == [str(i) for i in range(len(chain))]


@pytest.mark.slow
def test_state_dict_names_carry_weights_both_ways(model: nn.Module) -> None:
    given = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    names = state_dict_names(model, given)
    children = sequential(model, given, verify=False)
    own, theirs = model.state_dict(), children.state_dict()
    assert set(names) == set(own)
    assert set(names.values()) == set(theirs)
    assert len(names) == len(theirs)
    assert all(torch.equal(theirs[ours], own[name]) for name, ours in names.items())
    children.load_state_dict({ours: torch.zeros_like(own[name]) for name, ours in names.items()})
    assert not any(value.any() for value in model.state_dict().values())


def test_it_knows_the_names_of_its_layers(model: nn.Module) -> None:
    given = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    chain, children = build_chain(model, given), sequential(model, given, verify=False)
    names = tuple(layer.name for layer in chain.layers)
    assert isinstance(children, LayerSequential)
    assert (children.model_name, children.layer_names) == (type(model).__name__, names)
    again = sequential(children, given, verify=False)
    assert (again.model_name, again.layer_names) == (children.model_name, names)
    assert copy.deepcopy(children).layer_names == names
    part = children[1:3]
    assert isinstance(part, LayerSequential)
    assert (len(part), part.layer_names) == (2, ())


class AddsOne(nn.Linear):
    """To its input itself."""

    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given.add_(1))


def test_a_first_layer_that_works_in_place_gets_a_clone() -> None:
    model = nn.Sequential(AddsOne(4, 4), nn.Linear(4, 2))
    given = torch.randn(3, 4)
    before = given.clone()
    children = sequential(model, given)
    assert len(children) == len(build_chain(model, given)) == 2
    output = children(given)
    assert torch.equal(given, before)
    assert torch.equal(output, model(given))
    assert not torch.equal(given, before)
    assert state_dict_names(model, given) == {
        "0.weight": "0.layer.weight",
        "0.bias": "0.layer.bias",
        "1.weight": "1.weight",
        "1.bias": "1.bias",
    }


@pytest.mark.slow
def test_the_model_keeps_its_children_and_attributes(model: nn.Module) -> None:
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    training = {name: module.training for name, module in model.named_modules()}
    kept = {name: set(module._non_persistent_buffers_set) for name, module in model.named_modules()}
    sequential(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert {name: module.training for name, module in model.named_modules()} == training
    assert {name: set(m._non_persistent_buffers_set) for name, m in model.named_modules()} == kept
    assert all(p.grad is None for p in model.parameters())


class UNet(nn.Module):
    """Two levels, whose features skip to the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.middle, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up2, self.up1 = nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, given: Tensor) -> Tensor:
        one = F.relu(self.down1(given), inplace=True)
        two = F.relu(self.down2(F.max_pool2d(one, 2)))
        value = F.dropout(self.norm(self.middle(F.max_pool2d(two, 2))), 0.2, self.training)
        value = F.interpolate(value, size=two.shape[-2:])
        value = self.up2(torch.cat([value, two], 1))
        value = F.interpolate(value, size=one.shape[-2:])
        return self.up1(torch.cat([value, one], 1))  # type: ignore[no-any-return]


class Detector(nn.Module):
    """As EAST does it: features of several depths merged upwards, and two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in ((3, 4), (4, 8), (8, 8))
        )
        self.merges = nn.ModuleList([nn.Conv2d(16, 8, 1), nn.Conv2d(12, 4, 1)])
        self.score, self.shape = nn.Conv2d(4, 1, 1), nn.Conv2d(4, 5, 1)

    def forward(self, given: Tensor) -> dict[str, Tensor]:
        features, value = [], given
        for stage in self.stages:
            value = stage(value)
            features.append(value)
            value = F.max_pool2d(value, 2)
        value = features[-1]
        for merge, feature in zip(self.merges, features[1::-1], strict=True):
            value = F.interpolate(value, scale_factor=2.0, mode="bilinear")
            value = F.relu(merge(torch.cat([value, feature], 1)))
        return {"score": torch.sigmoid(self.score(value)), "shape": self.shape(value)}


class Overwrites(nn.Module):
    """Changes in place, at the end, what was made at the beginning and what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, given: Tensor) -> Tensor:
        kept = given * 2
        value = given + 1
        for part in self.body:
            value = part(value)
        kept.add_(value)
        given.mul_(0)
        return torch.tanh(kept + given)


class Texts(nn.Module):
    """Two inputs, one of them whole numbers; layers of torch.nn's own encoder; a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, shift: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(ids) + shift))  # type: ignore[no-any-return]


def image() -> Tensor:
    return torch.randn(2, 3, 16, 16, dtype=torch.float64)


GRAPHS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "u-net": (UNet, image),
    "detector": (Detector, image),
    "overwrites": (Overwrites, image),
    "texts": (
        Texts,
        lambda: {"shift": torch.randn(2, 5, 8, dtype=torch.float64), "ids": torch.arange(10).reshape(2, 5)},
    ),
    "googlenet": (
        lambda: torchvision.models.googlenet(num_classes=3, init_weights=False),
        lambda: torch.randn(2, 3, 32, 32, dtype=torch.float64),
    ),
}
SMALL = [name for name in GRAPHS if name != "googlenet"]


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["block", "fine"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_of_many_kinds_stay_what_they_are(graph: str, granularity: str) -> None:
    torch.manual_seed(0)
    make, make_input = GRAPHS[graph]
    model, given = make().double(), ModelInput.of(make_input())
    weights = list(model.parameters())
    for training in (False, True):
        model.train(training)
        # Compared below; that nothing is found where nothing is wrong is seen once.
        is_checked = training and granularity == "block"
        layers = sequential(model, given, granularity=granularity, verify=is_checked)
        assert len(layers) > 1
        torch.manual_seed(1)
        expected = given.clone().call(model)
        torch.manual_seed(1)
        output = layers(given.clone().layer_input)
        assert type(output) is type(expected)
        pairs = list(zip(tree_leaves(output), tree_leaves(expected), strict=True))
        gradients = [
            torch.autograd.grad(sum(leaf.square().sum() for leaf in leaves), weights, allow_unused=True)
            for leaves in (tree_leaves(output), tree_leaves(expected))
        ]
        pairs += [(a, b) for a, b in zip(*gradients, strict=True) if a is not None or b is not None]
        assert len(pairs) > 3
        for ours, own in pairs:
            assert torch.equal(ours, own) or (training and torch.allclose(ours, own, rtol=1e-9))


@pytest.mark.slow
@pytest.mark.parametrize("graph", SMALL)
def test_checkpoints_of_fine_layers_move_both_ways(graph: str) -> None:
    make, make_input = GRAPHS[graph]
    model, given = make().double(), make_input()
    names = state_dict_names(model, given, granularity="fine")
    layers = sequential(model, given, granularity="fine", verify=False)
    own, theirs = model.state_dict(), layers.state_dict()
    assert set(names) == set(own)
    assert set(names.values()) == set(theirs)
    assert all(torch.equal(theirs[ours], own[name]) for name, ours in names.items())


@pytest.mark.slow
@pytest.mark.parametrize("graph", SMALL)
def test_what_is_handed_on_is_what_the_profile_counts(graph: str) -> None:
    make, make_input = GRAPHS[graph]
    model, given = make().double(), ModelInput.of(make_input())
    chain = build_chain(model, given, granularity="fine")
    value: Any = given.clone().layer_input
    several = 0
    for layer in chain.layers[:-1]:
        value = layer.module(value)
        handed = value if isinstance(value, tuple) else (value,)
        assert all(isinstance(tensor, Tensor) for tensor in handed)
        assert len({id(tensor) for tensor in handed}) == len(handed) == layer.crossing
        several += len(handed) > 1
    assert several > 1


def test_layers_that_hand_on_tuples_know_their_names_and_their_granularity() -> None:
    model, given = UNet().eval(), torch.randn(2, 3, 16, 16)
    chain = build_chain(model, given, granularity="fine")
    layers = sequential(model, given, granularity="fine")
    assert layers.granularity == chain.granularity == "fine"
    for asked in ("block", "fine"):
        again = build_chain(layers, given, granularity=asked)
        assert again.granularity == "fine"
        assert [(x.name, x.crossing) for x in again.layers] == [(x.name, x.crossing) for x in chain.layers]
        assert [x.cut_reason is None for x in again.layers] == [x.cut_reason is None for x in chain.layers]
    pinned = sequential(model, given, granularity="fine", keep_together=["down*"])
    assert [x.cut_reason for x in build_chain(pinned, given).layers][1:4] == [
        *["kept together: down*"] * 2,
        None,
    ]
    other = pickle.loads(pickle.dumps(layers))
    assert other.granularity == "fine"
    assert torch.equal(other(given), layers(given))


def test_a_tuple_that_is_overwritten_is_cloned() -> None:
    class Adds(nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return torch.tanh(one.add_(other))

    given = (torch.randn(2, 3), torch.randn(2, 3))
    layers = sequential(Adds(), given)
    before = given[0].clone()
    output = layers(given)
    assert torch.equal(given[0], before)
    assert torch.equal(output, Adds()(*given))


class Resizes(nn.Module):
    """Its last operation uses the height and the width of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 2, 3, stride=2)

    def forward(self, given: Tensor) -> Tensor:
        size = given.shape[-2:]
        return F.interpolate(self.body(given), size=size)


def test_sizes_that_layers_take_for_constants_are_checked() -> None:
    model = Resizes()
    layers = sequential(model, torch.randn(2, 3, 16, 12))
    assert len(layers) == 2
    for batch in (1, 3):
        given = torch.randn(batch, 3, 16, 12)
        assert torch.equal(layers(given), model(given))
    with pytest.raises(ModelError, match="is 14; these layers were made for 12"):
        layers(torch.randn(2, 3, 16, 14))

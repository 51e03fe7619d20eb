"""The nn.Sequential of a model: same numbers, same parameters, same layers as the profile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torchvision
from torch import Tensor, nn

from pplan.profiler.layer_sequential import LayerSequential
from pplan.profiler.layers import chain_of
from pplan.profiler.sequential import sequential, state_dict_names


def nested() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.3))),
        nn.Flatten(),
        nn.Linear(4 * 30 * 30, 5),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vgg11": lambda: torchvision.models.vgg11(num_classes=5),
    "resnet18": lambda: torchvision.models.resnet18(num_classes=5),
    "nested": nested,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[request.param]().double()


def outcome(module: nn.Module, weights: Sequence[Tensor], given: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    torch.manual_seed(4)
    output = module(given.clone())
    return output, torch.autograd.grad(output.square().sum(), weights)


@pytest.mark.parametrize("training", [True, False])
def test_same_outputs_and_gradients_bit_for_bit(model: nn.Module, training: bool) -> None:
    model.train(training)
    given = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    weights = list(model.parameters())
    output, gradients = outcome(model, weights, given)
    same_output, same_gradients = outcome(sequential(model, given), weights, given)
    assert torch.equal(same_output, output)
    assert len(gradients) == len(weights) > 4
    assert all(torch.equal(a, b) for a, b in zip(same_gradients, gradients, strict=True))


def test_same_layers_as_the_profile_and_the_models_own_parameters(model: nn.Module) -> None:
    given = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    chain, children = chain_of(model, given), sequential(model, given)
    assert len(children) == len(chain)
    assert [type(child) for child in children if not isinstance(child, torch.fx.GraphModule)] == [
        type(layer.module) for layer in chain.layers if layer.path is not None
    ]
    assert len({id(child) for child in children}) == len(children)
    assert {id(p) for p in children.parameters()} == {id(p) for p in model.parameters()}
    assert list(dict(children.named_children())) == [str(i) for i in range(len(chain))]


def test_state_dict_names_carry_weights_both_ways(model: nn.Module) -> None:
    given = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    names = state_dict_names(model, given)
    children = sequential(model, given)
    own, theirs = model.state_dict(), children.state_dict()
    assert set(names) == set(own)
    assert set(names.values()) == set(theirs)
    assert len(names) == len(theirs)
    assert all(torch.equal(theirs[ours], own[name]) for name, ours in names.items())
    children.load_state_dict({ours: torch.zeros_like(own[name]) for name, ours in names.items()})
    assert not any(value.any() for value in model.state_dict().values())


def test_it_knows_the_names_of_its_layers(model: nn.Module) -> None:
    given = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    chain, children = chain_of(model, given), sequential(model, given)
    names = tuple(layer.name for layer in chain.layers)
    assert isinstance(children, LayerSequential)
    assert (children.model_name, children.layer_names) == (type(model).__name__, names)
    again = sequential(children, given)
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
    assert len(children) == len(chain_of(model, given)) == 2
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


def test_the_model_keeps_its_children_and_attributes(model: nn.Module) -> None:
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    training = {name: module.training for name, module in model.named_modules()}
    kept = {name: set(module._non_persistent_buffers_set) for name, module in model.named_modules()}
    sequential(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert {name: module.training for name, module in model.named_modules()} == training
    assert {name: set(m._non_persistent_buffers_set) for name, m in model.named_modules()} == kept
    assert all(p.grad is None for p in model.parameters())

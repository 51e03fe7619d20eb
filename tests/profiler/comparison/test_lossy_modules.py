"""What tracing loses without noticing: kept by another tool, or refused with the reason."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import ModelError
from pplan.profiler.layers import build_chain, sequential

GIVEN = torch.linspace(-1, 1, 12).reshape(3, 4)


class Parts(nn.Module):
    """A first part, a second, and a head; for inputs of four values a sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)

    def rest(self, given: Tensor) -> Tensor:
        result: Tensor = self.head(self.second(given))
        return result


class FrozenPart(Parts):
    def forward(self, given: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.first(given)
        return self.rest(features)


class GradientsSwitchedOff(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.training_precision = False

    def forward(self, given: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training_precision):
            features = self.first(given)
        return self.rest(features)


class DecoratedPart(Parts):
    @torch.no_grad()
    def features(self, given: Tensor) -> Tensor:
        result: Tensor = self.first(given)
        return result

    def forward(self, given: Tensor) -> Tensor:
        return self.rest(self.features(given))


class InferencePart(Parts):
    def forward(self, given: Tensor) -> Tensor:
        with torch.inference_mode():
            features = self.first(given)
        return self.rest(features.clone())


class AutocastPart(Parts):
    def forward(self, given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            features = self.first(given)
        return self.rest(features.float())


class TriesFirst(Parts):
    """A stand-in of torch.fx has no `.numpy()`; what catches that runs on other weights."""

    def forward(self, given: Tensor) -> Tensor:
        try:
            scale = float(given.detach().numpy().shape[1])
            features = self.first(given) * scale
        except Exception:
            features = self.second(given)
        result: Tensor = self.head(features)
        return result


class LayerDrop(Parts):
    def forward(self, given: Tensor) -> Tensor:
        features = self.first(given)
        if random.random() < 0.9:
            features = self.second(features)
        result: Tensor = self.head(features)
        return result


class RareLayerDrop(Parts):
    """So rare that a few passes hardly show it."""

    def forward(self, given: Tensor) -> Tensor:
        features = self.first(given)
        if random.random() >= 1e-9:
            features = self.second(features)
        result: Tensor = self.head(features)
        return result


class LayerDropByTorch(Parts):
    def forward(self, given: Tensor) -> Tensor:
        features = self.first(given)
        if torch.rand(1).item() < 0.5:
            features = self.second(features)
        result: Tensor = self.head(features)
        return result


class Mixup(Parts):
    def forward(self, given: Tensor) -> Tensor:
        share = float(np.random.beta(0.4, 0.4))
        return self.rest(self.first(share * given + (1 - share) * given.flip(0)))


class Shuffles(Parts):
    def forward(self, given: Tensor) -> Tensor:
        order = torch.from_numpy(np.random.permutation(4))
        return self.rest(self.first(given)[:, order])


class Counts(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, given: Tensor) -> Tensor:
        self.calls += 1
        return self.rest(self.first(given) * self.calls)


class WarmsUp(Parts):
    """After more calls than are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, given: Tensor) -> Tensor:
        self.calls += 1
        features = self.first(given)
        return self.rest(features if self.calls < 100 else features.detach())


class Cools(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def forward(self, given: Tensor) -> Tensor:
        self.temperature *= 0.9
        return torch.softmax(self.rest(self.first(given)) / self.temperature, dim=-1)


class OwnGenerator(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.draws = random.Random(3)

    def forward(self, given: Tensor) -> Tensor:
        features = self.first(given)
        return self.rest(features) if self.draws.random() > 1e-9 else features


class OutputHook(Parts):
    def forward(self, given: Tensor) -> Tensor:
        features = self.first(given)
        features.register_hook(lambda gradient: gradient * 3)
        return self.rest(features)


class OutputHookIfTraining(Parts):
    def forward(self, given: Tensor) -> Tensor:
        features = self.first(given)
        if features.requires_grad:
            features.register_hook(torch.neg)
        return self.rest(features)


class Permutes(Parts):
    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(4))

    def forward(self, given: Tensor) -> Tensor:
        features = self.first(given)[:, self.order.tolist()]
        self.order.copy_(self.order.roll(1))
        return self.rest(features)


class FreezesInForward(Parts):
    def forward(self, given: Tensor) -> Tensor:
        self.first.requires_grad_(False)
        return self.rest(self.first(given))


class KeepsHidden(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, given: Tensor) -> Tensor:
        features = self.first(given)
        if self.hidden is not None and len(self.hidden) == len(given):
            features = features + self.hidden
        self.hidden = features.detach()
        return self.rest(features)


class DecidesByValue(Parts):
    def forward(self, given: Tensor) -> Tensor:
        scale = 2.0 if bool(self.head.weight.detach().sum() > 1e6) else 1.0
        return self.rest(self.first(given) * scale)


class DecidesByBatch(Parts):
    def forward(self, given: Tensor) -> Tensor:
        features = self.first(given)
        return self.rest(features if len(given) < 2 else features - features.mean(0))


class ChoosesByDevice(Parts):
    """As mixtures of experts do; mostly a graph is traced on the meta device."""

    def forward(self, given: Tensor) -> Tensor:
        features = self.first(given)
        return self.rest(features * 2 if given.device.type == "meta" else features)


class NoticesTracing(Parts):
    def forward(self, given: Tensor) -> Tensor:
        features = self.first(given)
        return self.rest(features * 2 if isinstance(given, torch.fx.Proxy) else features)


class DataOfParameter(Parts):
    def forward(self, given: Tensor) -> Tensor:
        return self.rest(self.first(given) @ self.second[0].weight.data)


SameTraining = Callable[[nn.Module, nn.Module, nn.Module, object], None]


@pytest.mark.parametrize(
    "kind",
    [
        FrozenPart,
        GradientsSwitchedOff,
        DecoratedPart,
        AutocastPart,
        Permutes,
        NoticesTracing,
        ChoosesByDevice,
    ],
)
def test_regions_that_torch_export_keeps(kind: type[Parts], assert_same_training: SameTraining) -> None:
    model = kind()
    twin = copy.deepcopy(model)
    layers = sequential(model, GIVEN)
    assert len(layers) > 2
    assert_same_training(model, layers, twin, GIVEN)


REFUSED = {
    InferencePart: r"first\.0\.weight \(and 1 more parameters\) gets a gradient in the layers and none in "
    r"the model .*, in layer first\.0",
    FreezesInForward: r"gets a gradient in the layers and none in the model",
    TriesFirst: r"the output is not the model's .*; the first that differs is layer head",
    LayerDrop: r"draw other random numbers than the model, of random,",
    RareLayerDrop: r"draw other random numbers than the model, of random,",
    LayerDropByTorch: r"draw other random numbers than the model, of torch,",
    Mixup: r"draw other random numbers than the model, of numpy\.random,",
    OwnGenerator: r"draw other random numbers than the model, of draws,",
    Shuffles: r"the output is not the model's on a batch of 1",
    Counts: r"in pass 2, on a batch of 1 again .*; the first that differs is layer second\.0",
    Cools: r"the output is not the model's in pass 2",
    KeepsHidden: r"the output is not the model's in pass 2",
    OutputHook: r"the gradient of first\.0\.\w+ is not the model's",
    OutputHookIfTraining: r"the gradient of first\.0\.\w+ is not the model's",
    DecidesByBatch: "the output is not the model's on a batch of 1",
}
"""With the reason, which names the tensor and the layer, or the line."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(own, marks=[pytest.mark.slow] * (index % 4 != 0)) for index, own in enumerate(REFUSED)],
    ids=lambda kind: kind.__name__,
)
def test_what_no_tool_keeps_is_refused(kind: type[Parts]) -> None:
    with pytest.raises(ModelError) as caught:
        sequential(kind(), GIVEN)
    assert re.search(REFUSED[kind], caught.value.what), caught.value.what
    assert "granularity='module:PATTERN'" in caught.value.hint


def test_a_decision_by_a_weight_is_checked_in_every_run() -> None:
    model = DecidesByValue()
    layers = sequential(model, GIVEN)
    assert torch.equal(layers(GIVEN), model(GIVEN))
    with torch.no_grad():
        model.head.weight.fill_(1e7)
    with pytest.raises(ModelError, match="forward takes out of a tensor is True"):
        layers(GIVEN)


class Inside(nn.Module):
    """With one of the above as a part."""

    def __init__(self, kind: type[Parts]) -> None:
        super().__init__()
        self.body, self.head = kind(), nn.Linear(2, 2)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(given))
        return result


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_the_advice_helps(kind: type[Parts], assert_same_training: SameTraining) -> None:
    model = Inside(kind)
    twin = copy.deepcopy(model)
    layers = sequential(model, GIVEN, granularity="module:body")
    assert [type(layer) for layer in layers] == [kind, nn.Linear]
    assert_same_training(model, layers, twin, GIVEN)


class ReadsHead(Parts):
    """Its head's weight is used in two layers."""

    def forward(self, given: Tensor) -> Tensor:
        return self.rest(self.first(given) + self.head.weight.sum())


def _double(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(2)


def test_hooks_of_parameters_stay_with_them() -> None:
    """Copies lose them; the layers have the model's own parameters."""
    model = ReadsHead()
    weights: list[Any] = [model.first[0].weight, model.head.weight]
    for weight in weights:
        weight.register_hook(lambda gradient: gradient * 3)
        weight.register_post_accumulate_grad_hook(_double)
    gradients = []
    for trained in (model, sequential(model, GIVEN)):
        model.zero_grad()
        torch.autograd.backward([trained(GIVEN).sum()])
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert len(gradients[0]) == 6
    for found, expected in zip(*gradients, strict=True):
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


def test_what_only_later_calls_would_show_is_said() -> None:
    with pytest.warns(UserWarning, match="forward changes calls at each call, in Python"):
        sequential(WarmsUp(), GIVEN)


def test_the_callers_random_state_is_left_alone() -> None:
    def state() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]

    before = state()
    with pytest.raises(ModelError):
        sequential(Mixup(), GIVEN)
    assert state() == before


def test_unverified_chains_are_what_torch_fx_makes_of_a_model() -> None:
    chain = build_chain(FrozenPart(), GIVEN)
    assert (chain.tool, chain.comparison) == ("torch.fx", None)
    assert build_chain(FrozenPart(), GIVEN, verify=True).tool == "torch.export"

"""Several watchers hear everything, in order; saved bytes against a published figure and hand counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from pplan.profiler.layer import Layer
from pplan.profiler.layers import build_chain
from pplan.profiler.losses import load_loss
from pplan.profiler.passes import CompositeWatcher, CountedBytes, OutputGradients, SavedBytes, run_layers


class Listens:
    def __init__(self, name: str, heard: list[Any]) -> None:
        self.name, self.heard = name, heard

    def before(self, index: int, given: Any) -> None:
        self.heard.append((self.name, "before", index, tuple(given.shape)))

    def after(self, index: int, output: Any) -> None:
        self.heard.append((self.name, "after", index, tuple(output.shape)))

    def backward_starts(self) -> None:
        self.heard.append((self.name, "backward starts"))

    def gradient(self, index: int, gradient: Tensor) -> None:
        self.heard.append((self.name, "gradient", index, tuple(gradient.shape)))

    def backward_ends(self) -> None:
        self.heard.append((self.name, "backward ends"))


def test_each_hears_everything() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    given = torch.ones(1, 4)
    heard: list[Any] = []
    both = CompositeWatcher(Listens("a", heard), Listens("b", heard))
    run_layers(build_chain(model, given).layers, given, OutputGradients(0), both)
    alone: list[Any] = [
        ("before", 0, (1, 4)),
        ("after", 0, (1, 3)),
        ("before", 1, (1, 3)),
        ("after", 1, (1, 2)),
        ("backward starts",),
        ("gradient", 0, (1, 3)),
        ("backward ends",),
    ]
    assert heard == [(name, *told) for told in alone for name in "ab"]


def counted(model: nn.Module, layers: tuple[Layer, ...], given: Tensor) -> CountedBytes:
    saved = SavedBytes(model, len(layers))
    with saved.hooks():
        run_layers(layers, given, OutputGradients(0), saved)
    return saved.counted


def count(model: nn.Module, given: Tensor) -> CountedBytes:
    return counted(model, build_chain(model, given).layers, given)


class KeepsAttributes(torch.autograd.Function):
    """Keeps its counts as attributes of the context, which autograd's hooks of saved tensors do not see."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, counts: Tensor) -> Tensor:
        ctx.counts, ctx.others = counts, [counts[:2]]
        return given * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradients[0] * 2, None


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, given: Tensor) -> Tensor:
        doubled: Tensor = KeepsAttributes.apply(self.inner(given), torch.arange(5))
        return doubled


def test_attributes_of_a_context_are_saved() -> None:
    """As transformers keeps the tokens of each expert in float32: once, for the layer that made them."""
    saved = count(nn.Sequential(Counts(), Counts(), nn.Linear(4, 4)), torch.ones(3, 4))
    handed_on, own = 3 * 4 * 4, 5 * 8
    assert saved.saved_bytes == [handed_on + own, handed_on + own, handed_on]


def test_vgg19_saves_what_is_known_of_it() -> None:
    with torch.device("meta"):
        model = torchvision.models.vgg19()
    saved = count(model, torch.empty(32, 3, 224, 224, device="meta"))
    assert sum(saved.saved_bytes) / 2**20 == pytest.approx(2397.9, abs=0.05)
    first = 32 * 64 * 224 * 224 * 4
    assert saved.output_bytes[:3] == [first] * 3
    assert saved.saved_bytes[:3] == [32 * 3 * 224 * 224 * 4, first, 0]
    assert saved.saved_input_bytes[:3] == [0, 0, first]


def test_small_chain_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 2), nn.Sigmoid())
    saved = count(model, torch.ones(2, 4))
    # The first Linear's input; ReLU's result, a view of which is the second Linear's input; Sigmoid's result.
    assert saved.saved_bytes == [32, 64, 0, 0, 16]
    assert saved.saved_input_bytes == [0, 0, 64, 64, 0]
    assert saved.output_bytes == [64, 64, 64, 16, 16]


def test_weights_and_views_of_them_are_not_counted() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.factor: Tensor
            self.register_buffer("factor", torch.ones(4))

        def forward(self, given: Tensor) -> Tensor:
            result: Tensor = (given @ self.weight.t()[:, :2]) * self.factor[:2]
            return result

    assert count(nn.Sequential(nn.Linear(4, 4), Views()), torch.ones(3, 4)).saved_bytes == [48, 48]


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.Sigmoid(),
        nn.Conv2d(4, 4, 1),
        nn.GELU(),
        nn.Dropout(0.4),
        nn.Flatten(),
        nn.Linear(4 * 9, 7),
        nn.Tanh(),
        nn.Linear(7, 2),
        nn.Softplus(),
    )


def test_a_stage_run_by_itself_saves_its_layers_and_its_input() -> None:
    model = convolutions()
    given = torch.randn(2, 3, 10, 10)
    layers = build_chain(model, given).layers
    saved = counted(model, layers, given)
    value: Any = given
    tried = 0
    for start in range(1, len(layers)):
        value = layers[start - 1].module(value).detach()
        if layers[start - 1].cut_reason is None:
            alone = counted(model, layers[start:], value.clone().requires_grad_())
            expected = sum(saved.saved_bytes[start:]) + saved.saved_input_bytes[start]
            assert sum(alone.saved_bytes) == expected, layers[start].name
            tried += 1
    assert tried == 12
    assert sum(bytes_ > 0 for bytes_ in saved.saved_input_bytes) == 3


def test_counting_does_not_change_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3), nn.Tanh()).double()
    given = torch.randn(5, 4, dtype=torch.float64)
    count(model, given)
    ours = [p.grad for p in model.parameters()]
    output = model(given)
    start = OutputGradients(0).of(output)[1]
    theirs = torch.autograd.grad(output, list(model.parameters()), start)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None)
    assert None not in ours


def in_order(*modules: nn.Module) -> tuple[Layer, ...]:
    """Layers that hand tuples to each other."""
    return tuple(
        Layer(str(index), type(module).__name__, module, None, tuple(module.parameters()), (), None)
        for index, module in enumerate(modules)
    )


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        made = self.inner(given).sigmoid()
        return made, made[:, :2]


class Twice(nn.Module):
    """Hands on its first tensor twice, besides what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 2)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return given[0], self.inner(given[0]), given[0], given[1]


class Through(nn.Module):
    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return given[:2]


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 2)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = self.inner(given[0]) + given[1]
        return result


def test_tensors_that_cross_together_count_once_each() -> None:
    # 3 samples: an input of 48 bytes, the stem's result of 96, and 24 of what is made of it.
    model = nn.Sequential(Stem(), Twice(), Through(), Last())
    saved = counted(model, in_order(*model), torch.ones(3, 4))
    assert saved.output_bytes == [96 + 24, 96 + 24 + 24, 96 + 24, 24]
    # The stem's result is saved by its sigmoid; the others only use it again.
    assert saved.saved_bytes == [48 + 96, 0, 0, 0]
    # Once, though two tensors of it cross; needed to the end, through a layer that only hands it on.
    assert saved.saved_input_bytes == [0, 96, 96, 96]


def test_a_tensor_that_nobody_needs_any_more_is_no_input_to_keep() -> None:
    model = nn.Sequential(Stem(), Twice(), Through(), nn.Sequential(Pick(1), nn.Linear(2, 2)))
    saved = counted(model, in_order(*model), torch.ones(3, 4))
    assert saved.saved_input_bytes == [0, 96, 0, 0]
    assert saved.saved_bytes == [48 + 96, 0, 0, 24]


class Pick(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        return given[self.at]


def test_the_loss_has_bytes_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5))
    layers, watcher = build_chain(model, torch.ones(3, 4)).layers, SavedBytes(model, 2)
    with watcher.hooks():
        run_layers(layers, torch.ones(3, 4), OutputGradients(0), watcher, loss=load_loss("cross-entropy"))
    saved = watcher.counted
    assert (saved.saved_bytes, saved.output_bytes) == ([48, 96], [96, 60])
    assert saved.saved_input_bytes == [0, 0]
    # Of cross-entropy: the logarithms of 3 x 5 probabilities, 3 targets of 8 bytes, and a sum of weights.
    assert saved.loss_saved_bytes == 60 + 24 + 4
    assert saved.loss_output_bytes == 4


class RunAgain(torch.autograd.Function):
    """Keeps its input alone, and runs a layer again in its backward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(given, weight)
        return (given @ weight).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        again = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = (again[0] @ again[1]).tanh()
        return torch.autograd.grad(output, again, gradient)


class RunsAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = RunAgain.apply(given, self.weight)
        return output


def test_what_a_backward_saves_for_itself_is_no_layers() -> None:
    """It was counted to the last layer, or to the loss."""
    model = nn.Sequential(nn.Linear(4, 4), RunsAgain(), RunsAgain(), nn.Linear(4, 2))
    saved = count(model, torch.ones(2, 4))
    assert saved.saved_bytes == [32, 32, 32, 32]
    assert saved.saved_input_bytes == [0, 0, 0, 0]

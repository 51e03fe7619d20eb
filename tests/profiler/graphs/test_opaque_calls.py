"""Modules that torch.export cannot look into are one call each, and the rest is still cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import ModelError
from pplan.profiler.layers import as_sequential, build_chain

AROUND = "torch.export around blocks.0, blocks.1"
X = torch.linspace(-1, 1, 24).reshape(3, 8)


class Decides(nn.Module):
    """By the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + self.inner(x) * scale if x.sum() > 0 else x - self.inner(x)  # type: ignore[no-any-return]


class Several(Decides):
    """Takes and returns more than a tensor."""

    def forward(self, x: Tensor, scale: float = 1.0, other: Tensor | None = None) -> Any:
        made = super().forward(x if other is None else x + other, scale)
        return made, {"twice": made * 2, "count": 3}, None


class Square(torch.autograd.Function):
    """With a backward that is not the derivative: tracing through it would show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient * ctx.saved_tensors[0]  # type: ignore[no-any-return]


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Square.apply(x)


class Normed(Decides):
    """Draws random numbers, keeps buffers, and works on its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x.mul_(scale)
        return self.drop(self.norm(super().forward(x)))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        # torch.fx cannot compare a size, so that torch.export is needed for everything.
        x = self.first(x) if x.shape[1] == 8 else x
        total = x * 0
        for block in self.blocks:
            made = block(x) if isinstance(block, Squares) else block(x, scale=0.5)
            x = made[0] if isinstance(made, tuple) else made
            total = total + (made[1]["twice"] * made[1]["count"] if isinstance(made, tuple) else made)
        return self.last(x + total)  # type: ignore[no-any-return]


def trained(model: nn.Module, run: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.manual_seed(1)
    output = run(x.clone())
    output.square().sum().backward()
    return [output.detach(), *(parameter.grad for parameter in model.parameters()), *model.buffers()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "blocks", [[Decides(), Decides()], [Several(), Several()], [Squares(), Squares()], [Normed(), Normed()]]
)
def test_the_rest_is_cut_and_trains_as_the_model_does(blocks: list[nn.Module]) -> None:
    model = Blocks(*blocks)
    plain = copy.deepcopy(model)
    chain = build_chain(model, X, granularity="module:blocks.*", verify=True)
    assert chain.tool == AROUND
    assert {"blocks.0", "blocks.1"} <= {layer.name for layer in chain.layers}
    assert any(layer.cut_reason is None for layer in chain.layers[:-1])
    layers = as_sequential(chain)
    for batch in (3, 6):
        x = X.repeat(2, 1)[:batch]
        expected, found = trained(plain, plain, x), trained(model, layers, x)
        assert len(expected) > 4
        for ours, own in zip(found, expected, strict=True):
            assert (ours is None) == (own is None)
            assert ours is None or torch.equal(ours, own if own is not None else ours)


@pytest.mark.slow
def test_the_same_module_may_come_twice() -> None:
    block = Decides()
    chain = build_chain(Blocks(block, block), X, granularity="module:blocks.*", verify=True)
    names = [layer.name for layer in chain.layers]
    assert (chain.tool, "blocks.0" in names) == ("torch.export around blocks.0", True)
    assert "blocks.1" in names


class Counts(Decides):
    """Another number each time, kept in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.count += 1
        return self.inner(x) * scale / self.count  # type: ignore[no-any-return]


class Lazy(Decides):
    """Its buffer has another shape after the first call."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1]).float()
        return self.inner(x) * self.table * scale  # type: ignore[no-any-return]


class Hooked(nn.Module):
    """Doubles the gradients that come through it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.register_full_backward_hook(lambda _module, given, _: (given[0] * 2,))  # type: ignore[index]

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner(x) * scale  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Counts, Lazy, Hooked])
def test_what_a_graph_loses_stays_in_a_module_taken_whole(kind: type[nn.Module]) -> None:
    chain = build_chain(Blocks(kind(), kind()), X, verify=True)
    assert chain.tool == AROUND
    assert chain.comparison
    assert chain.comparison.batches == (1, 1, 2)
    assert not chain.comparison.rounding


@pytest.mark.slow
def test_another_copy_is_traced_around_the_same_modules() -> None:
    model = Blocks(Counts(), Counts())
    tool = build_chain(model, X, verify=True).tool
    chain = build_chain(copy.deepcopy(model), X, tool=tool)
    assert chain.tool == tool
    assert len(chain) == len(build_chain(model, X, verify=True))


class Rows(Decides):
    """Returns the batch size, as a number."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x, scale), {"twice": x * 2, "count": x.shape[0]}


class Without(Blocks):
    """Gradients are off around a block: a region of the graph holds the call."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if x.shape[1] == 8 else x
        with torch.no_grad():
            gate = self.blocks[0](x)
        return self.last(x * gate)  # type: ignore[no-any-return]


class Itself(Blocks):
    """Decides outside of all its modules."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) if x.sum() > 0 else x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Blocks(Rows()), "returns other numbers at another batch size"),
        (Without(Decides()), "without gradients, or under autocast"),
        (Itself(), "torch.export: GuardOnData"),
    ],
)
def test_what_cannot_be_helped_is_refused(model: Blocks, why: str) -> None:
    # Then the sign of the sum, by which they decide, is that of the input, whatever the weights.
    nn.init.zeros_(model.first.bias)
    with pytest.raises(ModelError, match=why):
        build_chain(model, X, verify=True)


class Half(nn.Module):
    """Returns a tuple, as a leaf."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x / 2,)


class TakesHalf(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if x.shape[1] == 8 else x
        return self.last(x + self.blocks[0](x)[0])  # type: ignore[no-any-return]


def test_a_leaf_that_returns_a_tuple_is_traced_into() -> None:
    chain = build_chain(TakesHalf(Half()), X, verify=True)
    assert (chain.tool, chain.comparison and chain.comparison.batches) == ("torch.export", (1, 1, 2))

"""Models that nothing traces, cut at the calls of the user's own modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import ModelError
from pplan.profiler.layers import build_chain, sequential

WIDTH = 6


class Block(nn.Module):
    """Goes one way or the other by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, given: Tensor, scale: Tensor, *, power: int = 1) -> Tensor:
        value = self.drop(self.linear(given)) * scale**power
        return given + (value if float(value.detach().sum()) > 0 else -value)  # type: ignore[no-any-return]


class Untraceable(nn.Module):
    """Its own forward depends on values, too; embedding, blocks and head are plain."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(10, WIDTH), nn.Dropout(0.2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def between(self, value: Tensor) -> Tensor:
        return value

    def behind(self, value: Tensor, first: Tensor) -> Tensor:  # noqa: ARG002
        return self.norm(value)  # type: ignore[no-any-return]

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        if int(ids.max()) >= 10:
            raise ValueError("no such word")
        first = value = self.drop(self.embed(ids))
        scale = self.scale.exp()
        for block in self.blocks:
            value = self.between(block(value, scale, power=2))
        logits = self.head(self.behind(value, first))
        return {"logits": logits if bool((logits != 0).any()) else -logits}


IDS = torch.arange(8).reshape(2, 4)


def test_blocks_in_a_row_are_layers_without_tracing() -> None:
    model = Untraceable()
    chain = build_chain(model, IDS, granularity="module:blocks.*", verify=True)
    assert chain.tool == "calling these modules in a row"
    assert [layer.name for layer in chain.layers] == ["before", "blocks.0", "blocks.1", "blocks.2", "after"]
    # The value, the scale that all blocks are handed, and the model's input.
    assert [layer.crossing for layer in chain.layers] == [3, 3, 3, 2, 0]
    assert chain.comparison is not None
    assert chain.comparison.batches == (1, 1, 2)
    assert chain.comparison.rounding == 0
    assert [layer.cut_reason for layer in chain.layers] == [None] * 5
    # Before the blocks there is no head; behind them the model's code runs from its start.
    own = {name: id(tensor) for name, tensor in model.named_parameters()}
    before = {id(tensor) for tensor in chain.layers[0].module.parameters()}
    assert before == {own["embed.weight"], own["scale"]}
    assert own["head.weight"] in {id(tensor) for tensor in chain.layers[-1].module.parameters()}


def test_they_train_as_the_model() -> None:
    torch.manual_seed(0)
    model = Untraceable()
    layers = sequential(model, IDS, granularity="module:blocks.*")
    results = []
    for module in (model, layers):
        torch.manual_seed(1)
        model.zero_grad()
        output = module(IDS)["logits"]
        output.square().sum().backward()
        gradients = [own.grad.clone() for own in model.parameters() if own.grad is not None]
        results.append([output.detach(), *gradients, torch.rand(1)])
    assert len(results[0]) == len(list(model.parameters())) + 2
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


class Skips(Untraceable):
    """What came before the blocks is used behind them."""

    def behind(self, value: Tensor, first: Tensor) -> Tensor:
        return self.norm(value) + first  # type: ignore[no-any-return]


class Computes(Untraceable):
    """Between the blocks."""

    def between(self, value: Tensor) -> Tensor:
        return value * 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Skips, "in a row: the output is not the model"),
        (Computes, "that the model computes behind the module before it"),
    ],
)
def test_what_cannot_be_cut_so_says_why(kind: type[Untraceable], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        build_chain(kind(), IDS, granularity="module:blocks.*", verify=True)

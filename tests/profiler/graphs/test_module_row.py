"""Models that nothing traces, cut at the calls of the user's own modules."""

from __future__ import annotations

import re

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


class Lengths(nn.Module):
    """Makes a number of lengths, as speech models do for their masks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 8) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.arange(int(lengths.max()))[None] >= lengths[:, None]
        x = x.transpose(0, 1)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=mask)
        return x.transpose(0, 1), lengths


class Hidden(nn.Module):
    """A part that decides by its input, with a list inside, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.idle = nn.Linear(4, 4), Deciding(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.first(x))  # type: ignore[no-any-return]


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = layer(x * 2) if x.sum() > 0 else layer(x * 3)
        return x


def test_the_advice_names_a_list_that_can_be_called_in_a_row() -> None:
    model, given = Lengths(), (torch.randn(3, 5, WIDTH), torch.tensor([5, 2, 4]))
    with pytest.raises(ModelError, match=r"int\(lengths\.max\(\)\)") as caught:
        build_chain(model, given, verify=True)
    assert "granularity='module:blocks.*'" in caught.value.hint
    chain = build_chain(model, given, granularity="module:blocks.*", verify=True)
    assert [layer.name for layer in chain.layers][1:4] == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("granularity", "reason"),
    [
        ("module:part.inner.*", r"part\.inner\.0 is inside part, which is run as a whole; .*x\.sum\(\) > 0"),
        ("module:first,part.inner.*", r"'module:part\.inner\.\*' makes no cut"),
        ("module:idle", "no operation of forward runs in idle$"),
    ],
)
def test_a_pattern_that_makes_no_cut_is_refused_with_the_reason(granularity: str, reason: str) -> None:
    with pytest.raises(ModelError, match="makes no cut") as caught:
        build_chain(Hidden(), torch.ones(2, 4), granularity=granularity)
    assert re.search(reason, caught.value.what), caught.value.what
    assert caught.value.hint


def test_a_pattern_of_the_whole_model_makes_no_cut() -> None:
    with pytest.raises(ModelError, match="nothing before or behind"):
        build_chain(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), granularity="module:0")


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

"""The default cuts of models as people write them: the blocks, by the names that they have in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from pplan.profiler.layer import LayerChain
from pplan.profiler.layers import build_chain

WIDTH = 8


class Attends(nn.Module):
    """A block of two residual parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, given: Tensor) -> Tensor:
        given = given + self.mix(self.norm(given))
        return given + self.mlp(given)  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    """Blocks inside a module of their own, with functions around them."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(WIDTH, WIDTH), blocks
        self.position = nn.Parameter(torch.zeros(WIDTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def run(self, value: Tensor) -> Tensor:
        for block in self.blocks.children():
            value = block(value)
        return value

    def forward(self, given: Tensor) -> Tensor:
        value = self.run(self.embed(given) + self.position)
        return self.head(self.norm(value).mean(1))  # type: ignore[no-any-return]


class Stage(nn.Module):
    def __init__(self, down: nn.Module) -> None:
        super().__init__()
        self.blocks, self.down = nn.Sequential(Attends(), Attends()), down

    def forward(self, given: Tensor) -> Tensor:
        return self.down(self.blocks(given))  # type: ignore[no-any-return]


class TwoWays(nn.Module):
    """Blocks that hand on two values, as those of TNT and CoaT."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Attends(), Attends()

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self.one(one), self.two(two)
        return one + two, two


class Pairs(Wrapped):
    def run(self, value: Tensor) -> Tensor:
        other = value * 2
        for block in self.blocks.children():
            value, other = block(value, other)
        return value + other


class Experts(nn.Module):
    """All experts take the same: they are no blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, given: Tensor) -> Tensor:
        weights = self.gate(given).softmax(-1)
        parts = [expert(given) * weights[..., i, None] for i, expert in enumerate(self.experts)]
        return given + torch.stack(parts).sum(0)


class Scaled(Wrapped):
    """Multiplies around blocks that multiply, too."""

    def run(self, value: Tensor) -> Tensor:
        return super().run(value * 2) * 3


ENDS = ["embed", "norm", "head"]


def between(*names: str) -> list[str]:
    return [ENDS[0], *names, *ENDS[1:]]


def blocks(count: int, kind: Callable[[], nn.Module] = Attends) -> list[nn.Module]:
    return [kind() for _ in range(count)]


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "list": (lambda: Wrapped(nn.ModuleList(blocks(3))), between("blocks.0", "blocks.1", "blocks.2")),
    "sequential": (lambda: Wrapped(nn.Sequential(*blocks(2))), between("blocks.0", "blocks.1")),
    "dict": (
        lambda: Wrapped(nn.ModuleDict({"a": Attends(), "b": Attends()})),
        between("blocks.a", "blocks.b"),
    ),
    "stages": (
        lambda: Wrapped(nn.Sequential(Stage(nn.Linear(WIDTH, WIDTH)), Stage(nn.Identity()))),
        between(
            "blocks.0.blocks.0",
            "blocks.0.blocks.1",
            "blocks.0.down",
            "blocks.1.blocks.0",
            "blocks.1.blocks.1",
        ),
    ),
    "two values": (
        lambda: Pairs(nn.ModuleList(blocks(3, TwoWays))),
        between("blocks.0", "blocks.1", "blocks.2"),
    ),
    # One tensor alone crosses between these blocks and inside none: they are layers as it is.
    "experts": (
        lambda: Wrapped(nn.ModuleList(blocks(2, Experts))),
        ["embed", "add", "blocks.0", "blocks.1", "norm", "mean", "head"],
    ),
    # Functions are not numbered by those that lie inside blocks.
    "functions": (
        lambda: Scaled(nn.ModuleList(blocks(2, Experts))),
        ["embed", "add", "mul", "blocks.0", "blocks.1", "mul_1", "norm", "mean", "head"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_the_layers(name: str) -> None:
    make, names = CASES[name]
    given = torch.randn(2, 5, WIDTH)
    chain = build_chain(make(), given, verify=True)
    assert [layer.name for layer in chain.layers] == names
    assert [layer.cut_reason for layer in chain.layers] == [None] * len(names)
    assert chain.comparison is not None
    assert chain.comparison.rounding == 0


def on_meta(name: str, side: int, **options: Any) -> LayerChain:
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None, **options)
    return build_chain(model, torch.empty(2, 3, side, side, device="meta"))


@pytest.mark.slow
def test_a_vision_transformer_is_its_blocks() -> None:
    names = [layer.name for layer in on_meta("vit_b_16", 224).layers]
    blocks = [f"encoder.layers.encoder_layer_{i}" for i in range(12)]
    assert names == ["conv_proj", *blocks, "encoder.ln", "heads.head"]


@pytest.mark.slow
def test_stages_of_blocks_are_these() -> None:
    names = [layer.name for layer in on_meta("swin_t", 64).layers]
    depths = {1: 2, 3: 2, 5: 6, 7: 2}
    inner = [[f"features.{i}.{j}" for j in range(depths.get(i, 0))] or [f"features.{i}"] for i in range(8)]
    assert names == [*(name for names in inner for name in names), "norm", "head"]


@pytest.mark.slow
def test_a_layer_with_most_of_the_weights_is_opened() -> None:
    """Two heads of GoogLeNet lead from the middle to the end: no single tensor crosses behind the first."""
    names = [layer.name for layer in on_meta("googlenet", 224, init_weights=False).layers]
    inceptions = ["3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b"]
    assert {f"inception{number}" for number in inceptions} <= set(names)

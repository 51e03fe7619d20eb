"""The default cuts of models that collect features, and of those that add the input to the output."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from pplan.profiler.layer import LayerChain
from pplan.profiler.layers import build_chain, sequential

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def public() -> Any:
    """The rewritten models of public repositories."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("public_models")
    finally:
        sys.path.remove(str(BENCHMARKS))


class Backbone(nn.Module):
    """Collects its features from one layer on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.f = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12)))
        self.first = first

    def forward(self, x: Tensor) -> list[Tensor]:
        out = []
        for index, layer in enumerate(self.f):
            x = torch.relu(layer(x))
            if index >= self.first:
                out.append(x)
        return out


class Head(nn.Module):
    """Uses all features."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(32, 4)

    def forward(self, xs: list[Tensor]) -> Tensor:
        return self.p(sum(xs))  # type: ignore[no-any-return]


class Detector(nn.Module):
    """A backbone under a head."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.b, self.h = Backbone(first), Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.b(x))  # type: ignore[no-any-return]


class Wide(nn.Module):
    """A module of several parts whose inside is crossed by tensors much larger than its work."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        large = x.repeat(1, 400)
        x = self.right(torch.tanh(self.left(x)))
        return x + large.sum(1, keepdim=True)


def allowed(chain: LayerChain) -> int:
    return sum(layer.cut_reason is None for layer in chain.layers[:-1])


@pytest.mark.parametrize(("first", "largest"), [(11, 1), (8, 1), (4, 2), (0, 3)])
def test_a_backbone_is_opened_wherever_collecting_begins(first: int, largest: int) -> None:
    chain = build_chain(Detector(first), torch.randn(2, 32), verify=True)
    assert allowed(chain) >= 12 - largest
    linear = 4 * (32 * 32 + 32)
    assert max(layer.parameter_bytes for layer in chain.layers) <= (largest + 0.2) * linear


@pytest.mark.parametrize(
    ("name", "shape", "cuts"),
    [
        ("UNet", (3, 32, 32), 10),
        ("GPipeUNet", (3, 32, 32), 20),
        ("AmoebaNet", (3, 32, 32), 10),
        ("EAST", (3, 64, 64), 10),
        ("SSD", (3, 64, 64), 10),
        ("FPN", (3, 64, 64), 10),
        ("VDSR", (1, 16, 16), 18),
        ("SRVGGNet", (3, 16, 16), 8),
    ],
)
def test_models_of_several_tensors_over_cuts_are_opened(
    public: Any, name: str, shape: tuple[int, ...], cuts: int
) -> None:
    chain = build_chain(getattr(public, name)(), torch.randn(2, *shape), verify=True)
    assert allowed(chain) >= cuts
    assert chain.comparison is not None
    assert not chain.comparison.rounding
    assert not chain.comparison.why_not


def test_resnet101_has_a_cut_for_every_block() -> None:
    with torch.device("meta"):
        model = torchvision.models.resnet101()
    assert allowed(build_chain(model, torch.empty(2, 3, 64, 64, device="meta"))) >= 33


def test_names_are_those_of_the_modules_inside(public: Any) -> None:
    layers = sequential(public.EAST(), torch.randn(2, 3, 64, 64))
    assert layers.layer_names[:3] == ("extractor.features.0", "extractor.features.3", "extractor.features.7")
    assert len(set(layers.layer_names)) == len(layers)


class Again(nn.Module):
    """Calls a module twice, beside what it adds at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.relu(self.a(x))) + x  # type: ignore[no-any-return]


def test_a_module_that_is_called_again_names_both_layers() -> None:
    assert sequential(Again(), torch.randn(2, 8)).layer_names == ("a", "a_1")


def test_no_cut_is_made_inside_where_more_bytes_cross_than_the_work_is_worth() -> None:
    chain = build_chain(Wide(), torch.randn(2, 64))
    assert [layer.name for layer in chain.layers][:8] == [f"body.{index}" for index in range(8)]
    assert len(chain) == 9


def test_blocks_with_less_than_half_of_the_work_stay_whole() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
    chain = build_chain(encoder, torch.randn(2, 4, 16))
    assert [layer.name for layer in chain.layers] == ["layers.0", "layers.1", "layers.2"]

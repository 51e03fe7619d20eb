"""Profiles of which one block was counted for all equal ones, against the same with every block counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pplan
from pplan.profiler import estimate, measure, tracing

WIDTH = 16


class Block(nn.Module):
    """With a table that every block is handed, a tensor that it saves and hands on, and a kind of its own."""

    def __init__(self, number: int, kinds: str) -> None:
        super().__init__()
        self.number, self.kind = number, kinds[number]
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.inner.requires_grad_(self.kind != "f")

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        hidden = self.inner(self.norm(x) * table)
        if self.kind == "n":
            with torch.no_grad():
                hidden = F.gelu(hidden)
        hidden = F.gelu(hidden, approximate="tanh") if self.kind == "t" else F.gelu(hidden)
        return torch.sigmoid(x + self.outer(hidden))


class Model(nn.Module):
    """`kinds`: a letter for each block."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(number, kinds) for number in range(len(kinds)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.sin(x.detach().mean(-1, keepdim=True))
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, table)
        scores: Tensor = self.head(x)
        return scores


def both(monkeypatch: pytest.MonkeyPatch, model: nn.Module | str, **options: Any) -> tuple[Any, Any, int]:
    """With equal blocks counted once and without; and how many layers were counted in the former."""
    counted: list[int] = []
    find = estimate.find_equal_layers

    def noted(*args: Any) -> estimate.EqualLayers:
        blocks = find(*args)
        counted.append(len(blocks.shortened.chain))
        return blocks

    example = None if isinstance(model, str) else torch.ones(2, WIDTH)
    profiles = []
    for each in (noted, lambda subject, _: estimate.EqualLayers(subject, tuple(range(len(subject.chain))))):
        monkeypatch.setattr(measure, "find_equal_layers", each)
        made = pplan.profile(model, example, micro_batch_sizes=[1, 3], **options)
        profiles.append(made.model_dump(exclude={"made_by"}))
    return profiles[0], profiles[1], counted[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "counted"),
    [
        # The last block hands no table on. Of a row of equal ones the two at each end, and one between.
        ("." * 7 + "t" * 6 + "n" + "f" * 7, 1 + 5 + 5 + 1 + 5 + 1 + 1),
        (".t" * 6, 1 + 9 + 1 + 1),
    ],
)
def test_equal_to_a_profile_of_every_block(monkeypatch: pytest.MonkeyPatch, kinds: str, counted: int) -> None:
    once, each, layers = both(monkeypatch, Model(kinds), device="analytic:h100")
    assert layers == counted
    assert once == each


@pytest.mark.slow
def test_blocks_that_are_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformer with blocks taken whole is the one that torch.export looks into, layer by layer."""
    pytest.importorskip("transformers")
    options: Any = {
        "settings": {"layers": 5, "hidden": 32, "heads": 2, "sequence": 8, "vocabulary": 50},
        "device": "analytic:h100",
        "micro_batch_sizes": [1, 3],
    }
    traced = pplan.profile("hf:llama", **options)
    monkeypatch.setattr(tracing, "MANY", 4)
    whole = pplan.profile("hf:llama", **options)
    kept = {"name", "kind", "parameter_bytes", "cut_after", "crossing"}
    assert [layer.model_dump(include=kept) for layer in whole.layers] == [
        layer.model_dump(include=kept) for layer in traced.layers
    ]
    for one, other in zip(whole.layers, traced.layers, strict=True):
        for cost, own in zip(one.costs, other.costs, strict=True):
            assert (cost.saved_bytes, cost.output_bytes) == (own.saved_bytes, own.output_bytes)
            assert cost.forward_seconds == pytest.approx(own.forward_seconds)
            assert cost.backward_seconds == pytest.approx(own.backward_seconds)

"""Profiles of models that were traced with few of their blocks, against those traced with all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pplan
from pplan.profiler import layers, measure, repeated_layers
from pplan.profiler.repeated_layers import OperationRecord
from pplan.profiler.tracing import MANY
from pplan.profiler.user_model import ModelInput

WIDTH = 8
ODD = 6
"""The block that is another, where one is."""


class Block(nn.Module):
    """Adds a table that its model has; `t` approximates."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        hidden = self.outer(x + table)
        return x + (F.gelu(hidden, approximate="tanh") if self.kind == "t" else F.gelu(hidden))


class Model(nn.Module):
    """A letter a block. `odd`: what is so of one block alone."""

    def __init__(self, kinds: str, odd: str = "") -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(Block, kinds))
        self.head = nn.Linear(WIDTH, 10)
        self.odd = odd
        self.table: Tensor
        self.register_buffer("table", torch.ones(WIDTH))
        self.behind: nn.Module = nn.Identity()
        if odd == "tied":
            self.blocks[ODD].outer.weight = self.blocks[0].outer.weight  # type: ignore[union-attr]
        if odd == "same":
            self.behind = self.get_submodule(f"blocks.{ODD}.outer")

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embedding(x)
        for place, block in enumerate(self.blocks):
            x = block(x, self.table.sin())
            if self.odd == "relu" and place == ODD:
                x = torch.relu(x)
            if self.odd == "each":
                x = torch.relu(x)
            if self.odd == "late" and place == 16:
                x = torch.relu(x)
            if self.odd == "skip" and place == ODD:
                x = x + first
        if self.odd == "same":
            x = self.behind(x)
        scores: Tensor = self.head(x)
        if self.odd == "read":
            block = self.blocks[ODD]
            assert isinstance(block, Block)
            scores = scores + (x @ block.outer.weight).sum()
        return scores


class TableBlock(Block):
    """Saves the table that it is handed."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x * table, table)


class Turns(nn.Module):
    """A letter a block: small ones are handed one table, great ones another."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(TableBlock("t" if kind in "tT" else ".") for kind in kinds)
        self.head = nn.Linear(WIDTH, 10)
        self.kinds = kinds
        self.table: Tensor
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        small, great = self.table.sin(), self.table.cos()
        for place, block in enumerate(self.blocks):
            # By the place in the list, also where there are fewer blocks: as Gemma's masks.
            x = block(x, small if self.kinds[place].islower() else great)
        scores: Tensor = self.head(x)
        return scores


GRANULARITY = "module:blocks.*,head"


def blocks_traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each chain that is built, the blocks that the model has."""
    counts: list[int] = []
    build = layers.build_chain

    def noted(model: Any, *args: Any, **options: Any) -> Any:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        counts.append(len(lists[0]))
        return build(model, *args, **options)

    monkeypatch.setattr(measure, "build_chain", noted)
    return counts


@pytest.fixture(autouse=True)
def short_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small models have some to drop."""
    if "rows_are_found" not in request.node.name:
        monkeypatch.setattr(repeated_layers, "_WORTH_IT", 2)


def both(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> tuple[Any, Any, list[int]]:
    """The profile with blocks dropped and without, and how many blocks were traced for the first."""
    counts = blocks_traced(monkeypatch)
    options: Any = {
        "micro_batch_sizes": [2],
        "device": "analytic:h100",
        "granularity": "module:blocks.*,head",
    }
    short = pplan.profile(model, torch.ones(2, WIDTH), **options)
    traced = counts.copy()
    monkeypatch.setattr(repeated_layers, "_WORTH_IT", 10**6)
    whole = pplan.profile(model, torch.ones(2, WIDTH), **options)
    return short.model_dump(exclude={"made_by"}), whole.model_dump(exclude={"made_by"}), traced


@pytest.mark.parametrize(
    ("kinds", "left"),
    [
        # The last block is followed by the head, and in no row.
        pytest.param("t" + "." * 11, 8, marks=pytest.mark.slow),
        pytest.param("t." * 6, 12, marks=pytest.mark.slow),
        # Nor is the first: its table may be one that was made for all.
        pytest.param("." * 10, 8, marks=pytest.mark.slow),
    ],
)
def test_equal_to_a_profile_of_all_blocks(monkeypatch: pytest.MonkeyPatch, kinds: str, left: int) -> None:
    model = Model(kinds)
    short, whole, traced = both(monkeypatch, model)
    assert len(model.blocks) == len(kinds)
    assert traced == [left]
    assert [layer["name"] for layer in short["layers"]][1:-1] == [f"blocks.{n}" for n in range(len(kinds))]
    assert short == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "left"),
    [
        # Four periods and two, what is left of one, and the last, which is followed by the head.
        ("Tt" * 9, 12),
        ("tttT" * 6, 20),
        ("AA" + "atT" * 7, 2 + 15),
        # Another at the end, which by its place would be one of those in turn.
        ("Tt" * 8 + "ttt", 19),
    ],
)
def test_kinds_in_turn(monkeypatch: pytest.MonkeyPatch, kinds: str, left: int) -> None:
    short, whole, traced = both(monkeypatch, Turns(kinds))
    assert traced == [left]
    assert short == whole


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["relu", "tied", "same"])
def test_what_differs_is_traced(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    """A block before which and behind which too few are equal in a row."""
    short, whole, traced = both(monkeypatch, Model("." * 13, odd))
    assert traced == [13]
    assert short == whole


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["skip", "read", "each"])
def test_a_tensor_that_skips_layers(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    """Only the chain tells, also of a block's weight that the head reads, which in a shortened list is
    another block's, and of layers between blocks: then the whole model is traced after all."""
    short, whole, traced = both(monkeypatch, Model("." * 20, odd))
    assert traced[-1] == 20
    assert len(traced) == 2
    assert short == whole


@pytest.mark.slow
@pytest.mark.parametrize(("odd", "left"), [("relu", ODD + 2 + 6), ("late", 20)])
def test_places_in_the_list(monkeypatch: pytest.MonkeyPatch, odd: str, left: int) -> None:
    """Behind a block that is another a row is shortened; a model that asks for a place behind it is not."""
    short, whole, traced = both(monkeypatch, Model("." * 20, odd))
    assert traced == [left]
    assert short == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layers", "settings", "left"),
    [
        ("gemma2", 18, {"sliding_window": 16, "head_dim": 16}, 12),
        ("gpt_oss", 18, {"num_local_experts": 4, "sliding_window": 16, "head_dim": 16}, 12),
    ],
)
def test_local_and_global_attention(
    monkeypatch: pytest.MonkeyPatch, family: str, layers: int, settings: dict[str, int], left: int
) -> None:
    """Of sequences longer than the window, so that there are two masks."""
    pytest.importorskip("transformers")
    counts = blocks_traced(monkeypatch)
    sizes = {
        "layers": layers,
        "hidden": 64,
        "heads": 4,
        "intermediate": 96,
        "vocabulary": 128,
        "sequence": 32,
    }
    profiles = []
    for worth_it in (2, 10**6):
        monkeypatch.setattr(repeated_layers, "_WORTH_IT", worth_it)
        profile = pplan.profile(
            f"hf:{family}",
            device="analytic:h100",
            dtype="bfloat16",
            micro_batch_sizes=[2],
            settings=sizes | settings,
        )
        profiles.append(profile.model_dump(exclude={"made_by"}))
    assert counts == [left, layers]
    assert profiles[0] == profiles[1]


def test_rows_are_found() -> None:
    """By what blocks run, and what runs between them. A class a letter."""

    def longest(units: str) -> range | None:
        record: list[Any] = ["first"]
        for unit in units:
            record += [unit, "between"]
        classes = {unit: type(unit, (nn.Module,), {}) for unit in units}
        blocks = tuple(classes[unit]() for unit in units)
        whole = Counter({kind: count for kind, count in Counter(map(type, blocks)).items() if count >= MANY})
        row = repeated_layers._longest_row("blocks", blocks, record, whole)
        return None if row is None else row.dropped

    assert longest("a" * 13) is None
    assert longest("a" * 14) == range(3, 11)
    assert longest("b" + "a" * 20 + "c") == range(4, 18)
    assert longest("ab" * 15) == range(5, 23)
    assert longest("ab" * 8) is None
    # Each class that is too frequent to be looked into stays so, and the others stay rare.
    assert longest("ab" * 10) == range(5, 13)
    assert longest("aaab" * 6) is None
    assert longest("aaab" * 10) == range(9, 25)
    assert longest("aaaaaaab" * 5) is None
    assert longest("aaaaaaab" * 6) is None
    assert longest("aaaaaaab" * 8) == range(17, 33)
    assert longest("a" * 13 + "b" + "a" * 13) is None
    assert longest("a" * 14 + "b" + "a" * 25) == range(18, 37)


@pytest.mark.parametrize("method", ["begin", "end"])
def test_an_error_of_its_own_hooks_is_not_taken_for_the_models(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """It was: the model was traced whole, and nobody knew. One that fails by itself is traced whole."""
    model, example = Model("." * 10).to("meta"), ModelInput((torch.ones(2, WIDTH, device="meta"),), {})
    assert repeated_layers._run(model, list(model.blocks), example) is not None
    with monkeypatch.context() as broken:
        broken.setattr(model.blocks[3], "forward", lambda *_: 1 / 0)
        assert repeated_layers._run(model, list(model.blocks), example) is None

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(OperationRecord, method, fail)
    with pytest.raises(ZeroDivisionError):
        repeated_layers._run(model, list(model.blocks), example)

"""Tables and buffers that all blocks use: cuts lie between the blocks, and the layers are the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pplan.cost_models.errors import ModelError
from pplan.profiler.layer import LayerChain
from pplan.profiler.layers import build_chain, sequential
from pplan.profiler.measure import profile_model
from pplan.profiler.profile_options import ProfileOptions

WIDTH, LENGTH, BLOCKS = 8, 6, 4


class Block(nn.Module):
    """Attention with rotated queries and a mask, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, given: Tensor, cos: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(given)).chunk(3, dim=-1)
        weights = ((query * cos) @ (key * cos).transpose(1, 2) + mask).softmax(-1)
        given = given + self.out(weights @ value)
        return given + self.mlp(self.mlp_norm(given))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Hands the same tables to all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 20)
        self.register_buffer("frequencies", 1.0 / torch.arange(1.0, WIDTH + 1))
        self.register_buffer("hidden", torch.full((LENGTH, LENGTH), -1e9).triu(1))

    def cos(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return torch.outer(places, self.get_buffer("frequencies")).cos()

    def mask(self, ids: Tensor) -> Tensor:
        return self.get_buffer("hidden")[: ids.shape[1], : ids.shape[1]]

    def forward(self, ids: Tensor) -> Tensor:
        cos, mask, value = self.cos(ids), self.mask(ids), self.embed(ids)
        for block in self.blocks:
            value = block(value, cos, mask)
        return self.head(self.norm(value))  # type: ignore[no-any-return]


def ids() -> Tensor:
    return torch.arange(2 * LENGTH).reshape(2, LENGTH) % 20


def chain_of(model: nn.Module) -> LayerChain:
    return build_chain(model, ids(), verify=True)


NAMES = ["embed", *(f"blocks.{i}" for i in range(BLOCKS)), "norm", "head"]


@pytest.mark.slow
def test_tables_of_buffers_are_made_again_by_every_block() -> None:
    chain = chain_of(Transformer())
    assert [layer.name for layer in chain.layers] == NAMES
    assert [layer.crossing for layer in chain.layers] == [1] * (len(NAMES) - 1) + [0]
    assert [layer.cut_reason for layer in chain.layers] == [None] * len(NAMES)
    assert chain.comparison is not None
    assert chain.comparison.batches
    assert chain.comparison.rounding == 0


class OfInputs(Transformer):
    """A mask of the tokens: padding is not looked at."""

    def mask(self, ids: Tensor) -> Tensor:
        return (ids == 0)[:, None, :] * -1e9


class Learned(Transformer):
    """A bias that is trained, computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH))

    def mask(self, ids: Tensor) -> Tensor:  # noqa: ARG002
        return self.bias.tanh()


class Dropped(Transformer):
    """Drawn once: all blocks have the same."""

    def mask(self, ids: Tensor) -> Tensor:
        return F.dropout(super().mask(ids), 0.5, self.training)


class Steep(Transformer):
    """Too much to be done more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("wide", torch.randn(LENGTH, 300))

    def mask(self, ids: Tensor) -> Tensor:  # noqa: ARG002
        wide = self.get_buffer("wide")
        return torch.softmax(wide @ wide.T, -1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OfInputs, Learned, Dropped, Steep])
def test_other_tables_cross_the_cuts(kind: type[Transformer]) -> None:
    chain = chain_of(kind())
    assert [layer.name for layer in chain.layers] == NAMES
    between = chain.layers[1 : BLOCKS - 1]
    assert [(layer.crossing, layer.cut_reason) for layer in between] == [(2, None)] * len(between)


class Counting(Transformer):
    """Writes the buffer that all blocks read, each time or each second time."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.calls = every, 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % self.every == 0:
            self.get_buffer("frequencies").mul_(0.5)
        return super().forward(ids)


@pytest.mark.slow
def test_a_table_of_a_buffer_that_forward_writes_is_made_once() -> None:
    between = chain_of(Counting(1)).layers[1 : BLOCKS - 1]
    assert [(layer.crossing, layer.cut_reason) for layer in between] == [(2, None)] * len(between)


class Halving(nn.Module):
    """A block, run whole, that writes a buffer at every second call, past the version counter."""

    def __init__(self, shared: Tensor, *, hidden: bool) -> None:
        super().__init__()
        self.linear, self.calls, self.hidden = nn.Linear(WIDTH, WIDTH), 0, hidden
        self.register_buffer("shared", shared)

    def forward(self, given: Tensor) -> Tensor:
        self.calls += 1
        shared = self.get_buffer("shared")
        if self.calls % 2 == 0:
            (shared.data if self.hidden else shared).mul_(0.5)
        return self.linear(given) * shared  # type: ignore[no-any-return]


@pytest.mark.parametrize("hidden", [False, True])
def test_a_write_at_every_second_call_is_noticed(hidden: bool) -> None:
    shared = torch.rand(WIDTH)
    # As elements of an nn.Sequential they are not traced.
    model = nn.Sequential(*(Halving(shared, hidden=hidden) for _ in range(3)))
    chain = build_chain(model, torch.randn(2, WIDTH), verify=True)
    assert [layer.cut_reason for layer in chain.layers] == ["0 and 2 share 0.shared"] * 2 + [None]


@pytest.mark.slow
def test_what_is_counted_in_python_is_no_table() -> None:
    """A trace has the first call's side of it."""
    model = Counting(2)
    model.blocks = model.blocks[:2]
    with pytest.raises(ModelError, match="in pass 2"):
        chain_of(model)


class TwoNames(nn.Module):
    """The same buffer is registered by two modules."""

    def __init__(self, *, written: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        table = torch.randn(4)
        self.first.register_buffer("table", table)
        self.last.register_buffer("also", table)
        self.written = written

    def forward(self, given: Tensor) -> Tensor:
        if self.written:
            self.last.get_buffer("also").mul_(2)
        value = self.middle(torch.tanh(self.first(given) * self.first.get_buffer("table")))
        return self.last(value) * self.last.get_buffer("also")  # type: ignore[no-any-return]


@pytest.mark.parametrize("written", [False, True])
def test_a_buffer_of_two_names_is_one(written: bool) -> None:
    chain = build_chain(TwoNames(written=written), torch.randn(3, 4), verify=True)
    middle = next(layer for layer in chain.layers if layer.name == "middle")
    assert (middle.cut_reason is not None) is written


class Lazy(Transformer):
    """Keeps its table from the first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None

    def cos(self, ids: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = super().cos(ids)
        return self.kept


@pytest.mark.slow
@pytest.mark.parametrize("called", [False, True])
def test_a_table_that_is_kept_from_the_first_call_on(called: bool) -> None:
    model = Lazy()
    if called:
        model(ids())
    chain = chain_of(model)
    assert [layer.name for layer in chain.layers] == NAMES
    assert [layer.cut_reason for layer in chain.layers] == [None] * len(NAMES)


class Drawn(Transformer):
    """Without a random function in its name."""

    def cos(self, ids: Tensor) -> Tensor:
        return super().cos(ids) + torch.empty(WIDTH).uniform_()


@pytest.mark.slow
def test_a_table_that_is_drawn_is_drawn_once() -> None:
    chain = chain_of(Drawn())
    assert [layer.crossing for layer in chain.layers[1 : BLOCKS - 1]] == [2] * (BLOCKS - 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Transformer, OfInputs, Learned, Dropped, Steep, Lazy])
def test_layers_train_as_the_model(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    layers = sequential(model, ids())
    gradients = []
    for module in (model, layers):
        torch.manual_seed(1)
        model.zero_grad()
        module(ids()).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.slow
def test_the_ledger_counts_a_buffer_once_a_stage() -> None:
    profile = profile_model((Transformer(), ids()), ProfileOptions(device="meta", micro_batch_sizes=[2]))
    bytes = 4 * (WIDTH + LENGTH * LENGTH)
    assert {own.tensor: own.bytes for own in profile.shared_buffers} == {
        "frequencies": 4 * WIDTH,
        "hidden": 4 * LENGTH * LENGTH,
    }
    assert [layer.buffer_bytes for layer in profile.layers] == [0, bytes, *([0] * (BLOCKS + 1))]

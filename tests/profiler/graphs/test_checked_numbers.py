"""Models whose code takes numbers out of tensors: layers are made for the example's, and check them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import ModelError
from pplan.profiler.layer import LayerChain
from pplan.profiler.layers import build_chain, sequential

CHECKED = "torch.export with checked numbers"
BLOCKS = tuple(f"enc.layers.{index}" for index in range(3))


class Text(nn.Module):
    """An encoder with a mask: torch looks into it to see whether it is causal."""

    kept: Tensor

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3)
        self.mask = mask
        self.register_buffer("kept", nn.Transformer.generate_square_subsequent_mask(6))

    def forward(self, t: Tensor, given: Tensor | None = None) -> Any:
        n = t.shape[1]
        made: dict[str, Any] = {
            "made": lambda: nn.Transformer.generate_square_subsequent_mask(n),
            "logarithm": lambda: torch.log(torch.tril(torch.ones(n, n))),
            "open": lambda: torch.zeros(n, n),
            "kept": lambda: self.kept,
            "given": lambda: given,
        }
        padding = t == 0 if self.mask == "padding" else None
        mask = made[self.mask]() if self.mask in made else None
        return self.head(self.enc(self.emb(t), mask=mask, src_key_padding_mask=padding))


class Translation(nn.Module):
    """Encoder and decoder, with a mask for each."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.body = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)

    def forward(self, t: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(t.shape[1])
        return self.head(self.body(self.emb(t), self.emb(t), src_mask=torch.zeros_like(mask), tgt_mask=mask))


class Reads(nn.Module):
    """Two layers around a branch on a number."""

    sign: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("sign", torch.ones(()))
        self.register_buffer("steps", torch.zeros(()))

    def number(self, x: Tensor) -> Any:  # noqa: ARG002
        return self.sign

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        return self.b(x) if self.number(x) > 0 else self.b(x) * 2


class Trained(Reads):
    def number(self, x: Tensor) -> Any:  # noqa: ARG002
        return self.scale * 2


class Counted(Reads):
    def number(self, x: Tensor) -> Any:  # noqa: ARG002
        self.steps.add_(1)
        return self.steps < 3


class Drawn(Reads):
    def number(self, x: Tensor) -> Any:  # noqa: ARG002
        return torch.rand(()) - 0.5


class OfInput(Reads):
    def number(self, x: Tensor) -> Any:
        return torch.isfinite(x).all()


class OfBatch(Reads):
    def number(self, x: Tensor) -> Any:
        return torch.ones(x.shape[0]).sum().item() - 3


TOKENS = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0))
X = torch.linspace(-1, 1, 24).reshape(3, 8)


def chain_of(model: nn.Module, *inputs: Any) -> LayerChain:
    chain = build_chain(model, inputs if len(inputs) > 1 else inputs[0], verify=True)
    assert chain.comparison is not None
    assert chain.comparison.notes == ()
    return chain


@pytest.mark.parametrize("mask", ["made", "logarithm", "open", "kept", "padding", "none"])
def test_the_blocks_of_an_encoder_with_a_mask_are_the_layers(mask: str) -> None:
    chain = chain_of(Text(mask), TOKENS)
    assert tuple(layer.name for layer in chain.layers) == ("emb", *BLOCKS, "head")


def test_a_mask_that_is_given_is_read_too() -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    chain = chain_of(Text("given"), TOKENS, mask)
    assert chain.tool == CHECKED
    assert set(BLOCKS).issubset(layer.name for layer in chain.layers)


@pytest.mark.slow
def test_a_transformer_with_masks_has_its_blocks() -> None:
    names = {layer.name for layer in chain_of(Translation(), TOKENS).layers}
    assert {f"body.{part}.layers.{index}" for part in ("encoder", "decoder") for index in (0, 1)} <= names


def test_layers_check_the_numbers_they_were_made_for() -> None:
    model = Text("kept")
    layers = sequential(model, TOKENS)
    assert torch.equal(layers.eval()(TOKENS), copy.deepcopy(model).eval()(TOKENS))
    model.kept.zero_()
    with pytest.raises(ModelError, match="is False; these layers were made for True"):
        layers(TOKENS)


def test_layers_with_checks_are_saved() -> None:
    layers = sequential(Text("made"), TOKENS).eval()
    file = io.BytesIO()
    torch.save(layers, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(TOKENS), layers(TOKENS))


def test_a_number_of_a_buffer_that_nothing_writes_is_checked() -> None:
    chain = chain_of(Reads(), X)
    assert (len(chain), chain.tool) == (2, CHECKED)


@pytest.mark.parametrize("kind", [OfInput, Trained])
def test_an_answer_that_may_change_is_checked_where_nothing_else_helps(kind: type[Reads]) -> None:
    chain = chain_of(kind(), X)
    assert (len(chain), chain.tool) == (2, f"{CHECKED} of the input")


def test_the_samples_are_checked_at_run_time() -> None:
    model = OfInput()
    layers = sequential(model, X)
    assert torch.equal(layers(X), model(X))
    with pytest.raises(ModelError, match="is False; these layers were made for True"):
        layers(X * float("inf"))


@pytest.mark.parametrize("kind", [Counted, Drawn, OfBatch])
def test_numbers_that_change_from_step_to_step_are_refused(kind: type[Reads]) -> None:
    with pytest.raises(ModelError) as caught:
        build_chain(kind(), X, verify=True)
    assert "numbers" in caught.value.what

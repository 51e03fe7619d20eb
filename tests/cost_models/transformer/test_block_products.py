"""The products of a block, and what its devices exchange, one by one: sizes, layouts and bytes by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pplan.cost_models.transformer.block_kernels import block_work, embedding_work, head_work, predictor_work
from pplan.cost_models.transformer.kernel_table import (
    Collective,
    GroupedMatmul,
    Kernel,
    Matmul,
    RingAttention,
)
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees, padded_vocabulary
from pplan.cost_models.transformer.transformer_shape import AttentionShape, ExpertShape, TransformerShape

TOKENS = Tokens(64, 3)
GROUPED = TransformerShape("grouped", 256, 1024, 512, AttentionShape(8, 4, 32, 16), (False, False))
LATENT = replace(
    GROUPED,
    attention=AttentionShape(8, 8, 48, 32, latent_queries=96, latent_keys=64, rotary_width=16),
    experts=ExpertShape(number=8, per_token=2, width=64, shared_width=128),
    gated=False,
)
DEGREES = [
    ParallelDegrees(),
    ParallelDegrees(tensor=2),
    ParallelDegrees(context=2),
    ParallelDegrees(tensor=2, context=4, exchange="ring"),
    ParallelDegrees(context=2, exchange="all-gather"),
    ParallelDegrees(expert=4, tensor=2),
]
Linear = tuple[int, int, int]
"""Tokens, inputs and outputs."""
Sent = tuple[str, float, str]


def products(kernels: tuple[Kernel, ...]) -> Counter[tuple[int, int, int, str]]:
    return Counter((own.m, own.k, own.n, own.layout) for own in kernels if isinstance(own, Matmul))


def exchanges(kernels: tuple[Kernel, ...]) -> Counter[Sent]:
    return Counter((own.name, own.bytes, own.group) for own in kernels if isinstance(own, Collective))


def forwards(linears: list[Linear]) -> Counter[tuple[int, int, int, str]]:
    return Counter((tokens, inputs, outputs, "TN") for tokens, inputs, outputs in linears)


def backwards(linears: list[Linear]) -> Counter[tuple[int, int, int, str]]:
    """The gradients of the inputs, [tokens, outputs] x [outputs, inputs], and those of the weights."""
    inputs = Counter((tokens, outputs, inputs, "NN") for tokens, inputs, outputs in linears)
    return inputs + Counter((outputs, tokens, inputs, "NT") for tokens, inputs, outputs in linears)


def attention_products(shape: TransformerShape, degrees: ParallelDegrees) -> list[Linear]:
    own, count = shape.attention, 64 * 3 // degrees.context
    heads, groups = own.heads // degrees.tensor, own.key_value_heads // degrees.tensor
    output = (count, heads * own.value_width, shape.hidden)
    if not own.is_latent:
        wide = heads * own.head_width + groups * (own.head_width + own.value_width)
        return [(count, shape.hidden, wide), output]
    return [
        (count // degrees.tensor, shape.hidden, own.latent_queries),
        (count // degrees.tensor, shape.hidden, own.latent_keys + own.rotary_width),
        (count, own.latent_queries, heads * own.head_width),
        (count, own.latent_keys, heads * (own.head_width - own.rotary_width + own.value_width)),
        output,
    ]


def attention_exchanges(
    shape: TransformerShape, degrees: ParallelDegrees
) -> tuple[Counter[Sent], Counter[Sent]]:
    """Of forward and backward: what tensor-parallel devices gather and scatter, and heads or keys and values
    among those that share the sequence."""
    own, count = shape.attention, 64 * 3 // degrees.context
    heads, groups = own.heads // degrees.tensor, own.key_value_heads // degrees.tensor
    forward, backward = Counter[Sent](), Counter[Sent]()
    whole = 2.0 * count * shape.hidden
    if degrees.tensor > 1 and not own.is_latent:
        forward += Counter([("all_gather", whole, "tensor"), ("reduce_scatter", whole, "tensor")])
        backward += Counter([("all_gather", whole, "tensor")] * 2 + [("reduce_scatter", whole, "tensor")])
    elif degrees.tensor > 1:
        latents = [2.0 * count * own.latent_queries, 2.0 * count * (own.latent_keys + own.rotary_width)]
        forward += Counter([("all_gather", size, "tensor") for size in latents])
        forward += Counter([("reduce_scatter", whole, "tensor")])
        backward += Counter([("all_gather", whole, "tensor")])
        backward += Counter([("reduce_scatter", size, "tensor") for size in latents])
    keys = 2.0 * count * groups * (own.head_width + own.value_width)
    if degrees.context > 1 and degrees.exchange == "all-to-all":
        queries, results = 2.0 * count * heads * own.head_width, 2.0 * count * heads * own.value_width
        sent = (2.0 * count * groups * own.head_width, 2.0 * count * groups * own.value_width)
        swapped = Counter([("all_to_all", size, "context") for size in (queries, *sent, results)])
        forward, backward = forward + swapped, backward + swapped
    elif degrees.context > 1 and degrees.exchange == "all-gather":
        gathered = Counter([("all_gather", degrees.context * keys, "context")])
        forward, backward = forward + gathered, backward + gathered
        backward += Counter([("reduce_scatter", degrees.context * keys, "context")])
    elif degrees.context > 1:
        backward += Counter([("ring", keys, "context")])
    return forward, backward


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "shape", [GROUPED, LATENT], ids=lambda own: own.name + "-latent" * own.attention.is_latent
)
def test_dense_blocks(shape: TransformerShape, gated: bool, degrees: ParallelDegrees) -> None:
    work = block_work(replace(shape, gated=gated), False, degrees, TOKENS)
    count, width = 64 * 3 // degrees.context, 512 // degrees.tensor
    linears = attention_products(shape, degrees)
    linears += [(count, 256, (2 if gated else 1) * width), (count, width, 256)]
    assert products(work.forward) == forwards(linears)
    assert products(work.backward) == backwards(linears)
    forward, backward = attention_exchanges(shape, degrees)
    if degrees.tensor > 1:
        whole = 2.0 * count * 256
        forward += Counter([("all_gather", whole, "tensor"), ("reduce_scatter", whole, "tensor")])
        backward += Counter([("all_gather", whole, "tensor")] * 2 + [("reduce_scatter", whole, "tensor")])
    assert exchanges(work.forward) == forward
    assert exchanges(work.backward) == backward
    rings = [own for own in (*work.forward, *work.backward) if isinstance(own, RingAttention)]
    assert len(rings) == (2 if degrees.exchange == "ring" and degrees.context > 1 else 0)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_blocks_of_experts(shared: bool, gated: bool, degrees: ParallelDegrees) -> None:
    assert LATENT.experts is not None
    experts = replace(LATENT.experts, shared_width=128 if shared else 0)
    work = block_work(replace(LATENT, gated=gated, experts=experts), True, degrees, TOKENS)
    count, ups = 64 * 3 // degrees.context, 2 if gated else 1
    tokens, linears = count // degrees.tensor, attention_products(LATENT, degrees)
    linears.append((tokens, 256, 8))
    if shared:
        width = 128 // degrees.tensor
        linears += [(count, 256, ups * width), (count, width, 256)]
    assert products(work.forward) == forwards(linears)
    assert products(work.backward) == backwards(linears)
    # Each of the experts of a device gets its share of the tokens of all devices that share them.
    rows = -(-tokens * 2 // 8) * degrees.expert
    local = 8 // degrees.expert
    for kernels, parts in (
        (work.forward, ["forward"]),
        (work.backward, ["input_gradient", "weight_gradient"]),
    ):
        grouped = Counter(own for own in kernels if isinstance(own, GroupedMatmul))
        expected = Counter[GroupedMatmul]()
        for part in parts:
            expected[GroupedMatmul(local, rows, ups * 64, 256, part)] += 1  # type: ignore[arg-type]
            expected[GroupedMatmul(local, rows, 256, 64, part)] += 1  # type: ignore[arg-type]
        assert grouped == expected
    forward, backward = attention_exchanges(LATENT, degrees)
    if degrees.expert > 1:
        sent = Counter([("all_to_all", 2.0 * tokens * 2 * 256, "expert")] * 2)
        forward, backward = forward + sent, backward + sent
    if degrees.tensor > 1 and shared:
        whole = 2.0 * count * 256
        forward += Counter([("all_gather", whole, "tensor"), ("reduce_scatter", whole, "tensor")])
        backward += Counter([("all_gather", whole, "tensor")] * 2 + [("reduce_scatter", whole, "tensor")])
    assert exchanges(work.forward) == forward
    assert exchanges(work.backward) == backward


@pytest.mark.parametrize("degrees", DEGREES[:4], ids=str)
def test_what_stands_before_and_behind_the_blocks(degrees: ParallelDegrees) -> None:
    count, tensor = 64 * 3 // degrees.context, degrees.tensor
    whole, several = 2.0 * count * 256, tensor > 1
    gather, scatter = ("all_gather", whole, "tensor"), ("reduce_scatter", whole, "tensor")
    embedding = embedding_work(GROUPED, degrees, TOKENS)
    assert products(embedding.forward) == products(embedding.backward) == Counter()
    assert exchanges(embedding.forward) == Counter([scatter] * several)
    assert exchanges(embedding.backward) == Counter([gather] * several)
    head, rows = head_work(GROUPED, degrees, TOKENS), padded_vocabulary(GROUPED, tensor) // tensor
    assert products(head.forward) == forwards([(count, 256, rows)])
    assert products(head.backward) == backwards([(count, 256, rows)])
    sums = ("all_reduce", 4.0 * count, "tensor")  # the largest, the sum and the target of each token
    assert exchanges(head.forward) == Counter([gather, *[sums] * 3] * several)
    assert exchanges(head.backward) == Counter([scatter] * several)
    predictor = predictor_work(GROUPED, degrees, TOKENS)
    assert products(predictor.forward) == forwards([(count, 512, 256 // tensor)])
    assert products(predictor.backward) == backwards([(count, 512, 256 // tensor)])
    both = ("all_gather", 2 * whole, "tensor")
    assert exchanges(predictor.forward) == Counter([both, gather] * several)
    back = [gather, both, ("reduce_scatter", 2 * whole, "tensor")]
    assert exchanges(predictor.backward) == Counter(back * several)


def test_parameters_of_a_shape_without_biases() -> None:
    """Two norms of a block and one behind the last, and with latents a norm of each; the matrices by their
    sizes."""
    attention, dense = 256 * (8 * 32 + 4 * (32 + 16)) + 8 * 16 * 256, 3 * 256 * 512
    assert GROUPED.parameters() == 2 * 1024 * 256 + 256 + 2 * (attention + dense + 2 * 256)
    latent = 256 * (96 + 64 + 16) + 96 * 8 * 48 + 64 * 8 * (48 - 16 + 32) + 8 * 32 * 256 + 96 + 64
    experts = 256 * 8 + 2 * 256 * 128 + 8 * 2 * 256 * 64
    own = replace(LATENT, routed=(False, True))
    blocks = 2 * (latent + 2 * 256) + 2 * 256 * 512 + experts
    assert own.parameters() == 2 * 1024 * 256 + 256 + blocks
    assert own.active_parameters() == own.parameters() - 6 * 2 * 256 * 64
    assert replace(GROUPED, tied=True).parameters() == GROUPED.parameters() - 1024 * 256


def test_what_attention_saves_of_two_layers() -> None:
    """4 bytes a token and head, of a block, and of a predictor, which is a block with more before it."""
    block = block_work(GROUPED, False, ParallelDegrees(), TOKENS)
    saved = 4.0 * 64 * 3 * 8
    assert block.selective_saved == saved
    assert (predictor_work(GROUPED, ParallelDegrees(), TOKENS) + block).selective_saved == saved
    assert (block + block).selective_saved == 2 * saved


def test_blocks_that_exchange_tokens() -> None:
    """Those with experts, also behind what a predictor has before them."""
    dense, routed = (block_work(LATENT, kind, ParallelDegrees(), TOKENS) for kind in (False, True))
    assert (dense.exchanges_tokens, routed.exchanges_tokens) == (False, True)
    before = predictor_work(LATENT, ParallelDegrees(), TOKENS)
    assert ((before + dense).exchanges_tokens, (before + routed).exchanges_tokens) == (False, True)

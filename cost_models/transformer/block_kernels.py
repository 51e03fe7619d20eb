"""The kernels that one device runs for a block, and the bytes that the block keeps for its backward.

As Megatron-LM with Transformer Engine runs them in bfloat16: column- and row-parallel products, sequence
parallelism, fused norms, rotary positions and activations, flash attention, all-to-all dispatch of tokens to
experts. All bytes are of 2-byte numbers unless said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .kernel_table import AttentionKernel, Collective, GroupedMatmul, Kernel, Matmul, MemoryPass, Pass
from .parallel_degrees import ParallelDegrees, padded_vocabulary
from .transformer_shape import ExpertShape, TransformerShape

NUMBER = 2
"""Bytes of a bfloat16."""


@dataclass(frozen=True)
class LayerWork:
    """Of one layer on one device, for one micro-batch: kernels of forward and backward, bytes that it saves
    for backward, and bytes besides at its peak, while backward runs.

    `attention`: of the forward those kernels that selective recomputation runs again, from queries, keys and
    values to the result; `attention_saved`: what need not be kept then."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    saved: float
    workspace: float
    exchanges_tokens: bool = False
    """Whether the host waits for how many tokens each expert takes."""
    attention: tuple[Kernel, ...] = ()
    attention_saved: float = 0.0

    def __add__(self, other: LayerWork) -> LayerWork:
        return LayerWork(
            self.forward + other.forward,
            other.backward + self.backward,
            self.saved + other.saved,
            max(self.workspace, other.workspace),
            self.exchanges_tokens or other.exchanges_tokens,
            self.attention + other.attention,
            self.attention_saved + other.attention_saved,
        )


@dataclass(frozen=True)
class Tokens:
    """Of one micro-batch: `sequence` tokens of each of `samples`."""

    sequence: int
    samples: int = 1

    def on(self, degrees: ParallelDegrees) -> int:
        """Those for which a device computes products: its share of the context."""
        return self.sequence * self.samples // degrees.context


def block_work(shape: TransformerShape, routed: bool, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    """Attention and feed-forward layer, with their norms and residual sums."""
    feed_forward = (
        _experts(shape, shape.experts, degrees, tokens)
        if routed and shape.experts is not None
        else _feed_forward(shape, degrees, tokens)
    )
    return _attention(shape, degrees, tokens) + feed_forward


def embedding_work(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    """The lookup; with tensor parallelism each device looks up its rows and the sum is scattered."""
    whole = NUMBER * tokens.on(degrees) * shape.hidden
    own = whole / degrees.tensor
    gather, scatter = _gather_and_scatter(whole, degrees)
    return LayerWork(
        (MemoryPass(2 * own), *scatter), (*gather, MemoryPass(2 * whole), MemoryPass(2 * whole)), 0.0, 0.0
    )


def head_work(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    """Norm, product with the vocabulary, fused cross-entropy: the logits once in 2 bytes and once in
    float32."""
    count, rows = tokens.on(degrees), padded_vocabulary(shape, degrees.tensor) // degrees.tensor
    whole, logits = NUMBER * count * shape.hidden, NUMBER * count * rows
    own = whole / degrees.tensor
    product = _linear(count, shape.hidden, rows)
    gather, scatter = _gather_and_scatter(whole, degrees)
    sums = [Collective("all_reduce", 4.0 * count, "tensor")] * 3 if degrees.tensor > 1 else []
    return LayerWork(
        (
            MemoryPass(2 * own),
            *gather,
            product[0],
            *sums,
            MemoryPass(logits, "ce_fusion"),
        ),
        (
            MemoryPass(2 * logits, "ce_fusion"),
            *product[1:],
            *scatter,
            MemoryPass(3 * own),
        ),
        2 * own + 3 * logits,
        own,
    )


def _linear(tokens: int, inputs: int, outputs: int) -> tuple[Matmul, Matmul, Matmul]:
    """The product of forward, and those of the gradients of its input and of its weight."""
    return (
        Matmul(tokens, inputs, outputs, "TN"),
        Matmul(tokens, outputs, inputs, "NN"),
        Matmul(outputs, tokens, inputs, "NT"),
    )


def _gather_and_scatter(bytes: float, degrees: ParallelDegrees) -> tuple[list[Kernel], list[Kernel]]:
    """Of a whole tensor: the all-gather before a column-parallel product, and the reduce-scatter behind a
    row-parallel one."""
    if degrees.tensor == 1:
        return [], []
    return [Collective("all_gather", bytes, "tensor")], [Collective("reduce_scatter", bytes, "tensor")]


def _attention(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    inner = (
        _latent_attention(shape, degrees, tokens)
        if shape.attention.is_latent
        else _grouped_attention(shape, degrees, tokens)
    )
    residual = NUMBER * tokens.on(degrees) * shape.hidden / degrees.tensor
    # Norm and residual sum. Saved: the input and the norm's output.
    return LayerWork(
        (MemoryPass(2 * residual), *inner.forward, MemoryPass(3 * residual)),
        (*inner.backward, MemoryPass(3 * residual), MemoryPass(3 * residual)),
        2 * residual + inner.saved,
        inner.workspace + 2 * residual,
        attention=inner.attention,
        attention_saved=inner.attention_saved,
    )


def _kernel_of_attention(
    shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens
) -> tuple[list[Kernel], list[Kernel]]:
    """Attention over whole sequences with a share of the heads, and the exchange that makes it so."""
    attention = shape.attention
    heads, shared = attention.heads // degrees.tensor, attention.key_value_heads // degrees.tensor
    count = tokens.on(degrees)
    exchange: list[Kernel] = []
    if degrees.context > 1:
        queries, values = heads * attention.head_width, heads * attention.value_width
        keys = shared * (attention.head_width + attention.value_width)
        exchange = [
            Collective("all_to_all", NUMBER * count * size, "context") for size in (queries, keys, values)
        ]
    kernels = [
        AttentionKernel(
            tokens.sequence,
            heads // degrees.context,
            shared // degrees.context,
            attention.head_width,
            attention.value_width,
            backward,
            tokens.samples,
            attention.causal,
        )
        for backward in (False, True)
    ]
    forward, backward = ([*exchange, kernel] for kernel in kernels)
    return forward, backward


def _grouped_attention(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    """One projection to queries, keys and values; saved: these after the rotary positions, and the result."""
    attention, count, tensor = shape.attention, tokens.on(degrees), degrees.tensor
    whole = NUMBER * count * shape.hidden
    project = _linear(count, shape.hidden, attention.fused_size // tensor)
    output = _linear(count, attention.heads * attention.value_width // tensor, shape.hidden)
    forward, backward = _kernel_of_attention(shape, degrees, tokens)
    turned = NUMBER * count * (attention.heads + attention.key_value_heads) * attention.head_width / tensor
    rotary = MemoryPass(2 * turned)
    fused = NUMBER * count * attention.fused_size / tensor
    result = NUMBER * count * attention.heads * attention.value_width / tensor
    statistics = 4.0 * count * attention.heads / tensor
    gather, scatter = _gather_and_scatter(whole, degrees)
    return LayerWork(
        (*gather, project[0], rotary, *forward, output[0], *scatter),
        (*gather, *output[1:], *backward, rotary, *gather, *project[1:], *scatter),
        fused + result + statistics,
        2 * fused,
        attention=tuple(forward),
        attention_saved=statistics,
    )


def _latent_attention(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    """Two projections down, which each device computes for its own tokens, a norm of each, two up."""
    attention, count, tensor = shape.attention, tokens.on(degrees), degrees.tensor
    own, hidden = count // tensor, shape.hidden
    down_sizes = [attention.latent_queries, attention.latent_keys + attention.rotary_width]
    query_size = attention.query_size // tensor
    products = [_linear(own, hidden, size) for size in down_sizes if size]
    gathered = [NUMBER * count * size for size in down_sizes if size]
    products.append(_linear(count, attention.latent_queries or hidden, query_size))
    products.append(_linear(count, attention.latent_keys, attention.key_value_up_size // tensor))
    output = _linear(count, attention.heads * attention.value_width // tensor, hidden)
    forward, backward = _kernel_of_attention(shape, degrees, tokens)

    queries = NUMBER * count * query_size
    up = NUMBER * count * attention.key_value_up_size / tensor
    values = NUMBER * count * attention.heads * attention.value_width / tensor
    latent = sum(gathered) / tensor
    statistics = 4.0 * count * attention.heads / tensor
    # Queries are turned, keys put together of both parts, values copied.
    shuffle = (MemoryPass(2 * latent), MemoryPass(2 * queries), MemoryPass(up + queries + 2 * values))
    latents = [_gather_and_scatter(bytes, degrees) for bytes in gathered]
    spread = [kernel for gather, _ in latents for kernel in gather]
    gather = [kernel for _, scatter in latents for kernel in scatter]
    whole = NUMBER * count * hidden
    back, scatter = _gather_and_scatter(whole, degrees)
    return LayerWork(
        (*(product[0] for product in products), *spread, *shuffle, *forward, output[0], *scatter),
        (
            *back,
            *output[1:],
            *backward,
            *shuffle,
            *gather,
            *(part for product in products for part in product[1:]),
        ),
        2 * latent + 2 * queries + 2 * values + statistics,
        2 * queries + values,
        attention=tuple(forward),
        attention_saved=statistics,
    )


def _feed_forward(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    count, tensor = tokens.on(degrees), degrees.tensor
    inner = _matrices(shape, shape.feed_forward // tensor, count)
    whole = NUMBER * count * shape.hidden
    gather, scatter = _gather_and_scatter(whole, degrees)
    residual = whole / tensor
    return LayerWork(
        (MemoryPass(2 * residual), *gather, *inner.forward, *scatter, MemoryPass(3 * residual)),
        (*gather, *inner.backward, *gather, *scatter, MemoryPass(3 * residual), MemoryPass(3 * residual)),
        2 * residual + inner.saved,
        inner.workspace + residual,
    )


def _matrices(shape: TransformerShape, width: int, tokens: int) -> LayerWork:
    """The products up and down and the activation between them. Saved: what goes in and out of this one."""
    ups = 2 if shape.gated else 1
    up, down = _linear(tokens, shape.hidden, ups * width), _linear(tokens, width, shape.hidden)
    small = NUMBER * tokens * width
    return LayerWork(
        (up[0], MemoryPass((ups + 1) * small), down[0]),
        (*down[1:], MemoryPass((2 * ups + 1) * small), *up[1:]),
        (ups + 1) * small,
        ups * small,
    )


def _experts(
    shape: TransformerShape, experts: ExpertShape, degrees: ParallelDegrees, tokens: Tokens
) -> LayerWork:
    """Router, shared experts, and the routed ones: tokens are sorted by expert, sent, computed and sent back.

    Every expert takes as many tokens as every other.
    """
    count, tensor, hidden = tokens.on(degrees), degrees.tensor, shape.hidden
    own = count // tensor
    router = _linear(own, hidden, experts.number)
    shared = (
        _matrices(shape, experts.shared_width // tensor, count)
        if experts.shared_width
        else LayerWork((), (), 0.0, 0.0)
    )
    local = experts.number // degrees.expert
    rows = math.ceil(own * experts.per_token / experts.number) * degrees.expert
    ups = 2 if shape.gated else 1
    up, down = (
        _grouped_products(local, rows, ups * experts.width, hidden),
        _grouped_products(local, rows, hidden, experts.width),
    )
    sent = NUMBER * own * experts.per_token * hidden
    small = NUMBER * own * experts.per_token * experts.width
    residual = NUMBER * own * hidden
    exchange: list[Kernel] = [Collective("all_to_all", sent, "expert")] if degrees.expert > 1 else []
    sort = [MemoryPass(2 * sent, "permute_fwd")] if degrees.expert > 1 else []
    sort_back = [MemoryPass(2 * sent, "permute_bwd")] if degrees.expert > 1 else []
    whole = NUMBER * count * hidden
    gather, scatter = _gather_and_scatter(whole, degrees) if experts.shared_width else ([], [])
    forward: tuple[Kernel, ...] = (
        MemoryPass(2 * residual),
        router[0],
        *gather,
        *shared.forward,
        *scatter,
        MemoryPass(sent + residual, "permute_fwd"),
        *exchange,
        *sort,
        up[0],
        MemoryPass((ups + 1) * small),
        down[0],
        *sort,
        *exchange,
        MemoryPass(sent + residual, "permute_fwd"),
        MemoryPass(3 * residual),
        MemoryPass(3 * residual),
    )
    backward: tuple[Kernel, ...] = (
        MemoryPass(sent + residual, "permute_bwd"),
        *exchange,
        *sort_back,
        *down[1:],
        MemoryPass((2 * ups + 1) * small),
        *up[1:],
        *sort_back,
        *exchange,
        MemoryPass(sent + residual, "permute_bwd"),
        *gather,
        *shared.backward,
        *gather,
        *scatter,
        *router[1:],
        MemoryPass(3 * residual),
        MemoryPass(3 * residual),
        MemoryPass(3 * residual),
    )
    return LayerWork(
        forward,
        backward,
        2 * residual + shared.saved + sent + (ups + 1) * small + 12.0 * own * experts.number,
        3 * sent + ups * small,
        exchanges_tokens=True,
    )


def _grouped_products(groups: int, rows: int, outputs: int, inputs: int) -> list[GroupedMatmul]:
    parts: tuple[Pass, ...] = ("forward", "input_gradient", "weight_gradient")
    return [GroupedMatmul(groups, rows, outputs, inputs, part) for part in parts]

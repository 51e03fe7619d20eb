"""The kernels that one device runs for a block, and the bytes that the block keeps for its backward.

As Megatron-LM with Transformer Engine runs them in bfloat16: column- and row-parallel products, sequence
parallelism, fused norms, rotary positions and activations, flash attention, all-to-all dispatch of tokens to
experts. All bytes are of 2-byte numbers unless said.
"""

from __future__ import annotations

import math

from .attention_kernels import attention_work
from .kernel_table import Collective, GroupedMatmul, Kernel, MemoryPass, Pass
from .layer_work import NUMBER, LayerWork, Tokens, gather_and_scatter, linear, offload_tensors
from .parallel_degrees import ParallelDegrees, padded_vocabulary
from .transformer_shape import ExpertShape, TransformerShape


def block_work(shape: TransformerShape, routed: bool, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    """Attention and feed-forward layer, with their norms and residual sums."""
    feed_forward = (
        _experts(shape, shape.experts, degrees, tokens)
        if routed and shape.experts is not None
        else _feed_forward(shape, degrees, tokens)
    )
    return attention_work(shape, degrees, tokens) + feed_forward


def embedding_work(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    """The lookup; with tensor parallelism each device looks up its rows and the sum is scattered."""
    whole = NUMBER * tokens.on(degrees) * shape.hidden
    own = whole / degrees.tensor
    gather, scatter = gather_and_scatter(whole, degrees)
    return LayerWork(
        (MemoryPass(2 * own), *scatter), (*gather, MemoryPass(2 * whole), MemoryPass(2 * whole)), 0.0, 0.0
    )


def head_work(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    """Norm, product with the vocabulary, fused cross-entropy: the logits once in 2 bytes and once in
    float32."""
    count, rows = tokens.on(degrees), padded_vocabulary(shape, degrees.tensor) // degrees.tensor
    whole, logits = NUMBER * count * shape.hidden, NUMBER * count * rows
    own = whole / degrees.tensor
    product = linear(count, shape.hidden, rows)
    gather, scatter = gather_and_scatter(whole, degrees)
    sums = [Collective("all_reduce", 4.0 * count, "tensor")] * 3 if degrees.tensor > 1 else []
    return LayerWork(
        (
            MemoryPass(2 * own),
            *gather,
            product[0],
            *sums,
            MemoryPass(2 * logits, "ce_fusion"),
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


def predictor_work(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    """What stands before the block of a multi-token predictor: norms of the hidden states and of the next
    tokens' embeddings, and their projection to one, which megatron-core 0.16 splits by columns and gathers
    whole before each device takes its tokens; behind it the results are put together."""
    count, hidden = tokens.on(degrees), shape.hidden
    whole = NUMBER * count * hidden
    own = whole / degrees.tensor
    product = linear(count, 2 * hidden, hidden // degrees.tensor)
    gather, scatter = gather_and_scatter(2 * whole, degrees)
    collect, _ = gather_and_scatter(whole, degrees)
    norms = (MemoryPass(2 * own), MemoryPass(2 * own))
    norm_gradients = (MemoryPass(3 * own), MemoryPass(3 * own))
    copies = MemoryPass(4 * own)
    return LayerWork(
        (*norms, copies, *gather, product[0], *collect, copies),
        (copies, *collect, *gather, *product[1:], *scatter, copies, *norm_gradients),
        4 * own,
        2 * whole,
    )


def _feed_forward(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    count, tensor = tokens.on(degrees), degrees.tensor
    inner = _matrices(shape, shape.feed_forward // tensor, count)
    whole = NUMBER * count * shape.hidden
    gather, scatter = gather_and_scatter(whole, degrees)
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
    up, down = linear(tokens, shape.hidden, ups * width), linear(tokens, width, shape.hidden)
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

    Every expert takes as many tokens as every other. Sorting them, and adding them up again, is counted as
    three passes over those that are sent and one over the tokens: so SimuMax's measured shares of the
    bandwidth count it.
    """
    count, tensor, hidden = tokens.on(degrees), degrees.tensor, shape.hidden
    own = count // tensor
    router = linear(own, hidden, experts.number)
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
    gather, scatter = gather_and_scatter(whole, degrees) if experts.shared_width else ([], [])
    forward: tuple[Kernel, ...] = (
        MemoryPass(2 * residual),
        router[0],
        *gather,
        *shared.forward,
        *scatter,
        MemoryPass(3 * sent + residual, "permute_fwd"),
        *exchange,
        *sort,
        up[0],
        MemoryPass((ups + 1) * small),
        down[0],
        *sort,
        *exchange,
        MemoryPass(3 * sent + residual, "permute_fwd"),
        MemoryPass(3 * residual),
        MemoryPass(3 * residual),
    )
    backward: tuple[Kernel, ...] = (
        MemoryPass(3 * sent + residual, "permute_bwd"),
        *exchange,
        *sort_back,
        *down[1:],
        MemoryPass((2 * ups + 1) * small),
        *up[1:],
        *sort_back,
        *exchange,
        MemoryPass(3 * sent + residual, "permute_bwd"),
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
        # Of megatron-core's modules mlp_norm, expert_fc1 and moe_act.
        offload=offload_tensors(bytes / NUMBER for bytes in (residual, sent, ups * small)),
    )


def _grouped_products(groups: int, rows: int, outputs: int, inputs: int) -> list[GroupedMatmul]:
    parts: tuple[Pass, ...] = ("forward", "input_gradient", "weight_gradient")
    return [GroupedMatmul(groups, rows, outputs, inputs, part) for part in parts]

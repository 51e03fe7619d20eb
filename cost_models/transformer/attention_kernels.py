"""The kernels of attention on one device: of grouped queries or latent keys, heads and sequence shared."""

from __future__ import annotations

from typing import NamedTuple

from .implementations import MEGATRON, Implementation
from .kernel_table import AttentionKernel, Collective, Kernel, MemoryPass, RingAttention
from .layer_work import (
    NUMBER,
    LayerWork,
    Offload,
    Tokens,
    gather_and_scatter,
    linear,
    linears,
    offload_tensors,
)
from .parallel_degrees import ParallelDegrees
from .transformer_shape import TransformerShape


def attention_work(
    shape: TransformerShape,
    degrees: ParallelDegrees,
    tokens: Tokens,
    implementation: Implementation = MEGATRON,
) -> LayerWork:
    inner = (
        _latent_attention(shape, degrees, tokens, implementation)
        if shape.attention.is_latent
        else _grouped_attention(shape, degrees, tokens, implementation)
    )
    residual = NUMBER * tokens.on(degrees) * shape.hidden / degrees.tensor
    forward, backward = implementation.norm
    # Norm and residual sum.
    return LayerWork(
        (MemoryPass(forward * residual), *inner.forward, MemoryPass(3 * residual)),
        (*inner.backward, MemoryPass(3 * residual), MemoryPass(backward * residual)),
        norm_saved(residual, degrees, implementation) + inner.saved,
        inner.workspace + 2 * residual,
        selective=inner.selective,
        selective_saved=inner.selective_saved,
        offload=_attention_offload(shape, degrees, tokens),
    )


def norm_saved(residual: float, degrees: ParallelDegrees, implementation: Implementation) -> float:
    """Bytes that a norm keeps, and the product after it: its input, of all tensor-parallel devices where
    backward does not gather it again."""
    gathered = 1 if implementation.gathers_again else degrees.tensor
    return (implementation.norm_saved - 1 + gathered) * residual


def _attention_offload(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> Offload:
    """What megatron-core's modules attn_norm, qkv_linear, core_attn and attn_proj save: the input, the norm's
    output, latent vectors before and behind their norms, queries, keys, values, and, twice, the result."""
    own, count = shape.attention, tokens.on(degrees) / degrees.tensor
    latents = (own.latent_queries, own.latent_keys + own.rotary_width) if own.is_latent else ()
    keys, values = (own.key_value_heads * width for width in (own.head_width, own.value_width))
    once = (shape.hidden, shape.hidden, *latents, *latents, own.query_size, keys, values)
    return offload_tensors((count * size for size in once), [count * own.heads * own.value_width])


class _SharedAttention(NamedTuple):
    """The kernels of attention itself on one device, the bytes besides that it needs while it runs, and those
    of other devices' keys and values that it keeps."""

    forward: list[Kernel]
    backward: list[Kernel]
    workspace: float = 0.0
    saved: float = 0.0


def _share_attention(
    shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens, implementation: Implementation
) -> _SharedAttention:
    """Attention with a share of the heads, among the devices that share the sequence."""
    if degrees.context > 1 and degrees.exchange == "ring":
        return _ring_attention(shape, degrees, tokens)
    if degrees.context > 1 and degrees.exchange == "all-gather":
        return _attention_to_all_keys(shape, degrees, tokens, keeps=implementation.keeps_gathered_keys)
    attention = shape.attention
    heads, shared = attention.heads // degrees.tensor, attention.key_value_heads // degrees.tensor
    exchange: list[Kernel] = []
    if degrees.context > 1:
        queries, values = heads * attention.head_width, heads * attention.value_width
        keys = (shared * attention.head_width, shared * attention.value_width)
        count = NUMBER * tokens.on(degrees)
        # Each is put in order before it is sent and behind it, as Transformer Engine does it.
        exchange = [
            kernel
            for size in (queries, *keys, values)
            for kernel in (Collective("all_to_all", count * size, "context"), MemoryPass(4 * count * size))
        ]
    forward, backward = (
        _attention_kernel(shape, tokens.sequence, tokens, degrees.tensor * degrees.context, part)
        for part in (False, True)
    )
    return _SharedAttention([*exchange, forward], [*exchange, backward])


def _ring_attention(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> _SharedAttention:
    """Keys and values go round (Liu et al., "Ring Attention with Blockwise Transformers", ICLR 2024): each of
    c devices keeps its queries, and attends in c steps to the keys of every device, while those of the next
    step arrive.

    Of causal attention a device has a piece of the sequence's first half and the mirrored piece of its last,
    so that every step of every device is half of the square of its tokens (as Transformer Engine and torch
    balance it). Backward sends the gradients of keys and values along, and one time more, to their owner.
    As Transformer Engine keeps them, forward's workspace holds the keys, values and results of all steps.
    """
    attention, steps = shape.attention, degrees.context
    keys = _key_value_bytes(shape, degrees, tokens)
    result = NUMBER * tokens.on(degrees) / degrees.tensor * attention.heads * attention.value_width
    kernels = _step_kernels(shape, degrees, tokens)
    # Each result is added to those of the steps before, each gradient to that which came round.
    forward: list[Kernel] = [RingAttention(kernels[0], steps, keys), *[MemoryPass(3 * result)] * (steps - 1)]
    backward: list[Kernel] = [
        RingAttention(kernels[1], steps, 2 * keys),
        *[MemoryPass(3 * (keys + result))] * (steps - 1),
        Collective("ring", keys, "context"),
    ]
    return _SharedAttention(forward, backward, max(steps * (keys + result), 4 * keys))


def _attention_to_all_keys(
    shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens, *, keeps: bool
) -> _SharedAttention:
    """Every device gathers all keys and values, and attends with its own queries; backward gathers them again
    (as Transformer Engine does it), unless it `keeps` them, and adds up their gradients, each at its owner
    (nothing is hidden behind the attention). A device has the same pieces of the sequence as in a ring, and
    so as much to compute; its workspace holds all keys and values with their gradients.
    """
    steps = degrees.context
    keys = _key_value_bytes(shape, degrees, tokens)
    gathered = steps * keys
    forward, backward = _step_kernels(shape, degrees, tokens)
    gather = Collective("all_gather", gathered, "context")
    scatter = Collective("reduce_scatter", gathered, "context")
    return _SharedAttention(
        [gather, *[forward] * steps],
        [*[gather] * (not keeps), *[backward] * steps, scatter],
        2 * gathered,
        (gathered - keys) * keeps,
    )


def _key_value_bytes(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> float:
    """Of the tokens of one device of the context."""
    attention = shape.attention
    widths = attention.head_width + attention.value_width
    return NUMBER * tokens.on(degrees) / degrees.tensor * attention.key_value_heads * widths


def _step_kernels(
    shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens
) -> tuple[AttentionKernel, AttentionKernel]:
    """Forward and backward of the tokens of one device of the context to as many."""
    sequence, has_windows = tokens.sequence // degrees.context, degrees.exchange != "ring"
    forward, backward = (
        _attention_kernel(shape, sequence, tokens, degrees.tensor, part, has_windows=has_windows)
        for part in (False, True)
    )
    return forward, backward


def _attention_kernel(
    shape: TransformerShape,
    sequence: int,
    tokens: Tokens,
    sharers: int,
    backward: bool,
    *,
    has_windows: bool = True,
) -> AttentionKernel:
    """Of so many tokens of each sample, with the share of the heads of one of `sharers` devices.

    Each block has the mean of all blocks' windows. A ring passes all keys round whatever the window is.
    """
    own = shape.attention
    attended = shape.attended_share(tokens.sequence) if has_windows else 1.0
    heads, shared = own.heads // sharers, own.key_value_heads // sharers
    widths, samples = (own.head_width, own.value_width), tokens.samples
    return AttentionKernel(sequence, heads, shared, *widths, backward, samples, own.causal, attended)


def _grouped_attention(
    shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens, implementation: Implementation
) -> LayerWork:
    """Projections to queries, keys and values; saved: these after the rotary positions, and the result."""
    attention, count, tensor = shape.attention, tokens.on(degrees), degrees.tensor
    whole = NUMBER * count * shape.hidden
    keys, values = (
        attention.key_value_heads * width for width in (attention.head_width, attention.value_width)
    )
    sizes = (
        [attention.fused_size] if implementation.products[0] == 1 else [attention.query_size, keys, values]
    )
    project, project_back = linears(
        count, shape.hidden, [size // tensor for size in sizes], implementation.join
    )
    output = linear(count, attention.heads * attention.value_width // tensor, shape.hidden)
    forward, backward, workspace, remote_bytes = _share_attention(shape, degrees, tokens, implementation)
    turned = NUMBER * count * (attention.heads + attention.key_value_heads) * attention.head_width / tensor
    turn, turn_back = (MemoryPass(passes * turned) for passes in implementation.rotary)
    fused = NUMBER * count * attention.fused_size / tensor
    result = NUMBER * count * attention.heads * attention.value_width / tensor
    statistics = 4.0 * count * attention.heads / tensor
    gather, scatter = gather_and_scatter(whole, degrees)
    return LayerWork(
        (*gather, *project, turn, *forward, output[0], *scatter),
        (
            *gather,
            *output[1:],
            *backward,
            turn_back,
            *gather * implementation.gathers_again,
            *project_back,
            *scatter,
        ),
        fused + result + statistics + remote_bytes + turned * implementation.keeps_projection,
        2 * fused + workspace,
        selective=tuple(forward),
        selective_saved=statistics,
    )


def _latent_attention(
    shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens, implementation: Implementation
) -> LayerWork:
    """Two projections down, which each device computes for its own tokens, a norm of each, two up."""
    attention, count, tensor = shape.attention, tokens.on(degrees), degrees.tensor
    own, hidden = count // tensor, shape.hidden
    down_sizes = [attention.latent_queries, attention.latent_keys + attention.rotary_width]
    query_size = attention.query_size // tensor
    products = [linear(own, hidden, size) for size in down_sizes if size]
    gathered = [NUMBER * count * size for size in down_sizes if size]
    products.append(linear(count, attention.latent_queries or hidden, query_size))
    products.append(linear(count, attention.latent_keys, attention.key_value_up_size // tensor))
    output = linear(count, attention.heads * attention.value_width // tensor, hidden)
    forward, backward, workspace, remote_bytes = _share_attention(shape, degrees, tokens, implementation)

    queries = NUMBER * count * query_size
    up = NUMBER * count * attention.key_value_up_size / tensor
    values = NUMBER * count * attention.heads * attention.value_width / tensor
    latent = sum(gathered) / tensor
    statistics = 4.0 * count * attention.heads / tensor
    # Queries are turned, keys put together of both parts, values copied.
    shuffle = (MemoryPass(2 * latent), MemoryPass(2 * queries), MemoryPass(up + queries + 2 * values))
    latents = [gather_and_scatter(bytes, degrees) for bytes in gathered]
    spread = [kernel for gather, _ in latents for kernel in gather]
    gather = [kernel for _, scatter in latents for kernel in scatter]
    whole = NUMBER * count * hidden
    back, scatter = gather_and_scatter(whole, degrees)
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
        2 * latent + 2 * queries + 2 * values + statistics + remote_bytes,
        2 * queries + values + workspace,
        selective=tuple(forward),
        selective_saved=statistics,
    )

"""The kernels that one device runs for a block, and the bytes that the block keeps for its backward.

In bfloat16: column- and row-parallel products, sequence parallelism, norms, rotary positions and activations
as an implementation runs them, flash attention, all-to-all dispatch of tokens to experts. All bytes are of
2-byte numbers unless said.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .attention_kernels import attention_work, norm_saved
from .implementations import MEGATRON, Implementation
from .kernel_table import AttentionKernel, Collective, GroupedMatmul, Kernel, Matmul, MemoryPass, Pass
from .layer_work import NUMBER, LayerWork, Tokens, gather_and_scatter, linear, linears, offload_tensors
from .parallel_degrees import ParallelDegrees, padded_vocabulary
from .transformer_shape import ExpertShape, TransformerShape


def block_work(
    shape: TransformerShape,
    routed: bool,
    degrees: ParallelDegrees,
    tokens: Tokens,
    implementation: Implementation = MEGATRON,
) -> LayerWork:
    """Attention and feed-forward layer, with their norms and residual sums."""
    feed_forward = (
        _experts(shape, shape.experts, degrees, tokens, implementation)
        if routed and shape.experts is not None
        else _feed_forward(shape, degrees, tokens, implementation)
    )
    work = attention_work(shape, degrees, tokens, implementation) + feed_forward
    if not implementation.keeps_half:
        return work
    return _keep_half(work, NUMBER * tokens.on(degrees) * shape.hidden / degrees.tensor, degrees)


def _keep_half(work: LayerWork, boundary: float, degrees: ParallelDegrees) -> LayerWork:
    """A block of which selective recomputation keeps its input and the results of attention, of collectives
    that are no gathers, and of every second product (torchtitan's `SelectiveAC`)."""
    again: list[Kernel] = []
    saved, products = boundary, 0
    for kernel in work.forward:
        match kernel:
            case Matmul():
                products += 1
                if products % 2:
                    saved += NUMBER * kernel.m * kernel.n
                else:
                    again.append(kernel)
            case MemoryPass() | Collective(name="all_gather"):
                again.append(kernel)
            case Collective():
                saved += kernel.bytes / (degrees.tensor if kernel.name == "reduce_scatter" else 1)
            case GroupedMatmul():
                saved += NUMBER * kernel.groups * kernel.m * kernel.n
            case AttentionKernel():
                rows = kernel.samples * kernel.sequence * kernel.heads
                saved += NUMBER * rows * kernel.value_width + 4 * rows
    return replace(work, selective=tuple(again), selective_saved=max(0.0, work.saved - saved))


def embedding_work(shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens) -> LayerWork:
    """The lookup; with tensor parallelism each device looks up its rows and the sum is scattered."""
    whole = NUMBER * tokens.on(degrees) * shape.hidden
    own = whole / degrees.tensor
    gather, scatter = gather_and_scatter(whole, degrees)
    return LayerWork(
        (MemoryPass(2 * own), *scatter), (*gather, MemoryPass(2 * whole), MemoryPass(2 * whole)), 0.0, 0.0
    )


def head_work(
    shape: TransformerShape,
    degrees: ParallelDegrees,
    tokens: Tokens,
    implementation: Implementation = MEGATRON,
) -> LayerWork:
    """Norm, product with the vocabulary, cross-entropy over the tensor-parallel devices' logits."""
    vocabulary = padded_vocabulary(shape, degrees.tensor, implementation.vocabulary_multiple)
    count, rows = tokens.on(degrees), vocabulary // degrees.tensor
    whole, logits = NUMBER * count * shape.hidden, NUMBER * count * rows
    own = whole / degrees.tensor
    product = linear(count, shape.hidden, rows)
    gather, scatter = gather_and_scatter(whole, degrees)
    sums = [Collective("all_reduce", 4.0 * count, "tensor")] * 3 if degrees.tensor > 1 else []
    (norm, norm_back), (loss, loss_back) = implementation.norm, implementation.loss
    return LayerWork(
        (
            MemoryPass(norm * own),
            *gather,
            product[0],
            *sums,
            MemoryPass(loss * logits, "ce_fusion"),
        ),
        (
            MemoryPass(loss_back * logits, "ce_fusion"),
            *product[1:],
            *scatter,
            MemoryPass(norm_back * own),
        ),
        norm_saved(own, degrees, implementation) + implementation.loss_saved * logits,
        _head_workspace(whole, logits, rows, shape, degrees, implementation),
    )


def _head_workspace(
    whole: float,
    logits: float,
    rows: int,
    shape: TransformerShape,
    degrees: ParallelDegrees,
    implementation: Implementation,
) -> float:
    """Bytes besides what the head keeps for its loss, while its product's backward runs.

    The gradient of its input; with tensor parallelism its share of it, and the input gathered again. Where
    the weight's gradient is added up in another buffer, autograd takes an empty tensor of its size
    (megatron-core's `LinearWithGradAccumulationAndAsyncCommunication`). The loss needs no more than the
    gradient of the bfloat16 logits then.
    """
    if not implementation.has_placeholders:
        return 0.0
    gathered = whole + whole / degrees.tensor if degrees.tensor > 1 else 0.0
    needed = whole + gathered + NUMBER * rows * shape.hidden
    return max(0.0, needed - (implementation.loss_saved - 1) * logits)


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


def _feed_forward(
    shape: TransformerShape, degrees: ParallelDegrees, tokens: Tokens, implementation: Implementation
) -> LayerWork:
    count, tensor = tokens.on(degrees), degrees.tensor
    inner = _matrices(shape, shape.feed_forward // tensor, count, implementation)
    whole = NUMBER * count * shape.hidden
    gather, scatter = gather_and_scatter(whole, degrees)
    residual = whole / tensor
    norm, norm_back = implementation.norm
    return LayerWork(
        (MemoryPass(norm * residual), *gather, *inner.forward, *scatter, MemoryPass(3 * residual)),
        (
            *gather,
            *inner.backward,
            *gather * implementation.gathers_again,
            *scatter,
            MemoryPass(3 * residual),
            MemoryPass(norm_back * residual),
        ),
        norm_saved(residual, degrees, implementation) + inner.saved,
        inner.workspace + residual,
    )


def _matrices(shape: TransformerShape, width: int, tokens: int, implementation: Implementation) -> LayerWork:
    """The products up and down and the activation between them. Saved: what goes in and out of this one."""
    ups = 2 if shape.gated else 1
    products = min(implementation.products[1], ups)
    up, up_back = linears(tokens, shape.hidden, [ups * width // products] * products, implementation.join)
    down = linear(tokens, width, shape.hidden)
    small = NUMBER * tokens * width
    forward, backward = implementation.activation if shape.gated else (0, 0)
    return LayerWork(
        (*up, MemoryPass((ups + 1 + forward) * small), down[0]),
        (*down[1:], MemoryPass((2 * ups + 1 + backward) * small), *up_back),
        (ups + 1 + (implementation.activation_saved if shape.gated else 0)) * small,
        ups * small,
    )


def _experts(
    shape: TransformerShape,
    experts: ExpertShape,
    degrees: ParallelDegrees,
    tokens: Tokens,
    implementation: Implementation,
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
        _matrices(shape, experts.shared_width // tensor, count, implementation)
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
    norm, norm_back = implementation.norm
    forward: tuple[Kernel, ...] = (
        MemoryPass(norm * residual),
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
        *gather * implementation.gathers_again,
        *scatter,
        *router[1:],
        MemoryPass(3 * residual),
        MemoryPass(3 * residual),
        MemoryPass(norm_back * residual),
    )
    norm_bytes = (
        norm_saved(residual, degrees, implementation)
        if experts.shared_width
        else residual * (implementation.norm_saved)
    )
    return LayerWork(
        forward,
        backward,
        norm_bytes + shared.saved + sent + (ups + 1) * small + 12.0 * own * experts.number,
        3 * sent + ups * small,
        exchanges_tokens=True,
        # Of megatron-core's modules mlp_norm, expert_fc1 and moe_act.
        offload=offload_tensors(bytes / NUMBER for bytes in (residual, sent, ups * small)),
    )


def _grouped_products(groups: int, rows: int, outputs: int, inputs: int) -> list[GroupedMatmul]:
    parts: tuple[Pass, ...] = ("forward", "input_gradient", "weight_gradient")
    return [GroupedMatmul(groups, rows, outputs, inputs, part) for part in parts]

"""Transformer layers in plain PyTorch, on one device of those that share them.

A block and a head compute what transformers' modules compute: norms in float32 operation by operation, one
product for each of queries, keys, values, gate and up, `scaled_dot_product_attention`, the loss in float32.
That is what the implementation `transformers` is costed for (`cost_models/transformer/implementations.py`).
Devices share a layer by sequence and tensor parallelism (Korthikanti et al., MLSys 2023), by an all-gather of
keys and values, or by all-to-all dispatch of tokens to experts. Tokens go to experts in turn, so that each
takes as many as every other. Hidden states are [sequence, samples, width] of the device's tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from ..cost_models.transformer.layer_work import Tokens
from ..cost_models.transformer.parallel_degrees import ParallelDegrees, padded_vocabulary
from ..cost_models.transformer.transformer_shape import ExpertShape, TransformerShape


@dataclass(frozen=True)
class LayerGroups:
    """Process groups of the devices that share a layer; None where nobody does."""

    degrees: ParallelDegrees = field(default_factory=ParallelDegrees)
    tensor: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None


class _Gather(torch.autograd.Function):
    """All-gather along the first dimension; backward reduces and scatters."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _scatter(gradients[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    """Reduce-scatter along the first dimension; backward gathers."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(whole, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gather(gradients[0], ctx.group), None


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts of the first dimension, both ways."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """All-reduce; each device's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004  autograd's form
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004  autograd's form
        return gradients[0], None


def _gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def _scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    dist.reduce_scatter_tensor(part, whole.contiguous(), group=group)
    return part


def _exchange(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(sent, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    return received


def _gathered(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    result: Tensor = part if group is None else _Gather.apply(part, group)
    return result


def _scattered(whole: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    result: Tensor = whole if group is None else _Scatter.apply(whole, group)
    return result


def _exchanged(sent: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    result: Tensor = sent if group is None else _Exchange.apply(sent, group)
    return result


class _Norm(nn.Module):
    """Root mean square norm in float32, operation by operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        whole = hidden.float()
        whole = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * whole.to(hidden.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _turn(values: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions of [sequence, samples, heads, width]."""
    cosine, sine = angles
    first, second = values.chunk(2, dim=-1)
    return values * cosine + torch.cat((-second, first), dim=-1) * sine


class _Attention(nn.Module):
    """Grouped-query or latent attention with the heads of one device."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: TransformerShape, groups: LayerGroups, tokens: Tokens) -> None:
        super().__init__()
        self.own, self.groups, own = shape.attention, groups, shape.attention
        tensor, hidden = groups.degrees.tensor, shape.hidden
        self.heads, self.key_heads = own.heads // tensor, max(1, own.key_value_heads // tensor)
        if own.is_latent:
            inputs = own.latent_queries or hidden
            self.query_down = _linear(hidden, inputs) if own.latent_queries else None
            self.query_norm = _Norm(inputs)
            self.query = _linear(inputs, self.heads * own.head_width)
            self.key_down = _linear(hidden, own.latent_keys + own.rotary_width)
            self.key_norm = _Norm(own.latent_keys)
            self.key_up = _linear(own.latent_keys, own.key_value_up_size // tensor)
        else:
            self.query = _linear(hidden, self.heads * own.head_width)
            self.key = _linear(hidden, self.key_heads * own.head_width)
            self.value = _linear(hidden, self.key_heads * own.value_width)
        self.output = _linear(self.heads * own.value_width, hidden)
        width = own.rotary_width if own.is_latent else own.head_width
        positions = torch.arange(tokens.sequence).chunk(2 * groups.degrees.context)
        number = 0 if groups.context is None else dist.get_rank(groups.context)
        places = torch.cat((positions[number], positions[-1 - number]))
        angles = torch.outer(places, 10000 ** (-torch.arange(width // 2) / max(1, width // 2)))
        angles = torch.cat((angles, angles), dim=-1)[:, None, None]
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self._latent(hidden) if self.own.is_latent else self._grouped(hidden)
        result = self._attend(query, key, value)
        return _scattered(self.output(result.flatten(2)), self.groups.tensor)

    def _grouped(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = self.own
        whole = _gathered(hidden, self.groups.tensor)
        query = self.query(whole).unflatten(-1, (self.heads, own.head_width))
        key = self.key(whole).unflatten(-1, (self.key_heads, own.head_width))
        value = self.value(whole).unflatten(-1, (self.key_heads, own.value_width))
        angles = self.cosine, self.sine
        if own.head_width % 2:
            return query, key, value
        return _turn(query, angles), _turn(key, angles), value

    def _latent(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own, group, angles = self.own, self.groups.tensor, (self.cosine, self.sine)
        latent = hidden if self.query_down is None else self.query_norm(self.query_down(hidden))
        query = self.query(_gathered(latent, group)).unflatten(-1, (self.heads, own.head_width))
        keys, rotary = self.key_down(hidden).split_with_sizes([own.latent_keys, own.rotary_width], dim=-1)
        both = _gathered(torch.cat((self.key_norm(keys), rotary), dim=-1), group)
        keys, rotary = both.split_with_sizes([own.latent_keys, own.rotary_width], dim=-1)
        plain = own.head_width - own.rotary_width
        up = self.key_up(keys).unflatten(-1, (self.heads, plain + own.value_width))
        key, value = up.split_with_sizes([plain, own.value_width], dim=-1)
        turned = _turn(rotary[:, :, None], angles).expand(-1, -1, self.heads, -1)
        fixed, turning = query.split_with_sizes([plain, own.rotary_width], dim=-1)
        return (
            torch.cat((fixed, _turn(turning, angles)), dim=-1),
            torch.cat((key, turned), dim=-1),
            value,
        )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with [sequence, samples, heads, width]; with context parallelism to all devices' keys.

        Of `n` devices each has two of 2 n equal pieces of the sequence: one of the first half and the
        mirrored one of the last, so that each computes as much as every other.
        """
        group = self.groups.context
        gqa = self.heads != key.shape[2]
        if group is None:
            query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
            result = scaled_dot_product_attention(
                query, key, value, is_causal=self.own.causal, enable_gqa=gqa
            )
            return result.permute(2, 0, 1, 3)
        devices, piece = group.size(), query.shape[0] // 2
        number = dist.get_rank(group)
        key, value = (self._in_order(_gathered(each, group)).permute(1, 2, 0, 3) for each in (key, value))
        results = []
        for part, place in zip(query.chunk(2), (number, 2 * devices - 1 - number), strict=True):
            end = piece * (place + 1 if self.own.causal else 2 * devices)
            mask: Any = causal_lower_right(piece, end) if self.own.causal else None
            own = part.permute(1, 2, 0, 3)
            results.append(
                scaled_dot_product_attention(
                    own, key[:, :, :end], value[:, :, :end], attn_mask=mask, enable_gqa=gqa
                )
            )
        return torch.cat(results, dim=2).permute(2, 0, 1, 3)

    def _in_order(self, gathered: Tensor) -> Tensor:
        """Put the pieces of all devices in the order of the sequence."""
        pieces = gathered.chunk(2 * self.groups.degrees.context)
        return torch.cat((*pieces[::2], *pieces[::-2]))


class _FeedForward(nn.Module):
    """Matrices up and down of one device, with the activation between them."""

    def __init__(self, shape: TransformerShape, width: int) -> None:
        super().__init__()
        self.gate = _linear(shape.hidden, width) if shape.gated else None
        self.up, self.down = _linear(shape.hidden, width), _linear(width, shape.hidden)

    def forward(self, whole: Tensor) -> Tensor:
        up = self.up(whole)
        down: Tensor = self.down(gelu(up) if self.gate is None else silu(self.gate(whole)) * up)
        return down


class _Experts(nn.Module):
    """Router, shared experts, and the routed experts of one device."""

    order: Tensor

    def __init__(self, shape: TransformerShape, experts: ExpertShape, groups: LayerGroups, own: int) -> None:
        super().__init__()
        self.experts, self.groups, self.gated = experts, groups, shape.gated
        degrees, hidden = groups.degrees, shape.hidden
        self.router = _linear(hidden, experts.number)
        shared = experts.shared_width // degrees.tensor
        self.shared = _FeedForward(shape, shared) if shared else None
        local, ups = experts.number // degrees.expert, 2 if shape.gated else 1
        scale = hidden**-0.5
        self.up = nn.Parameter(torch.randn(local, hidden, ups * experts.width) * scale)
        self.down = nn.Parameter(torch.randn(local, experts.width, hidden) * scale)
        self.rows = math.ceil(own * experts.per_token / experts.number)
        # Row r of expert e holds copy e + r x number; the copies beyond the last one repeat the first ones.
        copies = torch.arange(self.rows * experts.number).reshape(self.rows, experts.number).t().flatten()
        self.register_buffer("order", copies % (own * experts.per_token))

    def forward(self, hidden: Tensor) -> Tensor:
        experts, group = self.experts, self.groups.expert
        flat = hidden.flatten(0, 1)
        weights, _ = self.router(flat).float().softmax(-1).topk(experts.per_token)
        token = self.order // experts.per_token
        devices = 1 if group is None else group.size()
        sent = _exchanged(flat[token], group)
        sizes = (devices, experts.number // devices, self.rows, hidden.shape[-1])
        rows = sent.view(sizes).transpose(0, 1).flatten(1, 2)
        up = rows @ self.up
        if self.gated:
            gate, up = up.chunk(2, dim=-1)
            up = silu(gate) * up
        else:
            up = gelu(up)
        back = (up @ self.down).view(sizes[1], sizes[0], *sizes[2:]).transpose(0, 1).flatten(0, 2)
        back = _exchanged(back, group) * weights.flatten()[self.order, None].to(hidden.dtype)
        result = torch.zeros_like(flat).index_add(0, token, back).view_as(hidden)
        if self.shared is not None:
            whole = self.shared(_gathered(hidden, self.groups.tensor))
            result = result + _scattered(whole, self.groups.tensor)
        return result


class PlainBlock(nn.Module):
    """A block of one device, with experts (`routed`) or without."""

    def __init__(self, shape: TransformerShape, routed: bool, groups: LayerGroups, tokens: Tokens) -> None:
        super().__init__()
        self.first, self.second = _Norm(shape.hidden), _Norm(shape.hidden)
        self.attention = _Attention(shape, groups, tokens)
        self.tensor_group = groups.tensor
        degrees = groups.degrees
        own = tokens.on(degrees) // degrees.tensor
        self.experts = _Experts(shape, shape.experts, groups, own) if routed and shape.experts else None
        width = shape.feed_forward // degrees.tensor
        self.feed_forward = _FeedForward(shape, width) if self.experts is None else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states of the device's tokens, [sequence, samples, width], in and out."""
        hidden = hidden + self.attention(self.first(hidden))
        normed = self.second(hidden)
        if self.feed_forward is None:
            assert self.experts is not None
            more: Tensor = self.experts(normed)
        else:
            whole = self.feed_forward(_gathered(normed, self.tensor_group))
            more = _scattered(whole, self.tensor_group)
        return hidden + more


class PlainHead(nn.Module):
    """Norm, product with the vocabulary, and the mean cross-entropy of one device."""

    def __init__(self, shape: TransformerShape, groups: LayerGroups) -> None:
        super().__init__()
        self.group = groups.tensor
        self.norm = _Norm(shape.hidden)
        self.rows = padded_vocabulary(shape, groups.degrees.tensor, 1) // groups.degrees.tensor
        self.product = _linear(shape.hidden, self.rows)

    def forward(self, hidden: Tensor) -> Tensor:
        """Loss of hidden states, [sequence, samples, width], whose next tokens are the vocabulary's first."""
        logits = self.product(_gathered(self.norm(hidden), self.group)).flatten(0, 1).float()
        if self.group is None:
            targets = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
            loss: Tensor = nn.functional.cross_entropy(logits, targets)
            return loss
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        logits = logits - largest[:, None]
        target = logits[:, 0] * (dist.get_rank(self.group) == 0)
        whole: Tensor = _Sum.apply(logits.exp().sum(-1), self.group)
        score: Tensor = _Sum.apply(target, self.group)
        return (whole.log() - score).mean()

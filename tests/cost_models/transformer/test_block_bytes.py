"""The bytes that a layer's passes over memory move, that it saves and that it needs besides: operation after
operation, each with the tensors that it reads, writes and keeps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from pplan.cost_models.transformer.block_kernels import block_work, embedding_work, head_work, predictor_work
from pplan.cost_models.transformer.implementations import MEGATRON
from pplan.cost_models.transformer.kernel_table import Kernel, MemoryPass
from pplan.cost_models.transformer.layer_work import LayerWork, Tokens
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
    ParallelDegrees(tensor=2, context=4, exchange="ring"),
    ParallelDegrees(context=2, exchange="all-gather"),
    ParallelDegrees(expert=4, tensor=2),
]


@dataclass
class Passes:
    """By hand: `forward` and `backward` bytes that each pass reads and writes, and `saved` ones. Tensors are
    numbers of two bytes."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    saved: float = 0.0

    def norm(self, tensor: float, *, adds: bool = True) -> None:
        """Reads and writes; keeps both. Backward reads the input and the gradient, and writes; `adds`: and so
        does the sum with the gradient that came past it."""
        self.forward.append(2 * (tensor + tensor))
        self.backward += [2 * (tensor + tensor + tensor)] * (2 if adds else 1)
        self.saved += 2 * (tensor + tensor)

    def add(self, tensor: float) -> None:
        """Reads two and writes one."""
        self.forward.append(2 * (tensor + tensor + tensor))

    def turn(self, tensor: float, kept: float) -> None:
        """Reads and writes, there and back, and keeps so many numbers."""
        self.forward.append(2 * 2 * tensor)
        self.backward.append(2 * 2 * tensor)
        self.saved += 2 * kept

    def activate(self, width: float, gated: bool) -> None:
        """Reads one or two and writes one; keeps all. Backward reads them and the gradient, and writes
        theirs."""
        read = 2 if gated else 1
        self.forward.append(2 * (read + 1) * width)
        self.backward.append(2 * (read + 1 + read) * width)
        self.saved += 2 * (read + 1) * width


def moved(kernels: tuple[Kernel, ...]) -> list[float]:
    return sorted(own.bytes for own in kernels if isinstance(own, MemoryPass))


def agree(work: LayerWork, own: Passes) -> None:
    assert moved(work.forward) == pytest.approx(sorted(own.forward))
    assert moved(work.backward) == pytest.approx(sorted(own.backward))


def attend(own: Passes, shape: TransformerShape, degrees: ParallelDegrees) -> float:
    """The attention of a block; bytes that it needs besides, at its peak."""
    count, sharers = TOKENS.sequence * TOKENS.samples / degrees.context, degrees.tensor
    heads, groups = shape.attention.heads / sharers, shape.attention.key_value_heads / sharers
    wide, value = shape.attention.head_width, shape.attention.value_width
    residual, result = count * shape.hidden / sharers, count * heads * value
    own.norm(residual)
    keys = count * groups * (wide + value)
    besides = 0.0
    if degrees.context > 1 and degrees.exchange == "ring":
        for _ in range(degrees.context - 1):
            own.add(result)
            own.backward.append(2 * 3 * (keys + result))
        # Keys, values and results of all steps; or keys and values and their gradients, coming and going.
        besides = max(2 * degrees.context * (keys + result), 2 * 4 * keys)
    elif degrees.context > 1 and degrees.exchange == "all-gather":
        besides = 2 * 2 * degrees.context * keys
    own.saved += 4 * count * heads  # a float32 of each row of the softmax
    if not shape.attention.is_latent:
        fused = count * (heads * wide + groups * (wide + value))
        own.turn(count * (heads + groups) * wide, fused)
        own.saved += 2 * result
        besides += 2 * 2 * fused
    else:
        down = [shape.attention.latent_queries, shape.attention.latent_keys + shape.attention.rotary_width]
        latent, queries = count * sum(down) / sharers, count * heads * wide
        up = count * heads * (wide - shape.attention.rotary_width + value)
        own.turn(latent, 2 * latent)
        own.turn(queries, 2 * queries)
        for passes in (own.forward, own.backward):
            passes.append(2 * (up + queries + 2 * result))
        own.saved += 2 * 2 * result
        besides += 2 * (2 * queries + result)
    own.add(residual)
    return besides + 2 * 2 * residual


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shape", [GROUPED, LATENT], ids=lambda own: own.name)
def test_dense_blocks(shape: TransformerShape, gated: bool, degrees: ParallelDegrees) -> None:
    shape, own = replace(shape, gated=gated), Passes()
    besides = attend(own, shape, degrees)
    count = TOKENS.sequence * TOKENS.samples / degrees.context
    residual, width = count * shape.hidden / degrees.tensor, count * shape.feed_forward / degrees.tensor
    own.norm(residual)
    own.activate(width, gated)
    own.add(residual)
    work = block_work(shape, False, degrees, TOKENS)
    agree(work, own)
    assert work.saved == pytest.approx(own.saved)
    assert work.workspace == pytest.approx(max(besides, 2 * residual + 2 * (1 + gated) * width))
    assert work.selective_saved == pytest.approx(4 * count * shape.attention.heads / degrees.tensor)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_blocks_of_experts(shared: bool, gated: bool, degrees: ParallelDegrees) -> None:
    assert LATENT.experts is not None
    experts = replace(LATENT.experts, shared_width=128 if shared else 0)
    shape, own = replace(LATENT, gated=gated, experts=experts), Passes()
    besides = attend(own, shape, degrees)
    count = TOKENS.sequence * TOKENS.samples / degrees.context
    tokens = count / degrees.tensor
    residual, sent, width = (tokens * own for own in (256, 2 * 256, 2 * 64))
    own.norm(residual)
    if shared:
        own.activate(count * 128 / degrees.tensor, gated)
    for passes in (own.forward, own.backward):
        # Tokens are put in the order of the experts, and back, as the measured shares of the bandwidth count
        # it: those that are sent three times. With several devices they are put in order on either side.
        passes += [2 * (residual + 3 * sent)] * 2
        passes += [2 * (sent + sent)] * (2 if degrees.expert > 1 else 0)
    own.activate(width, gated)
    own.saved += 2 * sent
    own.saved += 3 * 4 * tokens * 8  # of every expert, three numbers of four bytes
    own.add(residual)  # of the experts' results, weighed
    own.backward.append(2 * 3 * residual)
    own.add(residual)
    work = block_work(shape, True, degrees, TOKENS)
    agree(work, own)
    assert work.saved == pytest.approx(own.saved)
    assert work.workspace == pytest.approx(max(besides, 2 * (3 * sent + (1 + gated) * width)))


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_what_stands_before_and_behind_the_blocks(degrees: ParallelDegrees) -> None:
    count = TOKENS.sequence * TOKENS.samples / degrees.context
    whole, part = count * GROUPED.hidden, count * GROUPED.hidden / degrees.tensor
    embedding = embedding_work(GROUPED, degrees, TOKENS)
    agree(embedding, Passes([2 * 2 * part], [2 * 2 * whole] * 2))
    assert (embedding.saved, embedding.workspace) == (0, 0)

    head, own = head_work(GROUPED, degrees, TOKENS), Passes()
    logits = count * padded_vocabulary(GROUPED, degrees.tensor) / degrees.tensor
    own.norm(part, adds=False)
    own.forward.append(2 * 2 * logits)
    own.backward.append(2 * 2 * logits)
    agree(head, own)
    assert head.saved == pytest.approx(own.saved + 2 * logits + 4 * logits)
    rows = padded_vocabulary(GROUPED, degrees.tensor) / degrees.tensor
    gathered = whole + part if degrees.tensor > 1 else 0
    needed = 2 * (rows * GROUPED.hidden + whole + gathered)
    assert head.workspace == pytest.approx(max(0, needed - 4 * logits))
    in_place = replace(MEGATRON, loss_saved=1)
    other = head_work(GROUPED, degrees, TOKENS, in_place)
    assert other.saved + other.workspace == pytest.approx(own.saved + 2 * logits + needed)

    predictor, own = predictor_work(GROUPED, degrees, TOKENS), Passes()
    for _ in range(2):
        own.norm(part, adds=False)
        own.turn(2 * part, 0)  # two tensors put side by side, and the results together
    agree(predictor, own)
    assert predictor.saved == pytest.approx(own.saved)
    assert predictor.workspace == pytest.approx(2 * 2 * whole)

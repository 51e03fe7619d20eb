"""Ring attention and attention to gathered keys against the mask, cut into pieces; the ring against a clock
that runs every device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.topology import Device, Link, Topology, two_level_topology
from pplan.cost_models.transformer.block_kernels import block_work
from pplan.cost_models.transformer.kernel_table import AttentionKernel, Collective, Kernel, RingAttention
from pplan.cost_models.transformer.layer_work import LayerWork, Tokens
from pplan.cost_models.transformer.parallel_degrees import ContextExchange, ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, Overheads, RankCosts, TopologyLinks
from pplan.cost_models.transformer.transformer_shape import AttentionShape, TransformerShape

SHAPE = TransformerShape("model", 256, 1024, 512, AttentionShape(8, 2, 32, 32), (False, False))
TOKENS = Tokens(64)


def ring_of(kernels: tuple[Kernel, ...]) -> RingAttention:
    return next(kernel for kernel in kernels if isinstance(kernel, RingAttention))


def work(context: int, causal: bool = True, exchange: ContextExchange = "ring") -> LayerWork:
    shape = replace(SHAPE, attention=replace(SHAPE.attention, causal=causal))
    return block_work(shape, False, ParallelDegrees(context=context, exchange=exchange), TOKENS)


@pytest.mark.parametrize("context", [2, 4, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_each_step_of_each_device_is_its_part_of_the_mask(context: int, causal: bool) -> None:
    """Counted one by one; of the diagonal pplan counts one half, as FLOPs of causal attention are counted."""
    tokens = np.arange(TOKENS.sequence)
    pieces = tokens.reshape(2 * context, -1)
    owned = [np.concatenate((pieces[rank], pieces[-1 - rank])) for rank in range(context)]
    # Twice the number of pairs, that of a token with itself once where the mask ends there.
    mask = 2 * (tokens[None, :] < tokens[:, None]) + np.eye(len(tokens)) if causal else np.full((64, 64), 2)
    kernel = ring_of(work(context, causal).forward)
    for rank in range(context):
        for step in range(context):
            area = mask[np.ix_(owned[rank], owned[(rank - step) % context])].sum() / 2
            # Two products of a multiplication and an addition for each pair, head and number.
            assert kernel.step.flops == area * 2 * 2 * 8 * 32
    assert kernel.steps == context


@pytest.mark.parametrize("context", [2, 4, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_each_device_attends_to_gathered_keys(context: int, causal: bool) -> None:
    """Its own rows of the mask; and gathers what all devices have of keys and values, twice, and adds up the
    gradients once."""
    tokens = np.arange(TOKENS.sequence)
    pieces = tokens.reshape(2 * context, -1)
    mask = 2 * (tokens[None, :] < tokens[:, None]) + np.eye(len(tokens)) if causal else np.full((64, 64), 2)
    own = work(context, causal, "all-gather")
    for kernels, products in ((own.forward, 2), (own.backward, 5)):
        flops = sum(kernel.flops for kernel in kernels if isinstance(kernel, AttentionKernel))
        for rank in range(context):
            rows = mask[np.concatenate((pieces[rank], pieces[-1 - rank]))]
            assert flops == rows.sum() / 2 * products * 2 * 8 * 32
    keys_and_values = 2 * 64 * 2 * (32 + 32)
    exchanged = [
        [(each.name, each.bytes) for each in kernels if isinstance(each, Collective)]
        for kernels in (own.forward, own.backward)
    ]
    gathered = ("all_gather", keys_and_values)
    assert exchanged == [[gathered], [gathered, ("reduce_scatter", keys_and_values)]]
    assert own.saved == work(context, causal).saved


@pytest.mark.parametrize("context", [2, 4])
def test_as_much_attention_as_with_heads_for_tokens(context: int) -> None:
    for ring, swap in (
        (work(context).forward, work(context, exchange="all-to-all").forward),
        (work(context).backward, work(context, exchange="all-to-all").backward),
    ):
        other = next(kernel for kernel in swap if isinstance(kernel, AttentionKernel))
        assert ring_of(ring).steps * ring_of(ring).step.flops == other.flops


def clocked(topology: Topology, kernel: RingAttention, ranks: range, attention: float) -> float:
    """When the last device has attended to all: each starts a step when it has the keys, and its neighbour
    sends them on when it has them and the link is free."""
    arrived, links = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)
    computed = dict.fromkeys(ranks, 0.0)
    slowest = max(
        topology.link(rank, after).seconds(kernel.bytes)
        for rank, after in zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    )
    for step in range(kernel.steps):
        start = {rank: max(computed[rank], arrived[rank]) for rank in ranks}
        computed = {rank: start[rank] + attention for rank in ranks}
        if step + 1 == kernel.steps:
            break
        # Transfers of a step begin when the step before is done everywhere, as the kernels are launched.
        links = {rank: max(links[rank], start[rank]) + slowest for rank in ranks}
        arrived = {after: links[rank] for rank, after in zip(ranks, [*ranks[1:], ranks[0]], strict=True)}
    return max(computed.values())


@pytest.mark.parametrize(("tensor", "context"), [(1, 2), (1, 4), (2, 4), (1, 8), (4, 2)])
@pytest.mark.parametrize("bandwidth", [1e7, 1e9, 1e11])
def test_seconds_are_those_of_a_clock(tensor: int, context: int, bandwidth: float) -> None:
    topology = two_level_topology(Device("GPU", None), 8, 4, Link(bandwidth, 1e-6), Link(bandwidth / 4, 5e-6))
    costs = RankCosts(DeviceLimits(1e12, 1e11), TopologyLinks(topology), overheads=Overheads(0.0))
    degrees = ParallelDegrees(tensor, context, exchange="ring")
    shape = replace(SHAPE, attention=AttentionShape(8, 4, 32, 32))
    work = block_work(shape, False, degrees, TOKENS)
    for kernels in (work.forward, work.backward):
        kernel = ring_of(kernels)
        own = costs.kernel_seconds(kernel.step, degrees)
        ranks = range(0, tensor * context, tensor)
        assert costs.kernel_seconds(kernel, degrees) == pytest.approx(clocked(topology, kernel, ranks, own))


def test_what_goes_round() -> None:
    """Keys and values of the device's tokens, and with their gradients on the way back."""
    kernel = work(4)
    keys = 2 * (64 // 4) * 2 * (32 + 32)
    assert ring_of(kernel.forward).bytes == keys
    assert ring_of(kernel.backward).bytes == 2 * keys
    assert kernel.saved == work(4, exchange="all-to-all").saved


def test_more_devices_than_heads_of_keys() -> None:
    """2 heads of keys and values cannot be exchanged among 4 devices; they can go round."""
    assert "2 of keys" in ParallelDegrees(context=4).problem_with(SHAPE, 64)
    assert ParallelDegrees(context=4, exchange="ring").problem_with(SHAPE, 64) == ""
    assert "2 x context" in ParallelDegrees(context=4, exchange="ring").problem_with(SHAPE, 68)
    assert ParallelDegrees(2, 4, exchange="ring").describe() == "TP 2 x CP by ring 4"
    assert ParallelDegrees(context=4, exchange="all-gather").problem_with(SHAPE, 64) == ""

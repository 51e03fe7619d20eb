"""A plan's pipeline of a chain that can be cut at its own cuts alone: every second and byte as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pplan.cost_models.layer import Chain, SharedBuffer, TiedWeight
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.topology import Topology
from pplan.planner.assembly import Assembly
from pplan.planner.search.space import Space, narrow_space

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def chain_with_ties(make_chain: MakeChain, seed: int) -> Chain:
    """A weight and a buffer of the first layer, the middle and the last."""
    chain = make_chain(seed, 9, traffic=0.3, cuts=1.1, adding=0.5)
    users = (0, 4, 8)
    return replace(
        chain,
        tied=(TiedWeight("embedding", 40.0, 40.0, users),),
        shared_buffers=(SharedBuffer("mask", 7.0, users),),
    )


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-v", 2)])
def test_costs_and_ledgers_stay(
    schedule: str, chunks: int, zero: int, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    own, chain = find_schedule(schedule), chain_with_ties(make_chain, 3)
    ends = [0, 3, 5, 9] if chunks == 1 else [0, 2, 3, 6, 9]
    devices = (len(ends) - 1) // chunks
    assembly = Assembly(
        schedule=own,
        program=own.program(devices, 4, chunks),
        chain=chain,
        topology=make_topology(2 * devices, per_node=2, latency=0.01),
        size=4,
        bounds=list(pairwise(ends)),
        ranks=[[2 * device, 2 * device + 1] for device in range(devices)],
        recompute=["always", *["never"] * (devices - 1)],
        optimizer="adam",
        dtype="float32",
        zero=zero,
    )
    narrow = narrow_space(Space(chain, assembly.topology, "adam"), ends[1:])
    few = replace(assembly, chain=narrow.chain, bounds=list(pairwise(range(len(ends)))))
    assert few.table(0).blocks == len(ends) - 1 < assembly.table(0).blocks
    before, after = assembly.costs(), few.costs()
    assert before.arrays().keys() == after.arrays().keys()
    for name, values in before.arrays().items():
        # The tables add up the layers of a stage in another order.
        np.testing.assert_allclose(values, after.arrays()[name], rtol=1e-14, err_msg=name)
    assert (before.tied, before.port_seconds) == (after.tied, after.port_seconds)
    assert before.tied
    for device in range(devices):
        assert assembly.ledger(device) == few.ledger(device)

"""What parts need at the least, against the ledger of devices that have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import FRAGMENTATION_RESERVE
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.topology import Group, Topology
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.cut_search.part_tables import PipelineShape, _least_bytes, make_part_tables
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble
from pplan.planner.search.least_exchange import LeastExchanges

COUNT, LAYERS = 4, 6
EXACT = {("1f1b", "never"): 10, ("gpipe", "never"): 10}
"""Of five cuts, the parts that need as much as their device."""
EXACT |= {
    (name, mode): number for name in ("zb-h1", "zb-h2") for mode, number in (("never", 2), ("always", 5))
}


@pytest.fixture
def problem(make_chain: Callable[..., Chain], make_topology: Callable[..., Topology]) -> Problem:
    chain = make_chain(2, LAYERS, cuts=1.1)
    share = np.random.default_rng(2).random((LAYERS, 3))
    chain = replace(chain, pending_gradient_bytes=share * chain.saved_bytes)
    return Problem(chain, make_topology(2, memory=900), PlanOptions(mini_batch=COUNT, optimizer="sgd"))


def bytes_of(ledger: dict[str, Any], *without: str) -> float:
    """With the reserve; but for some terms."""
    own = sum(amount for name, amount in ledger.items() if name not in {"reserve", "context", *without})
    return float(own * (1 + FRAGMENTATION_RESERVE))


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("base", ["1f1b", "zb-h1", "zb-h2", "gpipe", "zb-v", "chimera"])
def test_parts_that_fit_on_no_device(base: str, mode: Any, problem: Problem) -> None:
    """Of one part a device as much as its ledger, but for what the optimizer's step needs, and, where it
    recomputes, a workspace; of several never more."""
    program = SCHEDULES[base].program(2, COUNT, SCHEDULES[base].default_virtual_stages)
    space, ranks, slots = problem.space, [(0,), (1,)], program.slots
    table, kinds = space.table(1), space.topology.kinds
    holders = len(program.pipes)
    needs = {
        slot: _least_bytes(space, program, slot, table, kinds, holders, mode)
        for slot in program.parts_by_slot
    }
    exact = 0
    config = PipelineConfig(base, "by_stage", COUNT, 1, SCHEDULES[base].default_virtual_stages)
    for inner in combinations(range(1, LAYERS), slots - 1):
        ends = (*inner, LAYERS)
        places = (0, *ends)
        devices = tuple(ranks[slot.device] for slot in program.pipes[0])
        made = assemble(space, Proposal(config, ends, devices), [mode] * slots)
        for slot, need in needs.items():
            part, ledger = program.parts_by_slot[slot], made.ledger(slot.device)
            least = float(need[places[part], places[part + 1]])
            assert least <= bytes_of(ledger, "optimizer_step") * (1 + 1e-12)
            without = ("optimizer_step", "workspace") if mode == "always" else ("optimizer_step",)
            exact += least == pytest.approx(bytes_of(ledger, *without))
    assert exact >= EXACT.get((base, mode), 0)


def test_devices_of_several_kinds_and_of_none(problem: Problem) -> None:
    """Anywhere the limit is that of the kind that holds most."""
    program = SCHEDULES["zb-h1"].program(2, COUNT)
    shape = PipelineShape(PipelineConfig("zb-h1", "never", COUNT, 1), program, ((0,), (1,)))

    def usable(anywhere: bool, *kinds: Any) -> Any:
        groups = tuple(Group(kind, 2 // len(kinds)) for kind in kinds)
        space = replace(problem.space, topology=replace(problem.topology, groups=groups))
        return make_part_tables(space, shape, LeastExchanges(space), anywhere=anywhere).usable

    kind = problem.topology.kinds[0]
    other = replace(kind, name="other")
    free = replace(kind, name="free", memory_bytes=None)
    assert (usable(True, kind) == usable(False, kind)).all()
    assert (usable(True, kind, other) == usable(False, kind)).all()
    assert usable(False, kind).sum() < usable(True, kind, free).sum()
    assert (usable(True, kind, free) == problem.space.usable).all()

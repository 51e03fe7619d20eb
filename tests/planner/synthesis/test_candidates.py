"""Shapes as problems of orders: bytes against the ledger's, cuts near by, and what recomputes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import FRAGMENTATION_RESERVE, Recompute, bytes_by_action
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble
from pplan.planner.synthesis.orders import F, OrderProblem
from pplan.planner.synthesis.synthesize import make_candidate, recompute_choices

from .test_orders import list_steps

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
LASTING = ("weights", "gradients", "optimizer", "weight_versions", "communication")
"""Terms that no order changes."""
MODES: tuple[Recompute, ...] = ("never", "always")


@pytest.fixture
def make_problem(make_chain: MakeChain, make_topology: MakeTopology) -> Callable[..., Problem]:
    def make(memory: int | None = None, cuts: float = 1.1, **options: Any) -> Problem:
        chain = make_chain(3, 8, cuts=cuts)
        share, losses = np.random.default_rng(3).random((8, 3)), np.zeros((8, 3))
        losses[-1] = 0.2 * chain.saved_bytes[-1]
        pending = share * chain.saved_bytes
        chain = replace(chain, pending_gradient_bytes=pending, loss_saved_bytes=losses)
        return Problem(chain, make_topology(2, memory=memory), PlanOptions(mini_batch=6, **options))

    return make


def shape(base: str, recompute: Any = "by_stage", ends: tuple[int, ...] = ()) -> Proposal:
    """On two devices."""
    program = SCHEDULES[base].program(2, 6)
    devices = tuple((slot.device,) for slot in program.pipes[0])
    config = PipelineConfig(base, recompute, 6, 1, program.chunks)
    own = ends or (*range(2, 2 * len(devices), 2), 8)
    return Proposal(config, own, devices)


def held(problem: OrderProblem, own: Any) -> list[float]:
    """By action, in a row of them."""
    level, rows = 0.0, []
    for step in own:
        begins, ends, workspace = problem.bytes[step[0]][step[1]]
        rows.append(level + begins + workspace)
        level += begins + ends
    return rows


@pytest.mark.parametrize("base", ["1f1b", "zb-h1", "zb-v", "interleaved"])
def test_bytes_are_those_of_the_ledger(base: str, make_problem: Callable[..., Problem]) -> None:
    """During every action, whatever the devices recompute, and what is left of the memory for them; but for
    what a schedule with whole backwards counts at its largest alone."""
    problem, own = make_problem(memory=3000), shape(base)
    for modes in product(MODES, repeat=2):
        by_part = tuple(modes[ranks[0]] for ranks in own.devices)
        candidate = make_candidate(problem, own, by_part)
        assembly, program = assemble(problem.space, own, by_part), candidate.problem.program
        lists = list_steps(program)
        assert lists is not None
        for device, mode in enumerate(modes):
            sizes = assembly.chunk_bytes(device)
            ledger = bytes_by_action(program, device, sizes, mode).bytes
            found = held(candidate.problem, lists[device])
            assert max(found) == pytest.approx(ledger.max())
            if program.splits_backward:
                assert found == pytest.approx(ledger.tolist())
            terms = assembly.ledger(device)
            lasting = sum(terms.get(name, 0.0) for name in LASTING)
            room = 3000 / (1 + FRAGMENTATION_RESERVE) - lasting
            assert candidate.problem.room[device] == pytest.approx(room)


@pytest.mark.parametrize("memory", [None, 1300, 1500, 1800, 2500])
def test_what_recomputes(memory: int | None, make_problem: Callable[..., Problem]) -> None:
    """Nothing; where devices have no room for as many as 1F1B holds, these alone, if not all, and all."""
    problem, own = make_problem(memory=memory), shape("zb-h1", ends=(5, 8))
    whole = make_candidate(problem, own, ("never", "never")).problem
    lacking = [whole.bytes[F][n][0] * (2 - n) > whole.room[n] for n in range(2)]
    expected: list[tuple[str, ...]] = [("never", "never")]
    if any(lacking):
        mixed = [tuple("always" if each else "never" for each in lacking)] if not all(lacking) else []
        expected += [*mixed, ("always", "always")]
    assert [each.recompute for each in recompute_choices(problem, own)] == expected
    for word, modes in (("always", "always"), ("never", "never")):
        assert [each.recompute for each in recompute_choices(problem, shape("zb-h1", word))] == [(modes,) * 2]

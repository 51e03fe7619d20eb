"""`min_micro_batch`: every replica gets so many samples of a micro-batch, and the proof is of these plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.joint_search import find_best_plan
from pplan.planner.objectives.solve_objective import NORM_COST, step_time
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]


def best_share(problem: Problem) -> tuple[float, float, float]:
    """Fewest samples of a replica, step and bound of the answer."""
    answer = find_best_plan(problem)
    assert answer.best is not None
    config = answer.best.config
    share = config.micro_batch_size / max(answer.best.proposal.replicas)
    return share, answer.best.step_seconds, answer.result.bound_seconds


@pytest.mark.parametrize("least", [2, 4, 8])
def test_replicas_get_so_many_samples(
    least: int, make_chain: MakeChain, make_topology: Callable[..., Topology]
) -> None:
    """The best of all plans with as many is found: that of the micro-batch sizes, one at a time."""
    chain = make_chain(3, 5, sizes=(1, 2, 4, 8, 16))
    free = Problem(chain, make_topology(2), PlanOptions(mini_batch=16))
    limited = replace(free, options=replace(free.options, min_micro_batch=least))
    share, step, bound = best_share(limited)
    assert share >= least
    assert bound <= step * (1 + 1e-9)
    fixed = []
    for count in (1, 2, 4, 8):
        if 16 // count >= least:
            options = replace(free.options, micro_batches=count, min_micro_batch=least)
            fixed.append(best_share(replace(free, options=options)))
    assert step == pytest.approx(min(seconds for _, seconds, _ in fixed))
    assert all(own >= least for own, _, _ in fixed)


def test_micro_batches_that_are_too_small_are_refused(
    make_chain: MakeChain, make_topology: Callable[..., Topology]
) -> None:
    problem = Problem(make_chain(3, 5, sizes=(1, 2, 4, 8)), make_topology(2), PlanOptions(mini_batch=8))
    too_many = replace(problem.options, micro_batches=4, min_micro_batch=4)
    with pytest.raises(UsageError, match="less than min_micro_batch=4") as caught:
        find_best_plan(replace(problem, options=too_many))
    assert "Use micro_batches=2 or fewer" in caught.value.hint
    with pytest.raises(UsageError, match="min_micro_batch=16: the global batch has 8 samples"):
        find_best_plan(replace(problem, options=PlanOptions(mini_batch=8, min_micro_batch=16)))


def even_chain(make_chain: MakeChain, layers: int = 6) -> Chain:
    """Equal layers whose costs are proportional to the samples: a step is all work and the bubble."""
    sizes = (1, 2, 4, 8, 16)
    by_size = np.outer(np.ones(layers), sizes)
    return replace(
        make_chain(0, layers, sizes=sizes),
        cut_after=np.append(np.ones(layers - 1, bool), False),
        forward_seconds=by_size,
        backward_seconds=2 * by_size,
        output_bytes=1e-9 * by_size,
        forward_host_seconds=0 * by_size,
        backward_host_seconds=0 * by_size,
        parameter_bytes=np.full(layers, 1e9),
        trainable_bytes=np.full(layers, 1e9),
        batch_norms=("layer0",),
    )


@pytest.mark.parametrize(("mini_batch", "size"), [(1024, 8), (128, 2)])
def test_batch_norms_get_samples_if_that_costs_little(
    mini_batch: int, size: int, make_chain: MakeChain, make_topology: Callable[..., Topology]
) -> None:
    """Of m micro-batches in two stages the bubble is 1 / m: of 1,024 samples 8 a micro-batch cost 0.7 % more
    than 1, of 128 samples 5.4 % and 2 cost 0.8 %."""
    problem = Problem(
        even_chain(make_chain), make_topology(2), PlanOptions(mini_batch=mini_batch, schedule="1f1b")
    )
    fastest_plan = find_best_plan(problem).best
    outcome = step_time(problem)
    assert fastest_plan is not None
    assert outcome.best is not None
    assert (fastest_plan.config.micro_batch_size, outcome.best.config.micro_batch_size) == (1, size)
    assert outcome.best.proposal.ends == fastest_plan.proposal.ends
    cost = outcome.best.step_seconds / fastest_plan.step_seconds - 1
    assert 0 < cost <= NORM_COST
    assert outcome.notes[0].startswith(f"micro-batches of {size} samples, for the batch norms: 0.")
    assert not outcome.result.exact
    assert outcome.result.bound_seconds <= fastest_plan.step_seconds * (1 + 1e-9)
    for options in (
        replace(problem.options, min_micro_batch=1),
        replace(problem.options, micro_batches=mini_batch),
    ):
        assert step_time(replace(problem, options=options)).notes == ()
    plain = replace(problem, chain=replace(problem.chain, batch_norms=()))
    assert step_time(plain).best == fastest_plan

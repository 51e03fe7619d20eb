"""Stages that run as few of their first layers again as make them fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import count_first_layers
from pplan.cost_models.topology import Topology
from pplan.planner.infeasible import no_plan_fits
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble, fastest
from pplan.planner.universal_bound import universal_bound

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def problem_of(chain: Chain, topology: Topology, recompute: str, **options: Any) -> Problem:
    return Problem(chain, topology, PlanOptions(mini_batch=8, recompute=recompute, **options))


@pytest.mark.parametrize("seed", [0, 2, 4])
@pytest.mark.parametrize("runtime", [None, "torch"])
def test_no_slower_than_whole_stages(
    seed: int, runtime: str | None, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain, words = make_chain(seed, 7, traffic=0.1), []
    options = {"schedule": "1f1b", "runtime": runtime, "micro_batches": 8, "use_all": True}
    free = find_best_plan(problem_of(chain, make_topology(3), "auto", **options)).best
    assert free is not None
    made = assemble(
        problem_of(chain, make_topology(3), "auto", **options).space, free.proposal, free.recompute
    )
    most = max(sum(made.ledger(device).values()) for device in range(3))
    for memory in (round(share * most) for share in (0.9, 0.75, 0.6)):
        topology = make_topology(3, memory=memory)
        whole, first = (
            find_best_plan(problem_of(chain, topology, word, **options)).result
            for word in ("auto", "first_layers")
        )
        if whole.best is not None:
            assert first.best is not None
            assert first.best.step_seconds <= whole.best.step_seconds * (1 + 1e-9)
        if first.best is None:
            continue
        assert first.exact
        problem, plan = problem_of(chain, topology, "first_layers", **options), first.best
        assert universal_bound(problem, ["1f1b"]) <= plan.step_seconds * (1 + 1e-9)
        assert fastest(problem.space, [plan.proposal]) == plan
        made = assemble(problem.space, plan.proposal, plan.recompute)
        for device, ((start, end), word) in enumerate(zip(plan.proposal.bounds, plan.recompute, strict=True)):
            count = count_first_layers(word)
            assert count is None or 0 < count < end - start
            assert sum(made.ledger(device).values()) <= memory * (1 + 1e-9)
            words.append(word)
            if count and start + count - 1 in range(end) and chain.cut_after[start : start + count - 1].any():
                # One cut earlier it does not fit.
                fewer = max(i + 1 for i in range(start, start + count - 1) if chain.cut_after[i]) - start
                assert sum(made.ledger(device, f"first_{fewer}").values()) > memory
    assert any(word.startswith("first_") for word in words)


def test_the_error_names_the_least_that_any_needs(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain = make_chain(1, 7)
    error = no_plan_fits(problem_of(chain, make_topology(2, memory=150), "first_layers"))
    needs = error.details["stage"]["memory_bytes"]
    for memory in (needs + 1, needs - 1):
        plan = find_best_plan(problem_of(chain, make_topology(2, memory=memory), "first_layers")).best
        assert (plan is not None) == (memory > needs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zb-h1"}, "recompute='first_layers' with schedule='zb-h1'"),
        ({"zero": 2}, "recompute='first_layers' with zero=2"),
        ({"runtime": "torchgpipe"}, "runtime='torchgpipe' does not run"),
    ],
)
def test_where_they_are_not_searched(
    options: dict[str, Any], message: str, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    with pytest.raises(UsageError) as caught:
        problem_of(make_chain(1, 5), make_topology(2), "first_layers", **options)
    assert message in caught.value.what
    assert caught.value.hint


def test_not_of_many_devices(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    with pytest.raises(UsageError, match="recompute='first_layers' cannot be searched"):
        find_best_plan(problem_of(make_chain(1, 5), make_topology(66), "first_layers"))

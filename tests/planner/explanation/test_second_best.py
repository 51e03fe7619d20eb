"""The runner-up plan held against every plan of small problems: it is the second-best one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from attack.enumeration import Enumeration, Scored

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.explanation.explain_context import ExplainContext
from pplan.planner.explanation.rivals import runners_up
from pplan.planner.scoring import fastest

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
SAME = 1e-8
"""Share by which the steps of plans that are as fast differ, at the most."""


def others_below(context: ExplainContext, limit: float) -> Iterator[Scored]:
    """All plans with other cuts, replicas, or devices that make a difference, whose steps are below a limit
    and not as long as the plan's."""
    present, space = context.present, context.problem.space
    for plan in Enumeration(context.problem, context.problem.schedules).below(limit):
        if abs(plan.step_seconds / present.step_seconds - 1) <= SAME:
            continue
        if (plan.proposal.ends, plan.proposal.replicas) == (present.proposal.ends, present.proposal.replicas):
            same = fastest(space, [replace(present.proposal, devices=plan.proposal.devices)])
            if same is not None and abs(same.step_seconds / present.step_seconds - 1) <= SAME:
                continue
        yield plan


CASES: dict[str, dict[str, Any]] = {
    "free": {},
    "a device a node": {"per_node": 1},
    "little memory": {"memory": 800},
    "gpipe": {"schedule": "gpipe"},
    "all devices": {"use_all": True},
    "never": {"recompute": "never", "memory": 1200},
}


@pytest.mark.parametrize("gpus", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_no_other_plan_is_faster(
    name: str, gpus: int, make_chain: MakeChain, make_topology: MakeTopology, solved: Callable[..., Any]
) -> None:
    """Four to six layers: what is said to be the second best, or the best of other numbers of stages, is."""
    options = {key: own for key, own in CASES[name].items() if key not in ("per_node", "memory")}
    machine = {key: own for key, own in CASES[name].items() if key not in options}
    for seed in range(3):
        chain = make_chain(seed, 4 + seed, traffic=(0.02, 0.3, 1.0)[seed], cuts=1.1)
        topology = make_topology(gpus, latency=0.01 * (seed % 2), **machine)
        context = solved(chain, topology, mini_batch=6, **options).question
        said, count = runners_up(context, [context.present], busiest=0), len(context.present.proposal.ends)
        rows = [said.second_best, said.other_stages]
        steps = [inf if row.plan is None else row.plan.step_seconds for row in rows]
        plans = list(others_below(context, max(steps) * (1 + 2 * SAME)))
        other_counts = [plan for plan in plans if len(plan.proposal.ends) != count]
        for row, step, every in zip(rows, steps, (plans, other_counts), strict=True):
            best = min((plan.step_seconds for plan in every), default=inf)
            assert step == pytest.approx(best, rel=SAME), (seed, row)
            assert row.proven or said.as_fast is not None

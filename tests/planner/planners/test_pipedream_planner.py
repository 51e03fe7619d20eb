"""PipeDream on chains and topologies: memory with weight versions, devices, and what it proposes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from pplan.cost_models.layer import Chain, list_cut_points
from pplan.cost_models.memory import ledger, total
from pplan.cost_models.runtime import find_runtime
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import PipelineConfig, pipeline_configs
from pplan.planner.objectives.throughput import plan_asynchronous
from pplan.planner.planners import PLANNERS
from pplan.planner.planners.pipedream_planner import (
    PAPER,
    PipeDreamStages,
    TooMuchWork,
    shortest_bottleneck,
)
from pplan.planner.search.space import Space
from tests.stage_bytes import stage_bytes

if TYPE_CHECKING:
    from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
Stages = tuple[tuple[int, int, int], ...]
"""(first layer, layer after the last, replicas) of each."""


def every_plan(places: tuple[int, ...], gpus: int) -> Iterator[Stages]:
    """All plans of one level from the first of these places on."""
    first, *later = places
    for index, end in enumerate(later):
        for replicas in range(1, gpus + 1):
            if end == places[-1]:
                yield ((first, end, replicas),)
            else:
                for rest in every_plan(places[index + 1 :], gpus - replicas):
                    yield ((first, end, replicas), *rest)


def memory(chain: Chain, size: int, stages: Stages, versions: list[int]) -> list[float]:
    """The ledger of every stage with so many versions of the weights, and as many micro-batches in flight."""
    return [
        float(
            total(
                ledger(
                    stage_bytes(chain.at(-(-size // replicas)), first, end - 1),
                    in_flight=count,
                    recompute="never",
                    optimizer="sgd",
                    replicas=replicas,
                    weight_versions=count,
                )
            )
        )
        for (first, end, replicas), count in zip(stages, versions, strict=True)
    ]


def bottleneck(chain: Chain, size: int, stages: Stages, bandwidth: float) -> float:
    """The paper's recurrence, of one level."""
    costs, slowest = chain.at(size), 0.0
    for first, end, m in stages:
        own = slice(first, end)
        compute = float((costs.forward_seconds + costs.backward_seconds)[own].sum())
        weights = float(costs.trainable_bytes[own].sum())
        cut = 2 * float(costs.output_bytes[first - 1]) / bandwidth if first else 0.0
        slowest = max(slowest, cut, max(compute, 2 * (m - 1) * weights / bandwidth) / m)
    return slowest


def test_no_asynchronous_plan_that_fits_is_faster(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    bitten = infeasible = 0
    for seed in range(60):
        chain, gpus = make_chain(seed, 6, traffic=0.3), 2 + seed % 3
        plans = list(every_plan(list_cut_points(chain), gpus))
        seconds = [bottleneck(chain, 4, stages, 20.0) for stages in plans]
        needs = [max(memory(chain, 4, s, list(range(len(s), 0, -1)))) for s in plans]
        limit = int(min(needs) * (0.97 + 0.06 * (seed % 11)))
        space = Space(chain, make_topology(gpus, memory=limit), "sgd")
        fitting = [t for t, need in zip(seconds, needs, strict=True) if need <= limit]
        if not fitting:
            assert plan_asynchronous(space, 4) is None
            infeasible += 1
            continue
        plan = plan_asynchronous(space, 4)
        assert plan is not None
        assert plan.estimate_seconds == pytest.approx(min(fitting), rel=1e-12)
        starts = (0, *plan.ends[:-1])
        stages = tuple(zip(starts, plan.ends, plan.replicas, strict=True))
        assert bottleneck(chain, 4, stages, 20.0) == pytest.approx(plan.estimate_seconds, rel=1e-12)
        assert max(memory(chain, 4, stages, list(range(len(stages), 0, -1)))) <= limit
        bitten += min(fitting) > min(seconds)
    assert infeasible >= 3
    assert bitten >= 10


def test_sizes_outside_of_the_profile_have_no_plan(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    space = Space(make_chain(1, 8, traffic=0.01), make_topology(6), "adam")
    assert plan_asynchronous(space, 48) is None


def test_what_recomputes_computes_forward_twice(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain = make_chain(2, 6)
    recompute = plan_asynchronous(Space(chain, make_topology(1), "sgd"), 4, recompute="always")
    assert recompute is not None
    costs = chain.at(4)
    whole = 2 * costs.forward_seconds.sum() + costs.backward_seconds.sum()
    assert recompute.estimate_seconds == pytest.approx(whole)


@pytest.mark.parametrize("memory", [None, 10**6])
def test_too_many_cuts_for_the_work_are_halved(
    memory: int | None, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain, topology = make_chain(0, 40, cuts=1.0), make_topology(4, per_node=2, memory=memory)
    space = Space(chain, topology, "sgd")
    stages = PipeDreamStages(space, PipelineConfig("pipedream", "never", 8, 4), PAPER)
    exact, thin = stages.proposal(), stages.proposal(work=1e4)
    least, seconds = ((own and own.estimate_seconds) or inf for own in (exact, thin))
    assert least <= seconds <= 2 * least < inf
    with pytest.raises(TooMuchWork):
        shortest_bottleneck(stages.instance, 1e4)


class TestProposals:
    def problem(self, space: Space, schedules: tuple[str, ...] = ("1f1b", "gpipe")) -> Problem:
        made = pipeline_configs(8, schedules, ("by_stage", "never"), [1, 2, 4])
        return cast("Problem", SimpleNamespace(space=space, configs=made))

    def test_runtimes_without_replicas_get_straight_pipelines(
        self, make_chain: MakeChain, make_topology: MakeTopology
    ) -> None:
        space = Space(
            make_chain(4, 9, traffic=0.05),
            make_topology(8, per_node=4),
            "sgd",
            runtime=find_runtime("torchgpipe"),
        )
        proposals = list(PLANNERS["pipedream"].propose(self.problem(space, ("gpipe",))))
        assert proposals
        for proposal in proposals:
            assert set(proposal.replicas) == {1}
            assert max(rank for own in proposal.devices for rank in own) < 4

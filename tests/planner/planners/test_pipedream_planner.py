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
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import PipelineConfig, pipeline_configs
from pplan.planner.objectives.throughput import plan_asynchronous
from pplan.planner.planners import PLANNERS, pipedream_planner
from pplan.planner.planners.base import Planner
from pplan.planner.planners.pipedream_planner import (
    PAPER,
    NestedStage,
    PipeDreamStages,
    TooMuchWork,
    place_parts,
    shortest_bottleneck,
)
from pplan.planner.planners.replica_groups import list_tiers
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


@pytest.mark.parametrize(
    ("schedule", "versions"), [("pipedream", [4, 3, 2, 1]), ("pipedream-2bw", [2, 2, 2, 2])]
)
def test_weight_versions_of_four_stages(
    schedule: str, versions: list[int], make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    space = Space(make_chain(1, 8, traffic=0.01), make_topology(4), "adam")
    stages = PipeDreamStages(space, PipelineConfig(schedule, "never", 8, 4), PAPER)
    for in_flight, count in zip((4, 3, 2, 1), versions, strict=True):
        expected = space.table(4).memory(in_flight, "never", "adam", 1, weight_versions=count)
        assert stages._need(1, "never", in_flight, "any") == pytest.approx(expected)


def test_devices_are_used_once(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    plan = plan_asynchronous(Space(make_chain(1, 8, traffic=0.01), make_topology(6), "adam"), 4)
    assert plan is not None
    ranks = [rank for own in plan.devices for rank in own]
    assert len(plan.ends) > 1
    assert sorted(ranks) == list(range(sum(plan.replicas)))


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


def test_many_cuts_are_thinned(
    make_chain: MakeChain, make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 10 blocks of the 40 layers: tables for 4 numbers of replicas of 10 x 10 entries."""
    monkeypatch.setattr(pipedream_planner, "ENTRIES", 4 * 100)
    chain, topology = make_chain(0, 40, cuts=1.0), make_topology(4, memory=10**6)
    stages = PipeDreamStages(Space(chain, topology, "sgd"), PipelineConfig("pipedream", "never", 8, 4), PAPER)
    assert stages.table.blocks == 10
    plan = plan_asynchronous(Space(chain, topology, "sgd"), 4)
    assert plan is not None
    assert plan.ends[-1] == 40
    assert set(plan.ends) <= set(stages.table.cut_points)


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


class TestDevices:
    def topology(self, gpus: int, *sizes: int) -> Topology:
        levels = tuple(
            Level(f"level{k}", size, Link(100.0 / 10**k, 0.0)) for k, size in enumerate((*sizes, None))
        )
        return Topology((Group(Device("toy", None), gpus),), levels)

    @pytest.mark.parametrize(
        ("gpus", "sizes", "expected"),
        [
            (3, (8,), [(3, 100.0)]),
            (16, (8,), [(8, 100.0), (2, 10.0)]),
            (16, (2, 4), [(2, 100.0), (4, 10.0), (2, 1.0)]),
            (12, (8,), [(4, 100.0), (3, 10.0)]),
            (9, (8,), [(9, 10.0)]),
            (1, (8,), [(1, 100.0)]),
            (8, (1,), [(8, 10.0)]),
        ],
    )
    def test_levels(self, gpus: int, sizes: tuple[int, ...], expected: list[tuple[int, float]]) -> None:
        assert [tuple(tier) for tier in list_tiers(self.topology(gpus, *sizes))] == expected

    def test_copies_of_an_inner_pipeline(self) -> None:
        tiers = list_tiers(self.topology(12, 4))
        inner = (NestedStage(0, 2, 3), NestedStage(2, 4, 1))
        parts = (NestedStage(0, 4, 2, inner), NestedStage(4, 5, 1, (NestedStage(4, 5, 2),)))
        assert place_parts(parts, tiers) == [(0, 1, 2, 4, 5, 6), (3, 7), (8, 9)]


class TestProposals:
    def problem(self, space: Space, schedules: tuple[str, ...] = ("1f1b", "gpipe")) -> Problem:
        made = pipeline_configs(8, schedules, ("by_stage", "never"), [1, 2, 4])
        return cast("Problem", SimpleNamespace(space=space, configs=made))

    @pytest.mark.parametrize(
        "planner", [PLANNERS["pipedream"], PLANNERS["pipedream-published"]], ids=lambda p: p.name
    )
    def test_one_for_every_size(
        self, planner: Planner, make_chain: MakeChain, make_topology: MakeTopology
    ) -> None:
        chain = make_chain(4, 9, traffic=0.05)
        proposals = list(planner.propose(self.problem(Space(chain, make_topology(6, per_node=3), "sgd"))))
        assert [p.config for p in proposals] == [
            PipelineConfig("1f1b", "by_stage", count, size) for count, size in ((2, 4), (4, 2), (8, 1))
        ]
        for proposal in proposals:
            assert proposal.ends[-1] == 9
            assert max(proposal.replicas) <= proposal.config.micro_batch_size
            ranks = [rank for own in proposal.devices for rank in own]
            assert len(set(ranks)) == len(ranks) <= 6
        assert max(max(p.replicas) for p in proposals) > 1

    def test_under_the_wished_schedule(self, make_chain: MakeChain, make_topology: MakeTopology) -> None:
        """Its versions of the weights count, so that it may fit nowhere where a flush does."""
        chain = make_chain(4, 6, traffic=0.05)
        needs = {}
        for schedule in ("1f1b", "pipedream"):
            limits = range(100, 20_000, 100)
            needs[schedule] = next(
                limit
                for limit in limits
                if list(
                    PLANNERS["pipedream"].propose(
                        self.problem(Space(chain, make_topology(4, memory=limit), "sgd"), (schedule,))
                    )
                )
            )
        assert needs["1f1b"] < needs["pipedream"] < inf

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


def test_a_stage_whose_shares_were_not_measured_is_never_planned(make_chain: MakeChain) -> None:
    """Of eight samples two replicas and more compute four at most, the largest measured size; so slow a link
    and such weights that one device a stage would be best."""
    topology = Topology((Group(Device("toy", None), 4),), (Level("node", None, Link(1.0, 0.0)),))
    several = 0
    for seed in range(6):
        chain = make_chain(seed, 6, traffic=0.001, cuts=1.1)
        plan = plan_asynchronous(Space(chain, topology, "sgd"), 8)
        assert plan is not None
        assert min(map(len, plan.devices)) > 1
        single = plan_asynchronous(Space(chain, topology, "sgd"), 4)
        assert single is not None
        several += min(map(len, single.devices)) == 1
    assert several == 6

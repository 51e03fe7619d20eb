"""The bounds of plans and of unfinished ones, which no completion falls below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.runtime import RUNTIMES
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import PipelineConfig, Proposal, linear_pipeline, pipeline_configs
from pplan.planner.search.bound import CompletionBound, MemoryBound
from pplan.planner.search.budget import SearchBudget
from pplan.planner.search.family import Family, quick_bound
from pplan.planner.search.linear_groups import WHOLE_BOUNDS
from pplan.planner.search.partial import empty_plans, extend_plans
from pplan.planner.search.pipelines import Pipelines, build_pipelines
from pplan.planner.search.placements import DeviceRanges
from pplan.planner.search.space import Space
from pplan.planner.search.stage_choices import StageChoices, list_stage_choices
from pplan.planner.search.stage_recompute import choose_modes
from pplan.planner.search.subproblem import BOUNDS, expansions

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
FamiliesOf = Callable[..., list[Family]]
BruteForce = Callable[..., Any]

EVERY = pipeline_configs(4, ("1f1b", "gpipe"), ("by_stage", "except_last", "always"), [1, 2, 4])
SLACK = 1 + 1e-12


def bounds_of(
    options: StageChoices, proposal: Proposal, completion: CompletionBound | None = None
) -> list[float]:
    """The bound before the first stage, with each further one, and of the whole plan; that of `completion`,
    where it is given."""
    cut_points, ranks = options.groups[0].costs.table.cut_points, options.ranges.placement.ranks
    bound: Any = completion or BOUNDS[proposal.config.schedule](options)
    root = completion.root if completion else bound.root(len(proposal.ends))
    seen, plans = [root], empty_plans(bound.start())
    for stage, (end, devices) in enumerate(zip(proposal.ends, proposal.devices, strict=True)):
        position, before = ranks.index(devices[0]), len(seen)
        for more in expansions(options, plans, len(proposal.ends) - stage):
            known = {name: values[more.parent] for name, values in plans.state.items()}
            own, now = bound.extend(known, more)
            same = (more.end == cut_points.index(end)) & (more.key == position)
            (rows,) = np.nonzero(same & (more.group.replicas == len(devices)))
            if len(rows):
                (row,) = rows
                seen.append(float(own[row]))
                following = extend_plans(plans, more, now, np.array([row]))
        assert len(seen) == before + 1
        plans = following
    return seen


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 18))]
)
def test_unfinished_plans(
    seed: int,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    mixed: Callable[..., Any],
    families_of: FamiliesOf,
    brute_force: BruteForce,
) -> None:
    """Whatever is chosen further; of plans with the cheapest recomputation, as the search makes them."""
    rng = np.random.default_rng(seed)
    adding = [1.0, 0.3, 0.0][seed % 3]
    chain = make_chain(seed, 6, traffic=[0, 0.1, 1, 10][seed % 4], cuts=0.9, adding=adding)
    chain = with_hosts(chain, [1.0, 5.0, 20.0][seed // 2 % 3])
    topology = make_topology(
        4, per_node=[8, 2][seed % 2], latency=[0, 0.05, 0.5][seed % 3], memory=[None, 700, 1200][seed % 3]
    )
    space = Space(chain, topology, "sgd", runtime=RUNTIMES["torchgpipe"] if seed % 7 == 0 else None)
    if seed % 5 == 0:
        topology, profiles = mixed(rng, chain, topology)
        space = Space(chain, topology, "sgd", profiles=profiles)
    family = families_of(space, [EVERY[seed % len(EVERY)]], (1,) if space.runtime else (1, 2, 3))[0]
    plans = [
        (proposal, step)
        for proposal, modes, step in brute_force(space, [family]).plans()
        if modes == choose_modes(space, proposal)
    ]
    options = list_stage_choices(
        space, family.config, DeviceRanges(space, family.placement, family.replicas), np.inf
    )
    for index in rng.choice(len(plans), min(15, len(plans)), replace=False) if plans else []:
        proposal, step = plans[index]
        assert quick_bound(space, family) <= step * SLACK
        bounds = bounds_of(options, proposal)
        assert len(bounds) == 1 + len(proposal.ends)
        assert max(bounds) <= step * SLACK
        (whole,) = WHOLE_BOUNDS[family.config.schedule](pipelines(space, [proposal]))
        assert whole <= step * SLACK
        if len(proposal.ends) > 1:
            assert max(bounds_of(options, proposal, completion_of(space, family, proposal))) <= step * SLACK


def completion_of(space: Space, family: Family, proposal: Proposal) -> CompletionBound:
    """The bound on unfinished plans below ten times the work of one device."""
    budget, far = SearchBudget(1e8), 10 * float(space.chain.forward_seconds.sum() * 3)
    found = MemoryBound(space, [family], range(1, 5), False, budget, every_range=True)
    found.least(far)
    ranges = found.left(family)
    assert ranges
    return CompletionBound(ranges, len(proposal.ends))


def with_hosts(chain: Chain, times: float) -> Chain:
    """Layers that take so many times as long to launch: from 5 times on hosts may decide."""
    return replace(
        chain,
        forward_host_seconds=times * chain.forward_host_seconds,
        backward_host_seconds=times * chain.backward_host_seconds,
    )


def pipelines(space: Space, proposals: list[Proposal]) -> Pipelines:
    modes = [choose_modes(space, proposal) for proposal in proposals]
    return build_pipelines(space, proposals, [own for own in modes if own is not None])


def every_cut(space: Space, config: PipelineConfig, stages: int) -> list[Proposal]:
    cuts = np.flatnonzero(space.chain.cut_after) + 1
    layers = len(space.chain)
    return [linear_pipeline(config, (*chosen, layers)) for chosen in combinations(cuts.tolist(), stages - 1)]


def test_gpipe_bound_is_the_step_where_backwards_are_alike(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    space = Space(make_chain(5, 7, cuts=1.1), make_topology(4, latency=0.1), "sgd")
    for config in (PipelineConfig("gpipe", "never", 4, 2), PipelineConfig("gpipe", "always", 8, 1)):
        plans = pipelines(space, every_cut(space, config, 3))
        assert len(plans) == 15
        assert WHOLE_BOUNDS["gpipe"](plans) == pytest.approx(plans.step_seconds(), rel=1e-12)


def test_busiest_stage_and_round_trips_are_in_the_bound(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """The two bounds that hold for any plan: the work of every stage, and chained round trips."""
    space = Space(make_chain(11, 8, cuts=1.1), make_topology(4, latency=1.0), "sgd")
    plans = pipelines(space, every_cut(space, PipelineConfig("1f1b", "never", 8, 1), 4))
    bounds = WHOLE_BOUNDS["1f1b"](plans)
    work, cuts = plans.forward + plans.backward, plans.occupancy + plans.latency
    for stage in range(4):
        before = work[:, :stage].sum(axis=1) + 2 * cuts[:, :stage].sum(axis=1)
        trip = work[:, stage:].sum(axis=1) + 2 * cuts[:, stage:].sum(axis=1)
        assert (bounds >= before + 8 * work[:, stage] - 1e-9).all()
        assert (bounds >= before + -(-8 // (4 - stage)) * trip - 1e-9).all()


def test_the_bound_counts_all_reduces(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Where nothing but reducing takes long, the bound of one stage is its step."""
    chain = make_chain(2, 5)
    heavy = np.full(5, 1e4)
    space = Space(replace(chain, parameter_bytes=heavy, trainable_bytes=heavy), make_topology(4), "sgd")
    for schedule in ("1f1b", "gpipe"):
        plans = pipelines(space, [Proposal(PipelineConfig(schedule, "never", 2, 4), (5,), ((0, 1, 2, 3),))])
        (bound,), (step,) = WHOLE_BOUNDS[schedule](plans), plans.step_seconds()
        assert bound == pytest.approx(step)
        assert step > 1000


@pytest.mark.parametrize("times", [1.0, 20.0])
@pytest.mark.parametrize("replicas", [1, 2])
def test_where_there_is_one_plan_nothing_is_left_to_minimise(
    replicas: int,
    times: float,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
) -> None:
    """Of three layers on three stages, all devices taken, the bound of the unfinished plan is that of the
    whole one from the beginning on. GPipe's begins with the larger of its own and 1F1B's, and forgets terms
    of stages before the last that was chosen."""
    for seed, config in enumerate(EVERY):
        if config.micro_batch_size < replicas:
            continue
        chain = with_hosts(make_chain(seed, 3, traffic=[0.1, 3][seed % 2], cuts=1.1, adding=0.5), times)
        weights = chain.trainable_bytes * np.array([1.0, 1.0, [1.0, 30.0][seed // 2 % 2]])
        chain = replace(chain, parameter_bytes=weights, trainable_bytes=weights)
        space = Space(chain, make_topology(3 * replicas, latency=0.3), "sgd")
        (family,) = families_of(space, [config], (replicas,))
        ranges = DeviceRanges(space, family.placement, family.replicas)
        options = list_stage_choices(space, config, ranges, np.inf)
        devices = tuple(tuple(range(s * replicas, (s + 1) * replicas)) for s in range(3))
        proposal = Proposal(config, (1, 2, 3), devices)
        (whole,) = WHOLE_BOUNDS[config.schedule](pipelines(space, [proposal]))
        bounds = bounds_of(options, proposal)
        if config.schedule == "gpipe":
            trips = BOUNDS["1f1b"](options).root(3)
            assert bounds[0] == pytest.approx(max(whole, trips), rel=1e-12)
            assert min(bounds) > 0.8 * whole
        else:
            assert bounds == pytest.approx([whole] * 4, rel=1e-12)

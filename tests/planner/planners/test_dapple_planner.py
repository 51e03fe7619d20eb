"""DAPPLE's search against brute force over all its plans, from the layers and term by term."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from pplan.cost_models.collectives import all_reduce_seconds
from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import ledger, total
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import PLANNERS
from pplan.planner.planners.dapple_planner import (
    POLICIES,
    BeamLimits,
    find_dapple_plan,
    split_machines,
)
from pplan.planner.planners.replica_groups import MicroBatchChoice
from pplan.planner.problem import Problem
from pplan.planner.search.space import Space
from tests.stage_bytes import stage_bytes

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
Devices = tuple[tuple[int, ...], ...]

EVERY = BeamLimits(width=10**9, plans_per_state=10**6)
"""No plan of a state is dropped."""
PAPER = BeamLimits(plans_per_state=1)


def paper_latency(forward: list[float], backward: list[float], reduced: list[float], count: int) -> float:
    """T_w + T_s + T_e, literally; transfers are among the stages."""
    pivot = len(forward) - 1
    for s in range(len(forward) - 2, -1, -1):
        between = sum(forward[a] + backward[a] for a in range(s + 1, pivot))
        if (count - 1) * (forward[s] + backward[s]) > (count - 1) * (
            forward[pivot] + backward[pivot]
        ) + between:
            pivot = s
    fill = sum(forward[: pivot + 1])
    steady = (count - 1) * (forward[pivot] + backward[pivot])
    ends = [
        reduced[s] + (sum(backward[s : pivot + 1]) if s <= pivot else -sum(backward[pivot + 1 : s]))
        for s in range(len(forward))
    ]
    return fill + steady + max(ends)


def carried(space: Space, size: int, cut: int, senders: tuple[int, ...], receivers: tuple[int, ...]) -> float:
    """Seconds of a transfer: each device sends and receives the part of the samples it has."""
    most = max(-(-size // len(group)) for group in (senders, receivers))
    whole = float(space.chain.at(most).output_bytes[cut - 1]) * min(len(senders), len(receivers))
    loads, latency = Counter[object](), 0.0
    for (i, a), (j, b) in product(enumerate(senders), enumerate(receivers)):
        share = min((i + 1) / len(senders), (j + 1) / len(receivers)) - max(
            i / len(senders), j / len(receivers)
        )
        if share > 1e-9:
            link = space.topology.link(a, b)
            latency = max(latency, link.latency_seconds)
            for port in space.topology.ports(a, b):
                loads[port] += share * whole / link.bandwidth_bytes_per_second  # type: ignore[assignment]
    return latency + max(loads.values())


def estimated(space: Space, trial: MicroBatchChoice, ends: tuple[int, ...], devices: Devices) -> float:
    """The latency straight from the layers; inf where a stage does not fit."""
    forward, backward, reduced = list[float](), list[float](), list[float]()
    for stage, ((a, b), own) in enumerate(zip(pairwise((0, *ends)), devices, strict=True)):
        layers = space.chain.at(-(-trial.size // len(own)))
        in_flight = (
            trial.micro_batches if trial.schedule == "gpipe" else min(trial.micro_batches, len(ends) - stage)
        )
        fitting = [
            mode
            for mode in ("never", "always")
            if space.memory_limit is None
            or total(
                ledger(
                    stage_bytes(layers, a, b - 1),
                    in_flight=in_flight,
                    recompute=mode,
                    optimizer=space.optimizer,
                    replicas=len(own),
                )
            )
            <= space.memory_limit
        ]
        if not fitting:
            return np.inf
        if stage:
            transfer = carried(space, trial.size, a, devices[stage - 1], own)
            forward.append(transfer)
            backward.append(transfer)
            reduced.append(0.0)
        f = float(layers.forward_seconds[a:b].sum())
        forward.append(f)
        backward.append(float(layers.backward_seconds[a:b].sum()) + (f if fitting[0] == "always" else 0.0))
        gradients = float(layers.trainable_bytes[a:b].sum())
        reduced.append(float(all_reduce_seconds(space.topology, own, gradients)))
    return paper_latency(forward, backward, reduced, trial.micro_batches)


def placed(stages: int, size: int, gpus: int, per_node: int) -> Iterator[Devices]:
    """Every way to give so many stages their devices, by all policies."""
    machines = split_machines(gpus, min(gpus, per_node))

    def extended(count: int, used: tuple[int, ...]) -> Iterator[Devices]:
        if count == 0:
            yield ()
            return
        for number in range(1, min(gpus - sum(used), size) + 1):
            for given in {policy(machines.rooms, used, number) for policy in POLICIES}:
                after = tuple(a + b for a, b in zip(used, given, strict=True))
                for later in extended(count - 1, after):
                    yield (machines.ranks(used, given), *later)

    return extended(stages, (0,) * len(machines.rooms))


def least(
    space: Space, trial: MicroBatchChoice, gpus: int, most_stages: int | None = None, use_all: bool = False
) -> float:
    """Of all plans."""
    cuts = [int(i) + 1 for i in np.flatnonzero(space.chain.cut_after)]
    per_node = space.topology.gpus_per_node
    each = (
        estimated(space, trial, (*chosen, len(space.chain)), devices)
        for stages in range(1, min(gpus, len(cuts) + 1, most_stages or gpus) + 1)
        for devices in placed(stages, trial.size, gpus, per_node)
        if not use_all or sum(map(len, devices)) == gpus
        for chosen in combinations(cuts, stages - 1)
    )
    return min(each, default=np.inf)


def case(
    seed: int, make_chain: MakeChain, make_topology: MakeTopology
) -> tuple[Space, MicroBatchChoice, int]:
    rng = np.random.default_rng(seed)
    gpus = int(rng.integers(1, 5))
    chain = make_chain(seed, int(rng.integers(1, 8 if gpus < 4 else 7)), traffic=[0.01, 0.1, 1][seed % 3])
    topology = make_topology(gpus, per_node=[8, 2][seed % 2], latency=[0, 0.05, 0.5][seed % 3])
    if seed % 4 == 1:
        shared = replace(topology.levels[1], devices_per_port=2)
        topology = replace(topology, levels=(topology.levels[0], shared))
    schedule = "gpipe" if seed % 6 == 5 else "1f1b"
    space = Space(chain, topology, "adam", [None, 700, 1000, 1500, 3000][seed % 5])
    return (
        space,
        MicroBatchChoice(schedule, [1, 2, 3, 8][seed % 4], [1, 2, 3, 4][seed // 4 % 4], ("by_stage",)),
        gpus,
    )


@pytest.mark.parametrize("seeds", [range(1, 120, 9), pytest.param(range(120), marks=pytest.mark.slow)])
def test_brute_force(seeds: range, make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """With every plan kept the search finds the least latency, and agrees where nothing fits; the paper's
    search, which keeps one plan of a state, finds no less."""
    infeasible = several = replicated_pipeline = as_good = feasible = recomputing = 0
    for seed in seeds:
        space, trial, gpus = case(seed, make_chain, make_topology)
        expected = least(space, trial, gpus)
        found, kept_one = (
            find_dapple_plan(space, trial, gpus, beam=EVERY),
            find_dapple_plan(space, trial, gpus, beam=PAPER),
        )
        if found is None:
            assert expected == np.inf
            assert kept_one is None
            infeasible += 1
            continue
        assert found.seconds == pytest.approx(expected, rel=1e-9)
        cut_points = space.table(space.chain.sizes[0]).cut_points
        ends = tuple(cut_points[end] for end in found.ends)
        assert estimated(space, trial, ends, found.devices) == pytest.approx(expected, rel=1e-9)
        assert kept_one is not None
        assert kept_one.seconds >= expected * (1 - 1e-9)
        feasible += 1
        as_good += kept_one.seconds <= expected * (1 + 1e-9)
        several += len(found.ends) > 1
        replicated_pipeline += max(map(len, found.devices)) > 1
        recomputing += found.recomputes
    assert infeasible > len(seeds) // 20
    assert several > len(seeds) // 6
    assert replicated_pipeline > len(seeds) // 6
    assert recomputing > len(seeds) // 60
    assert as_good > 0.8 * feasible


@pytest.mark.parametrize(("most", "use_all"), [(2, False), (None, True)])
def test_brute_force_of_some_plans(
    most: int | None, use_all: bool, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """With at most two stages, or on all devices."""
    differ = 0
    for seed in range(40):
        space, trial, gpus = case(seed, make_chain, make_topology)
        expected, found = (
            least(space, trial, gpus, most, use_all),
            find_dapple_plan(space, trial, gpus, most, use_all=use_all, beam=EVERY),
        )
        if found is None:
            assert expected == np.inf
            continue
        assert found.seconds == pytest.approx(expected, rel=1e-9)
        differ += expected > least(space, trial, gpus) * (1 + 1e-9)
    assert differ > 2


@pytest.mark.parametrize(
    ("runtime", "gpus", "most"), [("torchgpipe", 4, 1), ("torchgpipe", 36, 1), ("deepspeed", 4, 4)]
)
def test_replicas_that_the_runtime_runs(
    runtime: str, gpus: int, most: int, make_chain: MakeChain, make_problem: Callable[..., Problem]
) -> None:
    chain = make_chain(2, gpus + 4, traffic=0.01, cuts=1.0)
    problem = make_problem(chain, gpus, mini_batch=4 * gpus, runtime=runtime)
    proposals = list(PLANNERS["dapple"].propose(problem))
    assert proposals
    for proposal in proposals:
        assert len(set(proposal.replicas)) == 1
        assert proposal.replicas[0] <= most
        assert problem.allows(proposal)
        assert proposal.config in problem.configs


def test_weights_at_the_end_stay_on_one_device(make_chain: MakeChain) -> None:
    """As VGG's: much compute in front, the parameters behind it; two machines of four, one slow adapter each.

    Data parallelism sends all parameters through the adapters, an earlier cut large activations.
    """
    chain = make_chain(0, 7, sizes=(1, 2, 4, 8, 16, 32), cuts=1.0)
    seconds = np.array([2.0] * 6 + [0.3])[:, None] * np.array(chain.sizes) / 32
    chain = replace(
        chain,
        forward_seconds=seconds,
        backward_seconds=2 * seconds,
        output_bytes=np.array([100, 100, 100, 100, 100, 1, 0])[:, None] * np.array(chain.sizes) / 32,
        parameter_bytes=np.array([0.1] * 6 + [100]),
        trainable_bytes=np.array([0.1] * 6 + [100]),
    )
    adapter = Level("network", None, Link(10.0, 0.0), devices_per_port=4)
    topology = Topology((Group(Device("toy", None), 8),), (Level("node", 4, Link(1000.0, 0.0)), adapter))
    problem = Problem(chain, topology, PlanOptions(mini_batch=28 * 8))
    best = find_dapple_plan(problem.space, MicroBatchChoice("1f1b", 8, 28, ("never",)), 8)
    assert best is not None
    assert [len(own) for own in best.devices] == [7, 1]
    assert best.ends == (6, 7)
    assert Proposal(PipelineConfig("1f1b", "by_stage", 8, 28), best.ends, best.devices) in PLANNERS[
        "dapple"
    ].propose(problem)


def test_many_devices_and_layers(make_chain: MakeChain, make_problem: Callable[..., Problem]) -> None:
    """Cuts are thinned and neighbours stay together; the proposals are whole plans all the same."""
    problem = make_problem(make_chain(1, 150, cuts=1.0), 40, mini_batch=64, micro_batches=4)
    for proposal in PLANNERS["dapple"].propose(problem):
        assert proposal.ends[-1] == 150
        assert problem.allows(proposal)
        assert proposal.device_count > 20
        return
    pytest.fail("no proposal")

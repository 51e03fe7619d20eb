"""Plans whose stages share ports: the search's simulation against the general one, and against the bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest

from pplan.cost_models.collectives import all_reduce_loads
from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import Recompute
from pplan.cost_models.timeline import simulate
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.assembly import Assembly
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble
from pplan.planner.search.pipelines import build_pipelines
from pplan.planner.search.space import Space

MakeChain = Callable[..., Chain]


def machine(gpus: int, per_node: int, per_port: int, bandwidth: float = 40.0) -> Topology:
    """Nodes whose devices share ports to the network."""
    inside, between = Link(4 * bandwidth, 0.001), Link(bandwidth, 0.01)
    levels = (Level("node", per_node, inside), Level("network", None, between, per_port))
    return Topology((Group(Device("toy", None), gpus),), levels)


def random_proposals(
    rng: np.random.Generator, topology: Topology, chain: Chain, count: int
) -> list[Proposal]:
    """Straight pipelines of as many stages on any devices."""
    cut_points = [*(np.flatnonzero(chain.cut_after) + 1).tolist()]
    stages = int(rng.integers(2, min(5, len(cut_points) + 2)))
    config = PipelineConfig(str(rng.choice(["1f1b", "gpipe"])), "never", int(rng.choice([1, 3, 6])), 4)
    made = []
    for _ in range(count):
        ends = (*sorted(rng.choice(cut_points, stages - 1, replace=False).tolist()), len(chain))
        order, devices, first = rng.permutation(topology.gpus).tolist(), [], 0
        for left in reversed(range(stages)):
            replicas = int(rng.integers(1, min(4, topology.gpus - first - left) + 1))
            devices.append(tuple(sorted(order[first : first + replicas])))
            first += replicas
        made.append(Proposal(config, ends, tuple(devices)))
    return made


def nothing_again(proposals: list[Proposal]) -> list[tuple[Recompute, ...]]:
    """No stage recomputes."""
    never: Recompute = "never"
    return [tuple(never for _ in own.ends) for own in proposals]


def bytes_through_ports(made: Assembly) -> float:
    """Seconds for which the most loaded port is taken: every transfer of every micro-batch, part by part, and
    the all-reduces of all stages."""
    taken: defaultdict[tuple[object, ...], float] = defaultdict(float)
    topology, size = made.topology, made.size
    for cut, (senders, receivers) in enumerate(zip(made.ranks, made.ranks[1:], strict=False)):
        place = made.bounds[cut][1]
        sent = max(float(made.table(own).crossing[place]) for own in (cut, cut + 1))
        whole = sent * min(len(senders), len(receivers))
        parts = len(senders) * len(receivers)
        for route in ((senders, receivers), (receivers, senders)):
            for part in range(parts):
                a, b = route[0][part * len(route[0]) // parts], route[1][part * len(route[1]) // parts]
                seconds = whole / parts / topology.link(a, b).bandwidth_bytes_per_second
                for port in topology.ports(a, b):
                    taken[port.level, port.direction, port.owner] += seconds * made.program.micro_batches
    for stage, ranks in enumerate(made.ranks):
        gradients = float(made.table(stage).bytes_between(*made.bounds[stage]).trainable)
        for (level, owner), each in all_reduce_loads(topology, ranks).items():
            for direction in ("out", "in"):
                taken[level, direction, owner] += gradients * each
    assert size
    return max(taken.values(), default=0.0)


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 18))]
)
def test_the_searchs_steps_are_those_of_the_simulator(seed: int, make_chain: MakeChain) -> None:
    rng = np.random.default_rng(seed)
    chain = make_chain(seed, 9, sizes=(1, 2, 4), cuts=1.0, traffic=float(rng.choice([0.1, 1.0])))
    topology = machine(12, 4, int(rng.choice([1, 2, 4])))
    space = Space(chain=chain, topology=topology, optimizer="sgd")
    proposals = random_proposals(rng, topology, chain, 12)
    modes = nothing_again(proposals)
    pipelines = build_pipelines(space, proposals, modes)
    steps = pipelines.step_seconds()
    for proposal, own, step in zip(proposals, modes, steps, strict=True):
        made = assemble(space, proposal, own)
        assert simulate(made.program, made.costs()).step_seconds == pytest.approx(step, rel=1e-12)
        assert step >= bytes_through_ports(made) * (1 - 1e-12)
    alone = np.array([pipelines.select(np.array([row])).step_seconds()[0] for row in range(len(steps))])
    assert alone == pytest.approx(steps, rel=1e-12)
    for limit in (float(np.median(steps)), float(steps.min()), float(steps.max()) + 1):
        limited, most = pipelines.step_seconds(limit), min(limit, float(steps.min()))
        assert (limited <= steps * (1 + 1e-12)).all()
        assert (limited >= most * (1 - 1e-12)).all()
        if limit > steps.min():
            assert limited.min() == pytest.approx(steps.min(), rel=1e-12)
            assert limited.argmin() == steps.argmin()


def test_shared_ports_only_make_a_step_longer(make_chain: MakeChain) -> None:
    longer = 0
    for seed in range(20):
        chain, topology = make_chain(seed, 8, cuts=1.0), machine(8, 4, 4)
        space = Space(chain=chain, topology=topology, optimizer="sgd")
        proposals = random_proposals(np.random.default_rng(seed), topology, chain, 6)
        pipelines = build_pipelines(space, proposals, nothing_again(proposals))
        shared = pipelines.step_seconds()
        alone = pipelines.without_sharing().step_seconds()
        assert (shared >= alone * (1 - 1e-12)).all()
        longer += int((shared > alone * 1.001).sum())
    assert longer > 10


@pytest.mark.slow
def test_the_step_holds_what_a_nodes_port_must_carry(make_chain: MakeChain) -> None:
    """All gradient sums of a plan whose stages have a replica on each of two nodes go through one card.

    Each stage by itself hides its sum or adds little; together they need longer than all else.
    """
    chain, topology = make_chain(3, 16, cuts=1.0, traffic=0.01), machine(16, 8, 8, bandwidth=20.0)
    space = Space(chain=chain, topology=topology, optimizer="sgd")
    devices = tuple((stage, stage + 8) for stage in range(8))
    ends = tuple(2 * stage + 2 for stage in range(8))
    made = assemble(space, Proposal(PipelineConfig("1f1b", "never", 8, 2), ends, devices), ["never"] * 8)
    card = float(chain.trainable_bytes.sum()) / 20.0
    step = simulate(made.program, made.costs()).step_seconds
    assert step >= card
    answer = find_best_plan(Problem(chain, topology, PlanOptions(mini_batch=16, time_limit=5.0)))
    assert answer.best is not None
    best = assemble(space, answer.best.proposal, answer.best.recompute)
    assert answer.best.step_seconds >= bytes_through_ports(best) * (1 - 1e-12)
    assert answer.best.step_seconds <= step * (1 + 1e-12)

"""ZeRO over the replicas of a stage: what is searched, simulated and stored agree, and cost what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, combinations, product

import numpy as np
import pytest

from pplan.cost_models.collectives import all_gather_seconds, reduce_scatter_seconds
from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.optimizers import Precision
from pplan.cost_models.topology import Topology
from pplan.planner.build_plan import plan_without_comparison
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.planner.plan_simulation import simulate_plan
from pplan.planner.problem import Problem
from pplan.planner.replica_exchange import ReplicaExchange
from pplan.planner.scoring import assemble, fastest
from pplan.planner.search.branch_and_bound import SearchResult
from pplan.planner.stage_table import StageTable

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
MIXED = Precision(2, 4, 4)
REFERENCE = ProfileReference(file="toy.profile.json", sha256="0" * 64, dtype="bfloat16")


def requested(zero: int, **others: object) -> PlanOptions:
    return PlanOptions(zero=zero, optimizer="adam", gradient_dtype="fp32", **others)  # type: ignore[arg-type]


def proposals(seed: int, chain: Chain, count: int) -> list[Proposal]:
    """Random cuts, replicas, micro-batches and schedules on six devices."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        stages = int(rng.integers(1, 4))
        ends = (*sorted(rng.choice(np.arange(1, len(chain)), stages - 1, replace=False).tolist()), len(chain))
        ranks = iter(range(6))
        devices = tuple(tuple(next(ranks) for _ in range(rng.integers(1, 3))) for _ in ends)
        schedule = str(rng.choice(["1f1b", "gpipe", "zb-h1"]))
        made.append(Proposal(PipelineConfig(schedule, "by_stage", 4, 2), ends, devices))
    return made


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_searched_step_is_the_simulated_one(
    zero: int, seed: int, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """Of any plan: scored as in the search, simulated from its parts, and read back from its file."""
    chain = make_chain(seed, 9, cuts=1.1)
    topology = make_topology(6, per_node=3, latency=0.02, memory=8000)
    problem = Problem(chain, topology, requested(zero, mini_batch=8), "bfloat16")
    scored = 0
    for proposal in proposals(seed, chain, 12):
        best = fastest(problem.space, [proposal])
        if best is None:
            continue
        scored += 1
        found = SearchResult(best, best.step_seconds, best.step_seconds, exact=False)
        plan = plan_without_comparison(problem, best, found, model="toy", profile=REFERENCE)
        assert (plan.precision, plan.gradient_dtype, plan.zero) == ("mixed", "fp32", zero)
        read = Plan.parse(plan.to_json(), "toy.plan.json")
        simulated = simulate_plan(read, chain, topology)
        assert simulated.timeline.step_seconds == pytest.approx(best.step_seconds, rel=1e-12)
        for own, stage in zip(simulated.memory, read.stages, strict=True):
            assert own.terms == stage.memory
    assert scored >= 4


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_no_plan_is_faster_than_the_one_that_is_found(
    zero: int, seed: int, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """Against every cut and number of replicas of two searched schedules, where the search says exact."""
    chain = make_chain(seed, 5, cuts=1.1)
    topology = make_topology(3, per_node=2, latency=0.05, memory=3500)
    problem = Problem(chain, topology, requested(zero, mini_batch=4, schedule="1f1b"), "bfloat16")
    answer = find_best_plan(problem)
    assert answer.best is not None
    everything = [
        Proposal(config, ends, devices)
        for config in problem.configs
        for ends in all_ends(len(chain), 3)
        for devices in all_runs(len(ends), 3)
    ]
    best = fastest(problem.space, [p for p in everything if problem.allows(p)])
    assert best is not None
    assert answer.result.bound_seconds <= best.step_seconds * (1 + 1e-9)
    if answer.result.exact:
        assert answer.best.step_seconds <= best.step_seconds * (1 + 1e-9)


def all_ends(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [(*cuts, layers) for count in range(stages) for cuts in combinations(range(1, layers), count)]


def all_runs(stages: int, devices: int) -> list[tuple[tuple[int, ...], ...]]:
    """Neighbouring devices from rank 0 on."""
    return [
        tuple(tuple(range(end - count, end)) for count, end in zip(counts, accumulate(counts), strict=True))
        for counts in product(range(1, devices + 1), repeat=stages)
        if sum(counts) <= devices
    ]


@pytest.mark.parametrize("zero", [2, 3])
def test_forward_and_backward_wait_for_the_network(
    zero: int, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """Against a loop over the layers of every stage: fetch the next while one computes, reduce the last."""
    chain, topology = make_chain(3, 7, cuts=0.7), make_topology(4, per_node=2, latency=0.01)
    table, ranks = StageTable.of(chain, 2), (0, 1, 2)
    exchange = ReplicaExchange(topology, ranks, MIXED, zero)
    costs = table.costs
    forward = exchange.forward(table, costs.forward_seconds)
    backward = exchange.backward(table, costs.backward_seconds)
    gather = [
        float(all_gather_seconds(topology, ranks, float(size))) if zero == 3 else 0.0
        for size in costs.parameter_bytes
    ]
    scatter = [
        float(reduce_scatter_seconds(topology, ranks, 2 * float(size))) for size in costs.trainable_bytes
    ]
    for i, j in zip(*np.nonzero(table.valid), strict=True):
        own = range(table.cut_points[i], table.cut_points[j])
        seconds = gather[own[0]]
        for layer in own:
            fetched = gather[layer + 1] if layer != own[-1] else 0.0
            seconds += max(float(costs.forward_seconds[layer]), fetched)
        assert forward[i, j] == pytest.approx(seconds, rel=1e-12)
        seconds, reducing = gather[own[-1]], 0.0
        for layer in reversed(own):
            fetched = gather[layer - 1] if layer != own[0] else 0.0
            seconds += max(float(costs.backward_seconds[layer]), fetched + reducing)
            reducing = scatter[layer]
        assert backward[i, j] == pytest.approx(seconds + reducing, rel=1e-12)


def test_states_shrink_and_the_network_pays(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Each stage of ZeRO needs less memory; the first adds two collectives to the work."""
    chain, topology = make_chain(5, 6, cuts=1.1), make_topology(2, latency=0.01)
    proposal = Proposal(PipelineConfig("1f1b", "never", 4, 2), (6,), ((0, 1),))
    needs, steps = [], []
    for zero in range(4):
        space = Problem(chain, topology, requested(zero, mini_batch=8), "bfloat16").space
        made = assemble(space, proposal, ["never"])
        needs.append({name: round(amount, 6) for name, amount in made.ledger(0).items()})
        found = fastest(space, [proposal])
        assert found is not None
        steps.append(found.step_seconds)
    assert needs[1]["optimizer"] == pytest.approx(needs[0]["optimizer"] / 2)
    assert needs[1]["master_weights"] == pytest.approx(needs[0]["master_weights"] / 2)
    assert needs[1]["gradients"] == needs[0]["gradients"]
    assert needs[2]["gradients"] == pytest.approx(needs[0]["gradients"] / 2)
    assert needs[3]["weights"] < needs[2]["weights"] == needs[0]["weights"]
    whole = float(np.asarray(StageTable.of(chain, 1).stage_bytes.trainable)[0, -1])
    at_end = ReplicaExchange(topology, (0, 1), MIXED, 1).at_end(np.array(whole))
    work = StageTable.of(chain, 1).costs
    alone = 4 * float(work.forward_seconds.sum() + work.backward_seconds.sum())
    assert steps[1] == pytest.approx(alone + float(at_end), rel=1e-12)
    assert steps[2] < steps[3]


def test_one_replica_spreads_nothing(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain, topology = make_chain(5, 6, cuts=1.1), make_topology(2)
    proposal = Proposal(PipelineConfig("1f1b", "never", 4, 2), (3, 6), ((0,), (1,)))
    made = [
        fastest(Problem(chain, topology, requested(zero, mini_batch=8), "bfloat16").space, [proposal])
        for zero in range(4)
    ]
    assert len({plan.step_seconds for plan in made if plan is not None}) == 1


@pytest.mark.parametrize(
    ("runtime", "zero", "says"),
    [
        ("deepspeed", 2, "ZeRO stage 1 only"),
        ("torch", 3, "gathers weights again and again"),
        ("megatron", 2, "distributed optimizer"),
        ("torchgpipe", 1, "no replicas"),
    ],
)
def test_a_runtime_that_cannot_is_refused_before_searching(runtime: str, zero: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        PlanOptions(runtime=runtime, zero=zero)
    assert replace(PlanOptions(zero=1), runtime="deepspeed").zero == 1

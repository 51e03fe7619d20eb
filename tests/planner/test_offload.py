"""Stages that keep what they save in the host's memory: searched with those that run forward again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.timeline import step_seconds
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.infeasible import no_plan_fits
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble
from pplan.planner.search.stage_recompute import choose_modes
from pplan.planner.universal_bound import universal_bound

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
HOST = 20.0
"""Bytes per second of copies, of layers that take seconds and save some hundred bytes."""


def problem_of(chain: Chain, topology: Topology, **options: Any) -> Problem:
    asked: dict[str, Any] = {"mini_batch": 8, "recompute": "offload", "host_bandwidth": HOST} | options
    return Problem(chain, topology, PlanOptions(**asked))


def heavy(make_chain: MakeChain, seed: int, layers: int = 6) -> Chain:
    """What the layers save is most of their memory; the last one's loss saves some of it."""
    chain = make_chain(seed, layers, traffic=0.1)
    saved = 4 * chain.saved_bytes
    loss = np.zeros_like(saved)
    loss[-1] = 0.3 * saved[-1]
    return replace(chain, saved_bytes=saved, loss_saved_bytes=loss)


def stage_seconds(
    chain: Chain, bounds: tuple[int, int], size: int, mode: str, host: float
) -> tuple[float, float, float]:
    """Forward and backward of a stage of the layers between two bounds, and what it offloads."""
    costs, own = chain.at(size), slice(*bounds)
    forward, backward = (float(v[own].sum()) for v in (costs.forward_seconds, costs.backward_seconds))
    bytes_saved = costs.saved_bytes[own].copy()
    if bounds[1] == len(chain) and costs.loss_saved_bytes is not None:
        bytes_saved[-1] -= costs.loss_saved_bytes[-1]
    copied = float(bytes_saved.sum())
    return {
        "never": (forward, backward, copied),
        "always": (forward, backward + forward, copied),
        "offload": (forward + copied / host, backward + copied / host, copied),
    }[mode]


def all_plans(problem: Problem) -> Iterator[tuple[Proposal, tuple[str, ...]]]:
    """Every pipeline of one device a stage, with every word for every stage; and torchgpipe's for all."""
    chain = problem.chain
    cuts = [int(i) + 1 for i in np.flatnonzero(chain.cut_after)]
    sizes = [size for size in problem.sizes if problem.space.fits_someone(size, 1)]
    for size, schedule in product(sizes, problem.schedules):
        config = PipelineConfig(schedule, "offload", 8 // size, size)
        for stages in range(1, problem.gpus + 1):
            for chosen in combinations(cuts, stages - 1):
                devices = tuple((rank,) for rank in range(stages))
                proposal = Proposal(config, (*chosen, len(chain)), devices)
                for words in product(("never", "always", "offload"), repeat=stages):
                    yield proposal, words
                if schedule == "gpipe" and problem.runtime is None and size < 8:
                    yield proposal, ("except_last",) * stages


def fits(problem: Problem, proposal: Proposal, words: tuple[str, ...]) -> bool:
    """Whether the devices have room, and the hosts."""
    made, config = assemble(problem.space, proposal, words), proposal.config
    limit = problem.options.host_memory_bytes
    for stage, (word, ranks) in enumerate(zip(words, proposal.devices, strict=True)):
        if sum(made.ledger(stage).values()) > problem.space.limit(ranks):
            return False
        if word == "offload" and limit is not None:
            held = find_schedule(config.schedule).in_flight(stage, len(words), config.micro_batches)
            args = (problem.chain, proposal.bounds[stage], config.micro_batch_size)
            if held * stage_seconds(*args, word, 1.0)[2] > limit:
                return False
    return True


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
@pytest.mark.parametrize("share", [0.75, 0.5, 0.35])
def test_no_plan_of_all_is_faster_and_the_bound_holds_for_each(
    seed: int, share: float, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain, schedule = heavy(make_chain, seed), ["1f1b", "gpipe"][seed % 2]
    options: dict[str, Any] = {"schedule": schedule, "host_bandwidth": [HOST, 500.0][seed // 4]}
    options["runtime"] = [None, "torch"][seed // 2 % 2]
    free = problem_of(chain, make_topology(2), **options)
    first = find_best_plan(free, planners=()).best
    assert first is not None
    made = assemble(free.space, first.proposal, first.recompute)
    most = max(sum(made.ledger(device).values()) for device in range(made.program.devices))
    if seed % 3 == 0:
        options["host_memory_bytes"] = int(most / 2)
    problem = problem_of(chain, make_topology(2, memory=round(share * most)), **options)
    best, seen = inf, set[str]()
    for proposal, words in all_plans(problem):
        if fits(problem, proposal, words):
            made = assemble(problem.space, proposal, words)
            step = float(step_seconds(made.program, made.costs())[0])
            best, seen = min(best, step), seen | set(words)
    answer = find_best_plan(problem, planners=())
    if answer.best is None:
        assert best == inf
        return
    # Replicas, which are not enumerated here, may make it faster.
    assert answer.best.step_seconds <= best * (1 + 1e-9)
    assert answer.result.bound_seconds <= best * (1 + 1e-9)
    assert universal_bound(problem, [schedule]) <= answer.best.step_seconds * (1 + 1e-9)
    if max(answer.best.proposal.replicas) == 1 and answer.result.exact:
        assert answer.best.step_seconds == pytest.approx(best)


@pytest.mark.parametrize("word", ["never", "always", "offload"])
def test_the_simulated_stages_take_their_copies(
    word: str, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """Of both ways to the simulator: of one plan, and of many side by side."""
    chain = heavy(make_chain, 3)
    problem = problem_of(chain, make_topology(2), schedule="1f1b")
    end = int(np.flatnonzero(chain.cut_after)[1]) + 1
    proposal = Proposal(PipelineConfig("1f1b", "offload", 8, 1), (end, len(chain)), ((0,), (1,)))
    made = assemble(problem.space, proposal, (word, word))
    costs = made.costs()
    for stage, bounds in enumerate(pairwise((0, end, len(chain)))):
        forward, backward, copied = stage_seconds(chain, bounds, 1, word, HOST)
        again = 0.0 if costs.recompute is None else costs.recompute[stage, 0, 0] * forward
        assert costs.forward[stage, 0, 0] == pytest.approx(forward)
        assert costs.backward[stage, 0, 0] + again == pytest.approx(backward)
        assert made.offloaded_bytes(stage) == pytest.approx(copied if word == "offload" else 0.0)


def test_a_stage_that_must_takes_the_faster_way(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain = heavy(make_chain, 1)
    middle = int(np.flatnonzero(chain.cut_after)[1]) + 1
    config = PipelineConfig("gpipe", "offload", 8, 1)
    proposal = Proposal(config, (middle, len(chain)), ((0,), (1,)))
    for host, word in ((1.0, "always"), (1e9, "offload")):
        words = set[Any]()
        for memory in range(100, 6000, 100):
            problem = problem_of(chain, make_topology(2, memory=memory), host_bandwidth=host)
            words.add((choose_modes(problem.space, proposal) or (None,))[0])
        assert word in words


def test_where_nothing_else_fits_the_error_names_it(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """And it names the least that any plan needs."""
    chain = heavy(make_chain, 2)
    tightest = no_plan_fits(problem_of(chain, make_topology(2, memory=50))).details["stage"]["memory_bytes"]
    for memory in (tightest + 1, tightest - 1):
        plan = find_best_plan(problem_of(chain, make_topology(2, memory=memory)), planners=()).best
        assert (plan is not None) == (memory > tightest)
    auto = problem_of(chain, make_topology(2, memory=tightest + 1), recompute="auto")
    assert find_best_plan(auto, planners=()).best is None
    assert any(own.startswith("recompute='offload'") for own in no_plan_fits(auto).details["would_fit"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zb-h1"}, "recompute='offload' with schedule='zb-h1'"),
        ({"zero": 2}, "recompute='offload' with zero=2"),
        ({"runtime": "megatron"}, "runtime='megatron' does not run"),
        ({"host_bandwidth": None}, "the bandwidth between toy and its host is unknown"),
        ({"host_bandwidth": 0.5}, "host_bandwidth=0.5: must be from 1 to 1e\\+18 bytes per second"),
    ],
)
def test_where_it_is_refused(
    options: dict[str, Any], message: str, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        problem_of(make_chain(1, 5), make_topology(2), **options).space  # noqa: B018
    assert caught.value.hint


def test_a_known_gpu_has_the_bandwidth_of_its_link(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    topology = make_topology(2)
    groups = tuple(
        group._replace(device=replace(group.device, name="A100-80GB")) for group in topology.groups
    )
    named = replace(topology, groups=groups)
    host = problem_of(make_chain(1, 5), named, host_bandwidth=None).space.host
    assert host is not None
    assert host.bandwidth == pytest.approx(0.85 * 31.5e9, rel=0.01)


def test_not_of_many_devices(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    with pytest.raises(UsageError, match="recompute='offload' cannot be searched"):
        find_best_plan(problem_of(make_chain(1, 5), make_topology(66)))

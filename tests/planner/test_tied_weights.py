"""Plans whose stages share a weight: what they may be, for which runtimes, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain, TiedWeight
from pplan.cost_models.topology import Topology
from pplan.planner.build_plan import build_problem, plan_partition
from pplan.planner.coverage import describe_search
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Partition, Plan, ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.planner.stage_table import StageTable
from tests.stage_bytes import stage_bytes

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
REFERENCE = ProfileReference(file="toy.profile.json", sha256="0" * 64)


def tied(chain: Chain, *users: tuple[int, ...], bytes: float = 50.0) -> Chain:
    """The chain with weights of so many bytes that these layers use, and all cuts."""
    parameters, trainable = chain.parameter_bytes.copy(), chain.trainable_bytes.copy()
    for layers in users:
        parameters[layers[0]] += bytes
        trainable[layers[0]] += bytes
    weights = tuple(TiedWeight(f"weight{i}", bytes, bytes, layers) for i, layers in enumerate(users))
    cut_after = np.append(np.ones(len(chain) - 1, dtype=np.bool_), False)
    return replace(
        chain, parameter_bytes=parameters, trainable_bytes=trainable, tied=weights, cut_after=cut_after
    )


@pytest.mark.parametrize("seed", range(8))
def test_tables_are_those_of_each_stage(seed: int, make_chain: MakeChain) -> None:
    chain = tied(make_chain(seed, 9), (0, 8), (2, 4, 5))
    cut_after = np.append(np.random.default_rng(seed).random(8) < 0.7, False)
    chain = replace(chain, cut_after=cut_after)
    table, costs = StageTable.of(chain, 2), chain.at(2)
    for i, j in combinations(range(table.blocks + 1), 2):
        own, expected = (
            table.bytes_between(i, j),
            stage_bytes(costs, table.cut_points[i], table.cut_points[j] - 1),
        )
        for name in ("parameters", "trainable", "copies"):
            assert getattr(own, name) == pytest.approx(getattr(expected, name)), name


def solved(chain: Chain, topology: Topology, **options: object) -> Plan:
    wishes = PlanOptions(mini_batch=8, micro_batches=8, use_all=True, **options)  # type: ignore[arg-type]
    return solve_objective(
        Objective(), build_problem(chain, topology, wishes, REFERENCE, {}), model="toy", profile=REFERENCE
    )


def test_a_plan_says_which_stages_share_a_weight(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain = tied(make_chain(1, 6), (0, 5), (1, 2))
    plan = solved(chain, make_topology(3))
    bounds = [(stage.first_layer, stage.last_layer + 1) for stage in plan.stages]
    for own, users in zip(plan.tied, ((0, 5), (1, 2)), strict=False):
        assert own.stages == [
            number for number, (first, end) in enumerate(bounds) if any(first <= u < end for u in users)
        ]
    assert plan.tied[0].tensor == "weight0"
    # 50 bytes between two of three devices, at 20 bytes a second: each sends 50.
    assert plan.tied[0].sum_seconds == pytest.approx(50 / 20)
    weights = sum(stage.memory["weights"] for stage in plan.stages)
    copies = sum(50 * (len(own.stages) - 1) for own in plan.tied)
    whole = float(chain.parameter_bytes.sum() + chain.buffer_bytes.sum())
    assert weights == pytest.approx(whole + copies, abs=len(plan.stages))


def test_a_sum_that_costs_more_than_the_cut_brings_keeps_the_users_together(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    small, large = (tied(make_chain(1, 6), (0, 1), bytes=size) for size in (1.0, 1e4))
    wishes = PlanOptions(mini_batch=8, micro_batches=8, cut_after=("layer0",))
    forced = solve_objective(
        Objective(),
        build_problem(large, make_topology(2), wishes, REFERENCE, {}),
        model="toy",
        profile=REFERENCE,
    )
    assert forced.prediction.step_seconds > 1e4 / 20
    assert solved(large, make_topology(2)).tied == []
    assert (
        solve_objective(
            Objective(),
            build_problem(small, make_topology(2), wishes, REFERENCE, {}),
            model="toy",
            profile=REFERENCE,
        ).tied
        != []
    )


@pytest.mark.parametrize(
    ("runtime", "cuts"),
    [
        ("torch", True),
        ("deepspeed", True),
        ("megatron", False),  # one of the weights has three users
        ("torchgpipe", False),
        ("fairscale", False),
        ("torchtitan", False),
        ("huggingface", False),
    ],
)
def test_runtimes_that_keep_no_copies_keep_the_users_together(
    runtime: str, cuts: bool, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain = tied(make_chain(2, 6), (0, 3), (1, 2, 3))
    problem = build_problem(
        chain, make_topology(2), PlanOptions(mini_batch=8, runtime=runtime), REFERENCE, {}
    )
    assert problem.space.chain.cut_after.tolist() == [cuts, cuts, cuts, True, True, False]
    given = Partition("", (2, 6))
    if cuts:
        assert plan_partition(problem, given, model="toy", profile=REFERENCE).tied
    else:
        with pytest.raises(UsageError, match=rf"layer1, between layers that share a weight \({runtime}: "):
            plan_partition(problem, given, model="toy", profile=REFERENCE)


def test_the_answer_says_why_layers_stay_together(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    problem = build_problem(
        tied(make_chain(3, 6), (0, 3)), make_topology(2), PlanOptions(runtime="torchgpipe"), REFERENCE, {}
    )
    assert describe_search(problem).endswith(
        ", the layers that share weight0 on one stage (torchgpipe: it refuses a parameter that two stages "
        "share)"
    )


def test_megatron_ties_two_users(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain = tied(make_chain(2, 6), (0, 5))
    problem = build_problem(chain, make_topology(2), PlanOptions(runtime="megatron"), REFERENCE, {})
    assert problem.space.chain.cut_after.tolist() == [True] * 5 + [False]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_that_spreads_weights_or_gradients_keeps_the_users_together(
    zero: int, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain = tied(make_chain(2, 6), (0, 5))
    problem = build_problem(chain, make_topology(2), PlanOptions(zero=zero), REFERENCE, {})
    assert problem.space.chain.max_stages == (6 if zero == 1 else 1)


def test_alternatives_keep_together_what_their_runtimes_do(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    plan = solved(tied(make_chain(3, 6), (0, 3)), make_topology(2))
    assert plan.tied
    alternatives = {name: other for other in plan.alternatives for name in other.runtimes}
    for name in ("torchgpipe", "fairscale", "torchtitan"):
        assert alternatives[name].balance[0] >= 4
    assert alternatives["deepspeed"].balance == plan.balance


def test_asynchronous_plans_keep_the_users_together(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    from pplan.planner.objectives.throughput import fastest_asynchronous

    problem = build_problem(
        tied(make_chain(3, 6), (1, 4)), make_topology(3), PlanOptions(mini_batch=8), REFERENCE, {}
    )
    plan, _ = fastest_asynchronous(problem, np.inf)
    assert plan is not None
    assert not {2, 3, 4}.intersection(plan.proposal.ends)

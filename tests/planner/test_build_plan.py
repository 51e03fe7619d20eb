"""From costs and options to a plan: the winner, its comparisons, alternatives, notes and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pplan.api.plan_summary import summary_lines
from pplan.cost_models.collectives import exposed_all_reduce_seconds
from pplan.cost_models.errors import InfeasibleError, UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.quantities import format_seconds, parse_bytes, percent
from pplan.cost_models.topology import Device, Link, Topology, two_level_topology
from pplan.planner.alternatives import find_alternatives
from pplan.planner.build_plan import build_problem
from pplan.planner.candidate import SEARCHED, ScoredPlan, linear_pipeline
from pplan.planner.joint_search import JointSearchResult, plan_with
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import BASELINES, PLANNERS
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest
from pplan.planner.search.branch_and_bound import SearchResult

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
REFERENCE = ProfileReference(file="toy.profile.json", sha256="0" * 64)


def solved(chain: Chain, topology: Topology, **options: object) -> Plan:
    return solve_objective(
        Objective(),
        build_problem(chain, topology, PlanOptions(**options), REFERENCE, {}),  # type: ignore[arg-type]
        model="toy",
        profile=REFERENCE,
    )


def problem(chain: Chain, topology: Topology, **options: object) -> Problem:
    return Problem(chain, topology, PlanOptions(**options))  # type: ignore[arg-type]


def with_parameters(chain: Chain, size: float) -> Chain:
    weights = np.full(len(chain), size)
    return replace(chain, parameter_bytes=weights, trainable_bytes=weights)


def test_data_parallelism_wins_where_weights_are_light(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain = with_parameters(make_chain(1, 6), 0.001)
    plan = solved(chain, make_topology(3), mini_batch=12)
    assert (plan.balance, plan.replicas, plan.stages[0].devices) == ([6], [3], [0, 1, 2])
    assert (plan.mini_batch, plan.micro_batches, plan.micro_batch_size) == (12, 1, 12)
    costs = chain.at(4)
    exposed = exposed_all_reduce_seconds(
        costs.backward_seconds, costs.trainable_bytes, make_topology(3), range(3)
    )
    step = costs.forward_seconds.sum() + costs.backward_seconds.sum() + exposed
    assert plan.prediction.step_seconds == pytest.approx(step)
    assert plan.prediction.exact
    assert plan.prediction.gap == 0


def test_a_pipeline_wins_where_weights_are_heavy(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    plan = solved(with_parameters(make_chain(1, 6, traffic=0.01), 1e6), make_topology(3))
    assert len(plan.stages) == 3
    assert plan.replicas == [1, 1, 1]
    steps = {baseline.name: baseline.step_seconds for baseline in plan.baselines}
    assert list(steps) == list(BASELINES)
    made = [step for step in steps.values() if step is not None]
    assert made
    assert min(made) >= plan.prediction.step_seconds
    assert all(base.step_seconds or base.reason for base in plan.baselines)
    assert plan.prediction.lower_bound_seconds == pytest.approx(plan.prediction.step_seconds)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_named_schedule_is_kept(schedule: str, make_chain: MakeChain, make_topology: MakeTopology) -> None:
    plan = solved(with_parameters(make_chain(1, 6, traffic=0.01), 0.001), make_topology(3), schedule=schedule)
    assert plan.schedule == schedule
    assert plan.replicas == [3]
    parallel = next(baseline for baseline in plan.baselines if baseline.name == "data-parallel")
    assert parallel.step_seconds == pytest.approx(plan.prediction.step_seconds)


@pytest.mark.slow
def test_alternatives_hold_the_best_of_each_schedule(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain, topology = with_parameters(make_chain(2, 7), 1e6), make_topology(3)
    plan = solved(chain, topology, mini_batch=8)
    by_runtime = {tuple(other.runtimes): other for other in plan.alternatives}
    gpipe, one_f_one_b = by_runtime["torchgpipe", "fairscale"], by_runtime["deepspeed",]
    assert (gpipe.schedule, one_f_one_b.schedule) == ("gpipe", "1f1b")
    free = replace(
        chain, forward_host_seconds=0 * chain.forward_seconds, backward_host_seconds=0 * chain.forward_seconds
    )
    assert solved(chain, topology, mini_batch=8, schedule="1f1b").prediction.step_seconds == pytest.approx(
        one_f_one_b.step_seconds
    )
    alone = solved(chain, topology, mini_batch=8, runtime="torchgpipe")
    assert alone.prediction.step_seconds == pytest.approx(gpipe.step_seconds)
    assert alone.balance == gpipe.balance
    without_host = solved(free, topology, mini_batch=8, runtime="torchgpipe").prediction.step_seconds
    assert without_host == pytest.approx(
        solved(free, topology, mini_batch=8, schedule="gpipe").prediction.step_seconds
    )


def test_alternatives_where_an_interleaved_plan_is_the_best(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """As asked of its planner; of the other schedules nothing is proven by it."""
    chain, topology = make_chain(2, 8, cuts=1.1), make_topology(2)
    own = problem(chain, topology, mini_batch=8, schedule="interleaved")
    best = plan_with(PLANNERS["interleaved"], own)
    assert isinstance(best, ScoredPlan)
    found = SearchResult(best, best.step_seconds, best.step_seconds, exact=True)
    made = find_alternatives(
        problem(chain, topology, mini_batch=8), JointSearchResult(found, {"interleaved": best})
    )
    assert {"deepspeed", "torch"} <= {name for other in made for name in other.runtimes}
    proposed = {tuple(other.runtimes): other for other in made if other.schedule == "interleaved"}
    assert all(other.schedule in SEARCHED for other in made if other not in proposed.values())
    assert not any(other.exact for other in proposed.values())
    plain, ahead = (other for _, other in sorted(proposed.items(), key=lambda item: "torch" in item[0]))
    assert "megatron" in plain.runtimes
    # PyTorch's buffers: of every micro-batch, where the others have one.
    assert min(b - a for a, b in zip(plain.memory_bytes, ahead.memory_bytes, strict=True)) > 0
    between = (max(plain.memory_bytes) + max(ahead.memory_bytes)) // 2
    tight = problem(chain, topology, mini_batch=8, memory_limit=between)
    names = {
        name
        for other in find_alternatives(tight, JointSearchResult(found, {"interleaved": best}))
        for name in other.runtimes
        if other.schedule == "interleaved"
    }
    assert "megatron" in names
    assert "torch" not in names


@pytest.mark.slow
def test_one_process_pays_for_all_launches(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Launches of 1 s a layer and direction, whatever the size: few micro-batches are then the answer."""
    chain = with_parameters(make_chain(4, 4, traffic=0.01, cuts=1.0), 1e6)
    slow = replace(
        chain,
        forward_host_seconds=np.ones_like(chain.forward_seconds),
        backward_host_seconds=np.ones_like(chain.forward_seconds),
    )
    plan = solved(slow, make_topology(4), mini_batch=16, runtime="torchgpipe")
    free = solved(slow, make_topology(4), mini_batch=16, runtime="deepspeed", schedule="1f1b")
    assert plan.prediction.step_seconds >= 8 * plan.micro_batches
    assert plan.micro_batches < free.micro_batches


@pytest.mark.slow
def test_a_plan_says_where_several_processes_launch_for_longer_than_their_devices_compute(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain = with_parameters(make_chain(4, 4, traffic=0.01, cuts=1.0), 1e6)

    def launch_warnings(seconds: float, **options: object) -> tuple[Plan, list[str]]:
        hosts = np.full_like(chain.forward_seconds, seconds)
        slow = replace(chain, forward_host_seconds=hosts, backward_host_seconds=hosts)
        plan = solved(slow, make_topology(4), mini_batch=16, **options)
        return plan, [text for text in plan.warnings if "launch" in text]

    plan, [warning] = launch_warnings(100.0, schedule="1f1b")
    seconds = 200 * max(stage.last_layer + 1 - stage.first_layer for stage in plan.stages)
    assert f"takes {seconds} s to launch" in warning
    assert plan.prediction.step_seconds >= seconds * plan.micro_batches
    assert not launch_warnings(1e-9, schedule="1f1b")[1]
    # One process for all is slow, too, and its prediction has it.
    assert not launch_warnings(100.0, runtime="torchgpipe")[1]


def test_a_step_that_waits_for_links_is_not_said_to_wait_for_hosts(make_chain: MakeChain) -> None:
    """Each process launches for longer than its device computes, and each transfer takes far longer."""
    chain = make_chain(4, 2, cuts=1.1)
    hosts = 2 * chain.backward_seconds
    slow = replace(chain, forward_host_seconds=hosts, backward_host_seconds=hosts)
    options = {"mini_batch": 4, "micro_batches": 4, "schedule": "1f1b", "cut_after": ("layer0",)}
    for latency, is_said in ((0.0, True), (1e5, False)):
        link = Link(1e9, latency)
        topology = two_level_topology(Device("toy", None), 2, 8, link, link)
        plan = solved(slow, topology, **options)
        assert len(plan.stages) == 2
        assert any("waits for the hosts" in text for text in plan.warnings) == is_said


@pytest.mark.slow
def test_fewer_gpus_when_links_are_slow(make_chain: MakeChain) -> None:
    topology = two_level_topology(Device("toy", None), 3, 8, Link(1.0, 10.0), Link(1.0, 10.0))
    plan = solved(with_parameters(make_chain(1, 6, cuts=1.0), 1e6), topology)
    assert len(plan.stages) == 1
    assert plan.replicas == [1]
    whole = solved(with_parameters(make_chain(1, 6, cuts=1.0), 1e6), topology, use_all=True)
    assert sorted(rank for stage in whole.stages for rank in stage.devices) == [0, 1, 2]
    assert whole.prediction.step_seconds > plan.prediction.step_seconds
    assert plan.baselines[0].step_seconds == pytest.approx(plan.prediction.step_seconds)


def test_ledger_and_stages_add_up(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain = make_chain(6, 9)
    plan = solved(chain, make_topology(4, memory=4000), optimizer="adam")
    assert plan.stages[0].first_layer == 0
    assert plan.stages[-1].last_layer == 8
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        assert after.first_layer == before.last_layer + 1
        assert chain.cut_after[before.last_layer]
    for stage in plan.stages:
        assert stage.memory_bytes == sum(stage.memory.values()) <= 4000
        assert stage.memory_limit_bytes == 4000
        weights = chain.trainable_bytes[stage.first_layer : stage.last_layer + 1].sum()
        assert abs(stage.memory["optimizer"] - 2 * weights) < 1


@pytest.mark.slow
def test_notes_say_what_was_assumed(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain = make_chain(1, 4, sizes=(2, 4))
    free = solved(chain, make_topology(3))
    assert free.mini_batch == 96
    assert free.default_mini_batch is not None
    large = solved(chain, make_topology(3), mini_batch=16, micro_batches=2)
    assert "micro-batch size 8 is past the largest measured (4): extrapolated" in large.notes
    small = solved(chain, make_topology(3), mini_batch=7)
    assert small.micro_batch_size == 1
    assert "micro-batch size 1 is below the smallest measured (2): extrapolated" in small.warnings
    few = solved(make_chain(1, 4, cuts=0.0), make_topology(3), runtime="torchgpipe")
    assert any("at most 1 stage, fewer than 3 devices" in note for note in few.notes)


@pytest.mark.slow
def test_an_infeasible_problem_names_the_stage_and_the_way_out(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain = with_parameters(make_chain(3, 8, cuts=1.0), 100)
    chain = replace(chain, saved_bytes=chain.saved_bytes / 10)
    fixed = {"mini_batch": 16, "micro_batches": 4, "recompute": "never"}
    seen = set()
    for memory in (400, 1000, 1500, 1800):
        with pytest.raises(InfeasibleError) as caught:
            solved(chain, make_topology(2, memory=memory), **fixed, optimizer="adam")
        assert "a device: stage" in caught.value.what
        assert "of 2 (layer" in caught.value.what
        assert "are missing" in caught.value.what
        assert caught.value.exit_status == 3
        for route in caught.value.hint.removeprefix("What would fit: ").rstrip(".").split("; or "):
            field, _, value = route.split()[0].partition("=")
            value = value.strip("'")
            seen.add(field)
            if field == "gpus":
                assert route.split()[1:] == ["mini_batch=16"]
                assert solved(chain, make_topology(int(value), memory=memory), **fixed, optimizer="adam")
            elif field == "optimizer":
                assert solved(chain, make_topology(2, memory=memory), **fixed, optimizer=value)
            elif field == "memory":
                enough = parse_bytes(value)
                assert solved(chain, make_topology(2, memory=enough), **fixed, optimizer="adam")
            else:
                assert solved(chain, make_topology(2, memory=memory), mini_batch=16, optimizer="adam")
    assert seen >= {"gpus", "memory", "optimizer"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mini_batch": 0}, "mini_batch=0: must be at least 1"),
        ({"mini_batch": 64, "micro_batches": 0}, "micro_batches=0: must be at least 1"),
        ({"mini_batch": 64, "micro_batches": 5}, "micro_batches=5: does not divide the global batch of 64"),
        ({"mini_batch": 10**12}, "into at most 16384 micro-batches"),
        ({"mini_batch": 10**12, "micro_batches": 7}, "micro_batches=7: does not divide"),
        (
            {"mini_batch": 2**20, "micro_batches": 2**20},
            "micro_batches=1048576: at most 16384 are simulated",
        ),
        ({"schedule": "pipedream"}, "schedule='pipedream': it is asynchronous"),
        ({"recompute": "sometimes"}, "recompute='sometimes': not known"),
        ({"optimizer": "lion"}, "optimizer='lion': not known"),
        ({"runtime": "gpipe"}, "unknown runtime 'gpipe'"),
        ({"recompute": "except_last", "schedule": "1f1b"}, "recompute='except_last' with schedule='1f1b'"),
        ({"runtime": "torchgpipe", "schedule": "1f1b"}, "runtime='torchgpipe' does not run schedule='1f1b'"),
        (
            {"runtime": "deepspeed", "recompute": "except_last"},
            "does not run schedule='auto', recompute='except_last'",
        ),
        ({"recompute": "except_last", "mini_batch": 4, "micro_batches": 1}, "needs 2 micro-batches or more"),
    ],
)
def test_impossible_wishes(
    options: dict[str, object], message: str, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    with pytest.raises(UsageError) as caught:
        solved(make_chain(1, 5), make_topology(2), **options)
    assert message in caught.value.what
    assert caught.value.hint


def test_more_gpus_than_layers(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    with pytest.raises(UsageError, match="gpus=6: the model has 5 layers"):
        solved(make_chain(1, 5), make_topology(6), runtime="torchgpipe")
    assert sum(solved(make_chain(1, 5, traffic=0.0), make_topology(6)).replicas) <= 6


def test_a_mini_batch_that_nothing_divides(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    with pytest.raises(UsageError, match="mini_batch=12: no measured micro-batch size divides it"):
        solved(make_chain(1, 5, sizes=(8,)), make_topology(2), mini_batch=12)


@pytest.mark.slow
def test_one_process_stays_on_one_node(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain = with_parameters(make_chain(2, 9, cuts=1.0, traffic=0.01), 1e6)
    plan = solved(chain, make_topology(6, per_node=2))
    assert len(plan.stages) > 2
    by_runtime = {tuple(other.runtimes): len(other.balance) for other in plan.alternatives}
    assert by_runtime["torchgpipe", "fairscale"] <= 2 < by_runtime["deepspeed",]
    alone = solved(chain, make_topology(6, per_node=2), runtime="torchgpipe")
    two = solved(chain, make_topology(2, per_node=2), runtime="torchgpipe", mini_batch=alone.mini_batch)
    assert [base.step_seconds for base in alone.baselines[2:]] == [b.step_seconds for b in two.baselines[2:]]
    assert len(alone.stages) <= 2
    assert "torchgpipe is one process: it reaches the 2 devices of one node" in alone.notes


@pytest.mark.slow
def test_deepspeed_trains_every_stage(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """The layers without parameters take longest: other plans leave them alone on a stage."""
    chain = make_chain(2, 8, cuts=1.0, traffic=0.001)
    bare = np.arange(8) % 2 == 1
    chain = replace(
        chain,
        parameter_bytes=np.full(8, 1e6),
        trainable_bytes=np.where(bare, 0.0, 1e6),
        forward_seconds=chain.forward_seconds + 5.0 * bare[:, None],
    )

    def parts(balance: list[int]) -> list[float]:
        ends = np.cumsum([0, *balance])
        return [float(chain.trainable_bytes[a:b].sum()) for a, b in pairwise(ends)]

    plan = solved(chain, make_topology(6), mini_batch=8, schedule="1f1b")
    assert min(parts(plan.balance)) == 0
    for_deepspeed = next(other for other in plan.alternatives if "deepspeed" in other.runtimes)
    assert min(parts(for_deepspeed.balance)) > 0
    assert for_deepspeed.step_seconds > plan.prediction.step_seconds
    alone = solved(chain, make_topology(6), mini_batch=8, schedule="1f1b", runtime="deepspeed")
    assert (alone.balance, alone.replicas) == (for_deepspeed.balance, for_deepspeed.replicas)
    # DeepSpeed's own way leaves a layer alone on every stage: there is no such plan.
    fixed = solved(chain, make_topology(8), mini_batch=8, runtime="deepspeed")
    even = next(base for base in fixed.baselines if base.name == "even")
    assert even.detail.split()[0] != "8"
    without = problem(chain, make_topology(8), mini_batch=8, runtime="deepspeed")
    config = without.configs[-1]
    assert fastest(without.space, [linear_pipeline(config, range(1, 9))]) is None
    assert fastest(without.space, [linear_pipeline(config, range(2, 9, 2))]) is not None


@pytest.mark.parametrize("options", [{"micro_batches": 8}, {"micro_batches": 16}, {"recompute": "always"}])
def test_wishes_do_not_cripple_what_the_plan_is_compared_with(
    options: dict[str, object], make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain, topology = with_parameters(make_chain(1, 6), 0.001), make_topology(4)
    free = {base.name: base.step_seconds for base in solved(chain, topology, mini_batch=16).baselines}
    in_flight = {
        base.name: base.step_seconds for base in solved(chain, topology, mini_batch=16, **options).baselines
    }
    for name in ("one-gpu", "data-parallel"):
        assert in_flight[name] == free[name] is not None


def test_extrapolation_is_said_of_every_row(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Data parallelism wins with a measured size; the other rows are at 32 samples, past the largest of 8."""
    chain = with_parameters(make_chain(1, 6, sizes=(1, 8)), 0.001)
    plan = solved(chain, make_topology(4), mini_batch=32, micro_batches=1)
    assert plan.replicas == [4]
    assert "micro-batch size 32 is past the largest measured (8): extrapolated" in plan.notes


H100, H100_BANDWIDTH = "NVIDIA H100 80GB HBM3", 3.35e12


def optimizer_notes(plan: Plan) -> list[str]:
    return [note for note in plan.notes if note.startswith("optimizer step not included")]


@pytest.mark.parametrize(("zero", "share"), [(0, 1), (1, 2)])
def test_the_optimizers_step_is_named_where_it_is_long(zero: int, share: int, make_chain: MakeChain) -> None:
    """By hand: 6 layers of float32 weights; Adam updates all of them on every replica, or its part."""
    chain, link = make_chain(1, 6), Link(1e18, 0.0)
    two, other = (two_level_topology(Device(name, None), 2, 8, link, link) for name in (H100, "toy"))
    seconds = float(chain.at(1).forward_seconds.sum() + chain.at(1).backward_seconds.sum())
    per_layer = 0.05 * seconds * H100_BANDWIDTH / 28 / 6 * 4
    options: dict[str, object] = {"mini_batch": 2, "optimizer": "adam", "max_stages": 1, "zero": zero}
    plan = solved(with_parameters(chain, per_layer), two, **options)
    own = 28 * 6 * per_layer / 4 / share / H100_BANDWIDTH
    assert plan.prediction.optimizer_seconds == pytest.approx(own)
    said = f"adam (its own step, {format_seconds(own)} or more, not counted)"
    assert said in "\n".join(summary_lines(plan))
    (note,) = optimizer_notes(plan)
    assert f"takes {format_seconds(own)} or more at 3.35 TB/s" in note
    assert f"{percent(own / plan.prediction.step_seconds)} of the step" in note
    assert "on device 0, which" in note
    assert not optimizer_notes(solved(with_parameters(chain, per_layer / 100), two, **options))
    unknown = solved(with_parameters(chain, per_layer), other, **options)
    assert not optimizer_notes(unknown)
    assert unknown.prediction.optimizer_seconds is None
    assert "adam (its own step not counted)" in "\n".join(summary_lines(unknown))

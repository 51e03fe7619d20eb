"""A partition that was made elsewhere: its plan takes what the simulator says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.build_plan import build_problem, plan_partition
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Partition, Plan, ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.planner.plan_simulation import simulate_plan
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
PROFILE = ProfileReference(file="toy.profile.json", sha256="0" * 64)


def plan_of(chain: Chain, topology: Topology, given: Partition, **options: object) -> Plan:
    problem = Problem(chain, topology, PlanOptions(**{"mini_batch": 16, **options}))  # type: ignore[arg-type]
    return plan_partition(problem, given, model="toy", profile=PROFILE)


@pytest.mark.parametrize(
    ("schedule", "virtual", "replicas"),
    [
        ("1f1b", 1, 1),
        ("gpipe", 1, 2),
        ("naive", 1, 1),
        ("dapple", 1, 1),
        ("interleaved", 2, 1),
        ("zb-v", 2, 2),
        ("zb-h1", 1, 1),
    ],
)
def test_the_step_is_the_simulators(
    make_chain: MakeChain, make_topology: MakeTopology, schedule: str, virtual: int, replicas: int
) -> None:
    chain, topology = make_chain(1, 9, cuts=1.0), make_topology(8)
    given = Partition("", (2, 3, 7, 9), virtual, replicas)
    plan = plan_of(chain, topology, given, schedule=schedule, micro_batches=8, recompute="never")
    assert [stage.layers for stage in plan.stages] == plan.balance == [2, 1, 4, 2]
    assert (plan.schedule, plan.virtual_stages, plan.replicas) == (schedule, virtual, [replicas] * 4)
    assert len({rank for stage in plan.stages for rank in stage.devices}) == given.gpus
    assert plan.prediction.step_seconds == pytest.approx(
        simulate_plan(plan, chain, topology).timeline.step_seconds, rel=1e-9
    )
    assert (plan.prediction.exact, plan.searched) == (False, "this partition alone")
    assert 0 < plan.prediction.lower_bound_seconds < plan.prediction.step_seconds
    assert f"all plans of {schedule} " in plan.prediction.bound_covers
    assert Plan.parse(plan.to_json(), "x") == plan


def test_what_is_left_open_is_the_best(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """Over every schedule and number of micro-batches asked for one by one."""
    chain, topology = make_chain(2, 8, cuts=1.0), make_topology(4)
    given = Partition("", (3, 5, 8))
    each = [
        plan_of(chain, topology, given, schedule=schedule, micro_batches=count).prediction.step_seconds
        for schedule in ("1f1b", "gpipe")
        for count in (4, 8, 16)
    ]
    assert plan_of(chain, topology, given).prediction.step_seconds == pytest.approx(min(each), rel=1e-12)
    assert len(set(each)) > 1


def test_the_partition_that_solve_finds_takes_what_solve_says(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain, topology = make_chain(3, 7), make_topology(3)
    found = solve_objective(
        Objective(),
        build_problem(chain, topology, PlanOptions(mini_batch=16, schedule="1f1b"), PROFILE, {}),
        model="toy",
        profile=PROFILE,
    )
    if len(set(found.replicas)) > 1:
        pytest.fail("choose a seed whose best plan has as many replicas everywhere")
    given = Partition("", tuple(np.cumsum(found.balance).tolist()), 1, found.replicas[0])
    recompute = plan_of(chain, topology, given, schedule="1f1b", micro_batches=found.micro_batches)
    assert recompute.prediction.step_seconds == pytest.approx(found.prediction.step_seconds, rel=1e-9)


def test_recomputation_where_it_does_not_fit_without(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain, given = make_chain(4, 6, cuts=1.0), Partition("", (3, 6))
    asked = {"schedule": "gpipe", "micro_batches": 8}
    needs = {
        mode: max(
            stage.memory_bytes
            for stage in plan_of(chain, make_topology(2), given, recompute=mode, **asked).stages
        )
        for mode in ("never", "always")
    }
    assert needs["always"] < needs["never"]
    free = plan_of(chain, make_topology(2, memory=needs["never"] + 10), given, **asked)
    tight = plan_of(chain, make_topology(2, memory=needs["never"] - 10), given, **asked)
    assert (free.recompute, free.notes) == ("never", [])
    assert tight.recompute != "never"
    assert tight.prediction.step_seconds > free.prediction.step_seconds
    assert tight.notes == []


def test_what_does_not_fit_is_a_plan_that_says_so(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain, given = make_chain(4, 6, cuts=1.0), Partition("", (3, 6))
    plan = plan_of(chain, make_topology(2, memory=10), given, schedule="1f1b", micro_batches=8)
    assert plan.warnings[0][:18] == "it does not fit: d"
    assert "of 10 B" in plan.warnings[0]
    assert plan.recompute == "always"


def test_what_cannot_be(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain, topology = make_chain(5, 6, cuts=1.0), make_topology(2)
    with pytest.raises(UsageError, match="gpus=2: the partition needs 3 devices"):
        plan_of(chain, topology, Partition("", (2, 4, 6)))
    forbidden = replace(chain, cut_after=np.array([True, False, True, True, True, False]))
    with pytest.raises(UsageError, match="stage 0 ends after layer 1, layer1, where the profile"):
        plan_of(forbidden, topology, Partition("", (2, 6)))
    with pytest.raises(UsageError, match="interleaved"):
        plan_of(chain, topology, Partition("", (1, 2, 4, 6), 2), schedule="interleaved", micro_batches=1)
    with pytest.raises(UsageError, match="4 replicas share micro-batches of 2, so one has no sample"):
        plan_of(chain, make_topology(8), Partition("", (2, 6), 1, 4), micro_batches=8)

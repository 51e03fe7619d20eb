"""The best plan of a problem: what options leave, never worse than any planner, with less or with more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Topology
from pplan.planner.candidate import ScoredPlan
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import PLANNERS
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def problem(chain: Chain, topology: Topology, **options: Any) -> Problem:
    return Problem(chain, topology, PlanOptions(**options))


def step(chain: Chain, topology: Topology, **options: Any) -> float:
    """Of the best plan, which must be proven, but for one on devices in an order that is not searched; inf
    where none fits."""
    found = find_best_plan(problem(chain, topology, **options), []).result
    assert found.exact or found.universal
    return np.inf if found.best is None else found.best.step_seconds


class TestMonotone:
    """With more of anything the answer is never worse."""

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [1, 2, 3, 5])
    def test_memory(self, seed: int, make_chain: MakeChain, make_topology: MakeTopology) -> None:
        chain, per_node = make_chain(seed, 7, traffic=[0.1, 1][seed % 2]), [2, 8][seed % 2]
        steps = [
            step(chain, make_topology(4, per_node=per_node, memory=memory), mini_batch=8, optimizer="adam")
            for memory in (300, 500, 700, 900, 1200, 1600, 2500, None)
        ]
        assert all(more <= less for less, more in pairwise(steps))
        assert len(set(steps)) > 3

    @pytest.mark.parametrize(
        "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 4))]
    )
    def test_bandwidth(self, seed: int, make_chain: MakeChain, make_topology: MakeTopology) -> None:
        """A thousand times the bytes over a thousand times the bandwidth, which may not be below 1 B/s."""
        chain, own = make_chain(seed, 7), make_topology(4, per_node=[2, 8][seed % 2], latency=0.02)
        names = ("parameter_bytes", "trainable_bytes", "buffer_bytes", "output_bytes")
        chain = replace(chain, **{name: 1000 * getattr(chain, name) for name in names})
        steps = []
        for factor in (0.01, 0.1, 0.3, 1, 3, 10, 100):
            levels = [
                replace(
                    level,
                    link=replace(
                        level.link,
                        bandwidth_bytes_per_second=1000 * factor * level.link.bandwidth_bytes_per_second,
                    ),
                )
                for level in own.levels
            ]
            steps.append(step(chain, replace(own, levels=tuple(levels)), mini_batch=4))
        assert all(more <= less * (1 + 1e-12) for less, more in pairwise(steps))
        assert len(set(steps)) > 3

    @pytest.mark.slow
    @pytest.mark.parametrize("per_node", [1, 2, 3, 8])
    @pytest.mark.parametrize("seed", [1, 2])
    def test_devices(
        self, seed: int, per_node: int, make_chain: MakeChain, make_topology: MakeTopology
    ) -> None:
        chain = make_chain(seed, 7, traffic=[0.1, 1][seed % 2])
        memory = [None, 900][seed // 2]
        steps = [
            step(chain, make_topology(gpus, per_node=per_node, memory=memory), mini_batch=12)
            for gpus in range(1, 8)
        ]
        assert all(more <= less * (1 + 1e-12) for less, more in pairwise(steps)), steps
        assert len(set(steps)) > 2

    @pytest.mark.slow
    def test_devices_of_another_kind(self, make_chain: MakeChain, make_topology: MakeTopology) -> None:
        """A slow device more never hurts: it may stay free."""
        chain, levels = make_chain(3, 7, traffic=0.1), make_topology(6, per_node=2).levels
        fast, slow = Device("fast", 2000), Device("slow", 1000, speed=0.2)
        steps = [
            step(chain, Topology((Group(fast, 2), Group(slow, count)), levels), mini_batch=8)
            for count in range(1, 5)
        ]
        alone = step(chain, Topology((Group(fast, 2),), levels), mini_batch=8)
        assert all(more <= less * (1 + 1e-12) for less, more in pairwise([alone, *steps]))


WISHES: list[dict[str, Any]] = [
    {},
    {"schedule": "gpipe"},
    {"recompute": "never"},
    {"recompute": "always"},
    {"micro_batches": 4},
    {"max_stages": 2},
    {"use_all": True},
    {"runtime": "torchgpipe"},
    {"runtime": "deepspeed"},
    {"runtime": "torch"},
    {"cut_after": ("layer3",)},
    {"pins": (("layer2", 0), ("layer5", 1))},
    {"keep_together": ("layer[0-4]",)},
]


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        pytest.param(seed, own, marks=[pytest.mark.slow] * (seed == 1), id="-".join(own) or "free")
        for seed, own in zip(cycle((0, 1)), WISHES, strict=False)
    ],
)
def test_never_worse_than_any_planner(
    seed: int, options: dict[str, Any], make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """Nor is any planner below the bound; layers named as a transformer's, so that all planners have any."""
    chain = make_chain(seed, 9, cuts=1.1, traffic=[0.1, 1][seed])
    made = problem(chain, make_topology(4, per_node=[8, 2][seed], memory=2500), mini_batch=16, **options)
    answer = find_best_plan(made, list(PLANNERS))
    assert set(answer.by_planner) == set(PLANNERS)
    assert answer.best is not None
    plans = {name: plan for name, plan in answer.by_planner.items() if isinstance(plan, ScoredPlan)}
    assert len(plans) > 1
    assert answer.best.config.schedule in made.allowed_schedules
    for name, plan in plans.items():
        if plan.config.schedule not in made.allowed_schedules:
            assert name == "interleaved"  # is shown, and not in the running
            continue
        assert answer.best.step_seconds <= plan.step_seconds * (1 + 1e-9), name
        assert answer.result.bound_seconds <= plan.step_seconds * (1 + 1e-9), name
        assert made.allows(plan.proposal)
    reasons = [plan for plan in answer.by_planner.values() if isinstance(plan, str)]
    assert all(reasons)


@pytest.mark.slow
def test_a_named_planners_own_plan(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    """With the bound on all plans, whoever makes them."""
    chain = make_chain(2, 12, cuts=1.1, traffic=0.1)
    chain = replace(
        chain,
        names=tuple(f"layers.{index}" for index in range(12)),
        parameter_bytes=np.full(12, 50.0),
        trainable_bytes=np.full(12, 50.0),
    )
    topology = make_topology(4)
    free = find_best_plan(problem(chain, topology, mini_batch=16, planner="best"))
    for name in (*PLANNERS, r"deepspeed-type:layers\.[2-5]"):
        own = find_best_plan(problem(chain, topology, mini_batch=16, planner=name))
        assert own.best is not None, name
        assert own.best == own.by_planner[name], name
        assert own.result.bound_seconds <= own.best.step_seconds, name
        assert own.result.bound_seconds <= free.result.bound_seconds * (1 + 1e-9), name
        if own.result.exact:
            assert own.best.step_seconds == pytest.approx(own.result.bound_seconds, rel=1e-8), name

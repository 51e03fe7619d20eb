"""What a plan says in parts and as a whole is the same: the bytes of its ledgers, the seconds of its step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import pplan
from pplan.cost_models.errors import UsageError
from pplan.cost_models.schedules import SCHEDULES
from pplan.planner.explanation.step_limits import critical_path
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

PLANS = 40
CLOSE = 1e-9


def random_plan(rng: random.Random, make_profile: Callable[..., dict[str, Any]]) -> tuple[Plan, Profile]:
    """Of random costs, machine and partition. Raises UsageError where the schedule does not run with them."""
    layers = rng.randint(4, 9)
    parts = rng.random() < 0.5
    content = make_profile(
        rng.randrange(10**6),
        layers,
        cuts=1.1,
        loss=rng.random() < 0.5,
        parts=parts,
        host=rng.choice([0.0, 2.0]),
    )
    profile = Profile.model_validate(content)
    schedule = rng.choice(list(SCHEDULES))
    virtual = SCHEDULES[schedule].default_virtual_stages
    devices = rng.randint(1, layers // virtual)
    cuts = sorted(rng.sample(range(1, layers), devices * virtual - 1))
    balance = [end - start for start, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    replicas, micro_batches = rng.choice([1, 1, 2]), devices * rng.randint(1, 4)
    plan = pplan.import_plan(
        ",".join(map(str, balance)),
        profile,
        schedule=schedule,
        virtual_stages=virtual,
        replicas=replicas,
        micro_batches=micro_batches,
        mini_batch=micro_batches * replicas * rng.choice([1, 2]),
        optimizer=rng.choice(["sgd", "momentum", "adam", "adamw"]),
        recompute=rng.choice(["never", "always"]),
        zero=rng.choice([0, 0, 1]),
        bandwidth=rng.choice([1e7, 1e9, 1e11]),
        latency=rng.choice([0.0, 1e-4]),
        memory_bytes=10**12,
    )
    return plan, profile


@pytest.mark.slow
def test_parts_sum_to_the_whole(make_profile: Callable[..., dict[str, Any]]) -> None:
    """Every stage's ledger to its bytes, and its seconds to the step; so does the chain of what waits for
    what, and the step is that of the plan."""
    rng, seen = random.Random(1), set[str]()
    kinds, closed = set[str](), 0
    while closed < PLANS:
        try:
            plan, profile = random_plan(rng, make_profile)
        except UsageError:
            continue
        closed += 1
        seen.add(plan.schedule)
        for stage in plan.stages:
            assert sum(stage.memory.values()) == pytest.approx(stage.memory_bytes, rel=CLOSE)
        step = pplan.simulate(plan, profile)
        assert step.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=CLOSE)
        for times in step.stage_times:
            assert sum(times) == pytest.approx(step.step_seconds, rel=CLOSE), (plan.schedule, times)
            assert min(times) >= 0
        idle = 1 - sum(times.compute for times in step.stage_times) / step.stages / step.step_seconds
        assert idle == pytest.approx(plan.prediction.bubble, abs=CLOSE)
        path = critical_path(step)
        kinds.update(part.kind for part in path)
        assert sum(part.end - part.start for part in path) == pytest.approx(step.step_seconds, rel=CLOSE)
    assert len(seen) > 10
    assert kinds > {"compute", "recompute", "transfer", "port"}

"""The mini-batch where none is given: a rule that the profiling machine has no part in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.quantities import format_seconds
from pplan.cost_models.topology import Device, Link, Topology, two_level_topology
from pplan.planner.build_plan import build_problem
from pplan.planner.mini_batch import choose_mini_batch
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem

REFERENCE = ProfileReference(file="a.profile.json", sha256="0")


def chain(sizes: tuple[int, ...], *, saved: float = 1e3, layers: int = 6, scales: bool = False) -> Chain:
    """Layers of a millisecond a sample, and `saved` bytes of it."""
    each = np.outer(np.ones(layers), sizes).astype(np.float64)
    zero = np.zeros_like(each)
    weights = np.full(layers, 1e3)
    return Chain(
        names=tuple(f"layer{index}" for index in range(layers)),
        sizes=sizes,
        parameter_bytes=weights,
        trainable_bytes=weights,
        buffer_bytes=weights * 0,
        cut_after=np.array([True] * (layers - 1) + [False]),
        input_bytes_per_sample=1e3,
        forward_seconds=each * 1e-3,
        backward_seconds=each * 2e-3,
        output_bytes=each * 1e3,
        saved_bytes=each * saved,
        saved_input_bytes=zero,
        workspace_bytes=zero,
        forward_host_seconds=zero,
        backward_host_seconds=zero,
        scales_with_samples=scales,
    )


def machine(gpus: int, memory: int | None = None) -> Topology:
    """GPUs on one fast link."""
    link = Link(1e12, 0.0)
    return two_level_topology(Device("a GPU", memory), gpus, max(gpus, 1), link, link)


def problem(sizes: tuple[int, ...], gpus: int, options: PlanOptions | None = None) -> Problem:
    return Problem(chain(sizes), machine(gpus), options or PlanOptions())


@pytest.mark.parametrize("sizes", [(1,), (1, 2), (1, 2, 4, 8), (4, 8, 16, 64), (128, 256)])
@pytest.mark.parametrize("gpus", [1, 2, 3, 8, 12])
def test_it_is_32_samples_a_device_whatever_sizes_were_reached(sizes: tuple[int, ...], gpus: int) -> None:
    assert problem(sizes, gpus).mini_batch == 32 * gpus


@pytest.mark.parametrize(
    ("size", "gpus", "expected"), [(3, 2, 66), (5, 4, 120), (48, 2, 96), (100, 1, 100), (3000, 2, 6000)]
)
def test_with_one_measured_size_it_is_the_nearest_that_is_made_of_it(
    size: int, gpus: int, expected: int
) -> None:
    made = problem((size,), gpus)
    by_hand = [size * gpus * count for count in range(1, 1000)]  # which all devices can share, too
    nearest = min(by_hand, key=lambda batch: (abs(batch - 32 * gpus), batch))
    assert made.mini_batch == nearest == expected
    assert made.configs


@pytest.mark.parametrize(("count", "gpus", "expected"), [(7, 4, 126), (3, 8, 255), (100, 1, 100)])
def test_it_divides_into_the_micro_batches_that_are_wished(count: int, gpus: int, expected: int) -> None:
    made = problem((1, 2, 4, 8), gpus, PlanOptions(micro_batches=count))
    assert made.mini_batch == expected
    assert {config.micro_batches for config in made.configs} == {count}


def test_a_given_one_stays() -> None:
    own = problem((1, 2), 2, PlanOptions(mini_batch=6))
    assert own.mini_batch == 6
    assert choose_mini_batch(own, try_others=True) is None


def solved(own: Problem) -> Plan:
    return solve_objective(Objective(), own, model="toy", profile=REFERENCE)


@pytest.mark.slow
def test_half_and_twice_of_it_are_shown() -> None:
    own = problem((1, 2, 4, 8, 16, 32, 64), 2)
    plan = solved(own)
    assert plan.mini_batch == 64
    default = plan.default_mini_batch
    assert default is not None
    assert default.samples_per_device == 32
    assert [other.mini_batch for other in default.others] == [32, 128]
    for other in default.others:
        asked = solved(replace(own, options=PlanOptions(mini_batch=other.mini_batch)))
        assert other.step_seconds == pytest.approx(asked.prediction.step_seconds)
        assert other.samples_per_second == pytest.approx(asked.prediction.samples_per_second)
        assert asked.default_mini_batch is None


def test_of_a_large_problem_they_are_left_out() -> None:
    own = Problem(chain((1, 2), layers=40), machine(32), PlanOptions(time_limit=1.0))
    default = choose_mini_batch(own, try_others=True)
    assert default is not None
    assert default.others == []


def test_it_is_lessened_where_nothing_fits_and_that_is_said() -> None:
    """One micro-batch of 32 samples keeps 6 x 32 kB, and the device has 80 kB."""
    options = PlanOptions(micro_batches=1, schedule="gpipe", recompute="never")
    own = Problem(chain((1, 2, 4, 8, 16, 32), saved=1e3), machine(1, 80_000), options)
    plan = solved(own)
    assert plan.mini_batch == 8
    assert "no plan with 32 samples a device fits: the global batch is 8, not 32" in plan.warnings
    assert plan.default_mini_batch is not None
    assert plan.default_mini_batch.samples_per_device == 8


SENTENCE = re.compile(
    r"at most 2 samples per micro-batch: with (\d+) \(extrapolated\) these stages would take (\S+ m?s) a step"
)


@pytest.mark.parametrize("gpus", [1, 2])
def test_sizes_beyond_the_profile_that_would_pay_are_told(
    gpus: int, make_chain: Callable[..., Chain], make_topology: Callable[..., Topology]
) -> None:
    """The layers' costs are lines: a profile that holds the larger sizes gives the step that is told."""

    def solved(sizes: tuple[int, ...], **options: Any) -> Plan:
        chain = replace(make_chain(1, 4, sizes=sizes), cut_after=np.zeros(4, dtype=np.bool_))
        chain = replace(chain, parameter_bytes=np.zeros(4), trainable_bytes=np.full(4, 1e-6))
        limits = PlanOptions(mini_batch=16 * gpus, **options)
        return solve_objective(
            Objective(),
            build_problem(chain, make_topology(gpus), limits, REFERENCE, {}),
            model="toy",
            profile=REFERENCE,
        )

    def told(plan: Plan) -> list[tuple[str | Any, ...]]:
        return [found.groups() for text in plan.warnings if (found := SENTENCE.search(text))]

    small, large = solved((1, 2)), solved((1, 2, 16))
    assert large.prediction.step_seconds < 0.95 * small.prediction.step_seconds
    assert told(small) == [("16", format_seconds(large.prediction.step_seconds))]
    assert told(large) == told(solved((1, 2), micro_batches=8)) == []
    tight = 1.1 * max(stage.memory_bytes for stage in small.stages)
    assert told(solved((1, 2), memory_limit=tight)) == []

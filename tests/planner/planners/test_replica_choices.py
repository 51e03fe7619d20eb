"""Micro-batches, recomputation and groups of devices as the planners see them, by hand; and the plans of the
planners whose stages have equal replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.planner.candidate import PipelineConfig
from pplan.planner.planners import PLANNERS, equal_replicas, replica_groups
from pplan.planner.planners.base import can_share, full_shapes
from pplan.planner.planners.equal_replicas import (
    equal_blocks,
)
from pplan.planner.planners.replica_groups import (
    MicroBatchChoice,
    cost_replicas,
    group_devices,
    micro_batch_choices,
    size_choices,
)
from pplan.planner.problem import Problem

MakeProblem = Callable[..., Problem]
MakeChain = Callable[..., Chain]
MakeNamed = Callable[..., Chain]
Patch = pytest.MonkeyPatch


def choice(*modes: Any, schedule: str = "1f1b", count: int = 4, size: int = 2) -> MicroBatchChoice:
    return MicroBatchChoice(schedule, count, size, modes)


def test_micro_batches_in_flight() -> None:
    """Of 1F1B as many as stages to the last one; of GPipe all."""
    assert [choice().in_flight(stages) for stages in (1, 3, 4, 9)] == [1, 3, 4, 4]
    assert choice(schedule="gpipe").in_flight(1) == 4


@pytest.mark.parametrize(
    ("modes", "never", "again"),
    [
        (("by_stage", "never", "always"), "by_stage", "by_stage"),
        (("never", "always"), "never", "always"),
        (("except_last", "never"), "never", "except_last"),
        (("always",), "always", "always"),
        (("never",), "never", "never"),
        (("except_last", "always"), "except_last", "always"),
    ],
)
def test_the_mode_of_a_plan(modes: tuple[Any, ...], never: str, again: str) -> None:
    own = choice(*modes)
    assert own.config(False) == PipelineConfig("1f1b", never, 4, 2)  # type: ignore[arg-type]
    assert own.config(True) == PipelineConfig("1f1b", again, 4, 2)  # type: ignore[arg-type]


def test_one_choice_for_every_size() -> None:
    configs = [
        PipelineConfig(schedule, mode, count, 8 // count)
        for schedule in ("gpipe", "1f1b")
        for mode in ("never", "always")
        for count in (8, 2)
    ]
    assert micro_batch_choices(configs) == [
        choice("never", "always", count=8, size=1),
        choice("never", "always", count=2, size=4),
    ]
    assert {own.schedule for own in micro_batch_choices(configs[:4])} == {"gpipe"}
    other = replace(configs[0], schedule="zb-h1")
    assert micro_batch_choices([other]) == []


@pytest.mark.parametrize(
    ("modes", "never", "always"),
    [
        (("never",), [3.0, -inf], [-inf, -inf]),
        (("always",), [-inf, -inf], [5.0, -inf]),
        (("except_last",), [-inf, -inf], [5.0, -inf]),
        (("by_stage",), [3.0, -inf], [5.0, -inf]),
        (("never", "always"), [3.0, -inf], [5.0, -inf]),
    ],
)
def test_how_many_micro_batches_fit(
    modes: tuple[Any, ...], never: list[float], always: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the modes that may be, on stages that may be."""
    seconds = np.array([1.0, 2.0])
    group: Any = SimpleNamespace(
        forward=seconds,
        backward=2 * seconds,
        most_in_flight=lambda mode: np.array([3.0, 3.0] if mode == "never" else [5.0, 5.0]),
        table=SimpleNamespace(stage_bytes=SimpleNamespace(trainable=seconds), crossing=seconds),
    )
    monkeypatch.setattr(replica_groups, "all_reduce_seconds", lambda *_: np.zeros(2))
    space: Any = SimpleNamespace(
        usable=np.array([True, False]),
        budget=SimpleNamespace(check=lambda: None),
        replica_group=lambda *_: group,
        gradients=lambda trainable: trainable,
        topology=None,
    )
    own = cost_replicas(space, MicroBatchChoice("1f1b", 1, 2, modes), (0,))
    assert (own.never.tolist(), own.always.tolist()) == (never, always)
    # A stage recomputes from where it does not fit without, and there is none where it does not at all.
    for held, expected in ((3, 3.0 if never[0] == 3.0 else 4.0), (4, 4.0), (6, inf)):
        expected = expected if max(never[0], always[0]) >= held else inf
        assert own.work(held).tolist() == [expected, inf]


@pytest.mark.parametrize(
    ("gpus", "per_node", "most", "each"),
    [
        (8, 8, 8, 1),
        (9, 8, 8, 2),
        (16, 8, 8, 2),
        (24, 8, 8, 4),
        (12, 6, 4, 3),
        (64, 8, 8, 8),
        (72, 8, 8, 16),
        (7, 7, 3, 7),
    ],
)
def test_devices_that_stay_together(gpus: int, per_node: int, most: int, each: int) -> None:
    """The fewest: parts of a node, or whole ones."""
    assert group_devices(gpus, per_node, most) == each


def test_replicas_that_a_runtime_allows(make_problem: MakeProblem, make_chain: MakeChain) -> None:
    chain = make_chain(1, 6, cuts=1.1)
    sizes = [
        size_choices(make_problem(chain, 4, mini_batch=8, runtime=name, schedule=schedule).space, [1, 2, 4])
        for name, schedule in ((None, "auto"), ("deepspeed", "1f1b"), ("torchgpipe", "gpipe"))
    ]
    assert sizes == [[[1, 2, 4]], [[1], [2], [4]], [[1]]]


def test_stages_of_as_many_layers(make_named: MakeNamed) -> None:
    """More on later stages; at the nearest places where stages may end; of blocks, where names tell them."""
    names = [f"a{n}" for n in range(7)]
    assert equal_blocks(make_named(names), 3) == (2, 4, 7)
    assert equal_blocks(make_named(names), 4) == (1, 3, 5, 7)
    assert equal_blocks(make_named(names), 7) == (1, 2, 3, 4, 5, 6, 7)
    assert equal_blocks(make_named(names), 1) == (7,)
    assert equal_blocks(make_named(names, cuts=(3, 6)), 3) == (3, 6, 7)
    blocks = ["embed", *(f"layers.{n}" for n in range(5)), "norm", "head"]
    assert equal_blocks(make_named(blocks), 2) == (3, 8)
    assert equal_blocks(make_named(blocks), 3) == (2, 4, 8)
    assert equal_blocks(make_named(blocks), 5) == (2, 3, 4, 5, 8)
    assert equal_blocks(make_named(blocks), 6) == (1, 2, 3, 4, 6, 8)  # more than there are blocks


def test_stages_and_replicas_that_are_all_devices(make_problem: MakeProblem, make_chain: MakeChain) -> None:
    chain = make_chain(1, 6, cuts=1.1)
    problem = make_problem(chain, 6, mini_batch=12)
    assert sorted(full_shapes(problem)) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert sorted(full_shapes(make_problem(chain, 6, mini_batch=12, max_stages=3))) == [
        (1, 6),
        (2, 3),
        (3, 2),
    ]
    linear = make_problem(chain, 6, mini_batch=12, runtime="torchgpipe", schedule="gpipe")
    assert all(stages * width <= 6 for stages, width in full_shapes(linear))
    assert [can_share(problem, 6, width) for width in (1, 2, 3, 4, 6)] == [
        problem.space.fits_someone(6, 1),
        True,
        True,
        False,
        True,
    ]


def test_the_width_and_depth_with_the_least_estimate(
    make_problem: MakeProblem, make_chain: MakeChain, monkeypatch: Patch
) -> None:
    """Of one size of micro-batches each, with what all stages recompute."""
    problem = make_problem(make_chain(1, 6, cuts=1.1), 4, mini_batch=4, schedule="1f1b")
    asked = list[Any]()

    def plans(_: Any, own: MicroBatchChoice, stages: int, width: int) -> Any:
        asked.append((own.size, stages, width))
        ends = tuple(6 * (stage + 1) // stages for stage in range(stages))
        if own.size != 1:
            yield 10.0 / stages, ends, (width,) * stages, False
            yield 9.0 / stages, ends, (width,) * stages, True

    monkeypatch.setattr(equal_replicas, "width_and_depth_plans", plans)
    proposals = list(PLANNERS["pipedream-2bw"].propose(problem))
    assert sorted(asked) == [(1, 4, 1), (2, 2, 2), (2, 4, 1), (4, 1, 4), (4, 2, 2), (4, 4, 1)]
    assert [(own.ends, own.replicas, own.config.micro_batch_size) for own in proposals] == [
        ((1, 3, 4, 6), (1, 1, 1, 1), 4),
        ((1, 3, 4, 6), (1, 1, 1, 1), 2),
    ]
    assert all(own.config.recompute in ("by_stage", "always") for own in proposals)


def test_plans_that_do_not_recompute(
    make_problem: MakeProblem, make_chain: MakeChain, monkeypatch: Patch
) -> None:
    """AutoPipe's and BaPipe's, whose estimates are without; BaPipe's with the best micro-batches of each
    number of stages."""
    problem = make_problem(make_chain(1, 6, cuts=1.1), 4, mini_batch=4, schedule="1f1b", recompute="auto")
    modes = {own.recompute for own in problem.configs}
    configs = [replace(own, recompute=mode) for own in problem.configs for mode in ("always", "never")]
    vars(problem)["configs"] = configs
    assert modes == {"by_stage"}
    own = list(PLANNERS["autopipe"].propose(problem))
    assert {plan.config.recompute for plan in own} == {"never"}
    assert {(len(plan.ends), plan.replicas[0]) for plan in own} == {(1, 4), (2, 2), (4, 1)}
    estimates = {(2, 1): 5.0, (2, 2): 4.0, (2, 4): 6.0, (3, 1): 3.0, (1, 2): 7.0}

    def find(_: Any, each: MicroBatchChoice, stages: int) -> Any:
        seconds = estimates.get((stages, each.size))
        return None if seconds is None else (seconds, tuple(range(7 - stages, 7)))

    monkeypatch.setattr(equal_replicas, "find_bapipe_plan", find)
    plans = {len(plan.ends): plan for plan in PLANNERS["bapipe"].propose(problem)}
    assert {stages: plan.config.micro_batch_size for stages, plan in plans.items()} == {1: 2, 2: 2, 3: 1}
    assert {stages: plan.ends for stages, plan in plans.items()} == {1: (6,), 2: (5, 6), 3: (4, 5, 6)}
    assert {plan.config.recompute for plan in plans.values()} == {"never"}
    assert [plan.devices for plan in plans.values()] == [
        tuple((d,) for d in range(len(plan.ends))) for plan in plans.values()
    ]
    assert PLANNERS["bapipe"].refusal(problem) == "does not fit"
    long: Any = SimpleNamespace(space=SimpleNamespace(is_long=True))
    assert list(PLANNERS["bapipe"].propose(long)) == []
    assert PLANNERS["bapipe"].refusal(long) == "too many layers"

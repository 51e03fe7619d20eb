"""Where no plan fits: what is said, and that every change that is named makes one fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pplan.cost_models.errors import InfeasibleError
from pplan.cost_models.layer import Chain
from pplan.cost_models.quantities import parse_bytes
from pplan.cost_models.topology import Topology
from pplan.planner.infeasible import no_plan_fits
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def refused(problem: Problem) -> InfeasibleError:
    assert find_best_plan(problem, []).best is None
    return no_plan_fits(problem)


def changed(problem: Problem, words: str) -> Problem:
    """The problem with what a hint says, read as fields."""
    options, topology = problem.options, problem.topology
    for field, value in re.findall(r"([a-z_]+)='?([^ ']+)", words.split("(")[0]):
        if field == "gpus":
            topology = topology.with_gpus(int(value))
        elif field == "memory":
            size = parse_bytes(value)
            groups = tuple(
                group._replace(device=replace(group.device, memory_bytes=size)) for group in topology.groups
            )
            topology, options = replace(topology, groups=groups), replace(options, memory_limit=None)
        else:
            known: dict[str, Any] = {"mini_batch": int, "zero": int, "micro_batches": lambda _: None}
            options = replace(options, **{field: known.get(field, str)(value)})
    return Problem(problem.chain, topology, options)


WISHES: list[dict[str, Any]] = [
    {},
    {"recompute": "never"},
    {"micro_batches": 2, "optimizer": "adam"},
    {"schedule": "gpipe", "optimizer": "adam"},
    {"max_stages": 1},
    {"use_all": True},
    {"pins": (("layer5", 0),)},
    {"cut_after": ("layer0",)},
    {"runtime": "deepspeed"},
    {"runtime": "torchgpipe"},
    {"memory_limit": 350.0},
    {"schedule": "zb-h1"},
    {"schedule": "interleaved"},
    {"schedule": "zb-v", "optimizer": "adam"},
    {"schedule": "any", "recompute": "always"},
    {"recompute": "first_layers", "zero": 1, "optimizer": "adam"},
]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(own, marks=[pytest.mark.slow] * (number not in (1, 5, 8, 10, 11)))
        for number, own in enumerate(WISHES)
    ],
    ids=lambda options: "-".join(options) or "free",
)
def test_every_change_that_is_named_fits(
    options: dict[str, Any], make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain, named = make_chain(3, 8, cuts=1.1), 0
    for memory in (400, 600, 800):
        problem = Problem(chain, make_topology(2, memory=memory), PlanOptions(mini_batch=8, **options))
        if find_best_plan(problem, []).best is not None:
            continue
        error = no_plan_fits(problem)
        assert error.exit_status == 3
        assert "a device" in error.what
        if error.hint.startswith("Omit "):
            bare = replace(problem.options, pins=(), cut_after=(), use_all=False)
            assert find_best_plan(replace(problem, options=bare)).best is not None
            continue
        for words in error.hint.removeprefix("What would fit: ").rstrip(".").split("; or "):
            assert find_best_plan(changed(problem, words)).best is not None, words
            named += 1
    assert named > 0


def test_wishes_that_leave_no_plan_whatever_the_memory(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """With or without a limit."""
    chain = make_chain(3, 8, cuts=1.1)
    pinned = PlanOptions(mini_batch=8, pins=(("layer3", 7),))
    for options in (pinned, PlanOptions(mini_batch=8, cut_after=("layer1", "layer2", "layer3"))):
        error = refused(Problem(chain, make_topology(2), options))
        if options.pins:
            assert error.what == "pins=('layer3', 7): it needs 8 stages, and 2 devices make at most 2 stages"
            assert error.hint == "Pin it to stage1 or an earlier one."
        else:
            number = "`cut_after` names 3 layers, which makes 4 stages"
            assert error.what == f"{number}, and 2 devices make at most 2 stages"
            assert error.hint == "Name at most 1 layer."


def test_a_planner_that_makes_none(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain = make_chain(3, 8, cuts=1.1)
    error = refused(Problem(chain, make_topology(2), PlanOptions(mini_batch=8, planner="megatron")))
    assert error.what == "planner='megatron': no transformer blocks recognised"
    assert error.hint == "Omit `planner`: other plans fit."
    one_gpu = PlanOptions(mini_batch=8, planner="one-gpu")
    error = refused(Problem(chain, make_topology(4, memory=500), one_gpu))
    assert error.what == "planner='one-gpu': does not fit: device 0 needs 1.06 KiB of 500 B"
    error = refused(Problem(chain, make_topology(2, memory=100), one_gpu))
    assert error.what.startswith("no plan fits into 100 B a device: stage ")


def test_a_schedule_that_is_not_searched(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain = make_chain(3, 8, cuts=1.1)
    options = PlanOptions(mini_batch=8, schedule="zb-h1")
    error = refused(Problem(chain, make_topology(2, memory=100), options))
    assert error.what.startswith("no plan under zb-h1 fits into 100 B a device: stage ")
    assert ", zb-h1, recompute never) needs at least " in error.what
    options = replace(options, schedule="interleaved")
    error = refused(Problem(chain, make_topology(2, memory=100), options))
    assert error.what.startswith(
        "no plan under interleaved fits into 100 B a device: the smallest known plan needs "
    )
    assert "stage" not in error.details


BYTES = (
    "parameter_bytes",
    "trainable_bytes",
    "buffer_bytes",
    "output_bytes",
    "saved_bytes",
    "workspace_bytes",
)


@pytest.mark.parametrize("options", [{"pins": (("layer6", 0),)}, {"schedule": "zb-h1"}], ids=["pins", "zb"])
def test_the_memory_that_is_named_is_enough_under_the_options(
    options: dict[str, Any], make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """The plan that needs least is not one that a pin allows, or another schedule's."""
    chain = make_chain(3, 8, cuts=1.1)
    larger: dict[str, Any] = {name: 2**24 * getattr(chain, name) for name in BYTES}
    problem = Problem(
        replace(chain, **larger),
        make_topology(2, memory=2**30),
        PlanOptions(mini_batch=8, micro_batches=4, **options),
    )
    error = refused(problem)
    *_, words = error.hint.removeprefix("What would fit: ").rstrip(".").split("; or ")
    assert re.fullmatch(r"memory='[\d.]+[GMK]?i?B' a device", words)
    assert find_best_plan(changed(problem, words)).best is not None


def test_of_several_options_the_first_that_fails_is_named(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """Pins are checked before cuts, and a runtime that is not the cause is not blamed."""
    chain, topology = make_chain(3, 8, cuts=1.1), make_topology(2)
    options = PlanOptions(mini_batch=8, pins=(("layer3", 7),), runtime="torch")
    both = replace(options, runtime=None, cut_after=("layer1", "layer2", "layer3"))
    for own in (options, both):
        error = refused(Problem(chain, topology, own))
        assert error.what.startswith("pins=('layer3', 7): it needs 8 stages")
        assert error.hint == "Pin it to stage1 or an earlier one."


def test_pins_that_no_memory_helps(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    options = PlanOptions(mini_batch=8, pins=(("layer1", 2),))
    error = refused(Problem(make_chain(3, 8, cuts=1.1), make_topology(4, memory=50), options))
    needs = "stage 2 needs 2 cuts between the beginning on stage 0 and layer1, and 1 can be made"
    assert error.what == f"pins=('layer1', 2): {needs}"
    assert error.hint == "Pin it to stage1, or omit the pin. Memory is too small for that, too."


def test_memory_is_not_blamed_for_what_the_options_forbid(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain, topology = make_chain(3, 8, cuts=1.1), make_topology(3, memory=10**9)
    options = PlanOptions(mini_batch=8, keep_together=("*",), use_all=True, runtime="torchgpipe")
    error = refused(Problem(chain, topology, options))
    assert error.what == "`use_all`: at most 1 stage of 1 replica each use 1 of the 3 devices"
    assert error.hint == "Omit `use_all`, or use gpus=1."

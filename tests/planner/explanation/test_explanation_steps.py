"""What an explanation changes and says, by hand, with searches whose plans stand here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Topology
from pplan.planner.explanation import explanation as module
from pplan.planner.explanation.explain_context import SECONDS, make_context
from pplan.planner.explanation.explanation import _made_for, _notes, count_more, solve_what_ifs
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.search.budget import SearchBudget

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
Solve = Callable[..., Any]
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(("sharers", "words"), [(1, "one more GPU"), (4, "one more group of 4 GPUs")])
@pytest.mark.parametrize("launches", [True, False])
def test_each_change_by_itself(
    launches: bool,
    sharers: int,
    words: str,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    monkeypatch: Patch,
) -> None:
    """One device more, twice the bandwidth, twice the memory, recomputation of all and of none, and launches
    in no time."""
    problem = Problem(
        make_chain(1, 6), make_topology(3, memory=900), PlanOptions(mini_batch=8, memory_limit=800)
    )
    asked = list[Problem]()

    def resolve(own: Problem, seeds: Any, seconds: float, *, fully: bool) -> Any:
        assert (seeds, seconds, fully) == (["seed"], SECONDS / 2, True)
        asked.append(own)
        return SimpleNamespace(best=SimpleNamespace(step_seconds=3.2), exact=len(asked) % 2 == 0)

    monkeypatch.setattr(module, "resolve", resolve)
    monkeypatch.setattr(module, "plan_row", lambda _, **__: None)
    context: Any = SimpleNamespace(
        problem=problem,
        present=SimpleNamespace(step_seconds=4.0, recompute=("never",)),
        budget=SearchBudget(),
    )
    plan: Any = SimpleNamespace(profile=SimpleNamespace(tensor_parallel=sharers), device_kind="GPU")
    seeds: Any = ["seed"]
    answers = list(solve_what_ifs(context, seeds, plan, launches=launches))
    assert (answers[0].plan, answers[0].reason) == (None, "")
    changes = [words, "double the bandwidth", "double the memory", "recompute always", "recompute never"]
    assert [own.change for own in answers] == changes + ["launches in no time"] * launches
    assert [own.proven for own in answers] == [n % 2 == 0 for n in range(1, len(answers) + 1)]
    assert all(own.faster == pytest.approx(0.25) for own in answers)
    more, wide, large, always, never, *rest = asked
    assert (more.gpus, more.options.mini_batch) == (4, 8)
    rates = [level.link.bandwidth_bytes_per_second for level in wide.topology.levels]
    assert (wide.gpus, rates) == (3, [40.0, 10.0])
    assert (large.topology.device(0).memory_bytes, large.options.memory_limit) == (1800, 1600)
    assert (always.options.recompute, never.options.recompute) == ("always", "never")
    assert [float(np.abs(own.chain.forward_host_seconds).sum()) for own in rest] == [0.0] * launches


def test_changes_without_a_plan(
    make_chain: MakeChain, make_topology: MakeTopology, monkeypatch: Patch
) -> None:
    problem = Problem(make_chain(1, 6), make_topology(3), PlanOptions(mini_batch=8))
    context: Any = SimpleNamespace(
        problem=problem,
        present=SimpleNamespace(step_seconds=4.0, recompute=("never",)),
        budget=SearchBudget(),
    )
    plan: Any = SimpleNamespace(profile=SimpleNamespace(tensor_parallel=1), device_kind="CPU")
    monkeypatch.setattr(module, "resolve", lambda *_, **__: SimpleNamespace(best=None, exact=True))
    answers = list(solve_what_ifs(context, [], plan, launches=False))
    assert answers[0].change == "one more CPU"
    # There is no memory to double.
    assert [(own.plan, own.reason, own.proven) for own in answers] == [(None, "no plan fits", False)] * 4

    def refuse(*_: Any, **__: Any) -> Any:
        raise UsageError("it cannot be", "")

    monkeypatch.setattr(module, "resolve", refuse)
    assert list(solve_what_ifs(context, [], plan, launches=False)) == []


def test_nothing_is_added_to_two_kinds_of_devices(
    make_chain: MakeChain, make_topology: MakeTopology, monkeypatch: Patch
) -> None:
    machine = make_topology(2)
    groups = tuple(Group(Device(name, None), 1) for name in ("small", "large"))
    problem = Problem(make_chain(1, 6), replace(machine, groups=groups), PlanOptions(mini_batch=8))
    context: Any = SimpleNamespace(
        problem=problem,
        present=SimpleNamespace(step_seconds=4.0, recompute=("never",)),
        budget=SearchBudget(),
    )
    plan: Any = SimpleNamespace(profile=SimpleNamespace(tensor_parallel=1), device_kind="GPU")
    monkeypatch.setattr(module, "resolve", lambda *_, **__: SimpleNamespace(best=None, exact=True))
    changes = [own.change for own in solve_what_ifs(context, [], plan, launches=False)]
    assert changes == ["double the bandwidth", "recompute always", "recompute never"]


@pytest.mark.parametrize(("gpus", "more"), [(3, 1), (4, 4), (6, 2), (8, 4)])
def test_a_full_machine_gets_another_server(gpus: int, more: int, make_topology: MakeTopology) -> None:
    assert count_more(make_topology(gpus, per_node=4)) == more


@pytest.mark.parametrize(("gpus", "more"), [(2, 1), (16, 16)])
def test_many_devices_that_are_joined_alike_are_doubled(
    gpus: int, more: int, make_topology: MakeTopology
) -> None:
    """Nobody has a machine of 17."""
    machine = make_topology(gpus)
    assert count_more(replace(machine, levels=machine.levels[-1:])) == more


def test_no_search_begins_when_the_time_is_over(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    problem = Problem(make_chain(1, 6), make_topology(3), PlanOptions(mini_batch=8))
    context: Any = SimpleNamespace(problem=problem, budget=SearchBudget(seconds=0))
    context.present = SimpleNamespace(recompute=("never",))
    plan: Any = SimpleNamespace(profile=SimpleNamespace(tensor_parallel=1), device_kind="GPU")
    assert list(solve_what_ifs(context, [], plan, launches=True)) == []


@pytest.mark.parametrize(
    ("aim", "replanned", "words"),
    [
        (None, False, ""),
        (None, True, "few weights to move"),
        ("memory", True, "the least memory"),
        ("cost", False, "the fewest dollars a sample"),
        ("robust", False, "the 90th percentile of its step"),
        ("slow-devices", False, "the mean step with slow devices"),
        ("another", False, "another"),
    ],
)
def test_what_a_plan_was_made_for(aim: str | None, replanned: bool, words: str) -> None:
    objective = None if aim is None else SimpleNamespace(name=aim)
    plan: Any = SimpleNamespace(objective=objective, is_replanned=replanned)
    assert _made_for(plan) == words


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("sharers", [1, 4])
def test_notes(sharers: int, fits: bool) -> None:
    context: Any = SimpleNamespace(
        present=SimpleNamespace(step_seconds=4.0), fits=fits, budget=SearchBudget()
    )
    plan: Any = SimpleNamespace(
        prediction=SimpleNamespace(step_seconds=4.0),
        sharing=[],
        profile=SimpleNamespace(tensor_parallel=sharers),
        is_replanned=False,
        topology=None,
    )
    unfit = [] if fits else ["the plan does not fit into the memory of its devices"]
    assert _notes(context, plan) == unfit
    plan.sharing, plan.is_replanned, plan.prediction.step_seconds = "some", True, 5.0
    shared = "one device has a layer" if sharers == 1 else "4 devices share every layer"
    assert _notes(context, plan) == [
        *unfit,
        f"in all other plans here {shared}, as in this one",
        "the other plans here may use all devices, those that were lost, too",
        "the plan takes 4.00 s a step here, it says 5.00 s: it was made for another machine",
    ]


def test_a_stage_that_ends_where_none_may(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    """As where the file was edited; with so heavy weights that replicas do not pay."""
    weights = np.full(6, 1e5)
    chain = replace(make_chain(3, 6, cuts=1.1, traffic=0.1), parameter_bytes=weights, trainable_bytes=weights)
    own = solved(chain, make_topology(2), mini_batch=8, schedule="1f1b", recompute="never")
    first, second = own.plan.stages
    end = first.last_layer
    closed = chain.cut_after.copy()
    closed[end] = False
    with pytest.raises(
        UsageError, match=f"the plan's stage 0 ends with layer {end}, after which its options"
    ):
        make_context(own.plan, replace(chain, cut_after=closed), own.topology)
    assert make_context(own.plan, chain, own.topology).present.proposal.ends == (
        end + 1,
        second.last_layer + 1,
    )

"""What runner-up plans are chosen from, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.explanation import rivals
from pplan.planner.explanation.explain_context import search_near
from pplan.planner.explanation.rivals import (
    _cuts,
    _differs,
    _near,
    _runs,
    _shapes,
    runners_up,
)
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.search.placements import list_placements

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
Solve = Callable[..., Any]
CONFIG = PipelineConfig("1f1b", "never", 4, 2)


def proposal(ends: tuple[int, ...], *devices: tuple[int, ...]) -> Proposal:
    return Proposal(CONFIG, ends, devices)


@pytest.fixture
def four(make_chain: MakeChain, make_topology: MakeTopology) -> Problem:
    return Problem(make_chain(1, 8, cuts=1.1), make_topology(4), PlanOptions(mini_batch=8))


def test_a_device_more_or_less_or_moved(four: Problem) -> None:
    """Of two replicas and one, on four devices: none takes the only one."""

    def shapes(own: Proposal) -> list[tuple[int, ...]]:
        return sorted(each.replicas for each in _near(four, own, 4) if each.ends == own.ends)

    assert shapes(proposal((4, 8), (0, 1), (2,))) == [(1, 1), (1, 2), (2, 2), (3, 1)]
    assert shapes(proposal((4, 8), (0, 1), (2, 3))) == [(1, 2), (1, 3), (2, 1), (3, 1)]
    near = [own.devices for own in _near(four, proposal((4, 8), (0, 1), (2, 3)), 4)]
    assert ((0,), (1, 2, 3)) in near


def test_runs_of_an_order(make_topology: MakeTopology) -> None:
    (order,) = list_placements(make_topology(3))
    assert list(_runs(order, 1, [1, 2], 0)) == [((0,),), ((0, 1),)]
    assert list(_runs(order, 2, [1, 2], 0)) == [((0,), (1,)), ((0,), (1, 2)), ((0, 1), (2,))]
    assert list(_runs(order, 3, [1, 2], 0)) == [((0,), (1,), (2,))]
    assert list(_runs(order, 4, [1], 0)) == []
    nodes = list_placements(make_topology(4, per_node=2))[0]
    assert list(_runs(nodes, 2, [1], 0)) == [((0,), (1,)), ((0,), (2,))]


def test_shapes_nearest_to_the_plans_own_come_first(four: Problem) -> None:
    own = proposal((4, 8), (0, 1), (2,))
    shapes, every = _shapes(four, own)
    assert every
    assert len(shapes) == len(set(shapes))
    distances = [
        sum(abs(len(a) - len(b)) for a, b in zip(shape, own.devices, strict=True)) for shape in shapes
    ]
    assert distances == sorted(distances)
    assert {tuple(map(len, shape)) for shape in shapes} == {
        (a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a + b <= 4
    }


def test_the_cuts_next_to_the_busiest_stage() -> None:
    """Eight of eleven, in their order."""
    twelve = proposal(tuple(range(1, 13)), *((stage,) for stage in range(12)))
    assert _cuts(twelve, 0) == list(range(1, 9))
    assert _cuts(twelve, 11) == list(range(4, 12))
    assert _cuts(twelve, 6) == list(range(3, 11))
    assert _cuts(proposal((4, 8), (0,), (1,)), 1) == [4]
    assert _cuts(proposal((8,), (0,)), 0) == []


def test_a_cut_at_the_next_place(four: Problem) -> None:
    def moved(own: Proposal) -> set[tuple[int, ...]]:
        return {each.ends for each in _near(four, own, 0)}

    assert moved(proposal((3, 4, 8), (0,), (1,), (2,))) == {(2, 4, 8), (3, 5, 8)}
    assert moved(proposal((1, 8), (0,), (1,))) == {(2, 8)}
    assert moved(proposal((4, 8), (0,), (1,))) == {(3, 8), (5, 8)}


def test_devices_that_make_another_plan(
    make_chain: MakeChain, make_topology: MakeTopology, solved: Solve
) -> None:
    """More of them, or joined over the slow link; not others of the same node."""
    chain = make_chain(1, 6, cuts=1.1, traffic=1.0)
    question = solved(
        chain, make_topology(4, per_node=2), mini_batch=8, max_stages=2, schedule="1f1b"
    ).question
    present = question.present
    assert not _differs(question, present.proposal.devices)
    assert _differs(question, (*present.proposal.devices[:-1], (0, 1, 2, 3)))


@pytest.mark.parametrize("schedule", ["1f1b", "any"])
@pytest.mark.parametrize("exact", [True, False])
def test_what_is_proven_of_runners_up(
    schedule: str,
    exact: bool,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    solved: Solve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing where some schedules are not searched, or where a search ended early."""
    if not exact:
        monkeypatch.setattr(rivals, "search_near", lambda *own: replace(search_near(*own), exact=False))
    chain = make_chain(1, 4, cuts=1.1, traffic=0.1)
    options = {"mini_batch": 4, "micro_batches": 2, "recompute": "never", "schedule": schedule}
    question = solved(chain, make_topology(2), **options).question
    present = question.present
    linear = present.config.schedule in ("1f1b", "gpipe")
    found = runners_up(question, [present], busiest=0)
    proven = exact and schedule == "1f1b"
    assert found.other_stages.proven == proven
    assert found.second_best.proven == (proven and found.as_fast is None)
    assert linear or not found.second_best.proven

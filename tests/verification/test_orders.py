"""The orders of actions: as their papers draw them, and the same as the schedules' own programs."""

from __future__ import annotations

from itertools import product

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.schedules import SCHEDULES, find_schedule
from pplan.verification.orders import ASYNCHRONOUS, SYNCHRONOUS, ScheduleOrder, make_order
from pplan.verification.report import ImpossiblePlan, NotChecked
from pplan.verification.wiring import check_order, most_in_flight, wire_order


def drawn(order: ScheduleOrder) -> list[str]:
    return [
        " ".join(f"{kind.lower() if chunk else kind}{batch}" for kind, batch, chunk in own)
        for own in order.lists
    ]


def test_1f1b_as_in_the_paper() -> None:
    assert drawn(make_order("1f1b", 3, 4, 1)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_zb_h1_as_in_the_paper() -> None:
    assert drawn(make_order("zb-h1", 3, 4, 1)) == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_interleaved_as_in_the_paper() -> None:
    assert drawn(make_order("interleaved", 2, 4, 2)) == [
        "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3",
        "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3",
    ]


def test_every_schedule_is_known() -> None:
    assert set(SYNCHRONOUS) == {name for name, own in SCHEDULES.items() if own.synchronous}
    assert set(ASYNCHRONOUS) == {name for name, own in SCHEDULES.items() if not own.synchronous}


@pytest.mark.parametrize("name", [*SYNCHRONOUS, "wpipe"])
def test_the_same_as_the_programs(name: str) -> None:
    """Two ways to say the same: for every number, both run it or neither does."""
    ran = 0
    for p, m, v in product(range(1, 6), (1, 2, 3, 4, 6, 8, 10, 20), (1, 2, 3)):
        try:
            program = find_schedule(name).program(p, m, v)
        except UsageError:
            with pytest.raises(ImpossiblePlan):
                make_order(name, p, m, v)
            continue
        order = make_order(name, p, m, v)
        assert [[tuple(action) for action in own] for own in program.actions] == order.lists
        assert [[tuple(place) for place in pipe] for pipe in program.pipes] == order.routes
        assert list(program.pipe_of) == order.route_of
        assert [program.share(entry) for entry in range(program.micro_batches)] == order.shares
        assert most_in_flight(order) == pytest.approx([max(program.in_flight(d)) for d in range(p)])
        check_order(order)
        ran += 1
    assert ran > 5


@pytest.mark.parametrize(
    ("p", "m", "v"), [(0, 1, 1), (1, 0, 1), (1, 1, 0), (3, 6, 2)], ids=["p", "m", "v", "chunks"]
)
def test_numbers_that_cannot_be(p: int, m: int, v: int) -> None:
    with pytest.raises(ImpossiblePlan):
        make_order("1f1b", p, m, v)


def test_an_unknown_schedule_and_too_many_actions() -> None:
    with pytest.raises(ImpossiblePlan, match="schedule 'x' is none of naive"):
        make_order("x", 1, 1, 1)
    with pytest.raises(NotChecked, match="more than"):
        make_order("1f1b", 2**12, 2**12, 1)


def changed(lists: list[list[str]], held: float = 9) -> ScheduleOrder:
    own = [[(action[0], int(action[1]), 0) for action in device] for device in lists]
    routes = [[(device, 0) for device in range(len(lists))]]
    return ScheduleOrder(own, routes, [0, 0], [1.0, 1.0], [held] * len(lists), "")


@pytest.mark.parametrize(
    ("lists", "why"),
    [
        ([["F0", "F1", "B0", "B1"], ["F0", "F1", "B0"]], "missing"),
        ([["F0", "F1", "B0", "B1"], ["F0", "F1", "F0", "B0", "B1"]], "twice"),
        ([["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]], "in a circle"),
        ([["F1", "F0", "B0", "B1"], ["F0", "B0", "F1", "B1"]], None),
    ],
)
def test_orders_that_cannot_be_run(lists: list[list[str]], why: str | None) -> None:
    if why is None:
        assert len(wire_order(changed(lists))) == 8
    else:
        with pytest.raises(ImpossiblePlan, match=why):
            wire_order(changed(lists))


def test_more_in_flight_than_the_definition_says() -> None:
    order = changed([["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]], held=1)
    with pytest.raises(ImpossiblePlan, match="device 0 holds 2 micro-batches, 1 at the most"):
        check_order(order)

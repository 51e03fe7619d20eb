"""The orders of actions: those of the oracle's rules are those of the schedules' programs."""

from __future__ import annotations

from itertools import product

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.schedules import SCHEDULES, find_schedule
from tests.oracle.events import wire_order
from tests.oracle.orders import ASYNCHRONOUS, ORDERS, ImpossiblePlanError, Order, make_order


def test_every_schedule_is_known() -> None:
    assert set(ORDERS) - set(ASYNCHRONOUS) == {name for name, own in SCHEDULES.items() if own.synchronous}
    assert set(ASYNCHRONOUS) == {name for name, own in SCHEDULES.items() if not own.synchronous}


@pytest.mark.parametrize("name", ORDERS)
def test_the_same_as_the_programs(name: str) -> None:
    """Two ways to say the same: for every number, both run it or neither does."""
    ran = 0
    for p, m, v in product(range(1, 6), (1, 2, 3, 4, 6, 8, 10, 20), (1, 2, 3)):
        try:
            program = find_schedule(name).program(p, m, v)
        except UsageError:
            with pytest.raises(ImpossiblePlanError):
                make_order(name, p, m, v)
            continue
        order = make_order(name, p, m, v)
        assert [[tuple(action) for action in own] for own in program.actions] == order.lists
        assert [[tuple(place) for place in pipe] for pipe in program.pipes] == order.routes
        assert list(program.pipe_of) == order.route_of
        assert [program.share(entry) for entry in range(program.micro_batches)] == order.shares
        if len(program.pipes) == 1:
            most = [max(program.in_flight(device)) for device in range(p)]
            assert [order.most_in_flight(device) for device in range(p)] == pytest.approx(most)
        wire_order(order)
        ran += 1
    assert ran > 5


@pytest.mark.parametrize(
    ("lists", "why"),
    [
        ([["F0", "F1", "B0", "B1"], ["F0", "F1", "B0"]], "missing"),
        ([["F0", "F1", "B0", "B1"], ["F0", "F1", "F0", "B0", "B1"]], "twice"),
        ([["F0", "B0", "F1", "B1"], ["F0", "F1", "B0", "B1"]], "in a circle"),
    ],
)
def test_orders_that_cannot_be_run(lists: list[list[str]], why: str) -> None:
    actions = [[(action[0], int(action[1]), 0) for action in device] for device in lists]
    order = Order(actions, [[(device, 0) for device in range(2)]], [0, 0], [1.0, 1.0])
    with pytest.raises(ImpossiblePlanError, match=why):
        wire_order(order)

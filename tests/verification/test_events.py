"""The event loop against steps that were added up by hand, and against the simulator on random costs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.simulator.costs import Costs
from pplan.cost_models.timeline import simulate
from pplan.verification.orders import make_order
from pplan.verification.wiring import NONE, StepWork, simulate_events, wire_order


def work(
    schedule: str, p: int, m: int, forward: float, backward: float, occupancy: float, **more: Any
) -> StepWork:
    wiring = wire_order(make_order(schedule, p, m, 1))
    ports: list[Hashable | None] = [
        None if target == NONE else more.get("port", (device, wiring.device[target]))
        for device, target in zip(wiring.device, wiring.target, strict=True)
    ]
    return StepWork(
        wiring,
        [forward if kind == "F" else backward for kind, _, _ in wiring.action],
        ports,
        [0.0 if port is None else occupancy for port in ports],
        [0.0 if port is None else more.get("latency", 0.0) for port in ports],
        blocking=more.get("blocking", False),
    )


def test_without_transfers() -> None:
    """(m + p - 1) (F + B)."""
    assert max(simulate_events(work("1f1b", 3, 4, 1.0, 2.0, 0.0)).end) == pytest.approx(18.0)
    assert max(simulate_events(work("gpipe", 3, 4, 1.0, 2.0, 0.0)).end) == pytest.approx(18.0)


def test_transfers_take_turns_on_their_port() -> None:
    """Two stages, two micro-batches, gpipe: forwards of 1 s end at 1 and 2, transfers of 3 s one by one: they
    arrive at 4 and 7, and 1 s later each with the latency."""
    ran = simulate_events(work("gpipe", 2, 2, 1.0, 1.0, 3.0))
    assert sorted(ran.start)[:4] == [0.0, 1.0, 4.0, 7.0]
    ran = simulate_events(work("gpipe", 2, 2, 1.0, 1.0, 3.0, latency=1.0))
    assert sorted(ran.start)[:4] == [0.0, 1.0, 5.0, 8.0]


def test_one_port_for_all() -> None:
    """naive, one micro-batch: the same; gpipe on three stages: both cuts' activations wait for each other."""
    own = max(simulate_events(work("gpipe", 3, 4, 1.0, 1.0, 2.0)).end)
    assert max(simulate_events(work("gpipe", 3, 4, 1.0, 1.0, 2.0, port="one")).end) > own
    assert max(simulate_events(work("naive", 2, 1, 1.0, 1.0, 2.0, port="one")).end) == pytest.approx(8.0)


def test_a_launch_that_is_late() -> None:
    """One host: launches of 2 s one after another, actions of 1 s end with them."""
    bare = work("naive", 1, 2, 1.0, 1.0, 0.0)
    ends = [2.0, 4.0, 6.0, 8.0]
    ran = simulate_events(
        StepWork(
            bare.wired_order, bare.seconds, bare.port, bare.occupancy, bare.latency, [0.0, *ends[:-1]], ends
        )
    )
    assert ran.end == ends


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "chimera", "interleaved"])
def test_against_the_simulator(schedule: str, blocking: bool) -> None:
    rng = np.random.default_rng(len(schedule))
    parts = 2 if schedule == "interleaved" else 1
    program = find_schedule(schedule).program(4, 8, parts)
    shape = (program.devices, program.chunks, 1)
    forward, backward, weight = (rng.random(shape) for _ in range(3))
    cuts = (len(program.pipes), program.slots - 1)
    occupancy, latency = 0.3 * rng.random(cuts), 0.1 * rng.random(cuts)
    costs = Costs(
        forward=forward,
        backward=backward,
        weight=weight if program.splits_backward else None,
        forward_occupancy=occupancy,
        forward_latency=latency,
        backward_occupancy=occupancy,
        backward_latency=latency,
        transfers="blocking" if blocking else "overlapped",
    )
    wiring = wire_order(make_order(schedule, 4, 8, parts))
    tables = {"F": forward, "B": backward, "W": weight}
    rows = []
    for index, target in enumerate(wiring.target):
        kind, _, chunk = wiring.action[index]
        device, route = wiring.device[index], wiring.route[index]
        cut = 0 if target == NONE else min(wiring.part[index], wiring.part[target])
        sends = target != NONE
        rows.append(
            (
                float(tables[kind][device, chunk, 0]),
                (device, wiring.device[target]) if sends else None,
                float(occupancy[route, cut]) if sends else 0.0,
                float(latency[route, cut]) if sends else 0.0,
            )
        )
    seconds, ports, taken, late = (list(column) for column in zip(*rows, strict=True))
    ran = simulate_events(StepWork(wiring, seconds, ports, taken, late, blocking=blocking))
    assert max(ran.free) == pytest.approx(simulate(program, costs).step_seconds, rel=1e-12)

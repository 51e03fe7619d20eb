"""What is read from a timeline: where the time goes, transfers, memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.program import Action, Program, StageSlot, linear_program
from pplan.cost_models.schedules import SCHEDULES, find_schedule
from pplan.cost_models.step_costs import TRANSFERS, stage_costs
from pplan.cost_models.timeline import StageTime, Transfer, simulate

TWO = find_schedule("gpipe").program(2, 2)


def test_where_the_time_goes() -> None:
    """Latency 0.5. Stage 1: F0 1.5-2.5, F1 2.5-3.5, B1 3.5-5, B0 5-6.5; stage 0: F0 0-1, F1 1-2, B1 5.5-6.5,
    and B0, whose gradient is under way from 6.5 to 7, 7-8."""
    costs = replace(
        stage_costs(TWO, 1.0, [1.0, 1.5], transfer_latency=0.5), all_reduce=np.array([[0.25], [0.5]])
    )
    timeline = simulate(TWO, costs)
    assert timeline.step_seconds == 8.25
    assert timeline.stage_times == (
        StageTime(compute=4, transfer=1.0, warm_up_cool_down=2.0, imbalance=1.0, update=0.25),
        StageTime(compute=5, transfer=0, warm_up_cool_down=2.75, imbalance=0, update=0.5),
    )


def test_transfers() -> None:
    costs = replace(stage_costs(TWO, 1.0, 1.0, transfer_latency=0.5), forward_occupancy=np.full((1, 1), 2.0))
    forwards = [t for t in simulate(TWO, costs).transfers if t.action.kind == "F"]
    assert forwards == [
        Transfer(0, 1, Action("F", 0), 1, 1, 3.5),
        Transfer(0, 1, Action("F", 1), 2, 3, 5.5),
    ]


def test_time_that_a_sender_waits_is_transfer() -> None:
    costs = replace(stage_costs(TWO, 1.0, 1.0, transfer_latency=0.5), transfers="blocking")
    timeline = simulate(TWO, costs)
    # F0 0-1, F1 1.5-2.5 and then 0.5 more for its own; B1 ends on stage 1 at 5, is there at 5.5; B0 likewise.
    assert [(str(s.action), s.start) for s in timeline.spans if s.stage == 0] == [
        ("F0", 0), ("F1", 1.5), ("B1", 5.5), ("B0", 7),
    ]  # fmt: skip
    assert timeline.stage_times[0] == StageTime(4, 0.5 + 1.0 + 0.5, 2.0, 0, 0)
    # Stage 1 sends B1 from 5 to 5.5 and B0 from 6.5 to 7.
    assert timeline.stage_times[1] == StageTime(4, 1.0 + 0.5, 1.5 + 1.0, 0, 0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transfers", TRANSFERS)
def test_the_parts_make_the_step(name: str, transfers: str) -> None:
    program = find_schedule(name).program(4, 8)
    costs = stage_costs(program, [1, 2, 1, 3], [2, 3, 1, 2], [0.5, 1, 2, 1], transfer_latency=0.375)
    costs = replace(
        costs, transfers=transfers, all_reduce=np.ones((4, 1)), optimizer=np.full(4, 0.25), buckets=2
    )
    try:
        timeline = simulate(program, costs)
    except UsageError:
        assert transfers == "rendezvous"
        return
    for stage, times in enumerate(timeline.stage_times):
        assert all(seconds >= 0 for seconds in times)
        assert sum(times) == pytest.approx(timeline.step_seconds, rel=1e-12)
        assert times.compute == timeline.busy_seconds[stage]


def test_a_stage_without_actions_fills_all_the_time() -> None:
    program = Program(((Action("F", 0), Action("B", 0)), ()), ((StageSlot(0),),), (0,))
    timeline = simulate(program, stage_costs(program, 1.0, 1.0))
    assert timeline.stage_times[1] == StageTime(0, 0, 0, 2, 0)
    assert timeline.peak_in_flight == (1, 0)
    assert timeline.bubble == 0.5
    assert simulate(program, stage_costs(program, 0.0, 0.0)).bubble == 0.0


SPLIT = linear_program(
    [[Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1), Action("W", 0), Action("W", 1)]]
)


def test_activations_live_to_the_weight_gradient() -> None:
    timeline = simulate(SPLIT, stage_costs(SPLIT, 1.0, 1.0, 1.0))
    assert timeline.memory_over_time(0, 100, 10) == [(0, 100), (0, 110), (1, 120), (5, 110), (6, 100)]
    assert timeline.peak_in_flight == (2,)


def test_chunks_hold_their_part_or_their_own_bytes() -> None:
    own = (Action("F", 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0))
    program = Program((own,), ((StageSlot(0), StageSlot(0, 1)),), (0,))
    timeline = simulate(program, stage_costs(program, 2.0, 2.0))
    assert timeline.memory_over_time(0, 0, 10) == [(0, 0), (0, 5), (1, 10), (3, 5), (4, 0)]
    assert timeline.memory_over_time(0, 0, [7, 1]) == [(0, 0), (0, 7), (1, 8), (3, 7), (4, 0)]
    with pytest.raises(UsageError, match="bytes_in_flight: 3 values for 2 chunks"):
        timeline.memory_over_time(0, 0, [1, 2, 3])


@pytest.mark.parametrize("name", SCHEDULES)
def test_in_flight_is_what_memory_over_time_holds(name: str) -> None:
    program = find_schedule(name).program(4, 8)
    timeline = simulate(program, stage_costs(program, 1.0, 1.5, 0.5, transfer_latency=0.1))
    for stage, peak in enumerate(timeline.peak_in_flight):
        levels = [level for _, level in timeline.memory_over_time(stage, 0, 1)]
        assert max(levels) == pytest.approx(peak)
        assert levels[-1] == pytest.approx(0)


def test_what_lies_between_the_parts_of_a_backward() -> None:
    """One stage: F for 1 s, B for 2, W for 3. F brings 10 bytes, B 2 as it begins and 3 as it ends; W ends
    all of them."""
    program = find_schedule("zb-h1").program(1, 1)
    costs = replace(
        stage_costs(program, 1.0, 2.0), weight=np.full((1, 1, 1), 3.0), backward=np.full((1, 1, 1), 2.0)
    )
    timeline = simulate(program, costs)
    assert timeline.step_seconds == 6.0
    points = timeline.memory_over_time(0, 100.0, 10.0, [(2.0, 3.0)])
    assert points == [(0.0, 100.0), (0.0, 110.0), (1.0, 112.0), (3.0, 115.0), (6.0, 100.0)]
    plain = timeline.memory_over_time(0, 100.0, 10.0)
    assert plain == [(0.0, 100.0), (0.0, 110.0), (6.0, 100.0)]

"""All-reduces beside the drain: cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.program import Action, Program, StageSlot, linear_program
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import Costs, recompute_shares, stage_costs
from pplan.cost_models.timeline import simulate, step_seconds
from tests.candidates import side_by_side

TWO = find_schedule("gpipe").program(2, 1)
"""F0 on stage 0 to 1 and on stage 1 to 2, B0 on stage 1 to 3 and on stage 0 to 4."""


def two(*all_reduce: float) -> Costs:
    return replace(stage_costs(TWO, 1.0, 1.0), all_reduce=np.array(all_reduce)[:, None])


def spans(program: Program, costs: Costs) -> list[tuple[tuple[int, ...], float, float]]:
    return [(r.stages, r.start, r.end) for r in simulate(program, costs).reductions]


def test_what_fits_beside_the_drain_is_free() -> None:
    timeline = simulate(TWO, two(0.0, 1.0))
    assert timeline.step_seconds == 4
    assert [(r.part, r.stages, r.start, r.end) for r in timeline.reductions] == [(1, (1,), 3, 4)]
    assert simulate(TWO, two(0.0, 1.5)).step_seconds == 4.5
    assert simulate(TWO, two(0.5, 3.0)).stage_end == (4.5, 6.0)


def test_the_optimizer_follows() -> None:
    costs = replace(two(0.5, 3.0), optimizer=np.array([0.25, 0.5]))
    assert simulate(TWO, costs).stage_end == (4.75, 6.5)
    assert step_seconds(TWO, side_by_side([costs, costs])).tolist() == [6.5, 6.5]


def test_a_device_reduces_while_it_sends_its_last_gradient() -> None:
    """Stage 1's backward ends at 4, its blocking transfer at 5; its all-reduce goes on from 4 to 7."""
    sent = stage_costs(TWO, 1.0, 1.0, transfer_latency=1.0)
    costs = replace(sent, all_reduce=np.array([[0.0], [3.0]]), transfers="blocking")
    assert spans(TWO, costs) == [((1,), 4.0, 7.0)]
    assert simulate(TWO, costs).step_seconds == 7
    assert step_seconds(TWO, side_by_side([costs, costs])).tolist() == [7.0, 7.0]


def test_buckets_begin_while_the_last_backward_runs() -> None:
    """Stage 0's last backward runs from 3 to 4: half its gradients are ready at 3.5."""
    costs = replace(two(1.0, 0.0), buckets=2)
    assert spans(TWO, costs) == [((0,), 3.5, 4.0), ((0,), 4.0, 4.5)]
    assert spans(TWO, replace(costs, buckets=4))[0] == ((0,), 3.25, 3.5)
    assert step_seconds(TWO, side_by_side([costs, two(1.0, 0.0)])).tolist() == [4.5, 4.5]


def test_gradients_appear_after_the_forward_that_is_run_again() -> None:
    """Backwards of 2 s, the first of it a forward again: stage 0's last runs from 4 to 6."""
    costs = replace(two(1.0, 0.0), buckets=2, recompute=recompute_shares("always", TWO))
    assert spans(TWO, costs) == [((0,), 5.5, 6.0), ((0,), 6.0, 6.5)]


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, [(3, 4), (4, 6)]), (3.0, [(3, 6), (6, 8)])])
def test_chunks_of_a_device_take_turns(seconds: float, expected: list[tuple[float, float]]) -> None:
    """One device, two chunks: B0.1 ends at 3, B0 at 4."""
    own = (Action("F", 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0))
    program = Program((own,), ((StageSlot(0), StageSlot(0, 1)),), (0,))
    costs = replace(stage_costs(program, 2.0, 2.0), all_reduce=np.array([[2.0, seconds]]))
    assert [(start, end) for _, start, end in spans(program, costs)] == expected
    assert [r.part for r in simulate(program, costs).reductions] == [1, 0]


def test_weight_gradients_come_first() -> None:
    """F to 1, B to 2, W to 3: nothing is reduced before its W."""
    program = linear_program([[Action("F", 0), Action("B", 0), Action("W", 0)]])
    costs = replace(stage_costs(program, 1.0, 1.0, 1.0), all_reduce=np.ones((1, 1)))
    assert spans(program, costs) == [((0,), 3, 4)]


def test_copies_of_a_part_wait_for_each_other() -> None:
    """Two directions over two devices: part k lies on device k of one, on device 1 - k of the other.

    Device 0 runs F0, F1', B1', B0 (a prime for the other direction's first or last part), each 1 s.
    """
    there, back = (StageSlot(0), StageSlot(1)), (StageSlot(1, 1), StageSlot(0, 1))
    program = Program(
        (
            (Action("F", 0), Action("F", 1, 1), Action("B", 1, 1), Action("B", 0)),
            (Action("F", 1, 1), Action("F", 0), Action("B", 0), Action("B", 1, 1)),
        ),
        (there, back),
        (0, 1),
    )
    costs = replace(stage_costs(program, 1.0, 1.0), all_reduce=np.array([[0.5, 2.0], [2.0, 0.5]]))
    # Part 1 is complete on both devices at 3, part 0 at 4; each device reduces one at a time.
    assert spans(program, costs) == [((0, 1), 3, 5), ((0, 1), 5, 5.5)]
    slower = costs.backward.copy()
    slower[1, 0] = 3.0
    # Device 1 ends B0 of part 1 only at 5, and device 0 B0 of part 0 at 6, device 1 its own at 6.
    assert spans(program, replace(costs, backward=slower)) == [((0, 1), 5, 7), ((0, 1), 7, 7.5)]


def test_asynchronous_programs_reduce_at_every_update() -> None:
    program = find_schedule("pipedream").program(1, 3)
    costs = replace(stage_costs(program, 1.0, 1.0), all_reduce=np.full((1, 1), 3.0))
    # F and B end at 2, 4 and 6; the second all-reduce waits for the first.
    assert spans(program, costs) == [((0,), 2, 5), ((0,), 5, 8), ((0,), 8, 11)]
    assert spans(replace(program, update_every=2), costs) == [((0,), 4, 7)]


def test_ports_that_are_shared_hold_up_what_takes_no_time_by_itself() -> None:
    """Each takes the port for 2 s: of stage 1 from 1 to 3, as its backward ends, of stage 0 behind it."""
    port = (1, 0)
    costs = replace(stage_costs(TWO, 1.0, 1.0), reduce_loads={0: {port: 2.0}, 1: {port: 2.0}})
    assert spans(TWO, costs) == [((1,), 3.0, 3.0), ((0,), 4.0, 5.0)]
    assert simulate(TWO, costs).step_seconds == 5

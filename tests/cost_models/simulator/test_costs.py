"""Costs: what is refused, and what is made from the seconds of stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.program import Action, linear_program
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import recompute_shares, stage_costs
from pplan.cost_models.timeline import simulate, step_seconds
from tests.candidates import side_by_side

PROGRAM = find_schedule("1f1b").program(3, 4)
COSTS = stage_costs(PROGRAM, 1.0, 2.0)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("forward", (3, 1, 4)), ("weight", (1, 1, 1)), ("backward_latency", (1, 2)), ("optimizer", (3,))],
)
def test_impossible_values_are_refused(name: str, shape: tuple[int, ...], bad: float) -> None:
    values = np.ones(shape)
    values.flat[-1] = bad
    changed: dict[str, Any] = {name: values}
    with pytest.raises(UsageError, match=f"{name} holds {bad}") as caught:
        simulate(PROGRAM, replace(COSTS, **changed))
    assert caught.value.hint == "Costs must be finite and not negative."


def test_unknown_transfers_are_refused() -> None:
    with pytest.raises(UsageError, match="transfers 'magic': not known\nUse one of: overlapped, blocking"):
        simulate(PROGRAM, replace(COSTS, transfers="magic"))


def test_a_weight_gradient_of_its_own_takes_its_seconds() -> None:
    program = linear_program([[Action("F", 0), Action("B", 0), Action("W", 0)]])
    assert simulate(program, stage_costs(program, 1.0, 1.0, 4.0)).step_seconds == 6


def test_a_backward_that_is_not_split_takes_the_weights_too() -> None:
    assert simulate(PROGRAM, stage_costs(PROGRAM, 1.0, 1.5, 0.5)).spans == simulate(PROGRAM, COSTS).spans


def test_costs_of_one_value_or_one_a_stage() -> None:
    assert COSTS.forward[:, 0, 0].tolist() == [1, 1, 1]
    assert stage_costs(PROGRAM, [1, 2, 3], 1).forward[:, 0, 0].tolist() == [1, 2, 3]


def test_chunks_take_an_equal_part_of_their_stage() -> None:
    looped = find_schedule("interleaved").program(2, 4, 2)
    assert stage_costs(looped, [1, 3], 1).forward[:, :, 0].tolist() == [[0.5, 0.5], [1.5, 1.5]]


def test_both_directions_of_chimera_have_the_same_stages() -> None:
    """Device 0 holds the first stage of one direction, and the last of the other."""
    program = find_schedule("chimera").program(2, 2)
    table = stage_costs(program, [1, 3], 1).forward[:, :, 0]
    for pipe in program.pipes:
        assert [table[place] for place in pipe] == [1, 3]


def test_parts_of_a_micro_batch_cost_parts() -> None:
    """Two halves: half the seconds of computing and of the link, the whole latency."""
    actions = [[Action(kind, m) for kind, m in (("F", 0), ("F", 1), ("B", 0), ("B", 1))]] * 2  # type: ignore[arg-type]
    program = replace(linear_program(actions), shares=(0.5, 0.5))
    costs = replace(
        stage_costs(program, 2.0, 2.0, transfer_latency=0.25), forward_occupancy=np.full((1, 1), 3.0)
    )
    starts = {(span.stage, str(span.action)): span.start for span in simulate(program, costs).spans}
    # The first half leaves at 1, occupies the link to 2.5 and arrives at 2.75; the second at 2.5, 4 and 4.25.
    assert starts == {
        (0, "F0"): 0, (0, "F1"): 1, (1, "F0"): 2.75, (1, "F1"): 4.25,
        (1, "B0"): 5.25, (1, "B1"): 6.25, (0, "B0"): 6.5, (0, "B1"): 7.5,
    }  # fmt: skip


def test_overhead_of_every_action() -> None:
    costs = replace(COSTS, overhead=np.full(3, 0.5))
    assert simulate(PROGRAM, costs).spans == simulate(PROGRAM, stage_costs(PROGRAM, 1.5, 2.5)).spans


@pytest.mark.parametrize(
    ("mode", "shares"),
    [
        ("never", [[0, 0, 0, 0]] * 3),
        ("always", [[1, 1, 1, 1]] * 3),
        ("except_last", [[1, 1, 1, 0]] * 3),
        (["never", "always", "except_last"], [[0] * 4, [1] * 4, [1, 1, 1, 0]]),
    ],
)
def test_recompute_shares(mode: Any, shares: list[list[float]]) -> None:
    assert recompute_shares(mode, PROGRAM)[:, 0].tolist() == shares


def test_recomputation_is_a_forward_more_in_the_backward() -> None:
    costs = replace(COSTS, recompute=recompute_shares("except_last", PROGRAM))
    spans = simulate(PROGRAM, costs).spans
    taken = {(s.action.micro_batch, s.end - s.start) for s in spans if s.action.kind == "B"}
    assert taken == {(0, 3.0), (1, 3.0), (2, 3.0), (3, 2.0)}


def test_the_costs_of_one_of_many_candidates() -> None:
    together = side_by_side([COSTS, stage_costs(PROGRAM, [1, 1, 4], 1)])
    assert together.candidate(1).forward[:, 0, 0].tolist() == [1, 1, 4]
    assert step_seconds(PROGRAM, together.candidate(0)).shape == (1,)


def test_updates_of_asynchronous_programs_take_their_time_at_once() -> None:
    """Every second micro-batch; where a device holds two chunks, each chunk's update is half of it."""
    program = replace(find_schedule("pipedream").program(1, 4), update_every=2)
    costs = replace(stage_costs(program, 1.0, 1.0), optimizer=np.array([0.5]))
    assert [s.end for s in simulate(program, costs).spans if s.action.kind == "B"] == [2, 4.5, 6.5, 9]
    many = side_by_side([costs, replace(costs, optimizer=np.array([1.0]))])
    assert step_seconds(program, many).tolist() == [9, 10]
    looped = replace(find_schedule("interleaved").program(2, 4, 2), update_every=4)
    costs = replace(stage_costs(looped, 2.0, 2.0), optimizer=np.array([0.5, 0.0]))
    busy = simulate(looped, costs).busy_seconds
    assert busy == (4 * 4 + 0.5, 4 * 4)


@pytest.mark.parametrize(
    ("schedule", "firsts"),
    [
        # By device, the micro-batch whose backward is the first of each of its chunks.
        ("1f1b", [[0], [0], [0], [0]]),
        ("gpipe", [[3], [3], [3], [3]]),
        ("interleaved", [[0, 0], [0, 0], [0, 0], [0, 0]]),
        # Two micro-batches go down, two up: each direction has weights of its own.
        ("chimera", [[0, 2], [0, 2], [0, 2], [0, 2]]),
    ],
)
def test_the_first_backward_of_each_chunk_adds_to_no_gradients(
    schedule: str, firsts: list[list[int]]
) -> None:
    chunks = len(firsts[0]) if schedule == "interleaved" else 1
    program = find_schedule(schedule).program(4, 4, chunks)
    costs = stage_costs(program, 1.0, [2.0, 2.5, 3.0, 3.5], transfer_latency=0.25)
    backward = np.repeat(costs.backward, 4, axis=2)
    for device, own in enumerate(firsts):
        for chunk, micro_batch in enumerate(own):
            backward[device, chunk, micro_batch] -= 0.125
    expected = simulate(program, replace(costs, backward=backward))
    adding = replace(costs, accumulation=np.full((4, 1, 1), 0.125))
    assert simulate(program, adding).step_seconds == pytest.approx(expected.step_seconds)
    assert simulate(program, adding).step_seconds < simulate(program, costs).step_seconds


def test_of_a_split_backward_the_first_gradients_of_weights_are_faster() -> None:
    program = find_schedule("zb-h1").program(1, 3)
    costs = stage_costs(program, [1.0], [1.0], [1.0])
    assert simulate(program, costs).step_seconds == 9
    assert simulate(program, replace(costs, accumulation=np.full((1, 1, 1), 0.5))).step_seconds == 8.5


def test_asynchronous_schedules_keep_their_gradients() -> None:
    program = find_schedule("pipedream").program(2, 8)
    costs = stage_costs(program, 1.0, 2.0)
    adding = replace(costs, accumulation=np.ones((2, 1, 1)))
    assert simulate(program, adding).step_seconds == simulate(program, costs).step_seconds

"""Steady states against what sets the pace: the busiest stage, the round trip, the network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.program import Action, Program, StageSlot
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import stage_costs
from pplan.cost_models.timeline import steady_state

PROGRAM = find_schedule("pipedream").program(3, 60)


@pytest.mark.parametrize("forward", [[1, 1, 1], [1, 3, 2], [5, 1, 1], [0.1, 0.2, 0.7]])
def test_the_busiest_stage_sets_the_pace(forward: list[float]) -> None:
    state = steady_state(PROGRAM, stage_costs(PROGRAM, forward, [2 * f for f in forward]))
    assert state.seconds_per_micro_batch == pytest.approx(3 * max(forward), rel=1e-12)
    assert (state.period, state.exact) == (1, True)


def test_long_round_trips_set_the_pace() -> None:
    """Stage 0 holds two micro-batches; each is back after F, latency, F and B, latency, B: 1+3+2+3+1."""
    program = find_schedule("pipedream").program(2, 60)
    state = steady_state(program, stage_costs(program, 1.0, 1.0, transfer_latency=3.0))
    assert state.seconds_per_micro_batch == pytest.approx(10 / 2)
    assert (state.period, state.exact) == (2, True)


def test_updates_take_their_time() -> None:
    costs = replace(stage_costs(PROGRAM, 1.0, 2.0), optimizer=np.full(3, 0.5))
    assert steady_state(PROGRAM, costs).seconds_per_micro_batch == pytest.approx(3.5)


@pytest.mark.parametrize(("optimizer", "added"), [([0, 0, 0.5], 0.5), ([0.5, 0, 0], 0.5), ([0.5] * 3, 1.5)])
def test_seldom_updates(optimizer: list[float], added: float) -> None:
    """1F1B leaves no slack: updates of three stages at different moments delay all of them one by one."""
    costs = replace(stage_costs(PROGRAM, 1.0, 2.0), optimizer=np.array(optimizer, dtype=np.float64))
    state = steady_state(replace(PROGRAM, update_every=4), costs)
    assert state.seconds_per_micro_batch == pytest.approx(3 + added / 4)
    assert (state.period, state.exact) == (4, True)


@pytest.mark.parametrize(("every", "seconds"), [(1, 8.0), (2, 4.0), (4, 3.0)])
def test_the_network_sets_the_pace_where_it_is_slower(every: int, seconds: float) -> None:
    costs = replace(stage_costs(PROGRAM, 1.0, 2.0), all_reduce=np.array([[8.0], [1.0], [0.0]]))
    state = steady_state(replace(PROGRAM, update_every=every), costs)
    assert state.seconds_per_micro_batch == pytest.approx(seconds)


def alternate(micro_batches: range, ahead: int) -> tuple[Action, ...]:
    """Forwards `ahead`, then a backward and a forward in turn."""
    order = [Action("F", number) for number in micro_batches[:ahead]]
    for done, number in zip(micro_batches, micro_batches[ahead:], strict=False):
        order += [Action("B", done), Action("F", number)]
    return (*order, *(Action("B", number) for number in micro_batches[-ahead:]))


def three_to_one(micro_batches: int) -> Program:
    """PipeDream's 1F1B of three replicas, which take micro-batches in turn, and one device behind them."""
    replicas = [alternate(range(k, micro_batches, 3), 2) for k in range(3)]
    pipes = tuple((StageSlot(k), StageSlot(3)) for k in range(3))
    pipe_of = tuple(number % 3 for number in range(micro_batches))
    return Program((*replicas, alternate(range(micro_batches), 1)), pipes, pipe_of, update_every=1)


@pytest.mark.parametrize(("seconds", "pace"), [((9.0, 2.0), 3.0), ((9.0, 4.0), 4.0), ((1.5, 1.5), 1.5)])
def test_replicas_share_the_pace(seconds: tuple[float, float], pace: float) -> None:
    """PipeDream's 3-1: max(seconds / replicas)."""
    program = three_to_one(120)
    first, last = seconds
    costs = stage_costs(program, [first / 3, last / 3], [2 * first / 3, 2 * last / 3])
    state = steady_state(program, costs)
    assert state.seconds_per_micro_batch == pytest.approx(pace)
    assert state.exact


def test_a_mean_where_nothing_repeats() -> None:
    program = find_schedule("pipedream").program(2, 40)
    costs = stage_costs(program, 1.0, 2.0)
    uneven = np.broadcast_to(costs.forward, (2, 1, 40)) + np.sqrt(np.arange(40.0))
    state = steady_state(program, replace(costs, forward=uneven))
    assert not state.exact
    assert 3 < state.seconds_per_micro_batch < 3 + np.sqrt(40)


def test_what_has_no_steady_state_is_refused() -> None:
    gpipe = find_schedule("gpipe").program(2, 4)
    with pytest.raises(UsageError, match="it has no steady state"):
        steady_state(gpipe, stage_costs(gpipe, 1.0, 1.0))
    short = find_schedule("pipedream").program(4, 4)
    with pytest.raises(UsageError, match="4 micro-batches: too few for a steady state on 4 stages"):
        steady_state(short, stage_costs(short, 1.0, 1.0))


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw", "xpipe", "wpipe"])
def test_asynchronous_schedules_have_no_bubble_in_steady_state(name: str) -> None:
    schedule = find_schedule(name)
    program = schedule.program(4, 80)
    state = steady_state(program, stage_costs(program, 1.0, 2.0))
    assert state.seconds_per_micro_batch == pytest.approx(3.0)
    assert state.exact

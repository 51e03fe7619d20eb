"""The critical path of timelines by hand, and that it has no gap under any schedule and any runtime."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.program import Program
from pplan.cost_models.schedules import SCHEDULES, find_schedule
from pplan.cost_models.step_costs import TRANSFERS, Array, Costs
from pplan.cost_models.timeline import simulate
from pplan.planner.explanation.step_limits import Segment, critical_path


def by_stage(values: list[float]) -> Array:
    return np.array(values)[:, None, None]


def by_cut(values: list[float]) -> Array:
    return np.array(values)[None, :]


def spent(path: tuple[Segment, ...]) -> dict[tuple[str, int, int | None], float]:
    """Seconds by kind and place."""
    sums: dict[tuple[str, int, int | None], float] = defaultdict(float)
    for part in path:
        sums[part.kind, part.stage, part.to_stage] += part.end - part.start
    return {key: seconds for key, seconds in sums.items() if seconds > 1e-12}


def test_a_slow_stage() -> None:
    """1F1B: the first forward and the last backward of stage 0 stand around the slow stage's work."""
    program = find_schedule("1f1b").program(3, 6)
    costs = Costs(forward=by_stage([1, 10, 1]), backward=by_stage([2, 20, 2]))
    timeline = simulate(program, costs)
    path = critical_path(timeline)
    assert timeline.step_seconds == 1 + 6 * 30 + 2
    assert spent(path) == {("compute", 0, None): 3, ("compute", 1, None): 180}
    assert [part.stage for part in path] == [0, *[1] * 12, 0]


def test_a_slow_link() -> None:
    """GPipe: four transfers of 10 s each way follow one another, with a forward or backward of 1 s at each
    end of both rows."""
    program = find_schedule("gpipe").program(2, 4)
    costs = Costs(
        forward=by_stage([1, 1]),
        backward=by_stage([1, 1]),
        forward_occupancy=by_cut([10]),
        backward_occupancy=by_cut([10]),
    )
    assert spent(critical_path(simulate(program, costs))) == {
        ("compute", 0, None): 2,
        ("compute", 1, None): 2,
        ("transfer", 0, 1): 40,
        ("transfer", 1, 0): 40,
    }


def test_latency_counts_once_where_transfers_follow_one_another() -> None:
    program = find_schedule("gpipe").program(2, 4)
    costs = Costs(
        forward=by_stage([1, 1]),
        backward=by_stage([1, 1]),
        forward_occupancy=by_cut([10]),
        forward_latency=by_cut([5]),
    )
    found = spent(critical_path(simulate(program, costs)))
    assert found["transfer", 0, 1] == 45


def test_a_slow_host() -> None:
    """One process launches forwards in 5 s, and on a thread a device backwards in 7 s, of which 5 may be
    forwards launched again, one after another. All run in 1 s: the step is launches."""
    program = find_schedule("gpipe").program(2, 3)
    costs = Costs(
        forward=by_stage([1, 1]),
        backward=by_stage([1, 1]),
        forward_launch=by_stage([5, 5]),
        backward_launch=by_stage([7, 7]),
    )
    timeline = simulate(program, costs)
    assert timeline.step_seconds == 6 * 5 + 4 * 7
    path = spent(critical_path(timeline))
    assert path == {("host", 0, None): 3 * 5 + 3 * 7, ("host", 1, None): 3 * 5 + 7}
    timeline = simulate(program, replace(costs, recompute_launch=by_stage([5, 5])))
    # B2 and B1 of stage 1 from 30 and 42 on, B2 of stage 0 from 37 on; B1 of stage 0 waits for B1 of stage 1
    # until 49, B0 of stage 1 for what that launches again until 54, and B0 of stage 0 for it until 61.
    assert timeline.step_seconds == 61 + 7
    path = spent(critical_path(timeline))
    assert sum(path.values()) == timeline.step_seconds
    assert {kind for kind, *_ in path} == {"host"}


def test_a_host_that_delays_the_start_alone() -> None:
    """Each device has its host: after the first launch, which its action cannot end before, it computes."""
    program = find_schedule("1f1b").program(1, 4)
    costs = Costs(
        forward=by_stage([1]),
        backward=by_stage([10]),
        forward_launch=by_stage([3]),
        backward_launch=by_stage([1]),
        hosts="each",
    )
    timeline = simulate(program, costs)
    found = spent(critical_path(timeline))
    assert found == {("host", 0, None): 3, ("compute", 0, None): timeline.step_seconds - 3}


def test_what_is_run_again_and_the_all_reduce() -> None:
    program = find_schedule("1f1b").program(2, 5)
    costs = Costs(
        forward=by_stage([4, 1]),
        backward=by_stage([8, 1]),
        recompute=by_stage([1, 0]),
        all_reduce=np.array([[6.0], [0.0]]),
        optimizer=np.array([2.0, 2.0]),
    )
    found = spent(critical_path(simulate(program, costs)))
    assert found["recompute", 0, None] == 5 * 4
    assert found["compute", 0, None] == 5 * 12
    assert found["all_reduce", 0, None] == 6
    assert found["optimizer", 0, None] == 2


def random_costs(
    program: Program, rng: np.random.Generator, transfers: str, hosts: str | None, least: int = 1
) -> Costs:
    devices, chunks, pipes, cuts = (
        program.devices,
        program.chunks,
        len(program.pipes),
        program.slots - 1,
    )

    def some(*shape: int) -> Array:
        # Small whole numbers: many ends at the same second.
        return rng.integers(0, 4, shape).astype(np.float64)

    split, launched = program.splits_backward, hosts is not None
    relaunch = some(devices, chunks, 1)
    return Costs(
        forward=some(devices, chunks, 1) + least,
        backward=some(devices, chunks, 1) + least,
        weight=some(devices, chunks, 1) if split else None,
        recompute=np.full((devices, chunks, 1), 0.5) if rng.random() < 0.5 else None,
        forward_launch=some(devices, chunks, 1) if launched else None,
        backward_launch=relaunch if launched else None,
        weight_launch=some(devices, chunks, 1) if launched and split else None,
        recompute_launch=relaunch * rng.integers(0, 3, relaunch.shape) / 2 if launched else None,
        forward_occupancy=some(pipes, cuts),
        forward_latency=some(pipes, cuts),
        backward_occupancy=some(pipes, cuts),
        backward_latency=some(pipes, cuts),
        optimizer=some(devices) if rng.random() < 0.5 else None,
        all_reduce=3 * some(devices, chunks) if rng.random() < 0.7 else None,
        buckets=int(rng.choice([1, 3])),
        transfers=transfers,
        hosts="each" if hosts == "each" else "one",
        links=None if rng.random() < 0.5 else rng.integers(-1, 2, (devices, devices)),
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("least", [0, 1])
def test_the_path_has_no_gap(name: str, least: int) -> None:
    """From 0 to the end of the step, under all ways of transfers and of launches; also where passes take no
    time."""
    rng, seen = np.random.default_rng(10 - 9 * least), 0
    schedule = find_schedule(name)
    for transfers in TRANSFERS:
        for hosts in (None, "one", "each"):
            try:
                program = schedule.program(int(rng.choice([2, 4])), 8, schedule.default_virtual_stages)
                timeline = simulate(program, random_costs(program, rng, transfers, hosts, least))
            except UsageError:
                continue  # the numbers, or devices that would wait for each other for ever
            at = 0.0
            for part in critical_path(timeline):
                assert part.start == pytest.approx(at, abs=1e-9)
                assert part.end > part.start
                at = part.end
            assert at == pytest.approx(timeline.step_seconds)
            seen += 1
    assert seen >= 3

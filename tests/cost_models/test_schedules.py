"""The schedules against their drawings: every action takes one tick, transfers none."""

from __future__ import annotations

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.schedules import SCHEDULES, schedule_named
from pplan.cost_models.timeline import Timeline, simulate, uniform_costs

GPIPE = """
F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
.  F0 F1 F2 F3 .  .  B3 B2 B1 B0 .
.  .  F0 F1 F2 F3 B3 B2 B1 B0 .  .
"""

ONE_F_ONE_B = """
F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
.  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
.  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
"""


def drawing(timeline: Timeline) -> str:
    rows = [["." for _ in range(round(timeline.step_seconds))] for _ in range(timeline.stages)]
    for span in timeline.spans:
        rows[span.stage][round(span.start)] = str(span.action)
    return "\n".join(" ".join(cell.ljust(2) for cell in row).rstrip() for row in rows)


def drawn(text: str) -> str:
    lines = (line.split() for line in text.strip().splitlines())
    return "\n".join(" ".join(cell.ljust(2) for cell in line).rstrip() for line in lines)


@pytest.mark.parametrize(("name", "picture"), [("gpipe", GPIPE), ("1f1b", ONE_F_ONE_B)])
def test_drawing(name: str, picture: str) -> None:
    actions = schedule_named(name).actions(3, 4)
    assert drawing(simulate(actions, uniform_costs([1] * 3, [1] * 3, 4))) == drawn(picture)


def test_1f1b_with_backwards_of_two_ticks() -> None:
    timeline = simulate(schedule_named("1f1b").actions(2, 3), uniform_costs([1, 1], [2, 2], 3))
    starts = {(span.stage, str(span.action)): span.start for span in timeline.spans}
    assert starts == {
        (0, "F0"): 0, (0, "F1"): 1, (0, "B0"): 4, (0, "F2"): 6, (0, "B1"): 7, (0, "B2"): 10,
        (1, "F0"): 1, (1, "B0"): 2, (1, "F1"): 4, (1, "B1"): 5, (1, "F2"): 7, (1, "B2"): 8,
    }  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
def test_in_flight_is_what_the_timeline_holds(name: str, stages: int, micro_batches: int) -> None:
    schedule = schedule_named(name)
    timeline = simulate(
        schedule.actions(stages, micro_batches), uniform_costs([1.0] * stages, [2.0] * stages, micro_batches)
    )
    expected = tuple(schedule.in_flight(stage, stages, micro_batches) for stage in range(stages))
    assert timeline.peak_in_flight == expected


def test_unknown_schedule_names_the_known() -> None:
    with pytest.raises(UsageError, match="'1f2b' is unknown") as caught:
        schedule_named("1f2b")
    assert "1f1b, gpipe" in caught.value.hint

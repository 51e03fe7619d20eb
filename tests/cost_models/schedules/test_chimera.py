"""chimera: two directions over the same devices."""

from __future__ import annotations

from typing import Any

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.schedules import chimera, find_schedule

EVEN = [2, 4, 6, 8, 12]

# "Chimera", SC 2021, figure 3: four workers, four micro-batches; here forward and backward alike.
FIGURE = """
F0 F1 .  f2 b2 f3 b3 B0 .  B1
.  F0 f2 F1 f3 b2 B0 b3 B1 .
.  f2 F0 f3 F1 B0 b2 B1 b3 .
f2 f3 .  F0 B0 F1 B1 b2 .  b3
"""

# Two units, directly concatenated: the second's forwards fill the holes of the first.
TWO_UNITS = """
F0 f1 b1 B0 F2 f3 b3 B2
f1 F0 B0 b1 f3 F2 B2 b3
"""


def test_drawings(picture: Any, drawn: Any) -> None:
    assert picture(chimera(4, 4)) == drawn(FIGURE)
    assert picture(chimera(2, 4)) == drawn(TWO_UNITS)


@pytest.mark.parametrize("stages", EVEN)
@pytest.mark.parametrize("scale", [1, 3])
def test_bubble(stages: int, scale: int, play: Any) -> None:
    alike = play(chimera(stages, stages), scale, scale)
    assert alike.bubble == pytest.approx((stages - 2) / (2 * stages + stages - 2))
    twice = play(chimera(stages, stages), scale, 2 * scale)
    assert twice.bubble == pytest.approx((stages - 2) / (3 / 2 * stages + stages - 2))


@pytest.mark.parametrize("stages", EVEN)
@pytest.mark.parametrize("units", [1, 2, 5])
def test_concatenated_units_of_equal_passes_leave_no_further_hole(stages: int, units: int, play: Any) -> None:
    played = play(chimera(stages, units * stages))
    assert played.makespan == 2 * units * stages + stages - 2


@pytest.mark.parametrize("stages", EVEN)
@pytest.mark.parametrize("units", [1, 3])
def test_in_flight(stages: int, units: int) -> None:
    program = chimera(stages, units * stages)
    most = [max(program.in_flight(device)) for device in range(stages)]
    half = stages // 2
    assert most == [*range(half + 1, stages + 1), *range(stages, half, -1)]
    assert find_schedule("chimera").copies == 2


@pytest.mark.parametrize(("stages", "what"), [(3, "stages 3: chimera needs an even number"), (1, "stages 1")])
def test_odd_stages(stages: int, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        chimera(stages, stages)


def test_half_a_unit() -> None:
    with pytest.raises(
        UsageError, match="micro-batches 6: chimera needs a multiple of the stages, 4"
    ) as raised:
        chimera(4, 6)
    assert raised.value.hint == "Use 4 or 8."

"""avgpipe: pipelines in parallel on the same devices."""

from __future__ import annotations

from typing import Any

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.schedules import avgpipe, find_schedule, one_f_one_b

SIZES = [(stages, each) for stages in (1, 2, 3, 5) for each in (1, 2, 5)]

# Upper case: the first pipeline, of the even micro-batches. In its hole each device runs the second.
TWO = """
F0 f1 F2 f3 B0 b1 .  .  B2 b3
.  F0 f1 B0 b1 F2 f3 B2 b3 .
"""


def test_drawing(picture: Any, drawn: Any) -> None:
    assert picture(avgpipe(2, 4)) == drawn(TWO)


@pytest.mark.parametrize(("stages", "each"), SIZES)
@pytest.mark.parametrize("pipelines", [1, 2, 3])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (3, 1)])
def test_bubble(stages: int, each: int, pipelines: int, forward: int, backward: int, play: Any) -> None:
    """That of one pipeline with all the micro-batches: (p-1) / (N m + p-1)."""
    total = pipelines * each
    played = play(avgpipe(stages, total, pipelines=pipelines), forward, backward)
    assert played.makespan == (total + stages - 1) * (forward + backward)


@pytest.mark.parametrize(("stages", "each"), SIZES)
@pytest.mark.parametrize("advance", [0, 1, 3, 20])
def test_advance_goes_from_1f1b_to_all_forwards_first(
    stages: int, each: int, advance: int, play: Any
) -> None:
    program = avgpipe(stages, 2 * each, advance=advance)
    assert [max(program.in_flight(i)) for i in range(stages)] == [
        2 * min(each, stages - i + advance) for i in range(stages)
    ]
    play(program, 1, 2, 0, 0.5)


@pytest.mark.parametrize(("stages", "each"), SIZES)
def test_a_pipeline_by_itself_runs_1f1b(stages: int, each: int) -> None:
    program, alone = avgpipe(stages, 2 * each), one_f_one_b(stages, each)
    for pipeline in (0, 1):
        for own, expected in zip(program.actions, alone.actions, strict=True):
            its = [(a.kind, a.micro_batch // 2) for a in own if a.chunk == pipeline]
            assert its == [(a.kind, a.micro_batch) for a in expected]


def test_weights_of_two_pipelines_and_the_reference() -> None:
    assert find_schedule("avgpipe").copies == 3


def test_numbers_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="micro-batches 5: avgpipe needs a multiple of the pipelines, 2"):
        avgpipe(3, 5)
    with pytest.raises(UsageError, match="pipelines 0"):
        avgpipe(3, 4, pipelines=0)
    with pytest.raises(UsageError, match="advance -1"):
        avgpipe(3, 4, advance=-1)

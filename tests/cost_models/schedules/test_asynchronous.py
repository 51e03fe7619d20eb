"""pipedream, pipedream-2bw, xpipe and wpipe: no flush, updates beside the running pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.program import Program
from pplan.cost_models.schedules import (
    SCHEDULES,
    find_schedule,
    pipedream,
    pipedream_2bw,
    wpipe,
    xpipe,
    xpipe_staleness,
)

ASYNCHRONOUS = [name for name, schedule in SCHEDULES.items() if not schedule.synchronous]
SIZES = [(1, 4), (2, 8), (3, 12), (4, 24), (6, 30)]

# "PipeDream", SOSP 2019, figure 4: four workers, backwards of two ticks, here the first six mini-batches.
PIPEDREAM = """
F0 F1 F2 F3 .  .  .  .  .  .  B0 -  F4 B1 -  F5 B2 -  .  B3 -  .  B4 -  .  B5 -
.  F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  F4 B2 -  F5 B3 -  .  B4 -  .  B5 -  .  .
.  .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  F4 B3 -  F5 B4 -  .  B5 -  .  .  .  .
.  .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  F4 B4 -  F5 B5 -  .  .  .  .  .  .
"""

WPIPE = """
F0 F1 f0 f1 .  b0 F2 b1 F3 B0 f2 B1 f3 b2 .  b3 B2 B3
.  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 .
"""


def test_drawings(picture: Any, drawn: Any) -> None:
    assert picture(pipedream(4, 6), backward=2) == drawn(PIPEDREAM)
    assert picture(pipedream_2bw(4, 6), backward=2) == drawn(PIPEDREAM)
    assert picture(xpipe(4, 6), backward=2) == drawn(PIPEDREAM)
    assert picture(wpipe(2, 4)) == drawn(WPIPE)


def seen(program: Program, device: int, chunk: int) -> tuple[int, int]:
    """Most versions of a chunk's weights that are in use at a time, and the most updates by which the weights
    of a micro-batch's forward are behind those that its gradient changes: read off the device's list."""
    every = program.update_every
    assert every
    backwards, used, versions, late = 0, dict[int, int](), 1, 0
    for kind, m, own in program.actions[device]:
        if own != chunk:
            continue
        newest = backwards // every
        if kind == "F":
            used[m] = newest
        else:
            late = max(late, m // every - used[m])
        versions = max(versions, len({*used.values(), newest}))
        if kind == "B":
            backwards += 1
            del used[m]
    return versions, late


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_pipedream_versions_and_staleness(stages: int, micro_batches: int) -> None:
    schedule = find_schedule("pipedream")
    program = schedule.program(stages, micro_batches)
    for i in range(stages):
        assert seen(program, i, 0) == (stages - i, stages - 1 - i)
        assert schedule.weight_versions(i, stages, micro_batches) == stages - i
        assert schedule.staleness(i, stages, micro_batches) == stages - 1 - i
        assert schedule.in_flight(i, stages, micro_batches) == stages - i


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("more", [0, 1, 3])
def test_2bw_versions_and_staleness(stages: int, micro_batches: int, more: int) -> None:
    """Two versions suffice; the last stage could do with one, and uses the older all the same."""
    schedule = find_schedule("pipedream-2bw")
    program = pipedream_2bw(stages, micro_batches, update_every=stages + more)
    enough = micro_batches > stages + more
    for i in range(stages):
        assert seen(program, i, 0) == ((2, 1) if i < stages - 1 and enough else (1, 0))
        assert schedule.weight_versions(i, stages, micro_batches) == 2
        assert schedule.staleness(i, stages, micro_batches) == 1


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("more", [0, 1])
def test_wpipe_versions_and_staleness(stages: int, micro_batches: int, more: int) -> None:
    """Two versions of the first chunk, one of the second, whose gradients are never late."""
    schedule, every = find_schedule("wpipe"), stages + more
    program = wpipe(stages, 4 * every, update_every=every)
    for i in range(stages):
        assert seen(program, i, 0) == (2, 1)
        assert seen(program, i, 1) == (1, 0)
        assert schedule.weight_versions(i, stages, micro_batches) == 1.5
        assert schedule.staleness(i, stages, micro_batches) == 1


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_wpipe_may_update_after_several_rounds(stages: int, rounds: int) -> None:
    """Rounds of as many micro-batches as there are stages, whatever the updates, keep as many versions."""
    program = replace(wpipe(stages, 4 * rounds * stages), update_every=rounds * stages)
    for i in range(stages):
        assert seen(program, i, 0) == (2, 1)
        assert seen(program, i, 1) == (1, 0)
        assert find_schedule("wpipe").chunk_versions == (2, 1)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_xpipe_staleness(stages: int, micro_batches: int, every: int) -> None:
    program = xpipe(stages, micro_batches, update_every=every)
    for i in range(stages):
        assert seen(program, i, 0)[1] == xpipe_staleness(i, stages, micro_batches, every)
        assert find_schedule("xpipe").weight_versions(i, stages, micro_batches) == 3


@pytest.mark.parametrize("name", ASYNCHRONOUS)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 1), (5, 7)])
def test_steady_state_has_no_bubble(name: str, stages: int, forward: int, backward: int, play: Any) -> None:
    """From its first backward to its last forward no device waits: one micro-batch every F + B."""
    program = find_schedule(name).program(stages, 6 * stages)
    chunks = program.chunks
    for own in play(program, forward, backward).spans:
        begin = next(start for action, start, _ in own if action.kind == "B")
        end = max(end for action, _, end in own if action.kind == "F")
        busy = sum(stop - start for _, start, stop in own if begin <= start < end)
        assert busy == end - begin
        assert end - begin > 2 * stages * chunks * (forward + backward)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_in_flight(stages: int, micro_batches: int) -> None:
    for name in ("pipedream", "pipedream-2bw", "xpipe"):
        program = find_schedule(name).program(stages, micro_batches)
        assert [max(program.in_flight(i)) for i in range(stages)] == [stages - i for i in range(stages)]
    program = wpipe(stages, micro_batches)
    assert [max(program.in_flight(i)) for i in range(stages)] == [
        (stages + (stages - i)) / 2 for i in range(stages)
    ]


def test_updates() -> None:
    assert pipedream(4, 8).update_every == 1
    assert [m(4, 8).update_every for m in (pipedream_2bw, xpipe, wpipe)] == [4, 4, 4]


def test_updates_that_cannot_be() -> None:
    with pytest.raises(
        UsageError, match="micro-batches an update 3: pipedream-2bw needs at least 4, the stages"
    ):
        pipedream_2bw(4, 8, update_every=3)
    with pytest.raises(UsageError, match="micro-batches an update 3: wpipe needs at least 4, the stages"):
        wpipe(4, 8, update_every=3)
    with pytest.raises(UsageError, match="micro-batches 10: wpipe needs a multiple of the stages, 4"):
        wpipe(4, 10)
    with pytest.raises(UsageError, match="virtual stages 3: wpipe runs 2 on a device"):
        find_schedule("wpipe").program(4, 8, 3)
    with pytest.raises(UsageError, match="micro-batches an update 0"):
        xpipe(4, 8, update_every=0)

"""What holds of every schedule; each one's order, bubble and memory are in schedules.py."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.program import Action, Program, StageSlot
from pplan.cost_models.schedules import SCHEDULES, find_schedule
from pplan.cost_models.step_costs import Costs
from pplan.cost_models.timeline import Timeline, simulate

NAMES = [
    *("naive", "gpipe", "1f1b", "dapple", "interleaved", "looped-bfs", "chimera"),
    *("zb-h1", "zb-h2", "zb-v", "dualpipe-v"),
    *("pipedream", "pipedream-2bw", "wpipe", "xpipe", "avgpipe", "autopipe"),
]

SIZES = [(1, 4), (2, 4), (2, 12), (4, 8), (4, 20)]
"""Stages and micro-batches that all schedules run; chimera no single stage."""
SMALL = [(stages, micro_batches) for stages in (1, 2, 3, 5) for micro_batches in (1, 2, 3, 4)]
"""Stages and micro-batches that some schedules refuse."""

RUNS = [
    (name, stages, micro_batches)
    for name in NAMES
    for stages, micro_batches in SIZES
    if (name, stages) != ("chimera", 1)
]


def small(name: str) -> list[Program]:
    programs = []
    for stages, micro_batches in SMALL:
        try:
            programs.append(find_schedule(name).program(stages, micro_batches))
        except UsageError:
            continue
    return programs


def played(program: Program) -> Timeline:
    ones = np.ones((program.devices, program.chunks, 1))
    return simulate(program, Costs(forward=ones, backward=2 * ones, weight=ones))


def test_names() -> None:
    assert list(SCHEDULES) == NAMES
    assert [schedule.name for schedule in SCHEDULES.values()] == NAMES


def test_unknown_schedule_names_the_known() -> None:
    with pytest.raises(UsageError, match="'1f2b' is unknown") as caught:
        find_schedule("1f2b")
    assert "1f1b, autopipe" in caught.value.hint


@pytest.mark.parametrize("name", NAMES)
def test_says_what_it_is(name: str) -> None:
    schedule = find_schedule(name)
    assert schedule.source
    assert all((schedule.needs, schedule.bubble, schedule.in_flight_formula))
    told = schedule.build.__doc__
    assert told
    for said in ("Needs of the runtime:", "Weight versions:", "Staleness:", "F0"):
        assert said in " ".join(told.split())


def check(program: Program, micro_batches: int) -> None:
    """Every place of a micro-batch's pipe has one F, then one B, then at most one W; none is elsewhere."""
    seen: Counter[tuple[StageSlot, int]] = Counter()
    for device, own in enumerate(program.actions):
        at = {action: position for position, action in enumerate(own)}
        assert len(at) == len(own)
        for kind, m, chunk in own:
            assert StageSlot(device, chunk) in program.pipes[program.pipe_of[m]]
            if kind == "F":
                seen[StageSlot(device, chunk), m] += 1
            else:
                assert at[Action("F", m, chunk)] < at[Action("B", m, chunk)] <= at[Action(kind, m, chunk)]
        kinds = Counter(action.kind for action in own)
        assert kinds["F"] == kinds["B"] >= kinds["W"]
    everything = {(place, m) for m, pipe in enumerate(program.pipe_of) for place in program.pipes[pipe]}
    assert seen == Counter(everything)
    assert sum(program.share(m) for m in range(program.micro_batches)) == micro_batches


@pytest.mark.parametrize(("name", "stages", "micro_batches"), RUNS)
def test_every_micro_batch_passes_every_place_once(name: str, stages: int, micro_batches: int) -> None:
    program = find_schedule(name).program(stages, micro_batches)
    check(program, micro_batches)
    timeline = played(program)
    assert timeline.stages == stages
    assert sum(timeline.busy_seconds) == pytest.approx(4 * micro_batches * stages * _chunks(program))


def _chunks(program: Program) -> float:
    """Places a device on a micro-batch's way: each takes four seconds, one, two and one."""
    return len(program.pipes[0]) / program.devices


@pytest.mark.parametrize("name", NAMES)
def test_small_numbers_run(name: str) -> None:
    programs = small(name)
    assert len(programs) >= 2
    for program in programs:
        check(program, round(sum(program.share(m) for m in range(program.micro_batches))))
        assert played(program).step_seconds > 0


@pytest.mark.parametrize(("name", "stages", "micro_batches"), RUNS)
def test_in_flight_is_what_the_timeline_holds(name: str, stages: int, micro_batches: int) -> None:
    schedule = find_schedule(name)
    timeline = played(schedule.program(stages, micro_batches))
    expected = [schedule.in_flight(stage, stages, micro_batches) for stage in range(stages)]
    assert list(timeline.peak_in_flight) == pytest.approx(expected)


@pytest.mark.parametrize("name", NAMES)
def test_synchronous_schedules_keep_one_version(name: str) -> None:
    schedule = find_schedule(name)
    versions = {schedule.weight_versions(stage, 4, 8) for stage in range(4)}
    late = {schedule.staleness(stage, 4, 8) for stage in range(4)}
    assert (schedule.program(4, 8).update_every is None) == schedule.synchronous
    assert schedule.synchronous == (name not in ("pipedream", "pipedream-2bw", "wpipe", "xpipe"))
    if schedule.synchronous:
        assert (versions, late) == ({1}, {0})


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_lists_of_actions(name: str) -> None:
    actions = find_schedule(name).actions(2, 3)
    assert [len(own) for own in actions] == [6, 6]
    assert [str(action) for action in actions[0]][:2] == ["F0", "F1"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("numbers", "what"),
    [
        ((0, 4), "stages 0"),
        ((4, 0), "micro-batches 0"),
        ((4, -8), "micro-batches -8"),
        ((4, 8, 0), "virtual stages 0"),
    ],
)
def test_counts_below_one(name: str, numbers: tuple[int, ...], what: str) -> None:
    with pytest.raises(UsageError, match=f"^{what}: must be at least 1"):
        find_schedule(name).program(*numbers)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("interleaved", "looped-bfs")])
def test_virtual_stages_of_schedules_that_have_their_own(name: str) -> None:
    allowed = 2 if name in ("zb-v", "dualpipe-v", "wpipe") else 1
    assert find_schedule(name).default_virtual_stages == allowed
    assert find_schedule(name).program(4, 8, allowed).devices == 4
    for other in (1, 2, 3):
        if other != allowed:
            with pytest.raises(UsageError, match=f"^virtual stages {other}: {name} runs {allowed}"):
                find_schedule(name).program(4, 8, other)


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "what", "hint"),
    [
        (
            "interleaved",
            4,
            6,
            "micro-batches 6: interleaved needs a multiple of the stages, 4",
            "Use 4 or 8.",
        ),
        ("interleaved", 4, 3, "micro-batches 3: interleaved needs a multiple of the stages, 4", "Use 4."),
        ("chimera", 3, 6, "stages 3: chimera needs an even number", "Use 2 or 4."),
        ("chimera", 4, 6, "micro-batches 6: chimera needs a multiple of the stages, 4", "Use 4 or 8."),
        ("dualpipe-v", 4, 6, "micro-batches 6: dualpipe-v needs at least 8, two a stage", "Use 8 or more."),
        ("wpipe", 4, 6, "micro-batches 6: wpipe needs a multiple of the stages, 4", "Use 4 or 8."),
        ("avgpipe", 4, 5, "micro-batches 5: avgpipe needs a multiple of the pipelines, 2", "Use 4 or 6."),
    ],
)
def test_numbers_that_a_schedule_cannot_run(
    name: str, stages: int, micro_batches: int, what: str, hint: str
) -> None:
    with pytest.raises(UsageError) as raised:
        find_schedule(name).program(stages, micro_batches)
    assert (raised.value.what, raised.value.hint) == (what, hint)

"""The drawing of a step: against hand-made ones, and each column against what fills it."""

from __future__ import annotations

import io
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pplan.cli.timeline_drawing import IDLE, KINDS, Cell, block, cells, column_count, draw_row, print_drawing
from pplan.cost_models.program import Action
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import stage_costs
from pplan.cost_models.timeline import Span, Timeline, simulate


def _timeline(schedule: str, stages: int, count: int, *seconds: float) -> Timeline:
    program = find_schedule(schedule).program(stages, count)
    return simulate(program, stage_costs(program, *seconds))


def _printed(timeline: Timeline, width: int, *, colour: bool = False) -> list[str]:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=False,
        markup=False,
        highlight=False,
    )
    print_drawing(timeline, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_gpipe_drawn() -> None:
    """Nine units of 2 + 4 columns: 30 of the 31 there are."""
    assert _printed(_timeline("gpipe", 3, 3, 1.0, 1.0), 9 + 31) == [
        "stage 0  F0-F1-F2-............B2-B1-B0-",
        "stage 1  ...F0-F1-F2-......B2-B1-B0-...",
        "stage 2  ......F0-F1-F2-B2-B1-B0-......",
        "         0                       10.0 s",
        "A column is 333 ms and shows what fills most of it. F forward, B backward.",
    ]


def test_a_split_backward_drawn() -> None:
    lines = _printed(_timeline("zb-h1", 2, 3, 1.0, 1.0, 1.0), 9 + 20)
    assert lines[:2] == [
        "stage 0  F0F1..B0W0F2B1W1B2W2",
        "stage 1  ..F0B0F1B1W0F2B2W1W2",
    ]
    assert lines[-1].endswith("F forward, B backward of the input, W of the weights.")
    some = _printed(_timeline("dualpipe-v", 2, 4, 1.0, 1.0, 1.0), 9 + 20)
    assert "B backward, of the input alone where there is a W, W of the weights" in some[-1]


def test_second_chunks_are_lower_case() -> None:
    lines = _printed(_timeline("interleaved", 2, 2, 2.0, 4.0), 9 + 32)
    assert lines[:2] == [
        "stage 0  F0F1f0f1....b0--..b1--B0--B1--",
        "stage 1  ..F0F1f0b0--f1b1--B0--B1--....",
    ]
    assert "lower case: the second chunk" in lines[-1]


def test_columns_that_meet_the_ends_of_actions() -> None:
    timeline = _timeline("1f1b", 4, 6, 1.0, 2.0)  # 27 units
    assert column_count(timeline, 110) == 108
    assert column_count(timeline, 107) == 81
    assert column_count(timeline, 80) == 80  # 54 would leave too much empty
    assert column_count(_timeline("1f1b", 4, 6, 1.0, 2.0**0.5), 110) == 110
    assert column_count(timeline, 10**6) <= 240


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "zb-v", "avgpipe", "autopipe", "wpipe"])
def test_every_row_has_its_columns(schedule: str) -> None:
    lines = _printed(_timeline(schedule, 4, 8, 1.3, 2.1, 0.7), 70)
    assert len(lines) == 6
    assert {len(line) for line in lines[:5]} == {70}


def test_numbers_where_there_is_room() -> None:
    wide = Span(0, Action("F", 12), 0.0, 1.0)
    assert [block(wide, width, "-") for width in (1, 2, 3, 5)] == ["F", "F-", "F12", "F12--"]
    assert block(Span(0, Action("B", 3, 1), 0.0, 1.0), 3, "-") == "b3-"
    assert block(Span(0, Action("W", 3, 2), 0.0, 1.0), 3, " ") == "W3 "


def test_a_column_shows_what_fills_most_of_it() -> None:
    spans = [
        Span(0, Action("F", 0), 0.0, 0.3),
        Span(0, Action("B", 0), 0.3, 0.6),
        Span(0, Action("F", 1), 0.6, 0.9),
        Span(0, Action("F", 2), 1.55, 2.0),
    ]
    # Column 0: 0.6 of forwards; column 1: 0.45 of a forward and 0.55 of nothing.
    assert cells(spans, 2.0, 2) == [Cell(0, 0), Cell(IDLE, -1)]
    assert draw_row(spans, cells(spans, 2.0, 2), colour=False).plain == "F."


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[Span], int]:
    """Actions of one stage in whole seconds, and the last second."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=20))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=len(lengths), max_size=len(lengths)))
    spans, now = [], 0
    for index, ((pause, length), kind) in enumerate(zip(lengths, kinds, strict=True)):
        start, now = now + pause, now + pause + length
        spans.append(Span(0, Action(kind, index), float(start), float(now)))  # type: ignore[arg-type]
    return spans, now + draw(st.integers(0, 5))


@given(rows(), st.integers(1, 60))
def test_columns_are_honest(row: tuple[list[Span], int], columns: int) -> None:
    """By exact overlaps, counted one by one."""
    spans, seconds = row
    for column, cell in enumerate(cells(spans, float(seconds), columns)):
        left, right = Fraction(column * seconds, columns), Fraction((column + 1) * seconds, columns)
        parts = [max(min(right, Fraction(s.end)) - max(left, Fraction(s.start)), Fraction(0)) for s in spans]
        by_kind = [
            sum((part for part, s in zip(parts, spans, strict=True) if s.action.kind == kind), Fraction(0))
            for kind in KINDS
        ]
        by_kind.append(right - left - sum(parts))
        nearly = (right - left) / 10**5
        assert by_kind[cell.kind] >= max(by_kind) - nearly
        if cell.kind != IDLE:
            assert spans[cell.span].action.kind == KINDS[cell.kind]
            own = [part for part, s in zip(parts, spans, strict=True) if s.action.kind == KINDS[cell.kind]]
            assert parts[cell.span] >= max(own) - nearly


def test_colours() -> None:
    timeline = _timeline("gpipe", 3, 3, 1.0, 1.0)
    letters, colours = _printed(timeline, 40), _printed(timeline, 40, colour=True)
    assert not any("\x1b" in line for line in letters)
    first = colours[0]
    assert first.count("\x1b[30;") == 6
    assert "\x1b[30;104mF0 \x1b[0m\x1b[30;44mF1 \x1b[0m\x1b[30;104mF2 \x1b[0m" in first
    assert "\x1b[30;102mB2 \x1b[0m\x1b[30;42mB1 \x1b[0m" in first
    assert "." not in first


def test_no_color_means_letters() -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=True, no_color=True)
    print_drawing(_timeline("gpipe", 3, 3, 1.0, 1.0), console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("stage 0  F0-F1-F2-....")

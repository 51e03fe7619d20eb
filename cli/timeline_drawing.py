"""A simulated step drawn in text: a row a stage, a column a stretch of time.

A column shows what fills most of it. An action that is wide enough carries its micro-batch:

    stage 0  F0-F1-F2-F3-........B0----B1----B2----B3----
    stage 1  ...F0-F1-F2-F3-B0----B1----B2----B3----.....
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from ..cost_models.quantities import format_seconds
from ..cost_models.timeline import Span, Timeline
from .table import line

KINDS = "FBW"
IDLE = 3
LEAST_COLUMNS = 20
MOST_COLUMNS = 240
NARROWER = 0.75
"""Of the columns there are, the part that is used at least: fewer may meet the ends of actions exactly."""
EXACT = 1e-6
"""Columns by which ends of actions may miss a column's end and still count as meeting it."""
STYLES = {
    "F": ("black on bright_blue", "black on blue"),
    "B": ("black on bright_green", "black on green"),
    "W": ("black on bright_magenta", "black on magenta"),
}
"""Of even and of odd micro-batches, so that one is told from the next."""


class Cell(NamedTuple):
    """What fills most of a column: an action (an index into the stage's spans), or nothing (-1)."""

    kind: int
    span: int


def print_drawing(timeline: Timeline, console: Console) -> None:
    """Prints the rows, a time axis and what the letters mean."""
    labels = [f"stage {stage}" for stage in range(timeline.stages)]
    margin = max(map(len, labels)) + 2
    columns = column_count(timeline, max(console.width - margin, LEAST_COLUMNS))
    colour = console.is_terminal and not console.no_color and console.color_system is not None
    for label, spans in zip(labels, timeline.spans_by_stage, strict=True):
        row = Text(label.ljust(margin))
        row.append_text(draw_row(spans, cells(spans, timeline.step_seconds, columns), colour=colour))
        console.print(row, no_wrap=True, crop=False, overflow="ignore", soft_wrap=True)
    end = format_seconds(timeline.step_seconds)
    line(console, " " * margin + "0" + end.rjust(columns - 1))
    line(console, legend(timeline, columns))


def column_count(timeline: Timeline, most: int) -> int:
    """Columns of the drawing: as many as there is room for, or a few less where all actions then begin and
    end with a column."""
    most = min(most, MOST_COLUMNS)
    ends = np.unique(np.concatenate([timeline.run.start, timeline.run.end])) / timeline.step_seconds
    for columns in range(most, int(NARROWER * most), -1):
        positions = ends * columns
        if np.abs(positions - np.round(positions)).max() <= EXACT:
            return columns
    return most


def cells(spans: Sequence[Span], seconds: float, columns: int) -> list[Cell]:
    """By column of the drawing, what fills most of it, where `columns` make up these seconds."""
    filled = [*([0.0] * columns for _ in range(IDLE)), [1.0] * columns]
    longest = [[0.0] * columns for _ in range(IDLE)]
    span_indices = [[-1] * columns for _ in range(IDLE)]
    for index, span in enumerate(spans):
        kind = KINDS.index(span.action.kind)
        for column, part in _parts(span.start / seconds * columns, span.end / seconds * columns, columns):
            filled[kind][column] += part
            filled[IDLE][column] -= part
            if part > longest[kind][column] + EXACT:
                longest[kind][column] = part
                span_indices[kind][column] = index
    # Rounded: of equal ones the first is shown, an action before a pause, whatever the last bits say.
    winners = np.round(np.array(filled) / EXACT).argmax(axis=0).tolist()
    return [Cell(k, -1 if k == IDLE else span_indices[k][c]) for c, k in enumerate(winners)]


def _parts(start: float, end: float, columns: int) -> Iterator[tuple[int, float]]:
    """The columns of a stretch, and how much of each it takes. Plain Python: most stretches of a long step
    lie in one column."""
    first = min(int(start), columns - 1)
    for column in range(first, max(min(ceil(end), columns), first + 1)):
        yield column, min(max(column + 1, start), end) - min(max(column, start), end)


def draw_row(spans: Sequence[Span], row: Sequence[Cell], *, colour: bool) -> Text:
    """A row as text: blocks of one action, each with its letter and, where there is room, its number."""
    text = Text()
    first = 0
    while first < len(row):
        last = first
        while last + 1 < len(row) and row[last + 1] == row[first]:
            last += 1
        cell, width = row[first], last + 1 - first
        if cell.kind == IDLE:
            text.append((" " if colour else ".") * width)
        else:
            action = spans[cell.span].action
            style = STYLES[action.kind][action.micro_batch % 2] if colour else None
            text.append(block(spans[cell.span], width, " " if colour else "-"), style)
        first = last + 1
    return text


def block(span: Span, width: int, filler: str) -> str:
    """`F3--`; lower case on every second chunk; without the number where it does not fit."""
    action = span.action
    letter = action.kind.lower() if action.chunk % 2 else action.kind
    name = f"{letter}{action.micro_batch}"
    return (name if len(name) <= width else letter).ljust(width, filler)


def legend(timeline: Timeline, columns: int) -> str:
    """A line that says how long a column is and what the letters mean."""
    program = timeline.program
    words = ["F forward", "B backward"]
    if program.splits_backward:
        words = ["F forward", "B backward of the input", "W of the weights"]
        kinds = [action.kind for own in program.actions for action in own]
        if kinds.count("B") > kinds.count("W"):
            words[1:] = ["B backward, of the input alone where there is a W", "W of the weights"]
    if program.chunks > 1:
        words.append("lower case: the second chunk" if program.chunks == 2 else "lower case: odd chunks")
    seconds = format_seconds(timeline.step_seconds / columns)
    return f"A column is {seconds} and shows what fills most of it. {', '.join(words)}."

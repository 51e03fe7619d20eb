"""Bars as an SVG drawing that needs nothing else: of layers, of stages, of schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .quantities import format_bytes, format_seconds
from .text_files import write_whole

WIDTH, MARGIN, BAR, GAP = 900.0, 14.0, 16.0, 5.0
HEAD, TITLE, LEGEND = 34.0, 24.0, 24.0
"""Height of the drawing's title, of a panel's, and of the legend."""
CHARACTER = 7.0
"""Width of one in the labels; a name of Chinese characters is wider, and cut by the browser's own measure."""
LONGEST_LABEL = 34
MOST_BARS = 200
"""In a panel: more would be no longer read."""
COLOURS = {
    "forward": "#4c8fd6",
    "backward": "#4da167",
    "memory": "#c49a3a",
    "computing": "#4c8fd6",
    "idle": "#d8d8d8",
    "only by itself": "#f0e2bf",
}
"""Black text is read on all of them."""


@dataclass(frozen=True, repr=False)
class Drawing:
    """An SVG drawing: a notebook shows it, `str` and `save` give its text."""

    title: str
    svg: str

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Writes it; an existing file is replaced only with `force`. Raises FileError."""
        write_whole(Path(path), self.svg, force=force)

    def __str__(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Drawing: {self.title}>"

    def _repr_svg_(self) -> str:
        """Of a notebook."""
        return self.svg


@dataclass(frozen=True)
class Bar:
    """A row: `parts` are its values by the names of their colours; `words` stand behind it; a `limit` is
    marked."""

    label: str
    parts: tuple[tuple[str, float], ...]
    words: str
    limit: float | None = None

    @property
    def length(self) -> float:
        """The value that has to fit."""
        return max(sum(value for _, value in self.parts), self.limit or 0.0)


@dataclass(frozen=True)
class Panel:
    """Bars of one unit, from one zero."""

    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class CostRow:
    """What a layer or a stage takes: seconds forward and backward, and bytes, against a limit."""

    label: str
    forward: float
    backward: float
    bytes: float
    limit: float | None = None

    @property
    def cells(self) -> list[str]:
        """Of a table."""
        return [
            self.label,
            format_seconds(self.forward),
            format_seconds(self.backward),
            format_bytes(self.bytes),
        ]


def draw_costs(title: str, times: str, memory: str, rows: Sequence[CostRow]) -> Drawing:
    """The seconds of all rows, under the heading `times`, and below them the bytes, under `memory`."""
    seconds, amounts = [], []
    for row in rows:
        words = f"{format_seconds(row.forward)} + {format_seconds(row.backward)}"
        seconds.append(Bar(row.label, (("forward", row.forward), ("backward", row.backward)), words))
        words = format_bytes(row.bytes) + ("" if row.limit is None else f" of {format_bytes(row.limit)}")
        amounts.append(Bar(row.label, (("memory", row.bytes),), words, row.limit))
    return draw_bars(title, [Panel(times, seconds), Panel(memory, amounts)])


def draw_bars(title: str, panels: Sequence[Panel]) -> Drawing:
    """The panels, one below the other, with a legend of what their colours mean."""
    height = HEAD + LEGEND + sum(map(_height, panels)) + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>{_escape(title)}</title>",
        f'<rect width="{WIDTH:g}" height="{height:g}" fill="white"/>',
        _text(MARGIN, 24, title, 'font-size="15" font-weight="bold"'),
        *_legend(panels),
    ]
    top = HEAD + LEGEND
    for panel in panels:
        lines += _panel(panel, top)
        top += _height(panel)
    return Drawing(title, "\n".join([*lines, "</svg>"]) + "\n")


def _height(panel: Panel) -> float:
    return TITLE + min(len(panel.bars), MOST_BARS) * (BAR + GAP) + MARGIN


def _legend(panels: Sequence[Panel]) -> Iterator[str]:
    """The colours in the order in which they come, and the mark of a limit."""
    names = list(dict.fromkeys(name for panel in panels for bar in panel.bars for name, _ in bar.parts))
    x, y = MARGIN, HEAD + 2
    for name in names:
        yield f'<rect x="{x:g}" y="{y:g}" width="12" height="12" fill="{COLOURS[name]}"/>'
        yield _text(x + 17, y + 10, name)
        x += 36 + CHARACTER * len(name)
    if any(bar.limit is not None for panel in panels for bar in panel.bars):
        yield f'<rect x="{x + 4:g}" y="{y:g}" width="2" height="12" fill="black"/>'
        yield _text(x + 12, y + 10, "limit")


def _panel(panel: Panel, top: float) -> Iterator[str]:
    bars = panel.bars[:MOST_BARS]
    more = f"; the first {MOST_BARS} of {len(panel.bars)}" if len(panel.bars) > MOST_BARS else ""
    yield _text(MARGIN, top + 14, panel.title + more, 'font-weight="bold"')
    left = MARGIN + 8 + CHARACTER * max((len(_short(bar.label)) for bar in bars), default=0)
    right = MARGIN + 8 + CHARACTER * max((len(bar.words) for bar in bars), default=0)
    scale = (WIDTH - left - right) / (max((bar.length for bar in bars), default=0.0) or 1.0)
    for row, bar in enumerate(bars):
        yield from _bar(bar, left, top + TITLE + row * (BAR + GAP), scale)


def _bar(bar: Bar, left: float, top: float, scale: float) -> Iterator[str]:
    yield f"<g><title>{_escape(f'{bar.label}: {bar.words}')}</title>"
    yield _text(left - 8, top + 12.5, _short(bar.label), 'text-anchor="end"')
    x = left
    for name, value in bar.parts:
        width = value * scale
        yield (f'<rect x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{BAR:g}" fill="{COLOURS[name]}"/>')
        x += width
    if bar.limit is not None:
        mark = left + bar.limit * scale
        yield f'<rect x="{mark:.2f}" y="{top - 1:g}" width="2" height="{BAR + 2:g}" fill="black"/>'
        x = max(x, mark)
    yield _text(x + 7, top + 12.5, bar.words)
    yield "</g>"


def _short(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{_escape(words)}</text>'


def _escape(words: str) -> str:
    """Without characters that XML does not have: a name in a file may hold any."""
    printable = "".join(character if character.isprintable() else "\ufffd" for character in words)
    return escape(printable, quote=False)

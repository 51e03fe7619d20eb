"""Figures for papers and notebooks, drawn by matplotlib: timelines, and bars of layers, stages and plans."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import arguments
from .arguments import Options, option, options_class, options_from
from .errors import MachineError, UsageError
from .quantities import format_bytes, format_seconds, percent
from .text_files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .timeline import Span, Timeline

FORMATS = ("pdf", "png", "svg")
MOST_BARS = 200
"""Bars of a panel. Nobody could read more."""
MOST_NUMBERS = 4000
"""Numbered boxes of a figure. Beyond this the boxes stay empty."""
MOST_TRANSFERS = 1000
"""Lines beyond which they would hide the rows."""
LONGEST_LABEL = 40
WIDTH = 7.0
"""Inches: both columns of a paper."""
ROW, BAR, PANEL, HEAD = 0.26, 0.2, 0.36, 0.5
"""Inches of a stage, of a bar, of a panel's title, and of the figure's title, legend and axis."""
LEAST_HEIGHT = 1.6
"""Inches in which a single stage has room between title, legend and axis."""
NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}
COLOURS = {
    "F": ("#7fb2e5", "#b5d4f1"),
    "B": ("#6cbf84", "#abdcb8"),
    "W": ("#cf9bd6", "#e5c8e9"),
}
"""Colours of an action on the first and on further virtual stages. Black text is readable on all of them."""
GREYS = {"F": ("#d9d9d9", "#eeeeee"), "B": ("#a6a6a6", "#bfbfbf"), "W": ("#ffffff", "#ffffff")}
BARS = {"forward": "F", "backward": "B", "computing": "F"}
OTHER_BARS = {"memory": ("#d9b25f", "#bfbfbf"), "idle": ("#e3e3e3", "#ffffff")}
TINTS = {"F": 0.65, "B": 0.3, "W": 0.85}
"""Share of white in the colour of a micro-batch."""
IDLE = "#f3f3f3"


def _size(name: str, value: Any) -> tuple[float, float] | None:
    """Width and height in inches. Raises UsageError."""
    if value is None:
        return None
    parts = value.split("x") if isinstance(value, str) else value
    try:
        width, height = (float(part) for part in parts)
    except (TypeError, ValueError):
        width = height = 0.0
    if not (1 <= width <= 100 and 1 <= height <= 100):
        raise UsageError(
            f"{name}={value!r}: not two lengths of 1 to 100 inches", "Give width x height, such as 7x3."
        )
    return width, height


def _points(name: str, value: Any) -> float:
    """Size of a font. Raises UsageError."""
    points = float(value) if isinstance(value, str) else arguments.number(name, value)
    if not 3 <= points <= 40:
        raise UsageError(f"{name}={value}: not 3 to 40 points", "For example: 9.")
    return points


def _read_points(text: str, name: str) -> float:
    """Typed size of a font. Raises UsageError."""
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name} {text}: not a number of points", f"For example: {name} 9") from None


def _figure(default: Any, check: Any, help: str, form: str | None = None, **more: Any) -> Any:
    return option(default, check, help, form, panel="The figure", **more)


@options_class
class FigureOptions(Options):
    """Look of a figure."""

    title: str | None = _figure(None, arguments.optional_word, "Title; '' draws none.", "TEXT")
    size: tuple[float, float] | None = _figure(
        None,
        _size,
        "Width and height in inches; default: 7 inches wide, as high as the rows need.",
        "WxH",
        read=lambda text, name: _size(name, text),
    )
    font: str | None = _figure(
        None, arguments.optional_word, "Font family; default: that of matplotlib.", "NAME"
    )
    font_size: float = _figure(8.0, _points, "Size of the text in points.", "POINTS", read=_read_points)
    greyscale: bool = _figure(False, arguments.flag, "Draw in grey, for print.")
    colour_by: Literal["action", "micro-batch"] | str = _figure(
        "action",
        arguments.word,
        "Colour boxes by action (forward, backward) or by micro-batch.",
        "action|micro-batch",
        words=("action", "micro-batch"),
    )


@dataclass(frozen=True, repr=False)
class Drawing:
    """A figure that a notebook shows and that `save` writes.

    Attributes:
        title: What it shows, in a line.
        figure: The figure of matplotlib, to be changed as you like.
        options: Its look.
    """

    title: str
    figure: Figure
    options: FigureOptions

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the figure as PDF, PNG or SVG.

        Args:
            path: File to write; its ending names the format.
            force: Replace an existing file.

        Raises:
            UsageError: The ending is another one.
            FileError: The file exists, or cannot be written.
        """
        write_whole(Path(path), self.to_bytes(figure_format("path", Path(path))), force=force)

    def to_bytes(self, format: str) -> bytes:
        """Return the content of a file, "pdf", "png" or "svg". Equal figures give equal bytes."""
        content = io.BytesIO()
        metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(format)
        with _look(self.options):
            self.figure.savefig(content, format=format, dpi=200, metadata=metadata)
        return content.getvalue()

    def __repr__(self) -> str:
        return f"<Drawing: {self.title}>"

    def _repr_svg_(self) -> str:
        """Show the figure in a notebook."""
        return self.to_bytes("svg").decode()


def figure_format(name: str, path: Path) -> str:
    """Return the format that the ending of a file names. Raises UsageError for others."""
    ending = path.suffix.removeprefix(".").lower()
    if ending not in FORMATS:
        raise UsageError(
            f"{name} {path}: ends in none of .pdf, .png and .svg", "Name a file such as step.pdf."
        )
    return ending


def figure_options(style: Mapping[str, Any]) -> FigureOptions:
    """The options given to a `plot` method. Raises UsageError."""
    options: FigureOptions = options_from(style, FigureOptions, of="plot")[0]
    return options


def draw_timelines(title: str, timelines: Mapping[str, Timeline], options: FigureOptions) -> Drawing:
    """Draw timelines below each other on one time axis, each under its name.

    Raises:
        MachineError: matplotlib is not installed.
    """
    rows = [timeline.stages for timeline in timelines.values()]
    longest = max(timeline.step_seconds for timeline in timelines.values())
    seconds, unit = _time_unit(longest)
    with _look(options):
        figure = _new_figure(options, HEAD + sum(PANEL + ROW * stages for stages in rows))
        panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        numbers = sum(len(timeline.spans) for timeline in timelines.values()) <= MOST_NUMBERS
        for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
            _draw_timeline(axes, timeline, seconds, options)
            if numbers:
                points = 72 * figure.get_figwidth() * 0.88 / (longest / seconds)
                _number_boxes(axes, timeline, seconds, points, options)
            words = f"{format_seconds(timeline.step_seconds)}, bubble {percent(timeline.bubble)}"
            heading = f"{_printable(name)}: {words}" if name else words
            axes.set_title(heading, loc="left", fontsize=options.font_size, parse_math=False)
        panels[-1].set_xlabel(f"time ({unit})")
        panels[-1].set_xlim(0, longest / seconds)
        _finish(figure, title, options, _legend(timelines.values(), options))
    return Drawing(title, figure, options)


def _time_unit(longest: float) -> tuple[float, str]:
    """Seconds of the unit of the time axis, and its name."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next((unit for unit in units if longest >= 2 * unit[0]), units[-1])


def _draw_timeline(axes: Axes, timeline: Timeline, seconds: float, options: FigureOptions) -> None:
    """The boxes of all stages, the lines of transfers, and the axes."""
    from matplotlib.collections import LineCollection

    step = timeline.step_seconds / seconds
    for stage, spans in enumerate(timeline.spans_by_stage):
        axes.broken_barh([(0, step)], (stage - 0.4, 0.8), facecolors=IDLE, zorder=0)
        for kind in NAMES:
            boxes = [span for span in spans if span.action.kind == kind]
            if boxes:
                axes.broken_barh(
                    [(span.start / seconds, (span.end - span.start) / seconds) for span in boxes],
                    (stage - 0.4, 0.8),
                    facecolors=[_colour(span, timeline, options) for span in boxes],
                    edgecolors="#555555" if options.greyscale else "white",
                    linewidths=0.4,
                    hatch="/////" if options.greyscale and kind == "W" else None,
                )
    moving = [transfer for transfer in timeline.transfers if transfer.end > transfer.start]
    if len(moving) <= MOST_TRANSFERS:
        lines = [
            [
                (one.start / seconds, one.stage + (0.4 if one.to_stage > one.stage else -0.4)),
                (one.end / seconds, one.to_stage - (0.4 if one.to_stage > one.stage else -0.4)),
            ]
            for one in moving
        ]
        axes.add_collection(LineCollection(lines, colors="#444444", linewidths=0.5, alpha=0.6))
    axes.set_ylim(timeline.stages - 0.5, -0.5)
    every = -(-timeline.stages // 32)
    axes.set_yticks(
        range(0, timeline.stages, every), [f"stage {n}" for n in range(0, timeline.stages, every)]
    )
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _colour(span: Span, timeline: Timeline, options: FigureOptions) -> Any:
    """Colour of a box."""
    action = span.action
    if options.colour_by == "action":
        return (GREYS if options.greyscale else COLOURS)[action.kind][min(action.chunk, 1)]
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    if options.greyscale:
        share = action.micro_batch / max(1, timeline.program.micro_batches - 1)
        return to_rgb(str(0.95 - 0.5 * share))
    white = TINTS[action.kind]
    return tuple((1 - white) * part + white for part in colormaps["tab10"](action.micro_batch % 10)[:3])


def _number_boxes(
    axes: Axes, timeline: Timeline, seconds: float, points: float, options: FigureOptions
) -> None:
    """Write the number of its micro-batch into every box that is wide enough. `points`: of a unit of time."""
    height = options.font_size * 0.85
    for span in timeline.spans:
        label = str(span.action.micro_batch)
        if (span.end - span.start) / seconds * points >= 0.65 * height * len(label) + 1:
            middle = (span.start + span.end) / 2 / seconds
            axes.text(middle, span.stage, label, ha="center", va="center_baseline", fontsize=height)


def _legend(timelines: Any, options: FigureOptions) -> list[tuple[str, Any, str]]:
    """Name, colour and hatch of every kind of box."""
    actions = {span.action for timeline in timelines for span in timeline.spans}
    kinds_and_chunks = {(action.kind, min(action.chunk, 1)) for action in actions}
    by_micro_batch = options.colour_by == "micro-batch"
    if by_micro_batch and options.greyscale:
        return []
    entries = []
    for kind, name in NAMES.items():
        for chunk in (0,) if by_micro_batch else (0, 1):
            if (kind, chunk) in kinds_and_chunks:
                tint = str(0.4 + 0.6 * TINTS[kind])
                colour = tint if by_micro_batch else (GREYS if options.greyscale else COLOURS)[kind][chunk]
                hatch = "/////" if options.greyscale and kind == "W" else ""
                entries.append((name + (", further virtual stages" if chunk else ""), colour, hatch))
    return [*entries, ("idle", IDLE, "")]


@dataclass(frozen=True)
class Bar:
    """A row. `parts`: values by the names of their colours. `words`: printed after it. `limit`: marked."""

    label: str
    parts: tuple[tuple[str, float], ...]
    words: str
    limit: float | None = None


@dataclass(frozen=True)
class Panel:
    """Bars of one unit. `kind`: of their numbers."""

    title: str
    bars: Sequence[Bar]
    kind: Literal["seconds", "bytes"] = "seconds"


@dataclass(frozen=True)
class CostRow:
    """Costs of a layer or a stage: seconds of forward and backward, and bytes with their limit."""

    label: str
    forward: float
    backward: float
    bytes: float
    limit: float | None = None

    @property
    def cells(self) -> list[str]:
        """Cells of a table."""
        return [
            self.label,
            format_seconds(self.forward),
            format_seconds(self.backward),
            format_bytes(self.bytes),
        ]


def draw_costs(
    title: str, times: str, memory: str, rows: Sequence[CostRow], options: FigureOptions
) -> Drawing:
    """Draw the seconds of all rows, under the heading `times`, and their bytes, under `memory`."""
    seconds, amounts = [], []
    for row in rows:
        words = f"{format_seconds(row.forward)} + {format_seconds(row.backward)}"
        seconds.append(Bar(row.label, (("forward", row.forward), ("backward", row.backward)), words))
        words = format_bytes(row.bytes) + ("" if row.limit is None else f" of {format_bytes(row.limit)}")
        amounts.append(Bar(row.label, (("memory", row.bytes),), words, row.limit))
    return draw_bars(title, [Panel(times, seconds), Panel(memory, amounts, "bytes")], options)


def draw_bars(title: str, panels: Sequence[Panel], options: FigureOptions) -> Drawing:
    """Draw panels of bars below each other.

    Raises:
        MachineError: matplotlib is not installed.
    """
    rows = [max(1, min(len(panel.bars), MOST_BARS)) for panel in panels]
    with _look(options):
        figure = _new_figure(options, HEAD + sum(PANEL + BAR * count for count in rows))
        axes_of_panels = figure.subplots(len(panels), 1, squeeze=False, height_ratios=rows)[:, 0]
        names = list(dict.fromkeys(name for panel in panels for bar in panel.bars for name, _ in bar.parts))
        for axes, panel in zip(axes_of_panels, panels, strict=True):
            _draw_panel(axes, panel, options)
        entries = [(name, _bar_colour(name, options), "") for name in names if len(names) > 1]
        _finish(figure, title, options, entries)
    return Drawing(title, figure, options)


def _draw_panel(axes: Axes, panel: Panel, options: FigureOptions) -> None:
    bars = panel.bars[:MOST_BARS]
    edge = "#555555" if options.greyscale else "none"
    ends = [max(sum(value for _, value in bar.parts), bar.limit or 0.0) for bar in bars]
    for row, (bar, end) in enumerate(zip(bars, ends, strict=True)):
        left = 0.0
        for name, value in bar.parts:
            axes.barh(row, value, 0.75, left, color=_bar_colour(name, options), edgecolor=edge, linewidth=0.4)
            left += value
        if bar.limit is not None:
            axes.plot([bar.limit] * 2, [row - 0.45, row + 0.45], color="black", linewidth=1.2)
        axes.annotate(bar.words, (end, row), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(bars)), [_printable(bar.label) for bar in bars])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_ylim(max(1, len(bars)) - 0.5, -0.5)
    axes.set_xlim(0, 1.3 * max(ends, default=0.0) or 1.0)
    more = f"; the first {MOST_BARS} of {len(panel.bars)}" if len(panel.bars) > MOST_BARS else ""
    axes.set_title(panel.title + more, loc="left", fontsize=options.font_size, parse_math=False)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _bar_colour(name: str, options: FigureOptions) -> str:
    if name in OTHER_BARS:
        return OTHER_BARS[name][options.greyscale]
    return (GREYS if options.greyscale else COLOURS)[BARS[name]][0]


def _new_figure(options: FigureOptions, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(options.size or (WIDTH, max(height, LEAST_HEIGHT)), layout="constrained")


def _finish(
    figure: Figure, title: str, options: FigureOptions, entries: Sequence[tuple[str, Any, str]]
) -> None:
    """Draw the title and a legend of name, colour and hatch."""
    from matplotlib.patches import Patch

    heading = title if options.title is None else options.title
    if heading:
        figure.suptitle(
            _printable(heading, 200), x=0.01, ha="left", fontsize=options.font_size * 1.15, parse_math=False
        )
    if entries:
        handles = [
            Patch(facecolor=colour, edgecolor="#777777", linewidth=0.4, hatch=hatch, label=name)
            for name, colour, hatch in entries
        ]
        figure.legend(
            handles=handles,
            loc="outside lower left",
            ncols=len(handles) if len(handles) <= 4 else 3,
            frameon=False,
            handlelength=1.2,
            handleheight=0.9,
        )


@contextmanager
def _look(options: FigureOptions) -> Iterator[None]:
    """The settings of matplotlib, in which the figure is drawn and saved. Raises MachineError without it."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise MachineError(
            "a figure needs matplotlib, which is not installed", "Install it: pip install 'pplan[plot]'"
        ) from None
    settings: Any = {
        "font.size": options.font_size,
        "font.family": ["sans-serif"] if options.font is None else [options.font, "sans-serif"],
        "axes.linewidth": 0.6,
        "hatch.linewidth": 0.4,
        "pdf.fonttype": 42,
        "svg.fonttype": "none",
        "svg.hashsalt": "pplan",
        "text.usetex": False,
        "savefig.facecolor": "white",
    }
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)
        yield


def _printable(words: str, most: int = LONGEST_LABEL) -> str:
    """A name of a file, short and without characters that cannot be drawn."""
    printable = "".join(character if character.isprintable() else "\ufffd" for character in words)
    return printable if len(printable) <= most else f"{printable[: most - 1]}…"

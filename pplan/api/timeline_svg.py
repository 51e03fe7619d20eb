"""A simulated step as an SVG file that needs nothing else: a row a stage, titles where the mouse rests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from ..cost_models.quantities import format_seconds
from ..cost_models.timeline import Span, Timeline, Transfer
from ..planner.plan_simulation import Simulation, describe_simulation

WIDTH, MARGIN, LEFT, ROW, GAP = 1400.0, 16.0, 84.0, 26.0, 14.0
TOP = 92.0
COLOURS = {"F": ("#4c8fd6", "#7fb0e4"), "B": ("#4da167", "#84c397"), "W": ("#b06fb8", "#cc9fd2")}
"""Of the first chunk and of further ones; black text is read on all of them."""
NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}
DIGIT = 6.2
"""Width of a character of a label."""
MOST_TRANSFERS = 5000
"""Lines beyond which they would hide the rows."""


def timeline_svg(simulation: Simulation) -> str:
    """The whole file."""
    return "\n".join(_lines(simulation)) + "\n"


def _lines(simulation: Simulation) -> Iterator[str]:
    timeline = simulation.timeline
    height = TOP + simulation.stages * (ROW + GAP) + 40
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" '
        f'width="{WIDTH:g}" height="{height:g}" font-family="sans-serif" font-size="11">'
    )
    yield f"<title>{escape(simulation.title, quote=False)}</title>"
    yield f'<rect width="{WIDTH:g}" height="{height:g}" fill="white"/>'
    first, *more = describe_simulation(simulation)
    yield _text(MARGIN, 26, first, "font-size='16' font-weight='bold'")
    yield _text(MARGIN, 46, " ".join(more), "font-size='12'")
    yield from _legend(timeline)
    for stage, spans in enumerate(timeline.spans_by_stage):
        y = _row(stage)
        yield _text(MARGIN, y + ROW / 2 + 4, f"stage {stage}", "font-size='12'")
        yield f'<rect x="{LEFT:g}" y="{y:g}" width="{_scale():g}" height="{ROW:g}" fill="#eeeeee"/>'
        yield from (_action(span, timeline) for span in spans)
    if len(timeline.transfers) <= MOST_TRANSFERS:
        yield '<g stroke="#555555" stroke-opacity="0.55">'
        yield from (
            _transfer(transfer, timeline) for transfer in timeline.transfers if transfer.end > transfer.start
        )
        yield "</g>"
    yield from _axis(timeline, _row(simulation.stages))
    yield "</svg>"


def _scale() -> float:
    """Width of the whole step."""
    return WIDTH - LEFT - MARGIN


def _row(stage: int) -> float:
    return TOP + stage * (ROW + GAP)


def _x(second: float, timeline: Timeline) -> float:
    return LEFT + second / timeline.step_seconds * _scale()


def _text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{escape(words, quote=False)}</text>'


def _action(span: Span, timeline: Timeline) -> str:
    action = span.action
    x, y, width = _x(span.start, timeline), _row(span.stage), _width(span.end - span.start, timeline)
    chunk = f", chunk {action.chunk}" if timeline.program.chunks > 1 else ""
    title = (
        f"stage {span.stage}: {NAMES[action.kind]} of micro-batch {action.micro_batch}{chunk}, "
        f"{format_seconds(span.start)} to {format_seconds(span.end)}, "
        f"{format_seconds(span.end - span.start)} long"
    )
    box = (
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{ROW:g}" '
        f'fill="{COLOURS[action.kind][min(action.chunk, 1)]}" stroke="white" stroke-width="0.5"/>'
    )
    label = str(action.micro_batch)
    words = ""
    if width >= DIGIT * len(label) + 3:
        words = _text(x + width / 2, y + ROW / 2 + 4, label, "text-anchor='middle'")
    return f"<g><title>{escape(title, quote=False)}</title>{box}{words}</g>"


def _width(seconds: float, timeline: Timeline) -> float:
    return seconds / timeline.step_seconds * _scale()


def _transfer(transfer: Transfer, timeline: Timeline) -> str:
    """A line from the row that sends to the row that receives."""
    down = transfer.to_stage > transfer.stage
    start = _row(transfer.stage) + (ROW if down else 0)
    end = _row(transfer.to_stage) + (0 if down else ROW)
    content = "activation" if transfer.action.kind == "F" else "gradient"
    title = (
        f"{content} of micro-batch {transfer.action.micro_batch}, stage {transfer.stage} to "
        f"{transfer.to_stage}: {format_seconds(transfer.start)} to {format_seconds(transfer.end)}"
    )
    return (
        f'<line x1="{_x(transfer.start, timeline):.2f}" y1="{start:g}" x2="{_x(transfer.end, timeline):.2f}" '
        f'y2="{end:g}"><title>{escape(title, quote=False)}</title></line>'
    )


def _legend(timeline: Timeline) -> Iterator[str]:
    kinds = "FBW" if timeline.program.splits_backward else "FB"
    x = LEFT
    for kind in kinds:
        for chunk, colour in enumerate(COLOURS[kind][: 2 if timeline.program.chunks > 1 else 1]):
            words = NAMES[kind] + (" of further chunks" if chunk else "")
            yield f'<rect x="{x:g}" y="60" width="14" height="14" fill="{colour}"/>'
            yield _text(x + 20, 71, words, "font-size='12'")
            x += 38 + 6.6 * len(words)
    yield f'<rect x="{x:g}" y="60" width="14" height="14" fill="#eeeeee"/>'
    yield _text(x + 20, 71, "idle; lines are transfers", "font-size='12'")


def _axis(timeline: Timeline, y: float) -> Iterator[str]:
    """Ticks at round times, and the end of the step."""
    step, every = timeline.step_seconds, tick_seconds(timeline.step_seconds)
    ticks = [n * every for n in range(int(step / every) + 1) if step - n * every > every / 3]
    for second in [*ticks, step]:
        x = _x(second, timeline)
        yield (
            f'<line x1="{x:.2f}" y1="{TOP - 4:g}" x2="{x:.2f}" y2="{y:g}" '
            'stroke="#000000" stroke-opacity="0.12"/>'
        )
        side = "end" if second == step else "middle"
        yield _text(x, y + 14, format_seconds(second, short=True), f"text-anchor='{side}'")


def tick_seconds(step: float) -> float:
    """1, 2 or 5 times a power of ten: so that there are 4 to 10 ticks."""
    power = 10.0 ** math.floor(math.log10(step / 4))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= step / 4)

"""Record the commands of the README's example as an animated SVG, from what they print.

`python docs/record_terminal.py` writes docs/images/terminal.svg.
It needs the extra `transformers` and no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, MOST_LINES = 80, 22
COMMANDS = [
    "pplan profile hf:gpt2 --set n_layer=48 --set n_embd=1600 --set n_head=25 \\\n"
    "    --sequence 1024 --device analytic:a100-40gb --amp bf16",
    "pplan solve --gpus 8 --gpu a100-40gb --optimizer adamw --mini-batch 64",
    "pplan export torch --script train.py",
]
STILL = 1
"""Page that is shown without animations."""
CHARACTER, LINE, LEFT, TOP = 8.4, 18.0, 14.0, 44.0
TYPING, PRINTING, READING = 0.03, 0.06, 5.0
"""Seconds of a character that is typed, of a line that is printed, and at the end of a page."""
FONTS = "ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
BUTTONS = ("#f87171", "#fbbf24", "#4ade80")


def record() -> list[tuple[str, list[str]]]:
    """Run the commands one after another. Returns each with the lines that it prints, as they fit."""
    pages = []
    environment = os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            words = command.replace("\\\n", "").split()[1:]
            ran = subprocess.run(
                [sys.executable, "-m", "pplan", *words],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            pages.append((command, list(_fitting(ran.stdout, len(command.splitlines())))))
    return pages


def _fitting(text: str, taken: int) -> Iterator[str]:
    """Lines as a terminal of 80 columns wraps them; an ellipsis for those below the page."""
    lines = [
        line[start : start + COLUMNS]
        for line in text.rstrip().splitlines()
        for start in range(0, max(1, len(line)), COLUMNS)
    ]
    yield from lines[: MOST_LINES - taken]
    if len(lines) > MOST_LINES - taken:
        yield "…"


def draw(pages: list[tuple[str, list[str]]]) -> str:
    """The animated SVG. Each page is typed, printed and read; then the next one takes its place."""
    starts, clock = [], 0.0
    for command, lines in pages:
        starts.append(clock)
        clock += TYPING * len(command) + PRINTING * len(lines) + READING
    width, height = 2 * LEFT + COLUMNS * CHARACTER, TOP + (MOST_LINES + 1) * LINE
    styles, body = [], []
    for page, ((command, lines), start) in enumerate(zip(pages, starts, strict=True)):
        end = starts[page + 1] if page + 1 < len(pages) else clock
        rows = [(f"$ {row}" if at == 0 else f"  {row}", True) for at, row in enumerate(command.splitlines())]
        rows += [(row, False) for row in lines]
        moment = start
        for at, (row, is_command) in enumerate(rows):
            name = f"p{page}l{at}"
            times = moment / clock, end / clock, clock
            is_last, still = page + 1 == len(pages), int(page == STILL)
            styles.append(_appearing(name, *times, is_last=is_last, still=still))
            body.append(_text(name, row, at, is_command))
            moment += TYPING * len(row) if is_command else PRINTING
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img">',
            "<title>pplan in a terminal: profile, solve and export GPT-2 XL for eight A100</title>",
            "<style>",
            f"text{{font:14px {FONTS};fill:#d8dee9;white-space:pre}}",
            ".c{fill:#a3e635}",
            *styles,
            "</style>",
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#1b1f27"/>',
            *(f'<circle cx="{20 + 20 * n}" cy="20" r="6" fill="{c}"/>' for n, c in enumerate(BUTTONS)),
            *body,
            "</svg>\n",
        ]
    )


def _appearing(name: str, start: float, end: float, seconds: float, *, is_last: bool, still: int) -> str:
    """The style of a line that is there from `start` to `end`, shares of the whole.

    Without animations it is visible where `still` is 1.
    """
    first, last = f"{100 * start:.3f}%", f"{100 * end:.3f}%"
    frames = f"0%{{opacity:0}}{first}{{opacity:1}}{last}{{opacity:0}}100%{{opacity:0}}"
    if start == 0:
        frames = f"0%{{opacity:1}}{last}{{opacity:0}}100%{{opacity:0}}"
    elif is_last:
        frames = f"0%{{opacity:0}}{first}{{opacity:1}}100%{{opacity:1}}"
    return (
        f"@keyframes {name}{{{frames}}}"
        f"#{name}{{opacity:{still};animation:{name} {seconds:.2f}s step-end infinite}}"
        f"@media(prefers-reduced-motion:reduce){{#{name}{{animation:none}}}}"
    )


def _text(name: str, row: str, at: int, is_command: bool) -> str:
    kind = ' class="c"' if is_command else ""
    words = escape(row).replace(" ", "\N{NO-BREAK SPACE}")  # not every viewer keeps spaces
    length = f' textLength="{len(row) * CHARACTER:g}"' if row.strip() else ""
    return f'<text id="{name}"{kind} x="{LEFT:g}" y="{TOP + at * LINE:g}"{length}>{words}</text>'


if __name__ == "__main__":
    (ROOT / "docs/images/terminal.svg").write_text(draw(record()))

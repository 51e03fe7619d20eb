"""Drawing of time, memory and gap over layers x devices, on two logarithmic axes each."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path

from pplan.cost_models.drawing import Drawing

WIDTH, TOP, HEIGHT, SPACE, LEFT, RIGHT = 900.0, 62.0, 190.0, 46.0, 70.0, 14.0
KINDS = {"1": ("one kind of GPU", "#4c8fd6"), "2": ("two kinds, half of them half as fast", "#c4622d")}
TIGHT = ("one kind, memory binds", "#3a7d44")
LOOSE_MEMORY = "80GiB"
"""Memory of a GPU in the cases where it does not bind."""
TITLE = "Time, memory and gap over layers x GPUs"


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis from `low` to `high`, at `start` and `end` of the drawing."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Where a value stands; what is below the axis, at its beginning."""
        share = log10(max(value, self.low) / self.low) / log10(self.high / self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Powers of ten."""
        return [10.0**power for power in range(ceil(log10(self.low)), floor(log10(self.high)) + 1)]


Row = Mapping[str, str]


def draw_scale(path: Path) -> Drawing:
    """Draw the rows that `benchmarks/scale.py --csv` writes."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    height = TOP + 3 * (HEIGHT + SPACE)
    across = Scale(300, 3e8, LEFT, WIDTH - RIGHT)
    panels = [
        ("processor time, seconds", "seconds", 1.0, 1.0, 100.0, "{:g} s"),
        ("memory, GiB", "gib", 1.0, 0.05, 5.0, "{:g} GiB"),
        ("gap to the proven bound, % (hollow: below 0.1)", "gap", 100.0, 0.1, 100.0, "{:g} %"),
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>{TITLE}</title>",
        f'<rect width="{WIDTH:g}" height="{height:g}" fill="white"/>',
        f'<text x="14" y="24" font-size="15" font-weight="bold">{TITLE}</text>',
        *_legend(),
    ]
    for number, (title, name, times, low, high, words) in enumerate(panels):
        top = TOP + number * (HEIGHT + SPACE)
        up = Scale(low, high, top + HEIGHT, top + 20)
        lines += [
            f'<text x="14" y="{top + 10:g}" font-weight="bold">{title}</text>',
            *_axes(across, up, words),
        ]
        lines += _points(rows, across, up, name, times)
    return Drawing(TITLE, "\n".join([*lines, "</svg>"]) + "\n")


def _legend() -> Iterator[str]:
    x = 14.0
    for words, colour in (*KINDS.values(), TIGHT):
        yield f'<circle cx="{x + 5:g}" cy="42" r="5" fill="{colour}"/>'
        yield f'<text x="{x + 16:g}" y="46">{words}</text>'
        x += 40 + 7 * len(words)
    yield f'<text x="{x:g}" y="46">large: 1,000 layers and more</text>'


def _axes(across: Scale, up: Scale, words: str) -> Iterator[str]:
    for value in across.ticks:
        x = across.at(value)
        yield f'<path d="M{x:.1f} {up.start:g}V{up.end:g}" stroke="#e4e4e4"/>'
        power = round(log10(value))
        yield f'<text x="{x:.1f}" y="{up.start + 15:g}" text-anchor="middle">10^{power}</text>'
    for value in up.ticks:
        y = up.at(value)
        yield f'<path d="M{across.start:g} {y:.1f}H{across.end:g}" stroke="#e4e4e4"/>'
        label = words.format(value)
        yield f'<text x="{across.start - 6:g}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    yield f'<path d="M{across.start:g} {up.end:g}V{up.start:g}H{across.end:g}" fill="none" stroke="black"/>'


def _points(rows: Sequence[Row], across: Scale, up: Scale, name: str, times: float) -> Iterator[str]:
    for row in rows:
        layers, gpus, value = int(row["layers"]), int(row["gpus"]), times * float(row[name])
        x, y = across.at(layers * gpus), up.at(value)
        _, colour = KINDS[row["kinds"]] if row["memory"] == LOOSE_MEMORY else TIGHT
        radius, fill = 7 if layers >= 1_000 else 4, colour if value >= up.low else "white"
        label = f"{layers:,} x {gpus:,}, {row['memory']}: {value:.3g}"
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" fill-opacity="0.75" '
            f'stroke="{colour}"><title>{label}</title></circle>'
        )

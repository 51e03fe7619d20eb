"""The ranges of quantities that docs/file-formats.md names, against those that readers hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pplan.cost_models import quantities

RANGES = {
    "seconds, measured or given": (0, "MOST_SECONDS"),
    "predicted seconds of a step": ("LEAST_PREDICTED_SECONDS", "MOST_PREDICTED_SECONDS"),
    "bytes of one figure, memory of a device": (0, "MOST_BYTES"),
    "bytes of a sum: of a stage, say": (0, "MOST_TOTAL_BYTES"),
    "bytes per second of a link": ("LEAST_RATE", "MOST_RATE"),
    "speed of a device, relative to the profiled one": ("LEAST_SPEED", "MOST_SPEED"),
    "times as long as usual, of a device that is slow at times": (1, "MOST_SLOWDOWN"),
    "samples of a measured micro-batch": (1, "MOST_SAMPLES"),
    "global batch, and micro-batches of a plan": (1, "MOST_MINI_BATCH"),
    "micro-batches of a step in a file": (1, "MOST_MICRO_BATCHES"),
    "actions of a step that are simulated or written out": (None, "MOST_ACTIONS"),
    "dollars of a device hour": ("LEAST_PRICE", "MOST_PRICE"),
    "layers": (1, "MOST_LAYERS"),
    "devices": (1, "MOST_DEVICES"),
}


def read_figure(text: str) -> float | None:
    """`2^63 - 1`, `1e18, or inf`, `above 1`, `131,072`."""
    match = re.search(r"(\d[\d,]*(?:e-?\d+)?)(?:\^(\d+))?( - 1)?", text)
    if match is None:
        return None
    number = match[1].replace(",", "")
    value = float(number) if match[2] is None else int(number) ** int(match[2])
    return value - (1 if match[3] else 0)


@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_those_of_the_docs(name: str) -> None:
    text = (Path(__file__).parents[2] / "docs/file-formats.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    for cell, bound in zip(row.split("|")[2:4], RANGES[name], strict=True):
        value = getattr(quantities, bound) if isinstance(bound, str) else bound
        assert read_figure(cell) == value

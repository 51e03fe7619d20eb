"""A simulated step as the report's page reads it: whole numbers of ten-millionths of the step."""

from __future__ import annotations

from typing import Any

from ...cost_models.timeline import Timeline
from ...planner.plan_simulation import Simulation

UNITS = 10_000_000
"""Of a step: three more digits than a zoomed drawing shows."""
MOST_ACTIONS = 70_000
"""In a page: each takes about 20 bytes."""


def timeline_data(simulation: Simulation) -> dict[str, Any]:
    """By device, its actions in order: `kinds`, micro-batches `m`, chunks `c` (empty where there is one), the
    idle time before each (`wait`), how long each takes (`run`); of what it sends the device that it goes `to`
    (-1: it sends nothing), how long it waits for its link (`queue`) and is on its way (`sent`). Of more
    actions than a page holds, the first micro-batches."""
    timeline = simulation.timeline
    step = timeline.step_seconds or 1.0
    program = timeline.program
    count = max(1, min(program.micro_batches, MOST_ACTIONS * program.micro_batches // len(timeline.order)))
    sent = {
        (one.stage, one.action): (one.to_stage, one.start - one.ready, one.end - one.start)
        for one in timeline.transfers
        if one.action.micro_batch < count
    }
    devices: list[dict[str, Any]] = [
        {"kinds": "", "m": [], "c": [], "wait": [], "run": [], "to": [], "queue": [], "sent": []}
        for _ in range(timeline.stages)
    ]
    ends = [0] * timeline.stages
    kinds: list[list[str]] = [[] for _ in devices]

    def units(seconds: float) -> int:
        return round(seconds / step * UNITS)

    for span in timeline.spans:
        if span.action.micro_batch >= count:
            continue
        own, start, end = devices[span.stage], units(span.start), units(span.end)
        to, queue, way = sent.get((span.stage, span.action), (-1, 0.0, 0.0))
        kinds[span.stage].append(span.action.kind)
        own["m"].append(span.action.micro_batch)
        own["c"].append(span.action.chunk)
        own["wait"].append(start - ends[span.stage])
        own["run"].append(end - start)
        own["to"].append(to)
        own["queue"].append(units(queue))
        own["sent"].append(units(way))
        ends[span.stage] = end
    for own, letters in zip(devices, kinds, strict=True):
        own["kinds"] = "".join(letters)
        own["c"] = own["c"] if any(own["c"]) else []
    return {
        "step": step,
        "units": UNITS,
        "title": simulation.title,
        "micro_batches": program.micro_batches,
        "shown": count,
        "devices": devices,
        "sums": _sums(timeline, units),
    }


def _sums(timeline: Timeline, units: Any) -> list[list[Any]]:
    """The all-reduces: their devices, start and end."""
    return [[list(own.stages), units(own.start), units(own.end)] for own in timeline.reductions[:10_000]]

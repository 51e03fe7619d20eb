"""A simulated step as a Chrome trace (JSON), which Perfetto and chrome://tracing open.

The pipeline is a process with a thread for every stage, the links another with a thread for every ordered
pair of stages; arrows lead from an action over its transfer to the action that waits for it. Counters show
what every stage holds. The format: "Trace Event Format", Google, 2016. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..cost_models.program import Action
from ..cost_models.program_order import NONE
from ..cost_models.timeline import Timeline
from ..planner.plan_simulation import Simulation

PIPELINE, LINKS = 1, 2
CATEGORIES = {"F": "forward", "B": "backward", "W": "weight gradient"}
Event = dict[str, Any]
Journey = tuple[int, int, int]
"""Positions of an action and of the one that waits for its result, and the thread of the transfer (-1: it
takes no time)."""


def trace_json(simulation: Simulation) -> str:
    """The whole file."""
    content = {
        "traceEvents": list(_events(simulation)),
        "displayTimeUnit": "ms",
        "otherData": {"schedule": simulation.schedule.name, "plan": simulation.plan},
    }
    # Without spaces: a large pipeline has hundreds of thousands of events.
    return json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"


def _events(simulation: Simulation) -> Iterator[Event]:
    timeline = simulation.timeline
    yield from _name_events(
        PIPELINE, simulation.title, [f"stage {stage}" for stage in range(simulation.stages)]
    )
    journeys, threads = _journeys(timeline)
    reducing = sorted({stage for reduction in timeline.reductions for stage in reduction.stages})
    names = [*threads, *(f"all-reduce of stage {stage}" for stage in reducing)]
    if names:
        yield from _name_events(LINKS, "links", names)
    yield from _computing(timeline)
    yield from _transfers(timeline, journeys)
    yield from _arrows(timeline, journeys)
    for reduction in timeline.reductions:
        for stage in reduction.stages:
            thread = len(threads) + reducing.index(stage)
            name = f"all-reduce of part {reduction.part}"
            yield _slice(LINKS, thread, name, "all-reduce", reduction.start, reduction.end, {})
    yield from _counters(simulation)


def _name_events(process: int, name: str, threads: Sequence[str]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for thread, thread_name in enumerate(threads):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": thread_name}}
        order = {"sort_index": thread}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": order}


def _nanoseconds(seconds: float) -> int:
    """Whole nanoseconds, so that rounding a sum never makes neighbours in a thread overlap."""
    return round(seconds * 1e9)


def _slice(
    process: int, thread: int, name: str, category: str, start: float, end: float, arguments: dict[str, Any]
) -> Event:
    start_nanoseconds = _nanoseconds(start)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": start_nanoseconds / 1e3,
        "dur": (_nanoseconds(end) - start_nanoseconds) / 1e3,
        "args": arguments,
    }


def _action_arguments(action: Action) -> dict[str, Any]:
    return {"micro_batch": action.micro_batch, "chunk": action.chunk}


def _computing(timeline: Timeline) -> Iterator[Event]:
    for stage, action, start, end in timeline.spans:
        yield _slice(
            PIPELINE, stage, str(action), CATEGORIES[action.kind], start, end, _action_arguments(action)
        )


def _journeys(timeline: Timeline) -> tuple[list[Journey], list[str]]:
    """What is sent from stage to stage, and the threads it is shown in: more than one for a link on which
    several are under way at a time."""
    order, run = timeline.order, timeline.run
    names: list[str] = []
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    journeys = []
    for i in sorted(order.sends.tolist(), key=lambda i: (float(run.begin[i]), i)):
        begin, end = _nanoseconds(float(run.begin[i])), _nanoseconds(float(run.arrival[i]))
        target, thread = int(order.target[i]), NONE
        if end > begin:
            pair = (int(order.device[i]), int(order.device[target]))
            ends = lanes.setdefault(pair, [])
            lane = next((n for n, (_, free) in enumerate(ends) if free <= begin), len(ends))
            if lane == len(ends):
                ends.append((len(names), end))
                names.append(f"{pair[0]} to {pair[1]}" + (f", {lane + 1}" if lane else ""))
            thread = ends[lane][0]
            ends[lane] = (thread, end)
        journeys.append((i, target, thread))
    return journeys, names


def _transfers(timeline: Timeline, journeys: Iterable[Journey]) -> Iterator[Event]:
    order, run = timeline.order, timeline.run
    for i, _, thread in journeys:
        if thread != NONE:
            action, begin = order.actions[i], float(run.begin[i])
            waited = _nanoseconds(begin - float(run.end[i])) / 1e3
            arguments = {**_action_arguments(action), "waited_for_the_link_us": waited}
            name = f"{'activation' if action.kind == 'F' else 'gradient'} {action}"
            yield _slice(LINKS, thread, name, "transfer", begin, float(run.arrival[i]), arguments)


def _arrows(timeline: Timeline, journeys: Iterable[Journey]) -> Iterator[Event]:
    """Flow events from the last nanosecond of an action (a flow starts in the slice it lies in) to the start
    of the action that waits for it."""
    order, run = timeline.order, timeline.run
    for number, (i, target, thread) in enumerate(journeys):
        common = {"name": "sent", "cat": "sent", "id": number}
        start, end = _nanoseconds(float(run.start[i])), _nanoseconds(float(run.end[i]))
        source, destination = int(order.device[i]), int(order.device[target])
        departs, arrives = max(start, end - 1) / 1e3, _nanoseconds(float(run.start[target])) / 1e3
        yield {"ph": "s", **common, "pid": PIPELINE, "tid": source, "ts": departs}
        if thread != NONE:
            begin = _nanoseconds(float(run.begin[i])) / 1e3
            yield {"ph": "t", **common, "pid": LINKS, "tid": thread, "ts": begin}
        yield {"ph": "f", "bp": "e", **common, "pid": PIPELINE, "tid": destination, "ts": arrives}


def _counters(simulation: Simulation) -> Iterator[Event]:
    """Bytes of every stage where a plan was simulated, else its micro-batches in flight."""
    for stage in range(simulation.stages):
        if not simulation.memory:
            name, unit, levels = "in flight", "micro-batches", _in_flight(simulation.timeline, stage)
        else:
            memory = simulation.memory[stage]
            name, unit = "memory", "bytes"
            levels = memory.over_time(simulation.timeline, stage)
        for second, level in levels:
            yield {
                "ph": "C",
                "name": f"{name} of stage {stage}",
                "pid": PIPELINE,
                "ts": _nanoseconds(second) / 1e3,
                "args": {unit: round(level, 6)},
            }


def _in_flight(timeline: Timeline, stage: int) -> list[tuple[float, float]]:
    return timeline.memory_over_time(stage, 0.0, 1.0)

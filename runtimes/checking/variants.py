"""The same stages under other schedules and numbers of micro-batches: what is run to calibrate. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ...cost_models.errors import PplanError
from ..formats.torch_actions import action_rows, build_program, schedule_class
from ..formats.torch_export import TorchExport
from .job import Case


def variants(case: Case, most: int = 3) -> list[Case]:
    """Cases of the same stages and micro-batches, at most so many; none of them is the case itself."""
    return list(islice(_found(case), most))


def _found(case: Case) -> Iterator[Case]:
    """Those of the same schedule first; a V of stages is no loop, so that no other schedule runs it."""
    document = case.document
    devices, order = len(document.stages), document.order
    looped = len(document.stages[0]) > 1
    others: tuple[str, ...] = ("looped-bfs", "interleaved") if looped else ("gpipe", "1f1b")
    if order in ("zb-v", "dualpipe-v"):
        others = ()
    schedules = [order, *(other for other in others if other != order)]
    for count in (2, 3, 1, 4):
        for schedule in schedules:
            if (schedule, count * devices) == (order, document.micro_batches):
                continue
            try:
                yield with_schedule(case, schedule, count * devices)
            except PplanError:
                continue


def with_schedule(case: Case, schedule: str, micro_batches: int) -> Case:
    """The case under another schedule with as many micro-batches of the same size. Raises UsageError."""
    old = case.document
    program = build_program(schedule, len(old.stages), micro_batches, len(old.stages[0]))
    document = TorchExport.model_validate(
        old.model_dump(by_alias=True)
        | {
            "order": schedule,
            "schedule": schedule_class(schedule, program),
            "micro_batches": micro_batches,
            "mini_batch": micro_batches * old.micro_batch_size,
            "actions": action_rows(program),
        }
    )
    return case.model_copy(update={"name": f"{case.name}-{schedule}-{micro_batches}", "document": document})

"""The frontier: the plans of which none is both faster and smaller, as a file (`NAME.frontier.json`)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ...cost_models.document import Document, MadeBy, Record
from ..plan_file import Bytes, Plan, StepSeconds


class Point(Record):
    """A plan of the frontier. `memory_bytes`: of the device that needs most. `exact`: no plan that needs no
    more is faster."""

    step_seconds: StepSeconds
    memory_bytes: Bytes
    exact: bool
    plan: Plan


class Frontier(Document):
    """The frontier of step time against memory, the fastest plan first. `complete`: the last point is the
    smallest plan there is, as far as the searches were exact; `memory_step` the share by which the memory of
    one point lies below that of the point before, at least."""

    kind: ClassVar[str] = "frontier"

    model: str
    points: Annotated[list[Point], Field(min_length=1)]
    complete: bool
    memory_step: Annotated[float, Field(ge=0, lt=1)]
    warnings: list[str] = []
    """What may make the figures wrong, of all points."""
    made_by: MadeBy = MadeBy()

"""Options that simulate a plan with other numbers than its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from ..cost_models import arguments
from ..cost_models.option_fields import Options, option
from ..cost_models.schedules.registration import optional_schedule

TRANSFERS = ("overlapped", "blocking", "blocking-receive", "rendezvous")
"""As of `Costs.transfers`, which is not imported here: the help of the command line would wait for numpy."""


class OverrideKeywords(TypedDict, total=False):
    """The fields of `Overrides`, as a caller may give them."""

    schedule: str | None
    stages: int | None
    micro_batches: int | None
    virtual_stages: int | None
    replicas: int | None
    transfers: Literal["overlapped", "blocking", "blocking-receive", "rendezvous"] | str


def _number(form: str, help: str) -> Any:
    return option(None, arguments.optional_whole, help, form, least=1)


@dataclass(frozen=True)
class Overrides(Options):
    """Numbers that replace those of the plan in a simulation; None: the plan's. Raises UsageError.

    `stages`: devices of the pipeline; with another number than the plan's each stage has one device.
    `virtual_stages`: of a device; `replicas`: of every stage. `transfers`: the planner lets all overlap.
    """

    schedule: str | None = option(
        None,
        optional_schedule,
        "Another schedule than the plan's: a name of pplan schedules, or your own in FILE.schedule; the cuts "
        "stay where it has as many stages.",
        "NAME|FILE",
    )
    stages: int | None = _number("N", "Devices of the pipeline; for a plan it cuts the layers anew.")
    micro_batches: int | None = _number("M", "Of a step; a plan's global batch is cut into so many.")
    virtual_stages: int | None = _number(
        "V", "Parts of the layers on each device; costs of a stage are shared by its parts equally."
    )
    replicas: int | None = _number(
        "R", "Devices that share each stage of a plan whose layers are cut anew; default: as many as now."
    )
    transfers: str = option(
        "overlapped",
        arguments.word,
        "Whether communication overlaps computation, or a stage waits for its sends, receives or both.",
        "|".join(TRANSFERS),
        words=TRANSFERS,
    )

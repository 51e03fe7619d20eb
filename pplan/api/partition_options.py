"""Options of a partition that another tool holds."""

from __future__ import annotations

from typing import Any

from ..cost_models import arguments
from ..cost_models.arguments import Options, option, options_class
from ..cost_models.schedule_text import optional_schedule

_PANEL = "The partition"


def _number(form: str, help: str) -> Any:
    return option(None, arguments.optional_whole, help, form, least=1, panel=_PANEL)


@options_class
class PartitionOptions(Options):
    """Settings that a partition of another tool may lack; None: its own, else the best.

    `virtual_stages`: of a device; `replicas`: of every stage.
    """

    schedule: str | None = option(
        None,
        optional_schedule,
        "Where the partition does not say it; default: the faster of 1f1b and gpipe.",
        "NAME|FILE",
        panel=_PANEL,
    )
    virtual_stages: int | None = _number("V", "Stages on each device.")
    replicas: int | None = _number("R", "Devices that share every stage.")
    recompute: str | None = option(
        None,
        arguments.optional_word,
        "Where the partition does not say it; default: if out of memory.",
        "never|always|except-last|auto",
        words=("never", "always", "except-last", "auto"),
        panel=_PANEL,
    )

"""Options of an explanation: the split in use that is compared with the plan."""

from __future__ import annotations

from collections.abc import Sequence

from ...cost_models import arguments
from ...cost_models.arguments import Converted, Options, option, options_class, read_counts
from ...cost_models.schedule_text import optional_schedule

_IN_USE = "The split in use"


@options_class
class ExplainOptions(Options):
    """The split in use. None stands for the best value that the plan's options allow.

    Attributes:
        current: Layers of each of its stages.
        replicas: Devices of each stage.
        micro_batches: Number of micro-batches.
        schedule: Schedule.
    """

    current: Converted[Sequence[int] | None, tuple[int, ...] | None] = option(
        None,
        arguments.wholes,
        "Layers of each stage as you split them now: why it is slower than the plan.",
        "N,N,...",
        read=read_counts,
        panel=_IN_USE,
    )
    replicas: int = option(
        1,
        arguments.whole,
        "Devices that share each of its stages.",
        "R",
        least=1,
        panel=_IN_USE,
    )
    micro_batches: int | None = option(
        None,
        arguments.optional_whole,
        "Into which it cuts the global batch; default: the best number.",
        "M",
        least=1,
        panel=_IN_USE,
    )
    schedule: str | None = option(
        None,
        optional_schedule,
        "Its schedule; default: the best that the plan might have.",
        "NAME|FILE",
        panel=_IN_USE,
    )

    @property
    def balance(self) -> tuple[int, ...]:
        """`current`; empty if it is not given."""
        return self.current or ()

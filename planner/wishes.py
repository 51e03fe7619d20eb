"""What the user asks of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cost_models.errors import UsageError
from ..cost_models.optimizers import OPTIMIZERS
from ..cost_models.precision import GRADIENT_DTYPES, PRECISIONS, ZERO_STAGES, known_word
from ..cost_models.runtime import runtime_named
from ..cost_models.schedules import SCHEDULES
from .pipeline_config import MODES, MOST_MICRO_BATCHES

ASYNCHRONOUS = tuple(name for name, schedule in SCHEDULES.items() if not schedule.synchronous)


@dataclass(frozen=True)
class Wishes:
    """What the user asks for; None and "auto" leave it to the search. Raises UsageError.

    `planner`: "best", the joint search, or a named planner. `use_all`: no device may stay free.
    `cut_after`: names of layers after which a stage must end; `keep_together`: patterns of names, no cut
    between neighbours that match the same; `pins`: (name of a layer, number of its stage, from 0).
    `memory_limit`: bytes that no device may exceed, besides what it has. `precision` and `gradient_dtype`: as
    of `cost_models.precision`; `zero`: what the replicas of a stage spread over them, as of `Training`.
    """

    mini_batch: int | None = None
    micro_batches: int | None = None
    schedule: str = "auto"
    recompute: str = "auto"
    optimizer: str = "sgd"
    precision: str = "auto"
    gradient_dtype: str = "auto"
    zero: int = 0
    runtime: str | None = None
    planner: str = "best"
    use_all: bool = False
    max_stages: int | None = None
    cut_after: tuple[str, ...] = ()
    keep_together: tuple[str, ...] = ()
    pins: tuple[tuple[str, int], ...] = ()
    memory_limit: float | None = None
    time_limit: float = 30.0
    """Seconds of processor time for the whole answer. Work is counted, so that answers seldom vary."""
    robust: bool = False
    """Of plans near the fastest, the one whose step at the 90th percentile is the best."""
    seconds_of: str | None = None
    """`cpu`: GPUs are planned with a processor's seconds, which is meant."""

    def __post_init__(self) -> None:
        counts = (
            ("mini_batch", self.mini_batch),
            ("micro_batches", self.micro_batches),
            ("max_stages", self.max_stages),
        )
        for field, value in counts:
            if value is not None and value < 1:
                raise UsageError(f"{field}={value}: must be at least 1", "Give a count of 1 or more.")
        if self.micro_batches is not None and self.micro_batches > MOST_MICRO_BATCHES:
            raise UsageError(
                f"micro_batches={self.micro_batches}: at most {MOST_MICRO_BATCHES} are simulated",
                "The bubble of so many is nothing: use fewer, larger ones.",
            )
        if not self.time_limit > 0:
            raise UsageError(f"time_limit={self.time_limit:g}: must be above 0", "Give 30s, say.")
        if self.robust and self.planner != "best":
            raise UsageError(
                f"`robust` with planner={self.planner!r}: a tool's own plan leaves nothing to choose",
                "Omit one of the two.",
            )
        self._check_words()

    def _check_words(self) -> None:
        synchronous = tuple(name for name in SCHEDULES if name not in ASYNCHRONOUS)
        if self.schedule in ASYNCHRONOUS:
            raise UsageError(
                f"schedule={self.schedule!r}: it is asynchronous, with late gradients and without a step",
                "Omit it: objective='throughput' chooses the best of pipedream, pipedream-2bw and the "
                "synchronous ones.",
            )
        modes = tuple(mode for mode in MODES if mode != "by_stage")
        for field, word, known in (
            ("schedule", self.schedule, ("auto", *synchronous)),
            ("recompute", self.recompute, ("auto", *modes)),
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("precision", self.precision, ("auto", *PRECISIONS)),
            ("gradient_dtype", self.gradient_dtype, ("auto", *GRADIENT_DTYPES)),
        ):
            known_word(field, word, known, also="fp64")
        if self.zero not in ZERO_STAGES:
            raise UsageError(
                f"zero={self.zero}: there is no such stage",
                "Use 0 (nothing is spread over the replicas of a stage), 1, 2 or 3.",
            )
        if self.runtime is not None:
            runtime_named(self.runtime).check_states(self.precision, self.zero)
        if self.recompute == "except_last" and self.schedule not in ("auto", "gpipe"):
            raise UsageError(
                f"recompute='except_last' with schedule={self.schedule!r}: only GPipe's backward begins with "
                "the last one",
                "Use schedule='gpipe', or recompute='always'.",
            )


@dataclass(frozen=True)
class Limits:
    """`must_cut`: layers after which a stage ends; `pins`: (layer, its stage). All 0-based."""

    must_cut: tuple[int, ...] = ()
    pins: tuple[tuple[int, int], ...] = ()

    def allow(self, bounds: Sequence[tuple[int, int]]) -> bool:
        """Whether stages with these first layers and layers after the last may be."""
        ends = {end for _, end in bounds}
        return all(layer + 1 in ends for layer in self.must_cut) and all(
            stage < len(bounds) and bounds[stage][0] <= layer < bounds[stage][1] for layer, stage in self.pins
        )

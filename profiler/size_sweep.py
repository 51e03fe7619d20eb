"""The micro-batch sizes in turn, as the budget and memory allow: which are measured, which not, and why."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ..cost_models.errors import ModelError, UsageError
from .gpu_state import GpuRecord, GpuState, read_gpu_state
from .graphs.output_shapes import ShapeDependsOnBatch
from .measurement_target import MeasurementTarget
from .models import is_positive
from .passes.timed_passes import link_sizes
from .profile_records import Unmeasured
from .size_result import SizeResult
from .size_run import SizeRun
from .user_model.failures import DoesNotFit

if TYPE_CHECKING:
    import torch

    from ..cost_models.errors import ModelError

if TYPE_CHECKING:
    from .journal import Journal, JournalSize


Run = TypeVar("Run", SizeRun, SizeResult)
_LARGEST = {"cpu": 64, "cuda": 1024}
_WARM_SECONDS, _WARM_SHARE = 3.0, 0.1
"""A GPU is warmed up for so long at the most; and so much of the budget."""


@dataclass(frozen=True)
class Progress:
    """What is being done: `doing` says it in words, `layer` is set while layers are tried one by one."""

    doing: str
    micro_batch_size: int
    layer: str | None
    fraction: float
    """The share of the budget that is spent, 0 to 1."""


@dataclass
class SizeSweep(ABC, Generic[Run]):
    """Measures sizes in ascending order, as far as budget and memory reach; subclasses measure one size.

    `sizes`: the user's, or None: 1, 2, 4, ...; the smallest is always measured. `rounds`: so many timed
    passes at every size whatever they cost, or None for as many as the budget allows. `journal`: is told of
    every pass; sizes and rounds that it held when it was opened are not measured again. `remark`: is told,
    in a sentence, of a budget that is exceeded in any case.
    """

    subject: MeasurementTarget
    sizes: Sequence[int] | None
    budget_seconds: float
    rounds: int | None = None
    progress: Callable[[Progress], None] | None = None
    journal: Journal | None = None
    remark: Callable[[str], None] = lambda _: None
    earlier_seconds: float = 0.0
    """What loading, tracing and comparing took of the budget."""
    runs: list[Run] = field(default_factory=list, init=False)
    unmeasured: list[Unmeasured] = field(default_factory=list, init=False)
    notes: list[str] = field(default_factory=list, init=False)
    interrupted: bool = field(default=False, init=False)
    """Whether Ctrl-C ended it after a size was measured."""
    gpu_begin: GpuState | None = field(default=None, init=False)
    _last_seconds: float = field(default=0.0, init=False)

    def measure(self) -> None:
        """Fills `runs` (ascending, never empty), `unmeasured`, `notes`. Raises MachineError, ModelError.

        KeyboardInterrupt goes through only where nothing is measured yet.
        """
        # The budget is that of all processes together.
        before = self.earlier_seconds + (self.journal.seconds if self.journal else 0.0)
        self._begun = self.subject.clock.now() - before
        self._pending = deque(sizes_to_try(self.sizes, self.subject.device))
        self._refusals: dict[int, tuple[str, str]] = {}
        try:
            with self.subject.modes.process():
                self._measure_sizes()
                # Further rounds may show a size to be faster than its first: then the next may fit after all.
                while self.rounds is None and self.one_more_round():
                    self._measure_sizes()
        except KeyboardInterrupt:
            self.runs += self.unfinished()
            if not self.runs:
                raise
            self._end_interrupted()
        if self._pending:
            size = self._pending[0]
            self.unmeasured += list_unmeasured(size, self.sizes, *self._refusals[size])
        link_sizes([run.rounds for run in self.runs])

    @property
    @abstractmethod
    def results(self) -> list[SizeResult]:
        """What was found at the sizes of `runs`."""

    @abstractmethod
    def measure_size(self, size: int) -> Run:
        """The first timed passes of a size. Raises DoesNotFit, ModelError."""

    def gpu_record(self) -> GpuRecord | None:
        """What the GPU said after the first warm-up, and says now."""
        end = read_gpu_state(self.subject.device)
        if end is None or self.gpu_begin is None:
            return None
        return GpuRecord(begin=self.gpu_begin, end=end)

    @property
    def warm_up_seconds(self) -> float:
        """How long the device is warmed up at the most, before the first size is timed.

        A GPU at rest runs at low clocks, then in a burst at the highest, then where power and heat let it: so
        it computes until its passes take as long as before.
        """
        if self.subject.device.type != "cuda":
            return 0.0
        return min(_WARM_SECONDS, _WARM_SHARE * self.budget_seconds)

    def note_warm_device(self) -> None:
        """After the warm-up: what the GPU says of itself."""
        self.gpu_begin = read_gpu_state(self.subject.device)

    @property
    def interruption_note(self) -> str:
        """What the profile says after Ctrl-C."""
        return "interrupted: larger micro-batch sizes were not measured"

    def predict_seconds(self, size: int, *, least: bool = False) -> float:  # noqa: ARG002
        """What `measure_size` would take, from the last sizes'; `least`: with the fewest rounds."""
        return self._last_seconds * size / self.runs[-1].size

    def memory_detail(self, size: int) -> str:  # noqa: ARG002
        """Why `size` is not begun, from the bytes of the last size; empty where it is."""
        return ""

    def accumulation(self) -> list[float] | None:
        """Seconds by layer to add gradients to those that are there; None where they are not known."""
        return None

    def one_more_round(self) -> bool:
        """One more timed pass of some size; whether there was reason and time."""
        return False

    def unfinished(self) -> list[Run]:
        """The size that was being measured when Ctrl-C came, where it has enough passes."""
        return []

    @property
    def spent(self) -> float:
        """Seconds of the budget."""
        return self.subject.clock.now() - self._begun

    def journal_size(self, size: int) -> JournalSize | None:
        """The journal's record of a size, left by an interrupted run."""
        return self.journal.sizes.get(size) if self.journal else None

    def tell(self, doing: str, size: int, layer: str | None = None) -> None:
        if self.progress is not None:
            share = self.spent / self.budget_seconds if self.budget_seconds > 0 else 1.0
            self.progress(Progress(doing, size, layer, min(share, 1.0)))

    def _measure_sizes(self) -> None:
        """Measures the pending sizes, in order, until one is refused."""
        while self._pending:
            size = self._pending[0]
            if "does not fit" in self._refusals.get(size, ()):
                return
            earlier = self.journal_size(size)
            begun = earlier is not None and earlier.has_passes
            refusal = self._refuse(size) if self.runs and not begun else None
            refusal = refusal or self._try(size)
            if refusal is not None:
                if size not in self._refusals or refusal[0] == "does not fit":
                    self._refusals[size] = refusal
                return
            self._pending.popleft()

    def _refuse(self, size: int) -> tuple[str, str] | None:
        """Why `size` is not begun: what it is predicted to cost would not fit."""
        predicted, left = self.predict_seconds(size), self.budget_seconds - self.spent
        if self.rounds is None and self.predict_seconds(size, least=True) > left:
            return "budget", budget_detail(predicted, left, self.budget_seconds) + self._enough()
        memory = self.memory_detail(size)
        return ("does not fit", memory) if memory else None

    def _try(self, size: int) -> tuple[str, str] | None:
        """Measures `size`; returns why it does not fit where it does not."""
        started = self.spent
        try:
            self.runs.append(self.measure_size(size))
        except DoesNotFit as error:
            if not self.runs:
                raise
            return "does not fit", error.what
        except ModelError as error:
            if not is_left_out(size, self.sizes, error):
                raise
            if not self.runs and len(self._pending) == 1:
                raise
            self.unmeasured.append(refused_size(size, error))
        self._last_seconds = self.spent - started
        return None

    def _enough(self) -> str:
        """The budget that would do for all sizes that the user named, in words; else nothing."""
        if self.sizes is None:
            return ""
        total = self.spent + sum(map(self.predict_seconds, self._pending))
        return f"; a budget of about {seconds_text(total, math.ceil)} would do for all that were asked for"

    def _end_interrupted(self) -> None:
        self.interrupted = True
        while self._pending and self._pending[0] <= self.runs[-1].size:
            self._pending.popleft()
        if self._pending:
            self._refusals.setdefault(self._pending[0], ("interrupted", "the measuring was interrupted"))
        self.notes.append(self.interruption_note)


def host_note(run: SizeRun | SizeResult) -> str | None:
    """A note where the device waits for the host at this size, else None."""
    bound = run.rounds.host_bound()
    if bound is None:
        return None
    host, device = (
        f"{seconds * 1e3:.2g} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms" for seconds in bound
    )
    return f"micro-batch size {run.size} is bound by the host: {host} to launch, {device} on the device"


def sizes_to_try(sizes: Sequence[int] | None, device: torch.device) -> Iterator[int]:
    """The sizes that the user named, else 1, 2, 4, ... as far as is usual on the device."""
    if sizes is not None:
        return iter(sizes)
    return (2**power for power in range(_LARGEST[device.type].bit_length()))


def is_left_out(size: int, sizes: Sequence[int] | None, error: ModelError) -> bool:
    """Return whether plans do without `size` for `error`, which must be raised otherwise.

    Batch norm refuses a single value a channel: where nobody asked for size 1, the others do. A layer that
    hands on another shape at one size runs there, and would be trained wrongly.
    """
    return isinstance(error, ShapeDependsOnBatch) or (sizes is None and size == 1)


def refused_size(size: int, error: ModelError) -> Unmeasured:
    """Record of a size that the model does not take, which no plan may use."""
    return Unmeasured(micro_batch_size=size, reason="refused", detail=error.what)


def budget_detail(predicted: float, left: float, budget: float) -> str:
    """Text: a size would take `predicted` seconds, and `left` of the `budget` seconds remain."""
    remaining = seconds_text(max(left, 0.0))
    return f"it would take about {seconds_text(predicted)}, {remaining} of {budget:g} s are left"


def list_unmeasured(size: int, sizes: Sequence[int] | None, reason: str, detail: str) -> list[Unmeasured]:
    """The size that was not measured, and after it the larger ones that the user named."""
    others = (size,) if sizes is None else [other for other in sizes if other >= size]
    return [
        Unmeasured.model_validate(
            {
                "micro_batch_size": other,
                "reason": reason,
                "detail": detail if other == size else f"after micro-batch size {size}: {detail}",
            }
        )
        for other in others
    ]


def seconds_text(seconds: float, whole: Callable[[float], int] = round) -> str:
    """Seconds as text: whole from 10 on, with two digits below."""
    return f"{whole(seconds)} s" if seconds >= 10 else f"{seconds:.2g} s"


def check_micro_batch_sizes(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Micro-batch sizes, ascending and each once; None where the user names none. Raises UsageError."""
    if sizes is None:
        return None
    several = not isinstance(sizes, str) and isinstance(sizes, Collection) and len(sizes) > 0
    if not several or not all(map(is_positive, sizes)):
        raise UsageError(
            f"micro_batch_sizes={sizes!r}: whole numbers of at least 1 are needed",
            "As in micro_batch_sizes=(1, 2, 4, 8).",
        )
    return tuple(sorted(set(map(int, sizes))))

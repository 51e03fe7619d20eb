"""The micro-batch sizes in turn, and the budget: what is measured, how often, and what is left unmeasured."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..cost_models.errors import ModelError
from ..cost_models.quantities import format_bytes
from .machine import free_host_bytes
from .measurement_target import Subject
from .micro_batch_sizes import beyond_budget, in_words, left_out_note, left_unmeasured, sizes_to_try
from .passes.timed_passes import link_sizes
from .profile_file import Unmeasured
from .size_run import SizeRun, release
from .user_model.failures import DoesNotFit, is_out_of_memory, refusal

if TYPE_CHECKING:
    from .journal import Journal, KeptSize

_FIRST_ROUNDS = 3
_TRUSTED_ROUNDS = 5
"""From so many rounds on, the quartiles are taken to say something."""
_CERTAIN = 0.005
"""Relative uncertainty of a median below which no more is measured."""
_MARGIN = 1.2
"""Memory of a pass above what is saved for backward: gradients and temporaries."""
_PARTS_MARGIN = 2.4
"""The same for a pass in two parts, which holds the gradients of all layers' outputs at once."""
_NO_PEAK = (
    "compiled for the CPU: what its kernels allocate while they run cannot be counted, so workspace is 0 and "
    "there is no peak"
)


@dataclass(frozen=True)
class Progress:
    """What is in hand: `doing` says it in words, `layer` is set while layers are tried one by one."""

    doing: str
    micro_batch_size: int
    layer: str | None
    fraction: float
    """Of the budget spent, 0 to 1."""


@dataclass
class Sweep:
    """Measures sizes in ascending order, then spends what is left of the budget where the spread is largest.

    `sizes`: the user's, or None: 1, 2, 4, ...; the smallest always, the others as far as budget and memory
    reach. `rounds`: so many at every size, whatever they cost. What is compiled is compiled for one size at a
    time, which gets all its rounds before the next is begun.
    """

    subject: Subject
    sizes: Sequence[int] | None
    budget_seconds: float
    rounds: int | None = None
    progress: Callable[[Progress], None] | None = None
    parts: bool = False
    """Whether backward is measured in two parts too; never of compiled models, whose blocks have no parts."""
    memory_bytes: int | None = None
    """As if the device had no more; None: what it has."""
    journal: Journal | None = None
    """Is told of every pass; sizes and rounds that it held when it was opened are not measured again."""
    runs: list[SizeRun] = field(default_factory=list)
    unmeasured: list[Unmeasured] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = field(default=False, init=False)
    """By Ctrl-C, after a size was measured."""

    def measure(self) -> None:
        """Fills `runs` (ascending, never empty), `unmeasured`, `notes`. Raises DoesNotFit, ModelError.

        KeyboardInterrupt goes through only where there is nothing yet.
        """
        # The budget is that of all sittings together.
        self._begun = self.subject.clock.now() - (self.journal.seconds if self.journal else 0.0)
        self._pending = deque(sizes_to_try(self.sizes, self.subject.device))
        self._refusals: dict[int, tuple[str, str]] = {}
        self._full: set[int] = set()
        self._in_hand: SizeRun | None = None
        try:
            with self.subject.modes.process():
                self._begin_sizes()
                # Further rounds may show a size to be faster than its first: then the next may fit after all.
                while self.rounds is None and self._one_more_round():
                    self._begin_sizes()
        except KeyboardInterrupt:
            self._keep_what_there_is()
            if not self.runs:
                raise
        self._leave_pending()
        link_sizes([run.rounds for run in self.runs])
        self.notes += [note for run in self.runs if (note := run.lead_note)]

    @property
    def spent(self) -> float:
        return self.subject.clock.now() - self._begun

    def _begin_sizes(self) -> None:
        """Measures the sizes that wait, in order, as far as they fit."""
        while self._pending:
            size = self._pending[0]
            if "does not fit" in self._refusals.get(size, ()):
                return
            kept = self._kept(size)
            has_passes = kept is not None and kept.has_passes
            refusal = self._stop_before(size) if self.runs and not has_passes else None
            refusal = refusal or self._try(size)
            if refusal is not None:
                if size not in self._refusals or refusal[0] == "does not fit":
                    self._refusals[size] = refusal
                return
            self._pending.popleft()

    def _stop_before(self, size: int) -> tuple[str, str] | None:
        """Why `size` is not begun: a cost in proportion to the last size's would not fit."""
        last = self.runs[-1]
        predicted = self._predicted(size)
        left = self.budget_seconds - self.spent
        if self.rounds is None and predicted > left:
            return "budget", beyond_budget(predicted, left, self.budget_seconds) + self._enough()
        return self._beyond_memory(last, size)

    def _beyond_memory(self, last: SizeRun, size: int) -> tuple[str, str] | None:
        """Why `size` would not fit, from the bytes of the last size."""
        if self.memory_bytes is not None and last.memory and last.peak_bytes:
            static = last.memory.static
            peak = static + (last.peak_bytes - static) * size / last.size
            if peak > self.memory_bytes:
                return "does not fit", (
                    f"it would need about {format_bytes(round(peak))} of {format_bytes(self.memory_bytes)}"
                )
        free = free_host_bytes() if self.subject.device.type == "cpu" else None
        needed = _MARGIN * sum(last.saved.saved_bytes) * size / last.size
        if free is not None and needed > free:
            return "does not fit", (
                f"it would save about {needed / 2**30:.1f} GiB for backward, {free / 2**30:.1f} GiB are free"
            )
        return None

    def _predicted(self, size: int) -> float:
        """Seconds of the warm-up and the first rounds of `size`, in proportion to the last size's."""
        last = self.runs[-1]
        return last.round_seconds * (self._first_round_count + last.warm_up_rounds) * size / last.size

    def _enough(self) -> str:
        """The budget that would do for all sizes that the user named, in words; else nothing."""
        if self.sizes is None:
            return ""
        total = self.spent + sum(self._predicted(size) for size in self._pending)
        return f"; a budget of about {in_words(total, math.ceil)} would do for all that were asked for"

    def _leave_pending(self) -> None:
        """Records the size that was not measured, and with it the larger ones that the user named."""
        if not self._pending:
            return
        size = self._pending[0]
        reason, detail = self._refusals[size]
        self.unmeasured += left_unmeasured(size, self.sizes, reason, detail)

    def _try(self, size: int) -> tuple[str, str] | None:
        """Measures `size` for the first time; returns what the allocator said where it does not fit."""
        try:
            self.runs.append(self._first_rounds(size))
            return None
        except Exception as error:
            if is_out_of_memory(error):
                said = refusal(error)
            elif isinstance(error, ModelError) and (note := left_out_note(size, self.sizes, error)):
                self.notes.append(note)
                return None
            else:
                raise
        # Only here, behind the except block, is nothing held by the traceback any more.
        self._take(None)
        release(self.subject.device)
        if not self.runs:
            raise DoesNotFit(
                f"{self.subject.loaded.name}: the smallest micro-batch size, {size}, does not fit: {said}",
                "Use smaller `micro_batch_sizes`, a smaller `dtype`, or a device of more memory.",
            )
        return "does not fit", said

    def _first_rounds(self, size: int) -> SizeRun:
        self._begun_last = size
        parts = self.parts and not self.subject.modes.compile
        run = SizeRun(self.subject, size, parts=parts, journal=self.journal)
        self._take(run)
        kept = self._kept(size)
        if kept is None:
            run.warm_up(lambda layer: self._tell("warm-up", run, layer.name))
            self._leave_out_parts_that_would_not_fit(run)
            run.warm_up_parts()
        else:
            run.go_on(kept)
        wanted = self._first_round_count
        for number in range(run.rounds_done, wanted):
            self._tell(f"round {number + 1} of {wanted}", run)
            run.round()
        self._note_parts(run)
        if run.memory is None and _NO_PEAK not in self.notes:
            self.notes.append(_NO_PEAK)
        return run

    def _kept(self, size: int) -> KeptSize | None:
        """What an interrupted profile has left of a size."""
        return self.journal.kept.get(size) if self.journal else None

    def _keep_what_there_is(self) -> None:
        """After an interruption: the size in hand too, where it has a round."""
        run = self._in_hand
        if run is not None and run.is_measured and run not in self.runs:
            self.runs.append(run)
        if not self.runs:
            return
        self.interrupted = True
        while self._pending and self._pending[0] <= self.runs[-1].size:
            self._pending.popleft()
        if self._pending:
            self._refusals.setdefault(self._pending[0], ("interrupted", "the measuring was interrupted"))
        rounds = sum(len(run.rounds) for run in self.runs)
        more = "; the same with `resume` continues" if self.journal else ""
        sizes = ", ".join(str(run.size) for run in self.runs)
        self.notes.append(f"interrupted after {rounds} rounds at micro-batch size {sizes}{more}")

    def _take(self, run: SizeRun | None) -> None:
        """Takes one in hand, the only one that holds its input on the device."""
        if self._in_hand is not None and self._in_hand is not run:
            self._in_hand.put_away()
        self._in_hand = run

    def _leave_out_parts_that_would_not_fit(self, run: SizeRun) -> None:
        """Besides what is saved, a CPU would hold about as much in gradients."""
        free = free_host_bytes() if self.subject.device.type == "cpu" else None
        needed = _PARTS_MARGIN * sum(run.saved.saved_bytes)
        if free is not None and needed > free:
            run.leave_parts_out(
                f"it would need about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
            )

    @property
    def _first_round_count(self) -> int:
        if self.rounds is not None:
            return self.rounds
        return _TRUSTED_ROUNDS if self.subject.modes.compile else _FIRST_ROUNDS

    def _one_more_round(self) -> bool:
        """Times the size whose median is the least certain once more; whether there was reason and time."""
        left = self.budget_seconds - self.spent
        able = [run for run in self._open() if run.size not in self._full and run.round_seconds <= left]
        run = max(able, key=_doubt, default=None)
        if run is None or _doubt(run) < _CERTAIN:
            return False
        self._take(run)
        self._tell(f"round {len(run.rounds) + 1}", run)
        kept = len(run.rounds)
        try:
            run.round()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._full.add(run.size)
            run.rounds.cut_to(kept)
        if run.size in self._full:
            release(self.subject.device)
        self._note_parts(run)
        return True

    def _open(self) -> list[SizeRun]:
        """The sizes that can be run again: compiled code is kept for the size begun last only."""
        if not self.subject.modes.compile:
            return self.runs
        return [run for run in self.runs if run.size == self._begun_last]

    def _note_parts(self, run: SizeRun) -> None:
        if run.parts_left_out:
            note = (
                f"micro-batch size {run.size} has no backward in two parts: {run.parts_left_out.rstrip('.')}"
            )
            if note not in self.notes:
                self.notes.append(note)

    def _tell(self, doing: str, run: SizeRun, layer: str | None = None) -> None:
        if self.progress is not None:
            share = self.spent / self.budget_seconds if self.budget_seconds > 0 else 1.0
            self.progress(Progress(doing, run.size, layer, min(share, 1.0)))


def _doubt(run: SizeRun) -> float:
    return float("inf") if len(run.rounds) < _TRUSTED_ROUNDS else run.rounds.uncertainty()

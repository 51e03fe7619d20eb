"""The micro-batch sizes in turn, as the budget and memory allow: which are measured, which not, and why."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ..cost_models.errors import ModelError
from ..cost_models.quantities import format_bytes
from .gpu_state import GpuRecord, GpuState, read_gpu_state
from .journal import Journal
from .layer import ShapeDependsOnBatch
from .local_machine import free_host_bytes
from .modes import MeasurementTarget
from .passes import time_gradient_adding
from .profile_file import Unmeasured
from .size_run import FEWEST_PASSES, FIRST_PASSES, SizeRun, release
from .timed_passes import SizeResult, link_sizes
from .user_model import DoesNotFit, is_out_of_memory, refusal

if TYPE_CHECKING:
    import torch


# The micro-batch sizes in turn, as the budget and memory allow: which are measured, which not, and why.

Run = TypeVar("Run", SizeRun, SizeResult)
_LARGEST = {"cpu": 64, "cuda": 1024}
_SIZES = 3
"""So many sizes come before further rounds of the first."""
_BESIDES_LOADING = 1.25
"""Where loading and tracing used the budget up, measuring may take a quarter of their seconds."""
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

    @property
    def limit_seconds(self) -> float:
        """Seconds that may be spent: the budget, or more for the first sizes where loading used it up."""
        besides = _BESIDES_LOADING * self.earlier_seconds if len(self.runs) < _SIZES else 0.0
        return max(self.budget_seconds, besides)

    def journal_size(self, size: int) -> SizeResult | None:
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
            begun = earlier is not None and bool(earlier.rounds.layers or earlier.rounds.whole)
            refusal = self._refuse(size) if self.runs and not begun else None
            refusal = refusal or self._try(size)
            if refusal is not None:
                if size not in self._refusals or refusal[0] == "does not fit":
                    self._refusals[size] = refusal
                return
            self._pending.popleft()

    def _refuse(self, size: int) -> tuple[str, str] | None:
        """Why `size` is not begun: what it is predicted to cost would not fit."""
        predicted, left = self.predict_seconds(size), self.limit_seconds - self.spent
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


# Sizes of a model that fits on its device whole: first rounds of each, then more where they vary most.

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
    "compiled for the CPU: this PyTorch does not tell what its kernels allocate while they run, so workspace "
    "is 0 and there is no peak"
)


@dataclass
class WholeSweep(SizeSweep[SizeRun]):
    """What is left of the budget after the first rounds is spent where the spread is largest.

    What is compiled is compiled for one size at a time, which gets all its rounds before the next is begun.
    """

    parts: bool = False
    """Whether backward is measured in two parts too; never of compiled models, whose blocks have no parts."""
    memory_bytes: int | None = None
    """As if the device had no more; None: what it has."""
    _full: set[int] = field(default_factory=set, init=False)
    """Sizes whose further rounds ran out of memory."""
    _current: SizeRun | None = field(default=None, init=False)
    _begun_last: int = field(default=0, init=False)

    def measure(self) -> None:
        super().measure()
        self.notes += [note for run in self.runs if (note := run.lead_note)]

    @property
    def results(self) -> list[SizeResult]:
        return [run.result for run in self.runs]

    def predict_seconds(self, size: int, *, least: bool = False) -> float:
        last = self.runs[-1]
        rounds = 1 if least and not self.subject.modes.compile else self._first_round_count
        return self._predict_round(size, self.runs) * (rounds + last.warm_up_rounds)

    def _predict_round(self, size: int, runs: Sequence[SizeRun]) -> float:
        """On the line through the last two sizes; no more than in proportion, and no less than the last's.

        Where a host launches for longer than its device computes, what it launches does not grow.
        """
        last = runs[-1]
        growing = last.rounds.device_share
        most = last.round_seconds * (1 - growing + growing * size / last.size)
        if len(runs) == 1:
            return most
        before = runs[-2]
        slope = (last.round_seconds - before.round_seconds) / (last.size - before.size)
        return min(most, last.round_seconds + max(slope, 0.0) * (size - last.size))

    def memory_detail(self, size: int) -> str:
        last = self.runs[-1]
        counted = last.counted
        if self.memory_bytes is not None and counted.memory and counted.peak_bytes:
            static = counted.memory.static
            peak = static + (counted.peak_bytes - static) * size / last.size
            if peak > self.memory_bytes:
                return f"it would need about {format_bytes(round(peak))} of {format_bytes(self.memory_bytes)}"
        needed = _MARGIN * sum(counted.saved_bytes) * size / last.size
        return self._beyond_host(needed, "save about {} for backward")

    def measure_size(self, size: int) -> SizeRun:
        try:
            return self._first_rounds(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = refusal(error)
        # Only here, behind the except block, is nothing held by the traceback any more.
        self._switch_to(None)
        release(self.subject.device)
        smallest = (
            f"{self.subject.loaded.name}: the smallest micro-batch size, {size}, does not fit: {reason}"
        )
        raise DoesNotFit(
            reason if self.runs else smallest,
            "Use smaller `micro_batch_sizes`, a smaller `dtype`, or a device of more memory.",
        )

    def one_more_round(self) -> bool:
        """The first backward of a size that has none, or once more the size whose median is least certain."""
        left = self.budget_seconds - self.spent
        able = [run for run in self._open() if run.size not in self._full and run.round_seconds <= left]
        run = next((run for run in able if self._lacks_first_backward(run, left)), None)
        begins = run is not None
        run = run or max(able, key=lambda run: (_doubt(run), -len(run.rounds)), default=None)
        if run is None or (not begins and _doubt(run) < _CERTAIN):
            return False
        self._switch_to(run)
        self.tell("first backward" if begins else f"round {len(run.rounds) + 1}", run.size)
        rounds_before = len(run.rounds)
        try:
            run.time_first_backward(FIRST_PASSES) if begins else run.round()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._full.add(run.size)
            run.rounds.cut_to(rounds_before)
        if run.size in self._full:
            release(self.subject.device)
        self._note_parts(run)
        return True

    def accumulation(self) -> list[float] | None:
        if not self.parts or self.interrupted:
            return None
        if self.runs and self.runs[0].counts_less:
            return None
        repeats = 1 if self._ends_budget(0.0) else FIRST_PASSES
        try:
            return time_gradient_adding(self.subject.chain.layers, self.subject.clock, repeats)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        return None

    def unfinished(self) -> list[SizeRun]:
        run = self._current
        return [run] if run is not None and run.is_measured and run not in self.runs else []

    @property
    def interruption_note(self) -> str:
        rounds = sum(len(run.rounds) for run in self.runs)
        sizes = ", ".join(str(run.size) for run in self.runs)
        more = "; the same with `resume` continues" if self.journal else ""
        return f"interrupted after {rounds} rounds at micro-batch size {sizes}{more}"

    def _first_rounds(self, size: int) -> SizeRun:
        self._begun_last = size
        parts = self.parts and not self.subject.modes.compile
        run = SizeRun(self.subject, size, parts=parts, journal=self.journal)
        self._switch_to(run)
        earlier = self.journal_size(size)
        if earlier is None:
            run.warm_up(
                lambda layer: self.tell("warm-up", size, layer.name),
                lambda seconds: bool(self.runs) or not self._ends_budget(seconds),
                lambda seconds: self._tell_exceeded_budget(size, seconds),
            )
            if run.counts_less:
                self.notes.append(
                    f"micro-batch size {size}: a budget of {self.budget_seconds:g} s leaves no time to count "
                    "the peak of a step, what the loss allocates and what adding gradients takes; plans take "
                    "the loss to allocate nothing, and the first micro-batch for as long as the others"
                )
            if not self.runs:
                self._warm_device(run)
                self._leave_parts_to_the_budget(run)
            # Besides what is saved, a CPU would hold about as much in gradients.
            beyond = self._beyond_host(_PARTS_MARGIN * sum(run.counted.saved_bytes), "need about {}")
            if beyond:
                run.leave_parts_out(beyond)
            run.warm_up_parts()
        else:
            run.resume(earlier)
        rounds = self._first_round_count
        for number in range(run.rounds_done, rounds):
            if number and self._ends_budget(run.round_seconds + self._reserve(run)):
                break
            self.tell(f"round {number + 1} of {rounds}", size)
            run.round()
        if parts and self.rounds is not None:
            run.time_first_backward(min(FIRST_PASSES, rounds))
        self._note_parts(run)
        if not self.runs and self.rounds is None and self.spent > self.budget_seconds:
            self.notes.append(self._short_budget(run))
        if run.counted.memory is None and _NO_PEAK not in self.notes:
            self.notes.append(_NO_PEAK)
        return run

    def _warm_device(self, run: SizeRun) -> None:
        if self.warm_up_seconds:
            run.warm_until_stable(self.warm_up_seconds)
            self.note_warm_device()

    def _ends_budget(self, seconds: float) -> bool:
        """Whether so many more would be past it; not of what is compiled, which cannot be run again later."""
        bounded = self.rounds is None and not self.subject.modes.compile
        return bounded and self.spent + seconds > self.limit_seconds

    def _reserve(self, run: SizeRun) -> float:
        """Seconds kept for one round of each of the next sizes, up to the third, as time allows."""
        reserve, left = 0.0, self.limit_seconds - self.spent
        runs = [*self.runs, run]
        for size in list(self._pending)[1 : 1 + _SIZES - len(runs)]:
            needed = self._predict_round(size, runs) * (1 + run.warm_up_rounds)
            if reserve + needed > left:
                break
            reserve += needed
        return reserve

    def _tell_exceeded_budget(self, size: int, pass_seconds: float) -> None:
        """Says at once that the smallest size takes longer than the budget, whatever is left out."""
        least = self.spent + (FEWEST_PASSES - 1) * pass_seconds
        if not self.runs and self.rounds is None and least > self.budget_seconds:
            loading = f"loading and tracing took {seconds_text(self.earlier_seconds)}, "
            self.remark(
                f"Micro-batch size {size} alone takes at least {seconds_text(least)}: "
                f"{loading if self.earlier_seconds else ''}a pass of the model takes "
                f"{seconds_text(pass_seconds)}, the budget is {self.budget_seconds:g} s"
            )

    def _leave_parts_to_the_budget(self, run: SizeRun) -> None:
        """The first size is measured whatever it costs; backward in two parts only where there is time."""
        a_pass = (self.spent - self.earlier_seconds) / run.counting_passes
        passes = run.parts_passes + 3  # to warm up, and one of each kind
        if self._ends_budget(passes * a_pass):
            needed = seconds_text(self.spent + passes * a_pass, math.ceil)
            run.leave_parts_out(f"a budget of {self.budget_seconds:g} s is too short, it takes {needed}")

    def _short_budget(self, run: SizeRun) -> str:
        """That the first size alone took longer than all was to take, and what would do."""
        left = self._first_round_count - len(run.rounds) + run.counts_less / 2
        enough = self.spent + run.round_seconds * max(left, 0.0)
        before = (
            f" ({seconds_text(self.earlier_seconds)} of it loading and tracing)"
            if self.earlier_seconds
            else ""
        )
        advice = (
            f"its seconds are less certain; about {seconds_text(enough, math.ceil)} would do for it"
            if left > 0
            else "larger sizes and further rounds need more"
        )
        rounds = f"{len(run.rounds)} round{'s' * (len(run.rounds) > 1)}"
        return (
            f"micro-batch size {run.size} alone took {seconds_text(self.spent)}{before} with {rounds}, "
            f"the budget is {self.budget_seconds:g} s: {advice}"
        )

    def _switch_to(self, run: SizeRun | None) -> None:
        """Makes it the only one that holds its input on the device."""
        if self._current is not None and self._current is not run:
            self._current.free_inputs()
        self._current = run

    def _beyond_host(self, needed: float, what: str) -> str:
        """Why bytes do not fit into a CPU's free memory; empty where they do, and on other devices."""
        free = free_host_bytes() if self.subject.device.type == "cpu" else None
        if free is None or needed <= free:
            return ""
        return f"it would {what.format(f'{needed / 2**30:.1f} GiB')}, {free / 2**30:.1f} GiB are free"

    @property
    def _first_round_count(self) -> int:
        if self.rounds is not None:
            return self.rounds
        return _TRUSTED_ROUNDS if self.subject.modes.compile else _FIRST_ROUNDS

    def _lacks_first_backward(self, run: SizeRun, left: float) -> bool:
        """Whether it is to be measured: as backward in two parts, and where the time is left."""
        is_wanted = self.parts and not self.subject.modes.compile and len(run.rounds.first) < FIRST_PASSES
        return is_wanted and FIRST_PASSES * run.round_seconds / 2 <= left

    def _open(self) -> list[SizeRun]:
        """The sizes that can be run again: compiled code is kept for the size begun last only."""
        if not self.subject.modes.compile:
            return self.runs
        return [run for run in self.runs if run.size == self._begun_last]

    def _note_parts(self, run: SizeRun) -> None:
        why = run.result.parts_left_out.rstrip(".")
        note = f"micro-batch size {run.size} has no backward in two parts: {why}"
        if why and note not in self.notes:
            self.notes.append(note)


def _doubt(run: SizeRun) -> float:
    return float("inf") if len(run.rounds) < _TRUSTED_ROUNDS else run.rounds.uncertainty()

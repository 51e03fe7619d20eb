"""Sizes of a model that fits on its device whole: first rounds of each, then more where they vary most."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..cost_models.quantities import format_bytes
from .local_machine import free_host_bytes
from .passes.timing import time_gradient_adding
from .size_passes import release
from .size_result import SizeResult
from .size_run import FEWEST_PASSES, FIRST_PASSES, SizeRun
from .size_sweep import SizeSweep, seconds_text
from .user_model.failures import DoesNotFit, is_out_of_memory, refusal

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
        return [SizeResult.of_run(run) for run in self.runs]

    def predict_seconds(self, size: int, *, least: bool = False) -> float:
        last = self.runs[-1]
        rounds = 1 if least and not self.subject.modes.compile else self._first_round_count
        return self._predict_round(size) * (rounds + last.warm_up_rounds)

    def _predict_round(self, size: int) -> float:
        """On the line through the last two sizes; no more than in proportion, and no less than the last's.

        Where a host launches for longer than its device computes, what it launches does not grow.
        """
        last = self.runs[-1]
        growing = last.rounds.device_share
        most = last.round_seconds * (1 - growing + growing * size / last.size)
        if len(self.runs) == 1:
            return most
        before = self.runs[-2]
        slope = (last.round_seconds - before.round_seconds) / (last.size - before.size)
        return min(most, last.round_seconds + max(slope, 0.0) * (size - last.size))

    def memory_detail(self, size: int) -> str:
        last = self.runs[-1]
        if self.memory_bytes is not None and last.memory and last.peak_bytes:
            static = last.memory.static
            peak = static + (last.peak_bytes - static) * size / last.size
            if peak > self.memory_bytes:
                return f"it would need about {format_bytes(round(peak))} of {format_bytes(self.memory_bytes)}"
        needed = _MARGIN * sum(last.saved.saved_bytes) * size / last.size
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
        run = run or max(able, key=_doubt, default=None)
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
            beyond = self._beyond_host(_PARTS_MARGIN * sum(run.saved.saved_bytes), "need about {}")
            if beyond:
                run.leave_parts_out(beyond)
            run.warm_up_parts()
        else:
            run.resume(earlier)
        rounds = self._first_round_count
        for number in range(run.rounds_done, rounds):
            if number and self._ends_budget(run.round_seconds):
                break
            self.tell(f"round {number + 1} of {rounds}", size)
            run.round()
        if parts and self.rounds is not None:
            run.time_first_backward(min(FIRST_PASSES, rounds))
        self._note_parts(run)
        if not self.runs and self.rounds is None and self.spent > self.budget_seconds:
            self.notes.append(self._short_budget(run))
        if run.memory is None and _NO_PEAK not in self.notes:
            self.notes.append(_NO_PEAK)
        return run

    def _warm_device(self, run: SizeRun) -> None:
        if self.warm_up_seconds:
            run.warm_until_stable(self.warm_up_seconds)
            self.note_warm_device()

    def _ends_budget(self, seconds: float) -> bool:
        """Whether so many more would be past it; not of what is compiled, which cannot be run again later."""
        bounded = self.rounds is None and not self.subject.modes.compile
        return bounded and self.spent + seconds > self.budget_seconds

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
        return (
            f"micro-batch size {run.size} alone took {seconds_text(self.spent)}{before} with "
            f"{len(run.rounds)} round{'s' * (len(run.rounds) > 1)}, the budget is {self.budget_seconds:g} s: "
            f"its seconds are less certain; about {seconds_text(enough, math.ceil)} would do for it"
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
        why = run.parts_left_out.rstrip(".")
        note = f"micro-batch size {run.size} has no backward in two parts: {why}"
        if why and note not in self.notes:
            self.notes.append(note)


def _doubt(run: SizeRun) -> float:
    return float("inf") if len(run.rounds) < _TRUSTED_ROUNDS else run.rounds.uncertainty()

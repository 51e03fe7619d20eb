"""The micro-batch sizes in turn, and the budget: what is measured, how often, and what is left unmeasured."""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch

from ..cost_models.errors import MachineError, ModelError
from .activations import SavedBytes, Workspace
from .clocks import Clock
from .layers import Layer, LayerChain
from .machine import free_host_bytes
from .models import LoadedModel
from .out_of_memory import is_out_of_memory, refusal
from .profile_file import Unmeasured
from .timing import (
    OutputGradients,
    Rounds,
    Stamps,
    Watcher,
    WholeTimes,
    run_layers,
    run_whole,
)

_FIRST_ROUNDS = 3
_TRUSTED_ROUNDS = 5
"""From so many rounds on, the quartiles are taken to say something."""
_CERTAIN = 0.005
"""Relative uncertainty of a median below which no more is measured."""
_LARGEST = {"cpu": 64, "cuda": 1024}
_MARGIN = 1.2
"""Memory of a pass above what is saved for backward: gradients and temporaries."""


@dataclass(frozen=True)
class Progress:
    """What is in hand: `doing` says it in words, `layer` is set while layers are tried one by one."""

    doing: str
    micro_batch_size: int
    layer: str | None
    fraction: float
    """Of the budget spent, 0 to 1."""


@dataclass(frozen=True)
class Subject:
    """What is measured, and where: the working copy of the model, its layers, and the clock."""

    loaded: LoadedModel
    chain: LayerChain
    device: torch.device
    dtype: torch.dtype
    clock: Clock
    seed: int
    notes: tuple[str, ...] = ()
    """What the profile is to say of it."""


class SizeRun:
    """One micro-batch size: its warm-up, its bytes, and its rounds so far."""

    def __init__(self, subject: Subject, size: int) -> None:
        self._subject = subject
        self.size = size
        given = subject.loaded.example_input_for(size)
        floating = given.dtype.is_floating_point
        self._input = given.to(subject.device, subject.dtype if floating else given.dtype)
        self._gradients = OutputGradients(subject.seed)
        self.saved = SavedBytes(subject.loaded.module, len(subject.chain))
        self.workspace_bytes = [0] * len(subject.chain)
        self.rounds = Rounds()
        self._taken: list[float] = []

    def warm_up(self, visit: Callable[[Layer], None], *, whole: bool) -> None:
        """Untimed passes, which also count the bytes; gradients exist afterwards and accumulate."""
        chain, device = self._subject.chain, self._subject.device
        with self.saved.hooks():
            self._layers_pass(_Announcing(self.saved, chain, visit))
        if device.type == "cuda":
            workspace = Workspace(len(chain), device)
            self._layers_pass(workspace)
            self.workspace_bytes = workspace.bytes
        if whole:
            self._whole_pass()

    def round(self) -> None:
        """One timed pass of the layers and one of the whole, in an order that alternates between rounds."""
        clock = self._subject.clock
        begun = clock.now()
        passes = [self._timed_layers, self._timed_whole]
        layers_first = len(self.rounds) % 2 == 0
        with _no_collection():
            for one in passes if layers_first else reversed(passes):
                one()
        self._taken.append(clock.now() - begun)

    @property
    def round_seconds(self) -> float:
        """Host seconds that a round takes, everything included: the median so far."""
        return median(self._taken)

    def _timed_layers(self) -> None:
        stamps = Stamps(self._subject.clock, len(self._subject.chain))
        self._layers_pass(stamps)
        self.rounds.layers.append(stamps.times())

    def _timed_whole(self) -> None:
        self.rounds.whole.append(self._whole_pass())

    def _layers_pass(self, watcher: Watcher) -> None:
        # A clone, made before the time counts: the first layer may work in place.
        given = self._input.clone()
        self._subject.clock.settle()
        run_layers(self._subject.chain.layers, given, self._gradients, watcher)

    def _whole_pass(self) -> WholeTimes:
        given = self._input.clone()
        self._subject.clock.settle()
        return run_whole(self._subject.loaded.module, given, self._gradients, self._subject.clock)


class _Announcing:
    """Passes everything on to another watcher, and says before each layer which it is."""

    def __init__(self, watcher: Watcher, chain: LayerChain, visit: Callable[[Layer], None]) -> None:
        self._watcher, self._chain, self._visit = watcher, chain, visit
        self.after = watcher.after
        self.backward_starts = watcher.backward_starts
        self.gradient = watcher.gradient
        self.backward_ends = watcher.backward_ends

    def before(self, index: int, given: object) -> None:
        self._visit(self._chain.layers[index])
        self._watcher.before(index, given)


@dataclass
class Sweep:
    """Measures sizes in ascending order, then spends what is left of the budget where the spread is largest.

    `sizes`: the user's, or None: 1, 2, 4, ...; the smallest always, the others as far as budget and memory
    reach. `rounds`: so many at every size, whatever they cost.
    """

    subject: Subject
    sizes: Sequence[int] | None
    budget_seconds: float
    rounds: int | None = None
    progress: Callable[[Progress], None] | None = None
    runs: list[SizeRun] = field(default_factory=list)
    unmeasured: list[Unmeasured] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measure(self) -> None:
        """Fills `runs` (ascending, never empty), `unmeasured`, `notes`. Raises MachineError, ModelError."""
        self._begun = self.subject.clock.now()
        self._pending = deque(self._candidates())
        self._refusals: dict[int, tuple[str, str]] = {}
        self._full: set[int] = set()
        self._begin_sizes()
        # Further rounds may show a size to be faster than its first: then the next one may fit after all.
        while self.rounds is None and self._one_more_round():
            self._begin_sizes()
        self._leave_pending()

    @property
    def spent(self) -> float:
        return self.subject.clock.now() - self._begun

    def _candidates(self) -> Iterator[int]:
        if self.sizes is not None:
            return iter(self.sizes)
        largest = _LARGEST[self.subject.device.type]
        return (2**power for power in range(largest.bit_length()))

    def _begin_sizes(self) -> None:
        """Measures the sizes that wait, in order, as far as they fit."""
        while self._pending:
            size = self._pending[0]
            if "does not fit" in self._refusals.get(size, ()):
                return
            refusal = self._stop_before(size) if self.runs else None
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
            return "budget", (
                f"it would take about {_in_words(predicted)}, {_in_words(max(left, 0.0))} of "
                f"{self.budget_seconds:g} s are left{self._enough()}"
            )
        free = free_host_bytes() if self.subject.device.type == "cpu" else None
        needed = _MARGIN * sum(last.saved.saved_bytes) * size / last.size
        if free is not None and needed > free:
            return "does not fit", (
                f"it would save about {needed / 2**30:.1f} GiB for backward, {free / 2**30:.1f} GiB are free"
            )
        return None

    def _predicted(self, size: int) -> float:
        """Seconds that the first rounds of `size` would take: in proportion to the last size's."""
        last = self.runs[-1]
        # About one round's time more, for the warm-up.
        return last.round_seconds * (_FIRST_ROUNDS + 1) * size / last.size

    def _enough(self) -> str:
        """The budget that would do for all sizes that the user named, in words; else nothing."""
        if self.sizes is None:
            return ""
        total = self.spent + sum(self._predicted(size) for size in self._pending)
        return f"; a budget of about {_in_words(total, math.ceil)} would do for all that were asked for"

    def _leave_pending(self) -> None:
        """Records the size that was not measured, and with it the larger ones that the user named."""
        if not self._pending:
            return
        size = self._pending[0]
        reason, detail = self._refusals[size]
        for other in self._pending if self.sizes is not None else (size,):
            told = detail if other == size else f"after micro-batch size {size}: {detail}"
            self.unmeasured.append(
                Unmeasured.model_validate({"micro_batch_size": other, "reason": reason, "detail": told})
            )

    def _try(self, size: int) -> tuple[str, str] | None:
        """Measures `size` for the first time; returns what the allocator said where it does not fit."""
        try:
            self.runs.append(self._first_rounds(size))
            return None
        except Exception as error:
            if is_out_of_memory(error):
                said = refusal(error)
            elif isinstance(error, ModelError) and self.sizes is None and size == 1:
                self.notes.append(f"micro-batch size 1 is left out: {error.what}")
                return None
            else:
                raise
        # Only here, behind the except block, is nothing held by the traceback any more.
        self._release()
        if not self.runs:
            raise MachineError(
                f"{self.subject.loaded.name}: the smallest micro-batch size, {size}, does not fit: {said}",
                "Use a smaller one with --micro-batch-sizes, a smaller --dtype, or a device of more memory.",
            )
        return "does not fit", said

    def _first_rounds(self, size: int) -> SizeRun:
        run = SizeRun(self.subject, size)
        first = not self.runs or self.subject.device.type == "cuda"
        run.warm_up(lambda layer: self._tell("warm-up", run, layer.name), whole=first)
        wanted = _FIRST_ROUNDS if self.rounds is None else self.rounds
        for number in range(wanted):
            self._tell(f"round {number + 1} of {wanted}", run)
            run.round()
        return run

    def _one_more_round(self) -> bool:
        """Times the size whose median is the least certain once more; whether there was reason and time."""
        left = self.budget_seconds - self.spent
        able = [run for run in self.runs if run.size not in self._full and run.round_seconds <= left]
        run = max(able, key=_doubt, default=None)
        if run is None or _doubt(run) < _CERTAIN:
            return False
        self._tell(f"round {len(run.rounds) + 1}", run)
        kept = len(run.rounds)
        try:
            run.round()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._full.add(run.size)
            del run.rounds.layers[kept:], run.rounds.whole[kept:]
        if run.size in self._full:
            self._release()
        return True

    def _release(self) -> None:
        gc.collect()
        if self.subject.device.type == "cuda":
            torch.cuda.empty_cache()

    def _tell(self, doing: str, run: SizeRun, layer: str | None = None) -> None:
        if self.progress is not None:
            share = self.spent / self.budget_seconds if self.budget_seconds > 0 else 1.0
            self.progress(Progress(doing, run.size, layer, min(share, 1.0)))


def _doubt(run: SizeRun) -> float:
    return float("inf") if len(run.rounds) < _TRUSTED_ROUNDS else run.rounds.uncertainty()


def _in_words(seconds: float, whole: Callable[[float], int] = round) -> str:
    """Whole seconds from 10 on, two digits below."""
    return f"{whole(seconds)} s" if seconds >= 10 else f"{seconds:.2g} s"


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector would stop some passes and not others."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

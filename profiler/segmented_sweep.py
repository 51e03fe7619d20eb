"""The micro-batch sizes in turn for a model that does not fit on its device whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from ..cost_models.errors import MachineError, ModelError
from .chain.layer_sequential import LayerSequential
from .chain.layers import Layer, LayerChain, build_chain
from .measurement_target import MeasurementTarget
from .micro_batch_sizes import beyond_budget, left_out_note, left_unmeasured, sizes_to_try
from .offload.fitting import count_needs, plan_segments
from .offload.segmented import Mover, Segmented
from .passes.timed_passes import link_sizes
from .profile_file import Unmeasured
from .size_result import SizeResult
from .size_run import no_collection, release
from .sweep import Progress
from .user_model.copies import copy_to_meta
from .user_model.failures import DoesNotFit, is_out_of_memory, refusal
from .user_model.loaded_model import ModelInput

_ROUNDS = 3
_SHARES = (1.0, 0.7, 0.5)
"""Of the free bytes, to plan with in turn where memory runs out: counting does not see everything."""


@dataclass
class SegmentedSweep:
    """Measures sizes in ascending order, as far as budget and memory reach.

    The subject's working copy lies on the host. `free_bytes` says what the device has left when asked.
    `rounds`: timed passes at every size, or None for a few. What fits together is planned from bytes counted
    on the meta device, with the loss, and with an estimate of what autocast converts.
    """

    subject: MeasurementTarget
    sizes: Sequence[int] | None
    budget_seconds: float
    free_bytes: Callable[[], int]
    rounds: int | None = None
    progress: Callable[[Progress], None] | None = None
    mover: Mover | None = None
    results: list[SizeResult] = field(default_factory=list)
    unmeasured: list[Unmeasured] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _last_segments: int = field(default=0, init=False)

    def measure(self) -> None:
        """Fills `results` (never empty), `unmeasured`, `notes`. Raises MachineError, ModelError."""
        self._measure_sizes()
        link_sizes([result.rounds for result in self.results])

    def _measure_sizes(self) -> None:
        self._begun = self.subject.clock.now()
        taken = 0.0
        for size in sizes_to_try(self.sizes, self.subject.device):
            predicted = taken * size / self.results[-1].size if self.results else 0.0
            left = self.budget_seconds - self._spent
            if self.rounds is None and self.results and predicted > left:
                return self._leave(size, "budget", beyond_budget(predicted, left, self.budget_seconds))
            started = self._spent
            try:
                self._measure_one(size)
            except DoesNotFit as error:
                if not self.results:
                    raise
                return self._leave(size, "does not fit", error.what)
            except ModelError as error:
                note = left_out_note(size, self.sizes, error)
                if note is None:
                    raise
                self.notes.append(note)
            taken = self._spent - started
        return None

    def segments(self, size: int, share: float = 1.0) -> tuple[range, ...]:
        """What would run together in `share` of what is free. Raises DoesNotFit, ModelError."""
        model, chain = self._counted
        example = self._example(size)
        given, amp = example.to("meta").handed, self.subject.modes.amp is not None
        needs = count_needs(model, chain.layers, given, self.subject.loss, amp=amp)
        entering = sum(tensor.nbytes for tensor in example.tensors)
        try:
            return plan_segments(needs, entering, int(share * self.free_bytes()), str(self.subject.device))
        except MachineError as error:
            raise DoesNotFit(f"{self._of(size)}: {error.what}", error.hint) from error

    @property
    def _spent(self) -> float:
        return self.subject.clock.now() - self._begun

    @cached_property
    def _counted(self) -> tuple[torch.nn.Module, LayerChain]:
        """The same layers, on the meta device."""
        loaded, chain = self.subject.loaded, self.subject.chain
        module, granularity = loaded.module, chain.granularity
        if isinstance(module, LayerSequential) and len(module.layer_names) == len(chain):
            # Its granularity is that of the model it was made of; the layers are its elements.
            granularity = "block"
        model = copy_to_meta(module, loaded.name)
        example = loaded.example_input_for(2).to("meta", self.subject.dtype)
        return model, build_chain(model, example, name=loaded.name, granularity=granularity, tool=chain.tool)

    def _example(self, size: int) -> ModelInput:
        subject = self.subject
        example = subject.loaded.example_input_for(size)
        return example.to(dtype=subject.dtype, memory_format=subject.modes.memory_format)

    def _measure_one(self, size: int) -> None:
        """In more segments where memory runs out. Raises DoesNotFit, ModelError."""
        said, tried = "", 0
        for share in _SHARES:
            try:
                segments = self.segments(size, share)
            except DoesNotFit:
                if not tried:
                    raise
                break
            if len(segments) == tried:
                continue
            tried, said = len(segments), self._refused(size, segments)
            if not said:
                return
            # Only here, behind the except block, is nothing held by the traceback any more.
            release(self.subject.device)
        raise DoesNotFit(
            f"{self._of(size)} does not fit even in segments: {said}",
            "Use smaller `micro_batch_sizes`, a smaller `dtype`, or a device of more memory.",
        )

    def _refused(self, size: int, segments: Sequence[range]) -> str:
        """Measures the size; returns what the allocator said where it does not fit."""
        subject = self.subject
        try:
            with subject.modes.process(), no_collection():
                run = Segmented(
                    subject.chain.layers,
                    segments,
                    subject.device,
                    subject.clock,
                    subject.seed,
                    subject.loss,
                    partial(subject.modes.forward_context, subject.device),
                    self.mover,
                    visit=lambda layer: self._tell(size, layer),
                    running=subject.modes.layers(subject.chain.layers),
                ).measure(self._example(size).handed, self.rounds or _ROUNDS)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return refusal(error)
        self._note(size, run.note, len(segments))
        self.results.append(SizeResult.of_segments(size, run))
        return ""

    def _note(self, size: int, note: str, segments: int) -> None:
        """The first size's note, and where a later one is measured in another number of segments."""
        if not self.results:
            self.notes.append(note)
        elif segments != self._last_segments:
            self.notes.append(f"from micro-batch size {size} on: measured in {segments} segments")
        self._last_segments = segments

    def _of(self, size: int) -> str:
        return f"{self.subject.loaded.name}: micro-batch size {size}"

    def _leave(self, size: int, reason: str, detail: str) -> None:
        self.unmeasured += left_unmeasured(size, self.sizes, reason, detail)

    def _tell(self, size: int, layer: Layer) -> None:
        if self.progress is not None:
            share = self._spent / self.budget_seconds
            self.progress(Progress("in segments", size, layer.name, min(share, 1.0)))

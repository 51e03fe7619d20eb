"""Sizes of a model that does not fit on its device whole, each measured segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial

import torch

from ..cost_models.errors import MachineError
from .chain.layer_sequential import LayerSequential
from .chain.layers import LayerChain, build_chain
from .memory.meta_kernels import kernels_on
from .offload.fitting import count_needs, plan_segments
from .offload.segmented import Mover, SegmentedMeasurement
from .size_passes import no_collection, release
from .size_result import SizeResult
from .size_sweep import SizeSweep
from .user_model.failures import DoesNotFit, is_out_of_memory, refusal
from .user_model.loaded_model import ModelInput, copy_to_meta

_ROUNDS = 3
_SHARES = (1.0, 0.7, 0.5)
"""Of the free bytes, to plan with in turn where memory runs out: counting does not see everything."""


@dataclass
class SegmentedSweep(SizeSweep[SizeResult]):
    """The subject's working copy lies on the host. `free_bytes` says what the device has left when asked.

    What fits together is planned from bytes counted on the meta device, with the loss, and with an estimate
    of what autocast converts.
    """

    _: KW_ONLY
    free_bytes: Callable[[], int]
    mover: Mover | None = None
    _last_segments: int = field(default=0, init=False)

    @property
    def results(self) -> list[SizeResult]:
        return self.runs

    def segments(self, size: int, share: float = 1.0) -> tuple[range, ...]:
        """What would run together in `share` of what is free. Raises DoesNotFit, ModelError."""
        model, chain = self._counted
        example = self._example(size)
        inputs, amp = example.to("meta").layer_input, self.subject.modes.amp is not None
        needs = count_needs(
            model, chain.layers, inputs, self.subject.loss, amp=amp, kernels=kernels_on(self.subject.device)
        )
        entering = sum(tensor.nbytes for tensor in example.tensors)
        try:
            return plan_segments(needs, entering, int(share * self.free_bytes()), str(self.subject.device))
        except MachineError as error:
            raise DoesNotFit(f"{self._of(size)}: {error.what}", error.hint) from error

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

    def measure_size(self, size: int) -> SizeResult:
        """In more segments where memory runs out."""
        reason, attempts = "", 0
        for share in _SHARES:
            try:
                segments = self.segments(size, share)
            except DoesNotFit:
                if not attempts:
                    raise
                break
            if len(segments) == attempts:
                continue
            attempts = len(segments)
            try:
                return self._measure_segments(size, segments)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                reason = refusal(error)
            # Only here, behind the except block, is nothing held by the traceback any more.
            release(self.subject.device)
        raise DoesNotFit(
            f"{self._of(size)} does not fit even in segments: {reason}",
            "Use smaller `micro_batch_sizes`, a smaller `dtype`, or a device of more memory.",
        )

    def _measure_segments(self, size: int, segments: Sequence[range]) -> SizeResult:
        subject = self.subject
        subject.modes.forget_compiled()
        with no_collection():
            run = SegmentedMeasurement(
                subject.chain.layers,
                segments,
                subject.device,
                subject.clock,
                subject.seed,
                subject.loss,
                partial(subject.modes.forward_context, subject.device),
                self.mover,
                visit=lambda layer: self.tell("in segments", size, layer.name),
                running=subject.modes.layers(subject.chain.layers),
                warm_up_seconds=0.0 if self.runs else self.warm_up_seconds,
                on_warm=self.note_warm_device,
                size=size,
            ).measure(self._example(size).layer_input, self.rounds or _ROUNDS)
        self._note(size, run.note, len(segments))
        return SizeResult.of_segments(size, run)

    def _note(self, size: int, note: str, segments: int) -> None:
        """The first size's note, and where a later one is measured in another number of segments."""
        if not self.runs:
            self.notes.append(note)
        elif segments != self._last_segments:
            self.notes.append(f"from micro-batch size {size} on: measured in {segments} segments")
        self._last_segments = segments

    def _of(self, size: int) -> str:
        return f"{self.subject.loaded.name}: micro-batch size {size}"

"""What a layer needs besides what is kept, while it runs; and the peak of a whole step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from .live_bytes import Meter, lasting


@dataclass(frozen=True)
class LossWorkspace:
    """Bytes that the loss needs for itself, targets included, above what all layers and it save."""

    forward: int
    backward: int

    @property
    def larger(self) -> int:
        """Of forward and backward."""
        return max(self.forward, self.backward)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one pass through the layers; an entry for each layer.

    `static`: held before the pass and after it: parameters, buffers, gradients and `other` (a library's own
    memory; what the allocator rounds up). `forward`, `backward`: workspace. `saved`: for backward.
    """

    static: int
    other: int
    saved: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def workspace(self) -> tuple[int, ...]:
        """The larger of forward and backward."""
        return tuple(map(max, self.forward, self.backward))

    @property
    def predicted_peak(self) -> int:
        """static + the largest over all layers i of (what layers 0 to i saved + workspace of i)."""
        saved = accumulate(self.saved)
        return self.static + max(before + own for before, own in zip(saved, self.workspace, strict=True))


class Workspace:
    """The watcher that finds what each layer needs for itself, in an untimed pass while `meter` counts.

    The workspace of layer i is the peak while it runs, above what is kept then: the static bytes, and what
    layers 0 to i save for backward. So it holds what the layer hands on where nobody saves that, gradients on
    their way, and temporaries; and static + saved + workspace is the peak of the pass, with no byte twice.

    Made right before the pass, when gradients exist and the libraries have what they allocate once.
    `passing`: tensors that exist by now and belong to the pass, so not to what is static: the input (which
    counts as saved, where it is) and the gradients that backward starts from. `memory` and `loss` are called
    when `meter` can be read: some only when they are left.
    """

    def __init__(self, model: nn.Module, layers: int, meter: Meter, passing: Iterable[Tensor] = ()) -> None:
        self._meter = meter
        self._layers = layers
        self._passing_bytes = meter.bytes_of(passing)
        self._lasting_bytes = meter.bytes_of(lasting(model))
        # By layer the intervals between marks in which it ran; one more, where a loss ends the pass: its own
        # bytes are not the layers'.
        self._forward: list[list[int]] = [[] for _ in range(layers + 1)]
        self._backward: list[list[int]] = [[] for _ in range(layers + 1)]
        self._current = 0
        """The layer whose forward or backward ran last."""
        self._start = meter.mark()

    @property
    def static_bytes(self) -> int:
        """Held before the pass and after it."""
        return self._meter.held_after(self._start) - self._passing_bytes

    def memory(self, saved_bytes: Sequence[int]) -> StepMemory:
        """After the pass: what was found, above `saved_bytes`, which SavedBytes counted in a pass like it."""
        return StepMemory(
            static=self.static_bytes,
            other=max(self.static_bytes - self._lasting_bytes, 0),
            saved=tuple(saved_bytes),
            forward=self._above(self._forward, saved_bytes),
            backward=self._above(self._backward, saved_bytes),
        )

    def loss(self, saved_bytes: Sequence[int], loss_saved_bytes: int) -> LossWorkspace:
        """After a pass that a loss ended: what that needed, above all that was saved until then."""
        allocated = self.static_bytes + sum(saved_bytes) + loss_saved_bytes
        forward, backward = (self._peak(passes[-1]) for passes in (self._forward, self._backward))
        return LossWorkspace(max(forward - allocated, 0), max(backward - allocated, 0))

    def before(self, index: int, layer_input: Any) -> None:  # noqa: ARG002
        self._meter.mark()

    def after(self, index: int, output: Any) -> None:  # noqa: ARG002
        self._forward[index].append(self._meter.mark())
        self._current = index

    def backward_starts(self) -> None:
        self._meter.mark()

    def gradient(self, index: int, gradient: Tensor) -> None:  # noqa: ARG002
        self._backward[self._current].append(self._meter.mark())
        self._current = min(self._current, index)

    def backward_ends(self) -> None:
        self._backward[self._current].append(self._meter.mark())

    def _peak(self, intervals: Iterable[int]) -> int:
        return max(map(self._meter.peak_in, intervals), default=0)

    def _above(self, passes: Sequence[Sequence[int]], saved_bytes: Sequence[int]) -> tuple[int, ...]:
        allocated = (self.static_bytes + saved for saved in accumulate(saved_bytes))
        peaks = map(self._peak, passes[: self._layers])
        return tuple(max(peak - before, 0) for peak, before in zip(peaks, allocated, strict=True))


def peak_of_step(step: Callable[[], object], meter: Meter) -> int:
    """The most bytes held while `step` runs: forward and backward of the untouched model, say."""
    gc.collect()
    with meter:
        meter.mark()
        step()
        interval = meter.mark()
    return meter.peak_in(interval)

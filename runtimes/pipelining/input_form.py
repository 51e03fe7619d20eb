"""A process's global batch as torch.distributed.pipelining cuts it: along dimension 0 of every tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...cost_models.errors import UsageError
from ...profiler.user_model.loaded_model import ModelInput


@dataclass(frozen=True)
class InputForm:
    """The model's input: which of its tensors, in order, belong to all samples and are not cut."""

    shared: tuple[bool, ...]

    @classmethod
    def of(cls, example: ModelInput) -> InputForm:
        """The form of an example."""
        return cls(tuple(tensor.dim() == 0 or len(tensor) != example.batch for tensor in example.tensors))

    def repeat_shared(self, batch: object, samples: int, micro_batches: int) -> tuple[Tensor, ...]:
        """The tensors of a global batch; those that are shared once for every micro-batch.

        Raises UsageError where it has another number of samples or tensors.
        """
        tensors = ModelInput.of(batch, "the global batch").tensors
        if len(tensors) != len(self.shared):
            raise UsageError(
                f"the input has {len(tensors)} tensors, the example input had {len(self.shared)}",
                "Give the arguments of the model's forward as in the example input.",
            )
        for tensor, shared in zip(tensors, self.shared, strict=True):
            if not shared:
                check_samples("input", tensor, samples)
        return tuple(
            torch.stack([tensor] * micro_batches) if shared else tensor.contiguous()
            for tensor, shared in zip(tensors, self.shared, strict=True)
        )

    def micro_batch(self, example: ModelInput, samples: int) -> tuple[Tensor, ...]:
        """One of `samples` samples as the first stage is handed it."""
        tensors = example.repeated(samples).tensors
        return tuple(
            tensor.contiguous().unsqueeze(0) if shared else tensor.contiguous()
            for tensor, shared in zip(tensors, self.shared, strict=True)
        )

    def drop_repeats(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The model's input, from what the first stage is handed."""
        return tuple(
            tensor.squeeze(0) if shared else tensor
            for tensor, shared in zip(tensors, self.shared, strict=True)
        )


def check_samples(name: str, tensor: Tensor | None, samples: int) -> None:
    """Raises UsageError where dimension 0 of `tensor` is not `samples`."""
    count = 0 if tensor is None or tensor.dim() == 0 else len(tensor)
    if count != samples:
        raise UsageError(
            f"the {name} holds {count} samples, a step of this process takes {samples}",
            "Give each process its replica's samples of the global batch: `share` picks them.",
        )

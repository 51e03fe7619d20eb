"""The layers of one stage, as a module that takes and returns the tensors that cross its cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...profiler.torch_internals import TreeSpec, tree_flatten, tree_unflatten
from .cut_tensors import CutTensor, add_zero_gradients, attach_all, pack_tensor, pass_on
from .input_form import InputForm


class StageModule(nn.Module):
    """Runs `layers` on what the stage before sent.

    `crossings`: of the tensors it takes, in order; None where they are not known: then they are taken as they
    are, and cloned, for the stage may overwrite them. `recompute`: how many of the first layers run again in
    backward, for their activations.
    `form`: of the input, for the first stage. The last one returns the tensors of the model's output, which
    `assemble` puts together.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        crossings: Sequence[CutTensor] | None = None,
        *,
        recompute: int = 0,
        form: InputForm | None = None,
        is_last: bool = False,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.crossings = None if crossings is None else tuple(crossings)
        self.recompute, self.form, self.is_last = recompute, form, is_last
        self.output_tensors: tuple[CutTensor, ...] = ()
        """Of the latest output, as the next stage's crossings."""
        self._structure: tuple[TreeSpec, list[Any]] | None = None

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The tensors to send, from those received."""
        tensors = self.receive(inputs)
        again = self.recompute if torch.is_grad_enabled() else 0
        if again:
            output = checkpoint(self._run, *tensors, layers=self.layers[:again], use_reentrant=False)
            if again < len(self.layers):
                output = self.layers[again:](output)
        else:
            output = self._run(*tensors, layers=self.layers)
        return self._pack_output(output, inputs)

    def build_output(self, output: Tensor | tuple[Tensor, ...]) -> Any:
        """The model's output, of the tensors that the last stage returned."""
        if self._structure is None:
            return output
        spec, leaves = self._structure
        tensors = iter((output,) if isinstance(output, Tensor) else output)
        return tree_unflatten([next(tensors) if leaf is _TENSOR else leaf for leaf in leaves], spec)

    def receive(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The layers' input, from the tensors received."""
        if self.form is not None:
            return self.form.drop_repeats(tensors)
        if self.crossings is None:
            return tuple(pass_on(tensor) if tensor.requires_grad else tensor for tensor in tensors)
        return tuple(about.receive(tensor) for about, tensor in zip(self.crossings, tensors, strict=True))

    def _run(self, *tensors: Tensor, layers: nn.Sequential) -> Any:
        """The first layers, on clones of what they overwrite: a micro-batch is needed again to recompute."""
        pairs = zip(tensors, self.crossings or (None,) * len(tensors), strict=True)
        layer_inputs = tuple(
            tensor.clone() if about is None or about.is_overwritten else tensor for tensor, about in pairs
        )
        return layers(layer_inputs[0] if len(layer_inputs) == 1 else layer_inputs)

    def _pack_output(self, output: Any, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        if self.is_last:
            leaves, spec = tree_flatten(output)
            tensors = [leaf.contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
            markers = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._structure = None if isinstance(output, Tensor) else (spec, markers)
        else:
            outputs = (output,) if isinstance(output, Tensor) else output
            self.output_tensors = tuple(CutTensor.of(tensor) for tensor in outputs)
            tensors = attach_all([pack_tensor(tensor) for tensor in outputs])
        carried = self._without_gradients(inputs)
        if carried and tensors:
            target = max(range(len(tensors)), key=lambda i: tensors[i].requires_grad)
            tensors[target] = add_zero_gradients(tensors[target], carried)
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def _without_gradients(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Inputs of which the schedule asks a gradient that they do not have."""
        if self.form is not None or self.crossings is None:
            return ()
        pairs = zip(tensors, self.crossings, strict=True)
        return tuple(tensor for tensor, about in pairs if tensor.requires_grad and not about.has_gradient)


class _Tensor:
    """Stands for a tensor in an output."""


_TENSOR = _Tensor()

Loss = Callable[..., Tensor]


def stage_loss(last: StageModule, loss_fn: Loss, share: float = 1.0) -> Loss:
    """The loss as the schedule calls it, of the tensors that the last stage returned; its gradient counts
    by `share`."""
    return lambda output, target: pass_on(loss_fn(last.build_output(output), target), share)

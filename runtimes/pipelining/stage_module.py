"""The layers of one stage, as a module that takes and returns the tensors that cross its cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...cost_models.errors import ExportError
from ...profiler.torch_internals import TreeSpec, tree_flatten, tree_unflatten
from ...profiler.user_model.loaded_model import scripted_parts
from .cut_tensors import CutTensor, add_zero_gradients, as_layer_input, attach_all, pack_tensor, pass_on
from .input_form import InputForm
from .offloading import SavedOnHost
from .recomputation import run_recomputed


class StageModule(nn.Module):
    """Runs `layers` on what the stage before sent.

    `crossings`: of the tensors it takes, in order; None where they are not known: then they are taken as they
    are, and cloned, for the stage may overwrite them. `recompute`: how many of the first layers run again in
    backward, for their activations; `written`: names of the buffers that forward changes. `offloads`: whether
    what is saved for backward waits in the host's memory. `outputs`: what the stage behind was told to
    expect, where it was told.
    `form`: of the input, for the first stage. The last one returns the tensors of the model's output, which
    `assemble` puts together.
    """

    def __init__(
        self,
        layers: nn.Sequential,
        crossings: Sequence[CutTensor] | None = None,
        *,
        recompute: int = 0,
        written: Sequence[str] = (),
        offloads: bool = False,
        outputs: Sequence[Tensor] | None = None,
        form: InputForm | None = None,
        is_last: bool = False,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.crossings = None if crossings is None else tuple(crossings)
        self.recompute, self.written, self.offloads = recompute, tuple(written), offloads
        self._scripted = tuple(scripted_parts(layers)) if recompute else ()
        self.form, self.is_last = form, is_last
        self._expected = None if is_last or outputs is None else [tensor.dtype for tensor in outputs]
        self.is_told_nothing = False
        """Whether the stage behind does not know what it is sent."""
        self.output_tensors: tuple[CutTensor, ...] = ()
        """Of the latest output, as the next stage's crossings."""
        self._structure: tuple[TreeSpec, list[Any]] | None = None

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The tensors to send, from those received."""
        tensors = self.receive(inputs)
        again = self.recompute if torch.is_grad_enabled() else 0
        if again:
            first = self.layers[:again]
            output = run_recomputed(first, self._layer_input, tensors, self.written, self._scripted)
            if again < len(self.layers):
                output = self.layers[again:](output)
        else:
            with self._saving(inputs):
                output = self.layers(self._layer_input(*tensors))
        return self._pack_output(output, inputs)

    def _saving(self, inputs: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
        """What is saved for backward inside goes where it is to wait."""
        if not (self.offloads and inputs and torch.is_grad_enabled()):
            return nullcontext()
        buffers = [own for name, own in self.layers.named_buffers() if name not in self.written]
        return SavedOnHost(inputs[0].device, [*inputs, *self.layers.parameters(), *buffers])

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

    def _layer_input(self, *tensors: Tensor) -> Any:
        """Clones of what the layers overwrite: a micro-batch is needed again to recompute."""
        pairs = zip(tensors, self.crossings or (None,) * len(tensors), strict=True)
        layer_inputs = tuple(
            tensor.clone() if about is None or about.is_overwritten else tensor for tensor, about in pairs
        )
        return as_layer_input(layer_inputs, self.crossings)

    def _pack_output(self, output: Any, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        if self.is_last:
            leaves, spec = tree_flatten(output)
            tensors = [_output_tensor(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
            markers = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._structure = None if isinstance(output, Tensor) else (spec, markers)
        else:
            in_tuple = not isinstance(output, Tensor) and len(output) == 1
            outputs = (output,) if isinstance(output, Tensor) else output
            self.output_tensors = tuple(CutTensor.of(tensor, in_tuple=in_tuple) for tensor in outputs)
            tensors = attach_all([pack_tensor(tensor) for tensor in outputs])
            self._check_outputs(tensors)
        carried = self._without_gradients(inputs)
        if carried and tensors:
            target = max(range(len(tensors)), key=lambda i: tensors[i].requires_grad)
            tensors[target] = add_zero_gradients(tensors[target], carried)
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def _check_outputs(self, tensors: Sequence[Tensor]) -> None:
        """Raises ExportError where the stage behind would take them for others."""
        about = self.output_tensors
        pairs = list(zip(tensors, about, strict=True))
        if self.is_told_nothing and any(own.in_tuple or sent.dtype != own.dtype for sent, own in pairs):
            raise ExportError(
                "what crosses a cut is no floating-point tensor, or one in a tuple, and the stages could "
                "not be run on the example input to tell the stage behind",
                "Give `build` an example input that a copy of the model takes.",
            )
        dtypes = [tensor.dtype for tensor in tensors]
        if self._expected is not None and dtypes != self._expected:
            sent, expected = (
                ", ".join(str(dtype).removeprefix("torch.") for dtype in some)
                for some in (dtypes, self._expected)
            )
            raise ExportError(
                f"a stage hands on {sent} where {expected} was expected: it runs under another autocast, "
                "or in another precision, than when it was built",
                "Call build inside the torch.autocast that the steps run in, with the model in its dtype.",
            )

    def _without_gradients(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Inputs of which the schedule asks a gradient that they do not have."""
        if self.form is not None or self.crossings is None:
            return ()
        pairs = zip(tensors, self.crossings, strict=True)
        return tuple(tensor for tensor, about in pairs if tensor.requires_grad and not about.has_gradient)


def _output_tensor(tensor: Tensor) -> Tensor:
    """An output of the model. A weight is handed on: PyTorch detaches outputs in place, which would freeze
    it."""
    is_weight = tensor.is_leaf and tensor.requires_grad
    return pass_on(tensor) if is_weight else tensor.contiguous()


class _Tensor:
    """Stands for a tensor in an output."""


_TENSOR = _Tensor()

Loss = Callable[..., Tensor]


class StageLoss:
    """The loss of the tensors that the last stage returned, as the schedule calls it.

    Its gradient counts by `share`. `targets`, where they are set, are those of the micro-batches. The
    schedule then hands over a micro-batch's number, because PyTorch cuts nothing but one tensor.
    """

    def __init__(self, last: StageModule, loss_fn: Loss, share: float = 1.0) -> None:
        self.last, self.loss_fn, self.share = last, loss_fn, share
        self.targets: Sequence[Any] | None = None

    def __call__(self, output: Tensor | tuple[Tensor, ...], target: Any) -> Tensor:
        """The loss of a micro-batch."""
        own = target if self.targets is None else self.targets[int(target)]
        return pass_on(self.loss_fn(self.last.build_output(output), own), self.share)

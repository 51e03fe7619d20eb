"""Runs a model and its layers in turn, each on its own copy, and compares what the passes leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...cost_models.errors import ModelError
from ..torch_internals import tensor_version
from ..user_model.failures import at_user_line, first_line, is_out_of_memory
from ..user_model.loaded_model import ModelInput, copy_model
from .differences import (
    Difference,
    describe_difference,
    differences,
    not_finite,
    relative_size,
    split_by_cause,
)
from .training_pass import PassResult, Trainee, class_attributes, plain_attributes

Bind = Callable[[nn.Module], nn.Sequential]
"""Makes the layers anew of a copy of the model, one element a layer."""

_REPETITIONS = 4
"""Of a model that may decide by a number that nobody can set: it could decide so again by chance."""
_VARIANTS = 5
"""Directions in which the last bits are changed, at the most."""


class ModelFails(ModelError):
    """The model itself does not run on this batch."""


class RoundingHides(Exception):
    """Layers and model differ by as much as rounding makes of the model: nothing can be told."""


class NotRepeatable(ModelError):
    """Copies of the model differ from each other."""


class LayersDiffer(Exception):
    """What differed after which passes; `failure` where the layers did not run."""

    def __init__(
        self, several: Sequence[Difference], batches: Sequence[int], failure: Exception | None = None
    ) -> None:
        super().__init__()
        self.differences, self.batches, self.failure = several, tuple(batches), failure


@dataclass(eq=False)
class SideBySide:
    """One comparison; see `ModelCheck.compare`."""

    model: nn.Module
    model_input: ModelInput
    name: str
    bind: Bind
    seed: int = 3_790_211
    """None that forward is likely to give torch.manual_seed, nor that of the trace: what either drew would be
    taken for what the model draws."""
    batches: list[int] = field(default_factory=list, init=False)
    """Of the passes so far."""
    seconds: float = field(default=0.0, init=False)
    """Of a first pass."""
    rounding: float = field(default=0.0, init=False)
    not_finite: str = field(default="", init=False)
    _states: list[dict[str, Any]] = field(default_factory=list, init=False)
    """Attributes of the model's modules after each pass."""
    _class_changes: list[set[str]] = field(default_factory=list, init=False)
    """Attributes of their classes that each pass of the model changed, and that of the layers did not."""

    def begin(self, batch: int, limit_seconds: float) -> bool:
        """The first pass, of `batch` samples. Raises ModelFails, LayersDiffer.

        Whether there was one of the layers: not where the model's took longer than the limit.
        """
        self._own, self._layers = self.plain(), self.layered()
        buffers = self._own.model.named_buffers(remove_duplicate=False)
        self._versions = {name: tensor_version(buffer) for name, buffer in buffers}
        self._constants = [(tensor, tensor_version(tensor)) for tensor in _constants(self._layers)]
        begun = time.perf_counter()
        expected = self._model_pass(batch)
        self.seconds = time.perf_counter() - begun
        if self.seconds > limit_seconds:
            return False
        begun = time.perf_counter()
        self._compare(expected)
        # What is run for the first time may take longer.
        self.seconds = min(self.seconds, time.perf_counter() - begun)
        return True

    def compare_again(self, batch: int) -> None:
        """A further pass, in the state that the ones before left. Raises as `begin` does."""
        self._compare(self._model_pass(batch))

    def changes_of_attributes(self) -> Iterator[str]:
        """Those that were another after each pass of the model, and are so in its copy alone."""
        own = plain_attributes(self._layers.model)
        *earlier, last = self._states
        for name, value in last.items():
            changes = earlier and all(name in state for state in earlier) and earlier[-1][name] != value
            if changes and own.get(name) != value:
                yield name
        if len(self._class_changes) > 1:
            yield from sorted(set.intersection(*self._class_changes))

    def written_buffers(self) -> Iterator[str]:
        """Those that the passes so far changed in the model's copy, by each of their names."""
        before = dict(self.model.named_buffers(remove_duplicate=False))
        for name, now in self._own.model.named_buffers(remove_duplicate=False):
            if tensor_version(now) != self._versions.get(name) or not _is_equal(now, before.get(name)):
                yield name

    def written_constant(self) -> str:
        """The shape and dtype of a tensor of no module that the layers changed; empty: none."""
        for tensor, version in self._constants:
            if tensor_version(tensor) != version:
                return f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"
        return ""

    @property
    def attributes(self) -> dict[str, Any]:
        """What modules keep in Python after the model's first pass, by dotted name."""
        return self._states[0] if self._states else {}

    def plain(self) -> Trainee:
        """A copy of the model, with other weights."""
        copy = copy_model(self.model, self.name)
        _perturb_parameters(copy)
        return Trainee(copy, lambda inputs: inputs.call(copy))

    def layered(self) -> Trainee:
        """The layers of a copy, whose weights are changed as those of `plain`, as training would."""
        copy = copy_model(self.model, self.name)
        layers = self.bind(copy)
        _perturb_parameters(copy)
        return Trainee(copy, lambda inputs: layers(inputs.layer_input), tuple(layers))

    def example(self, batch: int) -> ModelInput:
        """So many samples that differ: those of the example, then the same with their elements rotated.

        Rotated values are still of the kind that the model takes: indices, masks, probabilities.
        """

        def rotated(tensor: Tensor, source: Tensor) -> Tensor:
            if source.dim() > 1 and len(source) == self.model_input.batch:
                for sample in range(self.model_input.batch, batch):
                    tensor[sample] = tensor[sample].roll(sample // self.model_input.batch, dims=-1)
            return tensor.requires_grad_(source.requires_grad)

        sources = iter(self.model_input.tensors)
        plain = self.model_input.repeated(batch).clone()
        return plain.mapped(lambda tensor: rotated(tensor, next(sources)))

    def _model_pass(self, batch: int) -> PassResult:
        before = class_attributes(self._own.model)
        try:
            result = self._own.train_once(self.example(batch), self.seed)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ModelFails(
                f"{self.name} does not train on a batch of {batch}: {first_line(error)}{at_user_line(error)}",
                "Forward and backward must run on inputs like the example.",
            ) from error
        self.batches.append(batch)
        self._states.append(plain_attributes(self._own.model))
        after = class_attributes(self._own.model)
        self._class_changes.append({name for name in after if before.get(name) != after[name]})
        self.not_finite = self.not_finite or ", ".join(not_finite(result))
        return result

    def _compare(self, expected: PassResult) -> None:
        before = class_attributes(self._own.model)
        try:
            actual = self._layers.train_once(self.example(self.batches[-1]), self.seed)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise LayersDiffer([], self.batches, error) from error
        after = class_attributes(self._own.model)
        self._class_changes[-1] -= {name for name in after if before.get(name) != after[name]}
        several = differences(expected, actual)
        if not several:
            return
        variants = [self._varied(0)]
        real, unsure = split_by_cause(several, expected, variants)
        while real and len(variants) < _VARIANTS:
            # One direction may be one to which a value happens to be insensitive.
            variants.append(self._varied(len(variants)))
            real, unsure = split_by_cause(several, expected, variants)
        if real:
            raise LayersDiffer(real, self.batches)
        if unsure:
            self._refuse_unrepeatable(expected)
            raise RoundingHides(
                f"on a batch of {self.batches[-1]} rounding alone changes "
                f"{describe_difference(unsure[0])} as much"
            )
        self.rounding = max(self.rounding, relative_size(several, expected))

    def _refuse_unrepeatable(self, expected: PassResult) -> None:
        """Raises NotRepeatable where a copy of the model, from the same state, does not come to the same on a
        CPU: there nothing else than what the copies share can be why."""
        if self.model_input.tensors[0].device.type != "cpu":
            return
        repeated = (differences(expected, self._repeated(lambda _: None)) for _ in range(_REPETITIONS))
        several = next(filter(None, repeated), None)
        if several:
            raise NotRepeatable(
                f"{self.name}: {describe_difference(several[0])} is another each time, from the same "
                "weights, input and random state",
                "Does forward count its calls in a global, or draw from a clock, os.urandom or a generator "
                "outside of the model? Keep counters and generators as attributes of its modules.",
            )

    def _varied(self, variant: int) -> PassResult:
        """What the model leaves by now with the last bit of parameters and inputs changed."""
        generator = torch.Generator().manual_seed(variant)
        return self._repeated(lambda tensor: _change_last_bits(tensor, generator if variant else None))

    def _repeated(self, change: Callable[[Tensor], None]) -> PassResult:
        """What another copy of the model leaves by now, with `change` made to parameters and inputs."""
        copy = self.plain()
        with torch.no_grad():
            for parameter in copy.model.parameters():
                change(parameter)
        for batch in self.batches:
            inputs = self.example(batch)
            with torch.no_grad():
                for tensor in inputs.tensors:
                    change(tensor)
            result = copy.train_once(inputs, self.seed)
        return result


def _is_equal(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    is_same = one == other
    return bool((is_same | ((one != one) & (other != other))).all())


def _constants(layers: Trainee) -> Iterator[Tensor]:
    """Tensors that the trace keeps and no module of the model has: those of a network in a list, say."""
    modules = list(layers.model.modules())
    own = {id(value) for module in modules for value in (*module.buffers(False), *vars(module).values())}
    for layer in layers.layers:
        yield from (tensor for tensor in layer.buffers() if id(tensor) not in own)


def _perturb_parameters(model: nn.Module) -> None:
    """By a few per cent, each tensor by another part, in place; of zeros alone to small values.

    What the trace computed of the weights that the model has now, and what is the same only while two weights
    are equal (a teacher that starts as the student) or zero (a residual branch at the start), then differs.
    """
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.is_floating_point() and parameter.layout is torch.strided and parameter.numel():
                part = 0.02 + 0.01 * (index % 7) / 7
                flat = parameter.detach().reshape(-1)  # the values themselves, where they are contiguous
                if flat.any():
                    flat[::2] *= 1 - part
                    flat[1::2] *= 1 + part
                else:
                    flat[::2], flat[1::2] = -part, part
                parameter.copy_(flat.reshape(parameter.shape))


def _change_last_bits(tensor: Tensor, generator: torch.Generator | None) -> None:
    """In place: every other element a step up, the others a step down; or as the generator draws."""
    if tensor.is_floating_point():
        flat = tensor.detach().flatten()
        steps = torch.ones_like(flat)
        steps[::2] = -1
        if generator is not None:
            steps = (2 * torch.randint(2, flat.shape, generator=generator) - 1).to(steps)
        tensor.copy_((flat * (1 + steps * torch.finfo(flat.dtype).eps)).reshape(tensor.shape))

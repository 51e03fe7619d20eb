"""Runs layers beside the model they were made of; raises an error where their results differ."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..cost_models.errors import ModelError
from ..cost_models.quantities import format_bytes
from .layer import Comparison, tensors_used
from .local_machine import free_bytes
from .torch_private import has_hooks, tensor_version, tree_leaves, tree_map_only
from .training_pass import (
    Difference,
    PassResult,
    Trainee,
    class_attributes,
    describe_difference,
    differences,
    not_finite,
    plain_attributes,
    relative_size,
    split_by_cause,
)
from .trial import NotTheModel, leave_vmap
from .user_model import (
    ModelInput,
    at_user_line,
    copy_model,
    failing_as,
    first_line,
    fixed_seed,
    flat,
    ignoring_failures,
    is_out_of_memory,
    reseed,
    strided_buffers,
)

_ALIKE = 1e-3
"""Relative; far above what the batch size does to rounding, far below what another sample does."""
_PAIR = 2


def batch_note(model: nn.Module, name: str, pair: ModelInput) -> str:
    """A note where samples along dimension 0 change each other's outputs; empty where they do not.

    Only of models with a module that takes the batch second. One sample of the `pair` is run by itself and
    behind the other, on a copy in evaluation mode, where batch norm and dropout do not mix them; then the
    same along dimension 1.
    """
    names = [
        f"{path or name} ({type(module).__name__})"
        for path, module in model.named_modules()
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
    ]
    if not names:
        return ""
    # In evaluation mode, or of one sample, the model may not run: then nothing is known.
    copy = copy_model(model, name).eval()
    if not _mixes(copy, pair, 0):
        return ""
    is_second = all(tensor.dim() > 1 and tensor.shape[1] > 1 for tensor in pair.tensors)
    if is_second and _mixes(copy, _part(pair, 1, slice(0, _PAIR)), 1) is False:
        return (
            f"dimension 0 of the input does not look like the batch: {names[0]} takes the batch second "
            "(batch_first=False), and the samples lie in dimension 1; micro-batch sizes count dimension 0: "
            "set batch_first=True, or transpose in forward"
        )
    return (
        "what the model computes of a sample depends on the others of its batch, as a contrastive loss does: "
        "in a pipeline each sample is compared with those of its micro-batch alone"
    )


def _mixes(model: nn.Module, pair: ModelInput, dimension: int) -> bool | None:
    """Return whether the second of two samples along the dimension has other outputs than by itself.

    None where the model does not run.
    """
    results: list[list[Any]] = []
    with ignoring_failures(), torch.no_grad():
        both = (pair, _part(pair, dimension, slice(1, _PAIR)))
        results = [flat(inputs.clone().call(model))[0] for inputs in both]
    if not results:
        return None
    tensors = [
        (both, one)
        for both, one in zip(*results, strict=True)
        if isinstance(both, Tensor)
        and isinstance(one, Tensor)
        and both.is_floating_point()
        and both.dim() > 0
    ]
    return any(_differs(both, one) for both, one in tensors)


def _differs(both: Tensor, one: Tensor) -> bool:
    """Return whether `one` is not the second part of `both` in whichever dimension has two instead of one."""
    sizes = list(enumerate(zip(both.shape, one.shape, strict=False)))
    places = [place for place, (two, single) in sizes if two != single]
    if both.dim() == one.dim() and len(places) == 1 and sizes[places[0]][1] == (_PAIR, 1):
        both = both.narrow(places[0], 1, 1)
    return both.shape != one.shape or not torch.allclose(both, one, _ALIKE, _ALIKE, equal_nan=True)


def _part(example: ModelInput, dimension: int, part: slice) -> ModelInput:
    """Take the samples of `part` along the dimension."""

    def cut(tensor: Tensor) -> Tensor:
        if dimension:
            return tensor[:, part].clone()
        return tensor[part].clone() if tensor.dim() and len(tensor) == _PAIR else tensor

    return example.mapped(cut)


# Runs a model and its layers in turn, each on its own copy, and compares what the passes leave.

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

        def fails(error: Exception) -> ModelFails:
            return ModelFails(
                f"{self.name} does not train on a batch of {batch}: {first_line(error)}{at_user_line(error)}",
                "Forward and backward must run on inputs like the example.",
            )

        with failing_as(fails):
            result = self._own.train_once(self.example(batch), self.seed)
        self.batches.append(batch)
        self._states.append(plain_attributes(self._own.model))
        after = class_attributes(self._own.model)
        self._class_changes.append({name for name in after if before.get(name) != after[name]})
        self.not_finite = self.not_finite or ", ".join(not_finite(result))
        return result

    def _compare(self, expected: PassResult) -> None:
        before = class_attributes(self._own.model)
        with failing_as(lambda error: LayersDiffer([], self.batches, error)):
            actual = self._layers.train_once(self.example(self.batches[-1]), self.seed)
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
                pairs = flat[: flat.numel() // 2 * 2].view(-1, 2)
                if flat[0] or flat.any():
                    pairs *= flat.new_tensor([1 - part, 1 + part])
                    flat[len(pairs) * 2 :] *= 1 - part
                else:
                    flat[::2], flat[1::2] = -part, part
                if flat.data_ptr() != parameter.data_ptr():
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


# Layers that read what another layer keeps in Python: apart from each other they would not be the model.
#
# A skip connection through a list or an attribute of a module beside is no tensor that crosses a cut. So each
# layer that runs code of the user's is run once more by itself, a copy on what it was given before.

_WITHOUT_STATE = ("torch.", "torchvision.", "pplan.")
"""Packages whose modules keep nothing beside parameters and buffers."""


def find_reader(side: SideBySide, layer_names: Sequence[str]) -> str:
    """A layer that fails, or returns something else, without the layers before it; else nothing.

    Raises whatever the layers raise where they run one after another.
    """
    if not _runs_own_code(side.model):
        return ""
    layers = side.layered().layers
    suspects = [index for index, layer in enumerate(layers[1:], 1) if _runs_own_code(layer)]
    if not suspects:
        return ""
    pair = side.example(2)
    first, second = (_sample(pair, index) for index in range(2))
    versions = {id(tensor): tensor_version(tensor) for layer in layers for tensor in tensors_used(layer)}
    inputs, expected = _run_all(layers, first, side.seed, suspects)
    shared = set(_changed_by_another(layers, versions))
    # What copies have in common, a closure or a global, then holds what another sample left.
    _run_all(layers, second, side.seed, ())
    alone = side.layered().layers
    # From behind, so that none finds there what it should have been left by another.
    for index in reversed(suspects):
        if index in shared:
            continue
        try:
            actual = _run(_copied(alone[index]), inputs[index], side.seed + index)
        except Exception:
            return layer_names[index]
        if not _is_same(actual, expected[index]):
            return layer_names[index]
    return ""


def _copied(layer: nn.Module) -> nn.Module:
    """A copy; the layer itself where it holds what cannot be copied, which says nothing about its state."""
    try:
        return copy.deepcopy(layer)
    except Exception:
        return layer


def _runs_own_code(layer: nn.Module) -> bool:
    return any(not type(part).__module__.startswith(_WITHOUT_STATE) for part in layer.modules())


def _sample(pair: ModelInput, index: int) -> ModelInput:
    return pair.mapped(
        lambda tensor: tensor[index : index + 1].clone() if tensor.dim() and len(tensor) == 2 else tensor
    )


def _run_all(
    layers: Sequence[nn.Module], example: ModelInput, seed: int, suspects: Sequence[int]
) -> tuple[dict[int, Any], dict[int, list[Any]]]:
    """What the `suspects` layers were given, and what they returned."""
    value: Any = example.layer_input
    inputs, returned = dict[int, Any](), dict[int, list[Any]]()
    for index, layer in enumerate(layers):
        if index in suspects:
            inputs[index] = _detached(value)
        value = _run(layer, value, seed + index)
        if index in suspects:
            returned[index] = flat(_detached(value))[0]
    return inputs, returned


def _run(layer: nn.Module, value: Any, seed: int) -> Any:
    with torch.enable_grad(), leave_vmap(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reseed(seed)
        return layer(value)


def _detached(value: Any) -> Any:
    """In memory of its own: the next layer may work in place."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def _changed_by_another(layers: Sequence[nn.Module], before: dict[int, int]) -> Iterator[int]:
    """Layers that use a parameter or buffer of an earlier one which has changed."""
    earlier = dict[int, Tensor]()
    for index, layer in enumerate(layers):
        own = {id(tensor): tensor for tensor in tensors_used(layer)}
        if any(tensor_version(earlier[key]) != before[key] for key in own.keys() & earlier.keys()):
            yield index
        earlier |= own


def _is_same(actual: Any, expected: list[Any]) -> bool:
    """Tensors within rounding: the layers' copies may lie otherwise in memory, and what another sample left
    there makes more of a difference."""
    leaves = flat(actual)[0]
    return len(leaves) == len(expected) and all(map(_is_alike, leaves, expected))


def _is_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other)
    if one.shape != other.shape or one.dtype != other.dtype or one.layout is not torch.strided:
        return one.shape == other.shape and one.dtype == other.dtype
    if not (other.is_floating_point() or other.is_complex()):
        return torch.equal(one, other)
    # Of the largest element: what cancels out to nearly zero is all rounding.
    finite = other[other.isfinite()].abs()
    tolerance = torch.finfo(other.dtype).eps ** 0.5 * float(finite.max() if finite.numel() else 0)
    return torch.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True)


# Error texts where layers differ from their model: the first layer and tensor that do, and what to do.

_NAME = "Name the module around that part a layer, which is then run as it is: granularity='module:PATTERN'."
_GRADIENTS = (
    "Does forward run a part without gradients (torch.no_grad(), detach(), requires_grad_(False)), or change "
    "gradients by hooks? Set requires_grad of parameters outside of forward. "
)
_RANDOM = (
    "Does forward draw random numbers in Python, or decide by one? Draw with torch, and choose with "
    "torch.where. "
)
_STATE = (
    "Does forward keep a number or a tensor in Python from call to call? Keep it in a registered buffer. "
)
_SIZE = "Does forward decide by the batch size? Compute with x.shape[0]. "
_OTHER_WAY = (
    "Does forward decide in Python by a type, an exception or a value, or run a part under autocast? "
)


def describe(side: SideBySide, error: LayersDiffer, layer_names: Sequence[str]) -> tuple[str, str]:
    """What differed, and what to do."""
    when = f"on a batch of {error.batches[-1]}"
    if len(error.batches) > 1:
        when = f"in pass {len(error.batches)}, {when}" + (" again" if len(error.batches) == 2 else "")
    if error.failure is not None:
        failure = error.failure
        return f"its layers fail {when}: {first_line(failure)}{at_user_line(failure)}", _OTHER_WAY + _NAME
    random = any(each.kind == "random state" for each in error.differences)
    kinds = [each for each in error.differences if each.kind != "random state"]
    gradients = [each for each in kinds if each.kind == "gradient"]
    lost = [each for each in gradients if each.expected is None or each.actual is None]
    if not kinds:
        return _random_state(error, when), _RANDOM + _NAME
    if kinds[0].kind in ("output", "structure of the output"):
        where = _layer_of_output(side, error, layer_names)
        what = f"{describe_difference(kinds[0])} is not the model's {when}{_by(kinds[0])}{where}"
        return what, _hint(error, random) + _NAME
    if lost:
        return _gradients(lost, side, when, layer_names), _GRADIENTS + _NAME
    first = gradients[-1] if gradients else kinds[0]
    layer = _holder(first, side, layer_names)
    what = f"{describe_difference(first)} is not the model's {when}{_by(first)}{layer}"
    return what, (_GRADIENTS if first.kind == "gradient" else _hint(error, random)) + _NAME


def suspects(side: SideBySide, error: LayersDiffer) -> Iterator[str]:
    """Modules inside the model that do what a graph loses: a buffer that they leave differs, they change
    attributes in Python, or have hooks."""
    owners = [each.name.rpartition(".")[0] for each in error.differences if each.kind == "buffer"]
    before = plain_attributes(side.model)
    changed = [name for name, value in side.attributes.items() if before.get(name) != value]
    hooked = [path for path, module in side.model.named_modules() if has_hooks(module)]
    for path in (*owners, *(name.rpartition(".")[0] for name in changed), *hooked):
        if path:
            yield path


def _hint(error: LayersDiffer, random: bool) -> str:
    """In which pass: the first, the same again, one on a larger batch, or later ones of the first size."""
    if random:
        return _RANDOM
    return {1: _OTHER_WAY, 3: _SIZE}.get(len(error.batches), _STATE)


def _random_state(error: LayersDiffer, when: str) -> str:
    generators = " and ".join(each.name for each in error.differences)
    return f"its layers draw other random numbers than the model, of {generators}, {when}"


def _gradients(lost: Sequence[Difference], side: SideBySide, when: str, layer_names: Sequence[str]) -> str:
    """Text on parameters that get a gradient in the layers only, or in the model only."""
    first = lost[0]
    more = f" (and {len(lost) - 1} more parameters)" if len(lost) > 1 else ""
    has, lacks = ("layers", "model") if first.expected is None else ("model", "layers")
    layer = _holder(first, side, layer_names)
    return f"{first.name}{more} gets a gradient in the {has} and none in the {lacks} {when}{layer}"


def _by(difference: Difference) -> str:
    """How far off, of finite tensors."""
    expected, actual = difference.expected, difference.actual
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return f" ({_format(actual)} instead of {_format(expected)})"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f" ({_format(actual)} instead of {_format(expected)})"
    if not difference.may_be_rounding:
        return ""
    largest = float(expected.detach().abs().nan_to_num(0, 0, 0).max())
    share = difference.size / largest if largest else math.inf
    return f" (off by {share:.2g} of the largest element)"


def _format(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{'x'.join(map(str, value.shape))} {str(value.dtype).removeprefix('torch.')}"
    return value.__name__ if isinstance(value, type) else repr(value)[:60]


def _holder(difference: Difference, side: SideBySide, layer_names: Sequence[str]) -> str:
    """The first layer that uses the parameter or buffer."""
    if difference.kind not in ("gradient", "buffer", "parameter"):
        return ""
    layered = side.layered()
    tensors = dict((*layered.model.named_parameters(), *layered.model.named_buffers()))
    own = tensors.get(difference.name)
    for name, layer in zip(layer_names, layered.layers, strict=True):
        if own is not None and any(tensor is own for tensor in (*layer.parameters(), *layer.buffers())):
            return f", in layer {name}"
    return ""


_OutputMarks = dict[tuple[str, int], tuple[float, ...]]
"""By the name of a module and the number of its call: what tells one output from another."""


def _layer_of_output(side: SideBySide, error: LayersDiffer, layer_names: Sequence[str]) -> str:
    """The first module that returns something else, and the layer it is in."""
    try:
        expected, _ = _record(side.plain(), side, error.batches)
        actual, layers = _record(side.layered(), side, error.batches)
    except Exception:  # It is known already that something differs.
        return ""
    for key, value in actual.items():
        if not _alike(value, expected.get(key)):
            name = layer_names[layers[key]]
            module = "" if key[0] == name else f" ({key[0]})"
            return f"; the first that differs is layer {name}{module}"
    return f"; no module differs up to layer {layer_names[max(layers.values())]}" if layers else ""


def _record(
    trainee: Trainee, side: SideBySide, batches: Sequence[int]
) -> tuple[_OutputMarks, dict[Any, int]]:
    """Of the last pass."""
    for batch in batches[:-1]:
        trainee.train_once(side.example(batch), side.seed)
    marks: _OutputMarks = {}
    layers: dict[tuple[str, int], int] = {}
    with _recording(trainee, marks, layers):
        trainee.train_once(side.example(batches[-1]), side.seed)
    return marks, layers


@contextmanager
def _recording(trainee: Trainee, marks: _OutputMarks, layers: dict[tuple[str, int], int]) -> Iterator[None]:
    counts: dict[str, int] = {}
    current = [0]

    def entered(index: int) -> Any:
        return lambda *_: current.__setitem__(0, index)

    def returned(path: str) -> Any:
        def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
            key = (path, counts.setdefault(path, 0))
            counts[path] += 1
            marks[key], layers[key] = _output_marks(output), current[0]

        return note

    with ExitStack() as stack:
        for index, layer in enumerate(trainee.layers):
            stack.callback(layer.register_forward_pre_hook(entered(index)).remove)
        for path, module in trainee.model.named_modules():
            if path:
                stack.callback(module.register_forward_hook(returned(path)).remove)
        yield


def _output_marks(output: Any) -> tuple[float, ...]:
    """A few sums of all elements, weighted differently."""
    marks: list[float] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_quantized:
            flat = torch.view_as_real(leaf.detach()) if leaf.is_complex() else leaf.detach()
            flat = flat.flatten().double()
            weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=flat.dtype)
            marks += [
                float(flat.numel()),
                float(flat.sum()),
                float(flat.abs().sum()),
                float((flat / weights).sum()),
            ]
    return tuple(marks)


def _alike(actual: tuple[float, ...], expected: tuple[float, ...] | None) -> bool:
    if expected is None or len(actual) != len(expected):
        return expected is None
    return all(
        math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(actual, expected, strict=True)
    )


# Runs layers beside the model they were made of; raises an error where their results differ.

SECONDS = 10.0
"""Longer than that only the first pass may take, by the time of the model's part of it."""
LONGEST_SECONDS = 20.0
"""A first pass that would take longer is not made."""
_PASSES_OF_STATE = 5
"""More of them where forward changes something in Python at each call, on which what it computes may depend
later (a warm-up), or through the batch before."""
_SHARE_OF_MEMORY = 0.5
_COPIES = 4
"""Of all weights: two copies of the model, and the gradients of both."""


class ModelCheck:
    """Compares layers with the model; those of several frontends in turn."""

    def __init__(
        self, model: nn.Module, example: ModelInput, name: str, most_seconds: float = SECONDS
    ) -> None:
        self._model, self._name, self._seconds = model, name, min(most_seconds, SECONDS)
        self._why_not = _why_not(model, example)
        if not self._why_not:
            tensors = (*model.parameters(), *strided_buffers(model), *example.tensors)
            self._example = example.to(tensors[0].device)

    def compare(self, bind: Bind, layer_names: Sequence[str], how: str) -> Comparison:
        """Raises NotTheModel where the layers that `bind` makes differ, ModelError where the model fails.

        Both run on copies, with gradients, in the mode that the model is in, from one random state: on the
        smallest batch that the model takes, on it again, and with one sample more. `how` the layers were
        traced.
        """
        if self._why_not:
            return Comparison(why_not=self._why_not)
        failures: list[ModelError] = []
        for smallest in dict.fromkeys((1, 2, self._example.batch)):
            side = SideBySide(self._model, self._example, self._name, bind)
            try:
                with fixed_seed(side.seed), left_alone(self._model, self._name):
                    comparison = _compared(side, smallest, self._seconds)
                self._refuse_written_constant(side, how)
                self._refuse_hidden_state(bind, layer_names, how)
                return comparison
            except ModelFails as error:
                failures.append(error)
            except RoundingHides as error:
                return Comparison(why_not=str(error))
            except LayersDiffer as error:
                with fixed_seed(side.seed):
                    what, hint = describe(side, error, layer_names)
                refusal = NotTheModel(f"{self._name} cannot be traced by {how}: {what}", hint)
                refusal.suspects = tuple(dict.fromkeys(suspects(side, error)))
                raise refusal from None
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return Comparison(why_not="memory ran out")
        raise failures[0]

    def run_once(self) -> None:
        """Before anything is traced: tables that forward keeps outside of the model, in a global or by
        functools.cache, are then made of real tensors, and not of a trace's stand-ins for good. Modules of
        torch and torchvision keep none."""
        if not self._why_not and _runs_own_code(self._model):
            side = SideBySide(self._model, self._example, self._name, lambda _: nn.Sequential())
            # What fails is told when it is compared.
            with left_alone(self._model, self._name), suppress(Exception), fixed_seed(side.seed):
                side.plain().forward_once(self._example.clone(), side.seed)

    def _refuse_hidden_state(self, bind: Bind, layer_names: Sequence[str], how: str) -> None:
        side = SideBySide(self._model, self._example, self._name, bind)
        reader = ""
        with fixed_seed(side.seed), suppress(Exception):
            # What fails on a single sample is left at that.
            reader = find_reader(side, layer_names)
        if reader:
            raise NotTheModel(
                f"{self._name} cannot be traced by {how}: layer {reader} reads what another layer keeps in "
                "Python, which would not reach it on another stage",
                "Return it from the one module and hand it to the other as a tensor, or name a module "
                "around both a layer: granularity='module:PATTERN'.",
            )

    def _refuse_written_constant(self, side: SideBySide, how: str) -> None:
        """Copies of the model and the layers would each go on with another tensor."""
        constant = side.written_constant()
        if constant:
            raise NotTheModel(
                f"{self._name} cannot be traced by {how}: forward writes to a tensor that no module has "
                f"({constant}), of a network that is kept in a list, say",
                "Register it as a buffer, or the network as a submodule; requires_grad_(False) keeps its "
                "parameters from being trained.",
            )

    def check_output(self, bind: Bind, layer_names: Sequence[str], how: str) -> Comparison:
        """For layers that equal the model by construction: whether each does without what others keep in
        Python, and NaN and infinity in the output. Raises NotTheModel."""
        if self._why_not:
            return Comparison()
        self._refuse_hidden_state(bind, layer_names, how)
        side = SideBySide(self._model, self._example, self._name, lambda _: nn.Sequential())
        try:
            with fixed_seed(side.seed):
                values = ", ".join(not_finite(side.plain().forward_once(side.example(1), side.seed)))
                return Comparison(
                    not_finite=values, mixing=batch_note(side.model, side.name, side.example(2))
                )
        except Exception:
            # Batch norm takes no single sample; what else is wrong shows when it is measured.
            return Comparison()


def _compared(side: SideBySide, smallest: int, most_seconds: float) -> Comparison:
    """As many passes as the time allows, and as there is reason for, of the model and each time of the
    layers."""
    if not side.begin(smallest, LONGEST_SECONDS / 2):
        return Comparison(why_not=f"a pass of the model takes {side.seconds:.0f} s")
    seconds = 2 * side.seconds
    for batch in (smallest, smallest + 1, *_PASSES_OF_STATE * (smallest,)):
        if len(side.batches) > 2 and not next(side.changes_of_attributes(), None):
            break
        seconds += 2 * side.seconds * batch / smallest
        if seconds > most_seconds:
            break
        try:
            side.compare_again(batch)
        except ModelFails:
            break
    return Comparison(
        tuple(side.batches),
        "",
        side.rounding,
        side.not_finite,
        tuple(side.changes_of_attributes()),
        batch_note(side.model, side.name, side.example(2)),
        tuple(side.written_buffers()),
    )


@contextmanager
def left_alone(model: nn.Module, name: str) -> Iterator[None]:
    """Raises ModelError where training copies changes the model itself: gives a parameter a gradient, or a
    parameter or buffer another value."""
    before = [(path, parameter, parameter.grad) for path, parameter in model.named_parameters()]
    marks = _marks(model)
    for _, parameter, _ in before:
        parameter.grad = None
    try:
        yield
        trained = [path for path, parameter, _ in before if parameter.grad is not None]
    finally:
        for _, parameter, gradient in before:
            parameter.grad = gradient
    written = [path for path, mark in _marks(model).items() if marks.get(path) != mark]
    if trained or written:
        raise ModelError(
            f"{name} cannot be copied: a copy of it {'trains' if trained else 'writes to'} "
            f"{(trained or written)[0]} of the model itself",
            "Something that copy.deepcopy does not copy, such as a function or a hook, holds the parameter: "
            "read it from the module instead"
            + ("." if trained else ", and build the model anew: that tensor has another value now."),
        )


def _marks(model: nn.Module) -> dict[str, tuple[int, str]]:
    """By parameter and buffer what tells whether it was written to, through .data too."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {path: (0 if own.is_inference() else tensor_version(own), _checksum(own)) for path, own in tensors}


def _checksum(tensor: Tensor) -> str:
    if tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
        return ""
    return str(tensor.detach().sum().item())


def _why_not(model: nn.Module, example: ModelInput) -> str:
    """Why the model cannot be run here; empty where it can, as far as its weights tell."""
    tensors = (*model.parameters(), *strided_buffers(model), *example.tensors)
    if any(tensor.is_meta for tensor in tensors):
        return "tensors on the meta device have no values"
    needed = _COPIES * sum(tensor.nbytes for tensor in tensors)
    free = free_bytes(tensors[0].device)
    if free is not None and needed > _SHARE_OF_MEMORY * free:
        return f"it would need {format_bytes(needed)} for weights, {format_bytes(free)} are free"
    return ""

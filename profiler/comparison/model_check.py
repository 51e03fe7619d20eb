"""Runs layers beside the model they were made of; raises an error where their results differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...cost_models.errors import ModelError
from ...cost_models.quantities import format_bytes
from ..graphs.trial import NotTheModel
from ..local_machine import free_bytes
from ..torch_internals import tensor_version
from ..user_model.failures import is_out_of_memory
from ..user_model.flat_output import flat
from ..user_model.loaded_model import ModelInput
from ..user_model.seeding import fixed_seed
from .descriptions import describe, suspects
from .differences import not_finite
from .hidden_state import find_reader
from .side_by_side import Bind, LayersDiffer, ModelFails, RoundingHides, SideBySide

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


_ALIKE = 1e-3
"""Relative; far above what the batch size does to rounding, far below what another sample does."""


@dataclass(frozen=True)
class Comparison:
    """What was found; a difference is an error instead."""

    batches: tuple[int, ...] = ()
    """Of the passes, in order: of the model, and each time of the layers."""
    why_not: str = ""
    rounding: float = 0.0
    """The largest difference, in parts of the largest value of its kind; 0: equal bit for bit."""
    not_finite: str = ""
    attributes: tuple[str, ...] = ()
    """Of modules, that forward changes at each call and the layers do not."""
    mixing: str = ""
    """A module that takes the batch second, where samples along dimension 0 change each other's outputs."""
    written: tuple[str, ...] = field(default=(), compare=False)
    """Buffers of the model that the passes changed."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a profile is to say of it; nothing where all is equal."""
        lines = []
        if self.why_not:
            lines.append(f"layers and model were not compared by value: {self.why_not}")
        if self.rounding:
            lines.append(
                f"outputs and gradients of the layers are those of the model within rounding: they differ by "
                f"{self.rounding:.1g} of the largest"
            )
        if self.not_finite:
            lines.append(f"the model's own output holds {self.not_finite}, on the example input")
        if self.attributes:
            lines.append(
                f"forward changes {', '.join(self.attributes)} at each call, in Python, which the layers do "
                "not: where what it computes comes to depend on that, name the module a layer (`granularity`)"
            )
        if self.mixing:
            lines.append(
                f"dimension 0 of the input does not look like the batch: {self.mixing} takes the batch "
                "second (batch_first=False), and the outputs of one sample change with the others; "
                "micro-batch sizes count dimension 0: set batch_first=True, or transpose in forward"
            )
        return tuple(lines)


class ModelCheck:
    """Compares layers with the model; those of several frontends in turn."""

    def __init__(
        self, model: nn.Module, example: ModelInput, name: str, most_seconds: float = SECONDS
    ) -> None:
        self._model, self._name, self._seconds = model, name, min(most_seconds, SECONDS)
        self._why_not = _why_not(model, example)
        if not self._why_not:
            tensors = (*model.parameters(), *model.buffers(), *example.tensors)
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
        functools.cache, are then made of real tensors, and not of a trace's stand-ins for good."""
        if not self._why_not:
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
                return Comparison(not_finite=values, mixing=mixing_module(side))
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
        mixing_module(side),
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
    tensors = (*model.parameters(), *model.buffers(), *example.tensors)
    if any(tensor.is_meta for tensor in tensors):
        return "tensors on the meta device have no values"
    needed = _COPIES * sum(tensor.nbytes for tensor in tensors)
    free = free_bytes(tensors[0].device)
    if free is not None and needed > _SHARE_OF_MEMORY * free:
        return f"it would need {format_bytes(needed)} for weights, {format_bytes(free)} are free"
    return ""


def mixing_module(side: SideBySide) -> str:
    """A module that takes the batch second, where the model does not take it first; else nothing.

    Only of models that have such a module: one sample is run by itself and behind another, in evaluation
    mode, where batch norm and dropout do not mix them.
    """
    names = [
        f"{path or side.name} ({type(module).__name__})"
        for path, module in side.model.named_modules()
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
    ]
    if not names:
        return ""
    try:
        return names[0] if _mixes(side) else ""
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # In evaluation mode, or of one sample, the model may not run: then nothing is known.
        return ""


def _mixes(side: SideBySide) -> bool:
    pair, model = side.example(2), side.plain().model.eval()
    single = _second(pair)
    with torch.no_grad():
        together, _ = flat(pair.clone().call(model))
        alone, _ = flat(single.clone().call(model))
    both = [
        (a, b)
        for a, b in zip(together, alone, strict=True)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and a.dim() > 0
    ]
    return not all(
        len(a) == 2 and a[1:].shape == b.shape and torch.allclose(a[1:], b, _ALIKE, _ALIKE, equal_nan=True)
        for a, b in both
    )


def _second(pair: ModelInput) -> ModelInput:
    """The second of two samples."""
    return pair.mapped(lambda tensor: tensor[1:].clone() if tensor.dim() and len(tensor) == 2 else tensor)

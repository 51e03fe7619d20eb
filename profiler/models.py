"""A name or `package.module:factory` becomes a module and its example input."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..cost_models.errors import ModelError, UsageError
from .factories import described, made_by_factory, refuse_module
from .layer_sequential import LayerSequential
from .user_code import first_line

_DEFAULT_SIDE = 224
_SEEDS = 2**63
_FRAMES = 16
"""Frames of a clip: what torchvision's video models were trained on."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A module, and what one sample of its input looks like (`input_shape` is without the batch)."""

    module: nn.Module
    name: str
    input_shape: tuple[int, ...]
    classes: int | None = None
    dtype: torch.dtype = torch.float32
    """Of the input."""
    example: Tensor | None = None
    """Real samples, shape (any, *input_shape): inputs repeat them. Without: noise."""
    seed: int = 0

    def example_input_for(self, batch: int) -> Tensor:
        """An input of `batch` samples, the same at every call; the caller's random state is left alone."""
        if self.example is not None:
            return self.example.detach()[torch.arange(batch) % len(self.example)].clone()
        generator = torch.Generator().manual_seed(self.seed)
        shape = (batch, *self.input_shape)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(shape, generator=generator).to(self.dtype)
        return torch.zeros(shape, dtype=self.dtype)


def load_model(
    name: str,
    *,
    classes: int | None = None,
    input_shape: Sequence[int] | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Builds the model `name`: one of torchvision's, or `package.module:factory`.

    A factory is called without arguments and returns an nn.Module, or a module and an example input whose
    dimension 0 is the batch; the working directory is put on the import path, as `python -m` does. Models
    are built under `seed`, and the caller's random state is left as it was. `input_shape` is that of one
    sample; by default torchvision's own for the model, the example's, or 3x224x224.

    Raises ModelError: unknown, not importable, not callable, failing, or returning something else; UsageError
    for `classes` or `input_shape` that are no positive whole numbers, or a seed beyond 0 to 2**63 - 1.
    """
    seed = checked_seed(seed)
    shape = None if input_shape is None else _checked_shape(input_shape)
    if classes is not None and not is_positive(classes):
        raise UsageError(f"classes {classes!r}: must be a whole number of at least 1", "As in classes=1000.")
    if ":" in name:
        if classes is not None:
            raise UsageError(
                f"--classes {classes}: {name} is a factory, which decides itself",
                "Leave --classes away, or have the factory build that many classes.",
            )
        return _from_factory(name, shape, seed)
    return _from_torchvision(name, classes, shape, seed)


def from_module(
    module: nn.Module, example_input: Tensor, *, name: str | None = None, seed: int = 0
) -> LoadedModel:
    """A module at hand, with an input whose dimension 0 is the batch. Raises ModelError."""
    if not isinstance(module, nn.Module):
        raise ModelError(f"the model is a {type(module).__name__}", "Give a torch.nn.Module.")
    name = name or model_name(module)
    check_example(name, example_input)
    return LoadedModel(
        module=module,
        name=name,
        input_shape=tuple(example_input.shape[1:]),
        dtype=example_input.dtype,
        example=example_input,
        seed=seed,
    )


def model_name(module: nn.Module) -> str:
    """Its class, or the model it was made of."""
    own = module.model_name if isinstance(module, LayerSequential) else ""
    return own or type(module).__name__


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch draws from `seed`; afterwards the caller's random state is as it was."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


def is_positive(number: object) -> bool:
    """Whether it is a whole number of at least 1, of Python's or of numpy's."""
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 1


def checked_seed(seed: int) -> int:
    """Raises UsageError where torch, or the file of a profile, could not hold it."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) < _SEEDS:
        raise UsageError(f"seed {seed!r}: must be a whole number from 0 to 2**63 - 1", "As in seed=0.")
    return int(seed)


def refuse_lazy(name: str, module: nn.Module) -> None:
    """Raises ModelError where a parameter or buffer has no shape yet."""
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{name}: {path} is lazy and has no shape yet", "Run it once first, on an input of its own."
            )


def own_dtype(module: nn.Module) -> torch.dtype | None:
    """That of all floating parameters (of buffers, where there are none); None: several, or none at all."""
    for tensors in (module.parameters(), module.buffers()):
        dtypes = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
        if dtypes:
            return dtypes.pop() if len(dtypes) == 1 else None
    return None


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    several = isinstance(shape, Collection) and not isinstance(shape, str) and len(shape) > 0
    if not several or not all(map(is_positive, shape)):
        raise UsageError(
            f"input_shape {shape!r}: whole numbers of at least 1 are needed",
            "Give the shape of one sample, without the batch, as in input_shape=(3, 224, 224).",
        )
    return tuple(map(int, shape))


def _from_torchvision(
    name: str, classes: int | None, shape: tuple[int, ...] | None, seed: int
) -> LoadedModel:
    import torchvision

    known = torchvision.models.list_models()
    if name.lower() not in known:
        refuse_module(name)
        near = difflib.get_close_matches(name.lower(), known, n=5, cutoff=0.5)
        raise ModelError(
            f"model {name!r}: torchvision has no model of this name",
            (f"Nearest: {', '.join(near)}. " if near else "")
            + "A model of your own is named package.module:factory.",
        )
    name = name.lower()
    options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
    if "weights_backbone" in inspect.signature(torchvision.models.get_model_builder(name)).parameters:
        # Without it the backbone's weights would be downloaded.
        options["weights_backbone"] = None
    try:
        with warnings.catch_warnings(), seeded(seed):
            # torchvision announces changes of its default initialisation: nothing a user can act on here.
            warnings.simplefilter("ignore")
            module: nn.Module = torchvision.models.get_model(name, weights=None, **options)
    except Exception as error:
        raise ModelError(
            f"model {name!r}: torchvision could not build it: {first_line(error)}",
            "Check --classes, or name another model.",
        ) from error
    return LoadedModel(
        module=module,
        name=name,
        input_shape=shape or _torchvision_shape(name, module),
        classes=classes,
        seed=seed,
    )


def _torchvision_shape(name: str, module: nn.Module) -> tuple[int, ...]:
    """What the model's own evaluation transform crops to; video models take clips."""
    import torchvision

    side: Any = getattr(module, "image_size", None)
    if side is None:
        try:
            side = torchvision.models.get_model_weights(name).DEFAULT.transforms.keywords["crop_size"]
        except (AttributeError, KeyError, ValueError):
            side = _DEFAULT_SIDE
    height, width = (side, side) if isinstance(side, int) else (side[0], side[-1])
    frames = (_FRAMES,) if ".video." in type(module).__module__ else ()
    return (3, *frames, int(height), int(width))


def _from_factory(name: str, shape: tuple[int, ...] | None, seed: int) -> LoadedModel:
    with seeded(seed):
        made = made_by_factory(name)
    module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{name} returned {described(made)}",
            "Return an nn.Module, or a tuple of an nn.Module and an example input.",
        )
    if example is None:
        shape = shape or (3, _DEFAULT_SIDE, _DEFAULT_SIDE)
        return LoadedModel(module=module, name=name, input_shape=shape, seed=seed)
    check_example(name, example)
    own = tuple(example.shape[1:])
    return LoadedModel(
        module=module,
        name=name,
        input_shape=shape or own,
        dtype=example.dtype,
        example=example if shape in (None, own) else None,
        seed=seed,
    )


def check_example(name: str, example: object) -> None:
    """Raises ModelError where `example` is no tensor of samples."""
    if not isinstance(example, Tensor):
        raise ModelError(
            f"{name}: the example input is {described(example)}, one tensor is needed",
            "Return (module, tensor) with the batch as the tensor's dimension 0.",
        )
    if example.dim() == 0 or len(example) == 0:
        raise ModelError(
            f"{name}: the example input has shape {tuple(example.shape)}, which holds no sample",
            "Dimension 0 is the batch and must be at least 1.",
        )

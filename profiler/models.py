"""A name or `package.module:factory` becomes a module and its example input."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..cost_models.errors import ModelError, UsageError
from .user_code import at_user_line, first_line

_DEFAULT_SIDE = 224
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


def parse_shape(text: str) -> tuple[int, ...]:
    """`3x224x224` -> (3, 224, 224), the shape of one sample. Raises UsageError."""
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise UsageError(
            f"input shape {text!r}: positive whole numbers joined by x are needed",
            "Give the shape of one sample, without the batch, as in --input 3x224x224.",
        )
    return shape


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

    Raises ModelError: unknown, not importable, not callable, failing, or returning something else.
    """
    shape = None if input_shape is None else tuple(input_shape)
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
    name = name or type(module).__name__
    check_example(name, example_input)
    return LoadedModel(
        module=module,
        name=name,
        input_shape=tuple(example_input.shape[1:]),
        dtype=example_input.dtype,
        example=example_input,
        seed=seed,
    )


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch draws from `seed`; afterwards the caller's random state is as it was."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


def _from_torchvision(
    name: str, classes: int | None, shape: tuple[int, ...] | None, seed: int
) -> LoadedModel:
    import torchvision

    known = torchvision.models.list_models()
    if name.lower() not in known:
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
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ModelError(
            f"model {name!r}: a module and a factory are needed around the colon",
            "Name it as package.module:factory.",
        )
    with seeded(seed):
        target = _attribute(_imported(module_name, name), attribute, name)
        made = target if isinstance(target, nn.Module) else _called(target, name)
    module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{name} returned {_described(made)}",
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


def _imported(module_name: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ModelError(
                f"model {name!r}: there is no module {error.name!r}",
                f"Run pplan where {module_name.split('.')[0]} can be imported from; looked in {here} "
                "and the installed packages.",
            ) from None
        raise _import_failure(module_name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failure(module_name, error) from error


def _import_failure(module_name: str, error: BaseException) -> ModelError:
    return ModelError(
        f"importing {module_name} failed: {first_line(error)}{at_user_line(error)}",
        f'Mend it; python -c "import {module_name}" shows the same.',
    )


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, dir(target), n=3)
            raise ModelError(
                f"model {name!r}: {module.__name__} has no {attribute!r}",
                f"Nearest: {', '.join(near)}." if near else f"Define {attribute} in {module.__file__}.",
            )
        target = getattr(target, part)
    return target


def _called(factory: Callable[[], Any] | Any, name: str) -> Any:
    if not callable(factory):
        raise ModelError(
            f"model {name!r} is {_described(factory)}, which cannot be called",
            "Name a function that takes no arguments and returns an nn.Module.",
        )
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{name} failed: {first_line(error)}{at_user_line(error)}",
            "Mend the factory; it is called without arguments.",
        ) from error


def check_example(name: str, example: object) -> None:
    """Raises ModelError where `example` is no tensor of samples."""
    if not isinstance(example, Tensor):
        raise ModelError(
            f"{name}: the example input is {_described(example)}, one tensor is needed",
            "Return (module, tensor) with the batch as the tensor's dimension 0.",
        )
    if example.dim() == 0 or len(example) == 0:
        raise ModelError(
            f"{name}: the example input has shape {tuple(example.shape)}, which holds no sample",
            "Dimension 0 is the batch and must be at least 1.",
        )


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return "None" if value is None else f"an object of type {type(value).__name__}"

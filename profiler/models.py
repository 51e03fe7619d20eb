"""A name or `package.module:factory` becomes a module and its example input."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from time import perf_counter

import torch
from torch import nn

from ..cost_models.errors import ModelError, UsageError
from .chain.layer_sequential import model_name
from .loading.factories import call_factory
from .named_model import may_name, quote_name
from .user_model.failures import at_user_line, first_line
from .user_model.loaded_model import LoadedModel, ModelInput, describe_type
from .user_model.losses import import_function
from .user_model.seeding import check_seed, fixed_seed, noise

_DEFAULT_SHAPE = (3, 224, 224)
_TRANSFORMERS = "hf:"


def load_model(
    name: str,
    *,
    classes: int | None = None,
    input_shape: Sequence[int] | None = None,
    settings: Mapping[str, object] | None = None,
    input_like: str | None = None,
    seed: int = 0,
    on_meta: bool = False,
    known_only: bool = False,
) -> LoadedModel:
    """Builds the model `name`: torchvision's, `hf:` and one of transformers', or `package.module:factory`.

    A factory is called with `settings` as keyword arguments and returns an nn.Module, or a module and an
    example input (a tensor, a tuple of forward's arguments, or a dict of its keyword arguments) whose
    dimension 0 is the batch; the working directory is put on the import path, as `python -m` does. For
    transformers `settings` are of the model's configuration. Models are built under `seed`, and the caller's
    random state is left as it was. `input_shape` is that of one sample; by default torchvision's own for the
    model, the example's, or 3x224x224. `input_like` names a function, `package.module:function`, that returns
    an example input, as a factory may: it is taken instead of any other. `on_meta` builds without values
    where the model allows it. `known_only`: a file names it, and only models of torchvision and transformers
    are built; no path is read and no other code imported.

    Raises ModelError: unknown, not importable, not callable, failing, or returning something else; UsageError
    for `classes` or `input_shape` that are no positive whole numbers, a seed beyond 0 to 2**63 - 1, or what
    such a model does not take, or with both `input_like` and `input_shape`; MachineError without
    transformers.
    """
    begun = perf_counter()
    loaded = _loaded(
        name, classes, input_shape, settings, input_like, seed, on_meta=on_meta, known_only=known_only
    )
    return dataclasses.replace(loaded, loading_seconds=perf_counter() - begun)


def _loaded(
    name: str,
    classes: int | None,
    input_shape: Sequence[int] | None,
    settings: Mapping[str, object] | None,
    input_like: str | None,
    seed: int,
    *,
    on_meta: bool,
    known_only: bool,
) -> LoadedModel:
    if known_only and not may_name(name):
        raise ModelError(
            f"model {quote_name(name)}: a file's word runs no code", "Name it yourself: `model`."
        )
    seed = check_seed(seed)
    shape = None if input_shape is None else _checked_shape(input_shape)
    if classes is not None and not is_positive(classes):
        raise UsageError(f"classes {classes!r}: must be a whole number of at least 1", "As in classes=1000.")
    if input_like is not None and shape is not None:
        raise UsageError(
            f"input_like={input_like!r} and input_shape={shape!r}: both say what the input is", "Give one."
        )
    batch = None if input_like is None else _input_of(input_like, seed)
    if name.startswith(_TRANSFORMERS) or name.endswith(".json"):
        _refuse(name, "takes its sizes from its configuration", classes=classes, input_shape=shape)
        kind = name.removeprefix(_TRANSFORMERS)
        loaded = _from_transformers(kind, settings or {}, batch, seed, on_meta=on_meta, known_only=known_only)
        return dataclasses.replace(loaded, input_like=input_like)
    if ":" in name:
        _refuse(name, "is a factory, which decides itself", classes=classes)
        return _with_input(_from_factory(name, shape, settings or {}, seed), batch, input_like)
    from .loading.torchvision_models import load_torchvision

    if settings:
        raise UsageError(
            f"settings={dict(settings)!r}: {name} is no factory and no transformers model",
            "torchvision's models take `classes` and `input_shape`; a factory can call them as it likes.",
        )
    loaded = load_torchvision(name, classes, shape, seed, on_meta=on_meta, known_only=known_only)
    return _with_input(loaded, batch, input_like)


def _with_input(loaded: LoadedModel, batch: ModelInput | None, input_like: str | None) -> LoadedModel:
    return loaded if batch is None else dataclasses.replace(loaded, example=batch, input_like=input_like)


def _input_of(name: str, seed: int) -> ModelInput:
    """What the user's function returns. Raises ModelError."""
    role = "a function without arguments that returns an example batch"
    function = import_function("input_like", name, role)
    try:
        with fixed_seed(seed):
            example = function()
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"input_like {name!r} failed: {first_line(error)}{at_user_line(error)}",
            f"Mend it: {role} is needed.",
        ) from error
    return ModelInput.of(example, f"input_like {name!r}")


def from_module(module: nn.Module, example_input: object, *, name: str | None = None) -> LoadedModel:
    """A module at hand, with an example input as `ModelInput.of` takes it. Raises ModelError."""
    if not isinstance(module, nn.Module):
        raise ModelError(f"the model is a {type(module).__name__}", "Give a torch.nn.Module.")
    name = name or model_name(module)
    return LoadedModel(module, name, ModelInput.of(example_input, name))


def is_positive(number: object) -> bool:
    """Whether it is a whole number of at least 1, of Python's or of numpy's."""
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 1


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    several = isinstance(shape, Collection) and not isinstance(shape, str) and len(shape) > 0
    if not several or not all(map(is_positive, shape)):
        raise UsageError(
            f"input_shape {shape!r}: whole numbers of at least 1 are needed",
            "Give the shape of one sample, without the batch, as in input_shape=(3, 224, 224).",
        )
    return tuple(map(int, shape))


def _refuse(name: str, why: str, **options: object) -> None:
    """Raises UsageError where an option is given that such a model does not take."""
    for option, value in options.items():
        if value is not None:
            raise UsageError(f"{option}={value!r}: {name} {why}", f"Omit `{option}`.")


def _from_transformers(
    name: str,
    settings: Mapping[str, object],
    batch: ModelInput | None,
    seed: int,
    *,
    on_meta: bool,
    known_only: bool,
) -> LoadedModel:
    from .loading.transformers_models import load_transformers

    device = "meta" if on_meta else "cpu"
    loaded = load_transformers(name, settings, seed=seed, device=device, known_only=known_only, batch=batch)
    return LoadedModel(
        loaded.module,
        loaded.name,
        loaded.example,
        loss=loaded.loss,
        granularity=loaded.granularity,
        settings=settings,
        notes=loaded.notes,
    )


def _from_factory(
    name: str, shape: tuple[int, ...] | None, settings: Mapping[str, object], seed: int
) -> LoadedModel:
    with fixed_seed(seed):
        product = call_factory(name, settings)
    module, example = product if isinstance(product, tuple) and len(product) == 2 else (product, None)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{name} returned {describe_type(product)}",
            "Return an nn.Module, or a tuple of an nn.Module and an example input.",
        )
    if example is None:
        example_input = ModelInput.of(noise(shape or _DEFAULT_SHAPE, seed))
    else:
        example_input = ModelInput.of(example, name)
        example_input = example_input if shape is None else _reshaped(example_input, shape, name, seed)
    return LoadedModel(module, name, example_input, settings=settings)


def _reshaped(example: ModelInput, shape: tuple[int, ...], name: str, seed: int) -> ModelInput:
    """The example with samples of another shape, where it is one tensor."""
    if len(example.tensors) > 1:
        raise UsageError(
            f"input_shape={shape!r}: {name} takes {len(example.tensors)} tensors",
            "Omit `input_shape`: the factory's example input says what the model takes.",
        )
    tensor = example.tensors[0]
    if tuple(tensor.shape[1:]) == shape:
        return example
    if example.is_token_ids:
        return example.mapped(lambda tensor: torch.zeros((2, *shape), dtype=tensor.dtype))
    return example.mapped(lambda tensor: noise(shape, seed).to(tensor.dtype))

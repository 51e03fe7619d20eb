"""A name or `package.module:factory` becomes a module and its example input."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn

from ..cost_models.errors import ModelError, UsageError
from ..cost_models.quantities import is_positive
from .layer import model_name
from .losses import import_function
from .names import TRANSFORMERS, may_name, quote_name, refuse_unknown_name, unknown_name
from .user_model import (
    LoadedModel,
    ModelInput,
    at_user_line,
    check_seed,
    describe_type,
    failing_as,
    first_line,
    fixed_seed,
    import_named,
    noise,
)

# `package.module:factory`: the module is imported, the factory found and called; and what goes wrong.


def call_factory(name: str, settings: Mapping[str, object] | None = None) -> Any:
    """What the factory `name` returns for the keywords `settings`, or the object itself where it is a module.

    A factory returns the model and an example input, as `ModelInput.of` takes it. The example's batch is best
    a number that no other dimension 0 of its tensors has: a tensor that all samples share and that is as long
    as the batch would be taken for samples, and repeated with them.

    The working directory is put on the import path, as `python -m` does. Raises ModelError, and UsageError
    where the factory does not take a keyword, or an nn.Module is given any.
    """
    target = import_named(f"model {name!r}", name)
    if not isinstance(target, nn.Module):
        return _called(target, name, settings or {})
    if settings:
        raise UsageError(
            f"settings={dict(settings)!r}: {name} is a module already built, which takes no options",
            f"Omit `settings`, or name a factory: a function that builds the {type(target).__name__}.",
        )
    return target


def _called(factory: Callable[..., Any] | Any, name: str, settings: Mapping[str, object]) -> Any:
    if not callable(factory):
        raise ModelError(
            f"model {name!r} is {describe_type(factory)}, which cannot be called",
            "Name a function that takes no arguments and returns an nn.Module.",
        )
    _refuse_unexpected(factory, name, settings)
    try:
        return factory(**settings)
    except (Exception, SystemExit) as error:
        how = f"with {_format_settings(settings)}" if settings else "without arguments"
        raise ModelError(
            f"{name} failed: {first_line(error)}{at_user_line(error)}",
            f"Mend the factory; it is called {how}.",
        ) from error


def _refuse_unexpected(factory: Callable[..., Any], name: str, settings: Mapping[str, object]) -> None:
    """Raises UsageError for the first setting that is no keyword of the factory."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    by_keyword = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    for key in settings:
        if key not in by_keyword:
            near = difflib.get_close_matches(key, by_keyword, n=3)
            hint = f"Nearest: {', '.join(near)}. " if near else ""
            raise UsageError(
                f"settings[{key!r}]: {name} takes no keyword {key!r}",
                f"{hint}Its signature is {name.partition(':')[2]}{signature}.",
            )


def _format_settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in settings.items())


# torchvision's models by name, with the input that each is trained on.

_DEFAULT_SIDE = 224
_FRAMES = 16
"""Frames of a clip: what torchvision's video models were trained on."""


def load_torchvision(
    name: str,
    classes: int | None,
    shape: tuple[int, ...] | None,
    seed: int,
    *,
    on_meta: bool = False,
) -> LoadedModel:
    """Random weights, drawn from `seed`; `shape` is that of one sample. Raises ModelError."""
    import torchvision

    names = torchvision.models.list_models()
    if name.lower() not in names:
        raise unknown_name(name, names)
    name = name.lower()
    builder = torchvision.models.get_model_builder(name)
    if ".detection." in builder.__module__:
        raise ModelError(
            f"{name} is a detection model: how many boxes its later layers work on depends on the picture, "
            "so it has no chain of layers of known cost",
            "Profile its backbone: a factory that returns it, named package.module:factory.",
        )
    module = _build(name, builder, classes, seed, on_meta=on_meta)
    shape = shape or _own_shape(name, module)
    flow = ".optical_flow." in builder.__module__
    example = (noise(shape, seed), noise(shape, seed + 1)) if flow else noise(shape, seed)
    loss = "none" if flow else "cross-entropy"
    return LoadedModel(module, name, ModelInput.of(example), classes=classes, loss=loss)


def _build(name: str, builder: Any, classes: int | None, seed: int, *, on_meta: bool) -> nn.Module:
    import torchvision

    options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
    if "weights_backbone" in inspect.signature(builder).parameters:
        # Without it the backbone's weights would be downloaded.
        options["weights_backbone"] = None

    def build() -> nn.Module:
        model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
        return model

    with warnings.catch_warnings(), fixed_seed(seed):
        # torchvision announces changes of its default initialisation: nothing a user can act on here.
        warnings.simplefilter("ignore")
        if on_meta:
            # Some compute sizes with tensors while they are built, which have no values there.
            with contextlib.suppress(Exception), torch.device("meta"):
                return build()
        with failing_as(
            lambda error: ModelError(
                f"model {name!r}: torchvision could not build it: {first_line(error)}",
                "Check `classes`, or name another model.",
            )
        ):
            return build()


def _own_shape(name: str, module: nn.Module) -> tuple[int, ...]:
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


# A name or `package.module:factory` becomes a module and its example input.

_DEFAULT_SHAPE = (3, 224, 224)


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
    if not known_only:
        refuse_unknown_name(name)
    seed = check_seed(seed)
    shape = None if input_shape is None else _checked_shape(input_shape)
    if classes is not None and not is_positive(classes):
        raise UsageError(f"classes {classes!r}: must be a whole number of at least 1", "As in classes=1000.")
    if input_like is not None and shape is not None:
        raise UsageError(
            f"input_like={input_like!r} and input_shape={shape!r}: both say what the input is", "Give one."
        )
    batch = None if input_like is None else _input_of(input_like, seed)
    if name.startswith(TRANSFORMERS) or name.endswith(".json"):
        _refuse(name, "takes its sizes from its configuration", classes=classes, input_shape=shape)
        kind = name.removeprefix(TRANSFORMERS)
        from .transformers_models import load_transformers

        device = "meta" if on_meta else "cpu"
        loaded = load_transformers(
            kind, settings or {}, seed=seed, device=device, known_only=known_only, batch=batch
        )
        return dataclasses.replace(loaded, input_like=input_like)
    if ":" in name:
        _refuse(name, "is a factory, which decides itself", classes=classes)
        return _with_input(_from_factory(name, shape, settings or {}, seed), batch, input_like)
    if settings:
        raise UsageError(
            f"settings={dict(settings)!r}: {name} is no factory and no transformers model",
            "torchvision's models take `classes` and `input_shape`; a factory can call them as it likes.",
        )
    loaded = load_torchvision(name, classes, shape, seed, on_meta=on_meta)
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

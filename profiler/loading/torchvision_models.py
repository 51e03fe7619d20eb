"""torchvision's models by name, with the input that each is trained on."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from typing import Any

import torch
from torch import nn

from ...cost_models.errors import ModelError
from ..user_model.failures import first_line, is_out_of_memory
from ..user_model.loaded_model import LoadedModel, ModelInput
from ..user_model.seeding import fixed_seed, noise
from .factories import refuse_module
from .torchvision_names import unknown_name

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
    known_only: bool = False,
) -> LoadedModel:
    """Random weights, drawn from `seed`; `shape` is that of one sample. `known_only`: no module is looked for
    where there is no such model. Raises ModelError."""
    import torchvision

    names = torchvision.models.list_models()
    if name.lower() not in names:
        if not known_only:
            refuse_module(name)
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
        try:
            return build()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f"model {name!r}: torchvision could not build it: {first_line(error)}",
                "Check `classes`, or name another model.",
            ) from error


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

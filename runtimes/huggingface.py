"""Hugging Face transformers with accelerate: a `device_map`, which says on which device each module is.

One process runs the devices one after another, a micro-batch at a time: naive model parallelism. Source:
transformers' `integrations/accelerate.py`, accelerate's `utils/modeling.py` (check_device_map).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ..cost_models.document import MadeBy
from ..cost_models.errors import ExportError
from ..cost_models.runtime import runtime_named
from ..planner.plan_file import Plan
from .blocks import NotBlocksError, transformer
from .choice import Choice, choose
from .exported import Count, Exported, layers_hash, opened

if TYPE_CHECKING:
    from torch import nn


class HuggingfaceExport(Exported):
    """`device_map` is what `from_pretrained(..., device_map=...)` takes, for the modules that are layers."""

    kind: ClassVar[str] = "huggingface"
    runtime: Literal["huggingface"]
    micro_batches: Count
    """To be run one after another, their gradients added up."""
    device_map: dict[str, int | Literal["cpu"]]
    made_by: MadeBy = MadeBy()


def export(plan: Plan, *, device: str, made_by: MadeBy) -> tuple[HuggingfaceExport, str | None]:
    """The file's content, and a remark where it is not the plan itself. Raises ExportError."""
    choice, remark = choose(plan, runtime_named("huggingface"))
    if not plan.layer_names:
        raise ExportError(
            f"the plan of {plan.model} does not tell the names of its layers", "Make it again: pplan solve"
        )
    places = _places(plan, choice)
    document = HuggingfaceExport(
        runtime="huggingface",
        model=plan.model,
        layers_sha256=layers_hash(plan),
        mini_batch=choice.micro_batches * choice.micro_batch_size,
        micro_batch_size=choice.micro_batch_size,
        step_seconds=choice.step_seconds,
        micro_batches=choice.micro_batches,
        device_map={module: "cpu" if device == "cpu" else place for module, place in places.items()},
        made_by=made_by,
    )
    return document, remark


def _places(plan: Plan, choice: Choice) -> dict[str, int]:
    """The device of each module. Raises ExportError where a stage ends inside a transformer block."""
    places: dict[str, int] = {}
    devices = (
        device for device, layers in zip(choice.devices, choice.balance, strict=True) for _ in range(layers)
    )
    for module, device in zip(_modules(plan.layer_names), devices, strict=True):
        if places.setdefault(module, device) != device:
            raise ExportError(
                f"{module} is on devices {places[module]} and {device}: huggingface places blocks whole",
                f"Measure whole blocks: pplan.profile({plan.model!r}, "
                f"granularity='module:{module.rpartition('.')[0]}.*'), and make the plan again: pplan solve",
            )
    return places


def _modules(names: list[str]) -> list[str]:
    """The module of each layer: of a layer inside a transformer block, the block; else the layer itself."""
    try:
        model = transformer(names)
    except NotBlocksError:
        return names
    first, last = model.ends[0], model.ends[-1]
    return [
        f"{model.list_name}.{model.done(layer)}" if first <= layer < last else name
        for layer, name in enumerate(names)
    ]


def device_map(source: HuggingfaceExport | str | Path, model: nn.Module) -> dict[str, int | str]:
    """The map of the file, completed for `model`, which may be on the meta device.

    A profile calls a layer by its first module: those beside it (GPT-2's position embedding), and what the
    layers share (T5's embedding), are put on the first device. Raises UsageError, FileError; ExportError
    where the model has none of the file's modules.
    """
    document = opened(source, HuggingfaceExport)
    modules = dict(model.named_modules())
    placed: dict[str, int | str] = {
        name: place for name, place in document.device_map.items() if name in modules
    }
    if not placed:
        raise ExportError(
            f"the huggingface file is for {document.model}, the model ({type(model).__name__}) has no module "
            f"{next(iter(document.device_map))}",
            "Give it the model of the file, or make a plan for this one.",
        )
    first = next(iter(placed.values()))
    return placed | dict.fromkeys(_others(model, "", placed), first)


def _others(module: nn.Module, name: str, placed: Collection[str]) -> list[str]:
    """The largest modules, parameters and buffers that hold nothing of what is placed and are not in it."""
    inside = f"{name}." if name else ""
    if name in placed:
        return []
    if not any(other.startswith(inside) for other in placed):
        return [name]
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    found = [f"{inside}{key}" for key, _ in tensors]
    for key, child in module.named_children():
        found += _others(child, f"{inside}{key}", placed)
    return found

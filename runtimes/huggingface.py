"""Hugging Face transformers with accelerate: the `device_map` of an export, completed for a model."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from ..cost_models.errors import ExportError
from ..planner.plan_file import Plan
from .documents import HuggingfaceExport
from .exports import load_document

if TYPE_CHECKING:
    from torch import nn

__all__ = ["HuggingfaceExport", "device_map"]


def device_map(source: Plan | HuggingfaceExport | str | Path, model: nn.Module) -> dict[str, int | str]:
    """The map of a plan, its export or that one's file, for `model`, which may be on the meta device.

    A profile calls a layer by its first module: those beside it (GPT-2's position embedding), and what the
    layers share (T5's embedding), are put on the first device. Raises UsageError, FileError; ExportError
    where the model has none of the file's modules.
    """
    document = load_document(source, HuggingfaceExport)
    modules = dict(model.named_modules())
    devices: dict[str, int | str] = {
        name: place for name, place in document.device_map.items() if name in modules
    }
    if not devices:
        raise ExportError(
            f"the huggingface file is for {document.model}, the model ({type(model).__name__}) has no module "
            f"{next(iter(document.device_map))}",
            "Give it the model of the file, or make a plan for this one.",
        )
    first = next(iter(devices.values()))
    return devices | dict.fromkeys(_others(model, "", devices), first)


def _others(module: nn.Module, name: str, placed: Collection[str]) -> list[str]:
    """The largest modules, parameters and buffers that hold nothing of what is placed and are not in it."""
    inside = f"{name}." if name else ""
    if name in placed:
        return []
    if not any(other.startswith(inside) for other in placed):
        return [name]
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    names = [f"{inside}{key}" for key, _ in tensors]
    for key, child in module.named_children():
        names += _others(child, f"{inside}{key}", placed)
    return names

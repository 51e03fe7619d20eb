"""Hugging Face transformers with accelerate: a `device_map`, which says on which device each module is.

One process runs the devices one after another, a micro-batch at a time: naive model parallelism. Source:
transformers' `integrations/accelerate.py`, accelerate's `utils/modeling.py` (check_device_map).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from ...cost_models.document import DeviceIndex, MadeBy, MicroBatches
from ...cost_models.errors import ExportError
from ...cost_models.runtime import find_runtime
from ...planner.plan_file import Plan
from .export_document import ExportDocument
from .plan_choice import Choice, choose, document_fields
from .transformer_blocks import NotBlocksError, find_blocks


class HuggingfaceExport(ExportDocument):
    """`device_map` is what `from_pretrained(..., device_map=...)` takes, for the modules that are layers."""

    kind: ClassVar[str] = "huggingface"
    runtime: Literal["huggingface"]
    micro_batches: MicroBatches
    """To be run one after another, their gradients added up."""
    device_map: dict[str, DeviceIndex | Literal["cpu"]]


def export(plan: Plan, *, device: str, made_by: MadeBy) -> tuple[HuggingfaceExport, str | None]:
    """The file's content, and a remark where it is not the plan itself. Raises ExportError."""
    choice, remark = choose(plan, find_runtime("huggingface"))
    if not plan.layer_names:
        raise ExportError(
            f"the plan of {plan.model} does not tell the names of its layers", "Make it again: pplan solve"
        )
    places = _places(plan, choice)
    document = HuggingfaceExport(
        **document_fields(plan, choice, "huggingface"),
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
        model = find_blocks(names)
    except NotBlocksError:
        return names
    first, last = model.ends[0], model.ends[-1]
    return [
        f"{model.list_name}.{model.blocks_before(layer)}" if first <= layer < last else name
        for layer, name in enumerate(names)
    ]

"""What DeepSpeed (https://github.com/deepspeedai/DeepSpeed, 0.19.8) is given: 1F1B, and its configuration."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ...cost_models.document import DeviceCount, DeviceIndex, JsonObject, LayerBound, LayerCount, MadeBy
from ...cost_models.errors import ExportError
from ...cost_models.runtime import find_runtime
from ...planner.plan_file import Plan
from .export_document import ExportDocument, stage_bounds
from .plan_choice import Choice, choose, document_fields

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"type": "SGD", "params": {"lr": 0.01}},
    "momentum": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
    # torch's Adam: DeepSpeed's own is compiled on the spot, and is AdamW unless told otherwise.
    "adam": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True, "adam_w_mode": False}},
    "adamw": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
}
"""By the plan's word; the learning rates are torch's or usual defaults, for the user to change."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "float16": {"fp16": {"enabled": True}},
    "bfloat16": {"bf16": {"enabled": True}},
}


class DeepspeedExport(ExportDocument):
    """What `deepspeed.initialize` and a PipelineModule take.

    Stage i holds layers parts[i] up to, not including, parts[i + 1]; rank s * replicas + r is replica r of
    stage s. `config` is DeepSpeed's own configuration.
    """

    kind: ClassVar[str] = "deepspeed"
    runtime: Literal["deepspeed"]
    num_stages: LayerCount
    replicas: DeviceCount
    """Of every stage."""
    parts: Annotated[list[LayerBound], Field(min_length=2)]
    devices: list[DeviceIndex]
    """By rank, as the plan numbers them."""
    config: JsonObject
    granularity: str = "block"
    """How the model is cut into layers."""

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        ascending = all(first < end for first, end in pairwise(self.parts))
        if len(self.parts) != self.num_stages + 1 or self.parts[0] != 0 or not ascending:
            raise ValueError(f"parts {self.parts} are not the bounds of {self.num_stages} stages")
        if len(self.devices) != self.num_stages * self.replicas:
            raise ValueError(
                f"devices are {len(self.devices)}, num_stages {self.num_stages} times replicas "
                f"{self.replicas} must be as many"
            )
        return self


def export(plan: Plan, *, device: str, made_by: MadeBy) -> tuple[DeepspeedExport, str | None]:
    """The file's content, and a remark where it is not the plan itself. Raises ExportError.

    `device` changes nothing: DeepSpeed's launcher gives each process its device.
    """
    del device
    choice, remark = choose(plan, find_runtime("deepspeed"))
    document = DeepspeedExport(
        **document_fields(plan, choice, "deepspeed"),
        num_stages=len(choice.balance),
        replicas=choice.replicas,
        parts=stage_bounds(choice.balance),
        devices=list(choice.devices),
        config=_config(plan, choice),
        granularity=plan.profile.granularity,
        made_by=made_by,
    )
    return document, remark


def _config(plan: Plan, choice: Choice) -> dict[str, Any]:
    """DeepSpeed holds train_batch_size to be the product of the next two and the replicas."""
    return {
        "train_batch_size": choice.micro_batches * choice.micro_batch_size,
        "train_micro_batch_size_per_gpu": choice.micro_batch_size // choice.replicas,
        "gradient_accumulation_steps": choice.micro_batches,
        "gradient_clipping": 0.0,  # left out, it is 1.0 and changes the training
        "optimizer": _optimizer(plan),
        "pipeline": {
            "use_reentrant": False,  # the reentrant kind loses the gradients of a stage fed by plain data
            "activation_checkpoint_interval": max(choice.balance) if choice.recompute == "always" else 0,
        },
        **PRECISIONS.get(plan.profile.dtype, {}),
        **_gradients(plan),
        **({"zero_optimization": {"stage": plan.zero}} if plan.zero and choice.replicas > 1 else {}),
    }


def _gradients(plan: Plan) -> dict[str, Any]:
    """The dtype in which bfloat16's gradients add up: by default that depends on ZeRO."""
    if plan.profile.dtype == "bfloat16" and plan.gradient_dtype is not None:
        return {"data_types": {"grad_accum_dtype": plan.gradient_dtype}}
    return {}


def _optimizer(plan: Plan) -> dict[str, Any]:
    if plan.optimizer == "adamw-8bit":
        raise ExportError(
            "adamw-8bit: DeepSpeed's configuration names no optimizer with 8-bit states",
            "Make a plan with another: pplan.solve(optimizer='adamw'). Or export that one, and pass "
            "deepspeed.initialize an optimizer of bitsandbytes in place of the configuration's.",
        )
    if plan.optimizer not in OPTIMIZERS:
        raise ExportError(
            f"no DeepSpeed configuration is known for the plan's optimizer {plan.optimizer!r}",
            f"Make a plan with one of {', '.join(OPTIMIZERS)}: pplan.solve(optimizer='sgd')",
        )
    return OPTIMIZERS[plan.optimizer]

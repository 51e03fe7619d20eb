"""DeepSpeed (https://github.com/deepspeedai/DeepSpeed, 0.19.8): 1F1B order, one process a stage and replica.

Its PipelineModule partitions by its own rules only; `build` makes one that takes the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..cost_models.document import MadeBy
from ..cost_models.errors import ExportError, MachineError
from ..cost_models.runtime import runtime_named
from ..planner.plan_file import Plan
from .choice import Choice, choose
from .exported import Count, Exported, bounds_of, document_of, layers_hash, missing_package

if TYPE_CHECKING:
    import torch
    from deepspeed.pipe import PipelineModule
    from torch import nn

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


class DeepspeedExport(Exported):
    """What `deepspeed.initialize` and a PipelineModule take.

    Stage i holds layers parts[i] up to, not including, parts[i + 1]; rank s * replicas + r is replica r of
    stage s. `config` is DeepSpeed's own configuration.
    """

    kind: ClassVar[str] = "deepspeed"
    runtime: Literal["deepspeed"]
    num_stages: Count
    replicas: Count
    """Of every stage."""
    parts: Annotated[list[int], Field(min_length=2)]
    devices: list[int]
    """By rank, as the plan numbers them."""
    config: dict[str, Any]
    granularity: str = "block"
    """How the model is cut into layers."""
    made_by: MadeBy = MadeBy()

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
    choice, remark = choose(plan, runtime_named("deepspeed"))
    document = DeepspeedExport(
        runtime="deepspeed",
        model=plan.model,
        layers_sha256=layers_hash(plan),
        mini_batch=choice.micro_batches * choice.micro_batch_size,
        micro_batch_size=choice.micro_batch_size,
        step_seconds=choice.step_seconds,
        num_stages=len(choice.balance),
        replicas=choice.replicas,
        parts=bounds_of(choice.balance),
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
    """In what bfloat16's gradients add up: left out, that depends on ZeRO."""
    if plan.profile.dtype == "bfloat16" and plan.gradient_dtype is not None:
        return {"data_types": {"grad_accum_dtype": plan.gradient_dtype}}
    return {}


def _optimizer(plan: Plan) -> dict[str, Any]:
    if plan.optimizer == "adamw-8bit":
        raise ExportError(
            "adamw-8bit: DeepSpeed's configuration names no optimizer with 8-bit states",
            "Make a plan with another: pplan solve --optimizer adamw. Or export that one, and pass "
            "deepspeed.initialize an optimizer of bitsandbytes in place of the configuration's.",
        )
    if plan.optimizer not in OPTIMIZERS:
        raise ExportError(
            f"no DeepSpeed configuration is known for the plan's optimizer {plan.optimizer!r}",
            f"Make a plan with one of {', '.join(OPTIMIZERS)}: pplan solve --optimizer sgd",
        )
    return OPTIMIZERS[plan.optimizer]


def build(
    source: Plan | DeepspeedExport | str | Path,
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    example_input: object = None,
    *,
    layer_names: Sequence[str] | None = None,
) -> PipelineModule:
    """This process's stage of `model`; call it in every process after `deepspeed.init_distributed()`.

    `source`: a plan (or its best alternative for DeepSpeed, of which a UserWarning tells), its export, or the
    export's file. `model`: any module, made sequential as `pplan.sequential` does it, or an nn.Sequential of
    the plan's layers. `loss_fn(output, target)` makes the loss of a micro-batch. `example_input`: an input of
    it, of any batch; without one, `model` must be sequential, one contiguous tensor with a gradient crosses
    each cut, and every stage works on a clone of what it is handed (else only those that overwrite it).
    `layer_names`: those of the model's profile, where the model does not know them; an nn.Sequential without
    names must only have as many layers.

    Pass the result to `deepspeed.initialize(model=..., config=..., model_parameters=...)` with the `config`
    of the export. Its `train_batch` takes an iterator over (input, target) of a micro-batch of one replica,
    the input a tensor or the tuple of all tensors of the input.
    Raises UsageError, FileError; ExportError where the model is not the one of the plan, stages share
    parameters, the plan is not for DeepSpeed, or a stage has no parameters, which DeepSpeed's optimizers
    refuse; ModelError as `pplan.sequential` does; MachineError without DeepSpeed, before
    `deepspeed.init_distributed()` or with another number of processes.
    """
    from ..profiler.user_model.loaded_model import ModelInput
    from .pipelining.at_cut import safe_at_cuts
    from .pipelining.planned_layers import check_sharing, planned_layers

    document = document_of(source, DeepspeedExport, export)
    example = None if example_input is None else ModelInput.of(example_input)
    count = document.parts[-1]
    layers = planned_layers(document, count, model, example, layer_names, granularity=document.granularity)
    _check_parameters(document, layers)
    check_sharing(layers, document.parts)
    try:
        import torch.distributed
        from deepspeed.pipe import PipelineModule
    except ImportError as error:
        raise missing_package("deepspeed", error) from error
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise MachineError(
            "torch.distributed is not initialized, DeepSpeed's stages are processes of it",
            "Call deepspeed.init_distributed() first, in a script started with torchrun.",
        )
    processes, needed = torch.distributed.get_world_size(), document.num_stages * document.replicas
    if processes != needed:
        raise MachineError(
            f"{processes} processes, but {document.num_stages} stages x {document.replicas} replicas",
            f"Start {needed}: torchrun --nproc-per-node {needed} SCRIPT",
        )

    of_one = document.micro_batch_size // document.replicas
    safe = safe_at_cuts(layers, document.parts, example, of_one, packs_all=True)
    return _partitioned(PipelineModule, document)(safe, num_stages=document.num_stages, loss_fn=loss_fn)


def _partitioned(kind: Any, document: DeepspeedExport) -> Any:
    """DeepSpeed's class with the plan's partition: its own knows only its rules."""

    def partition_layers(module: Any, method: str = "") -> None:
        del method
        stage = module._topo.get_coord(module.global_rank).pipe
        module.parts = document.parts
        module._set_bounds(document.parts[stage], document.parts[stage + 1])

    return type("PlannedPipelineModule", (kind,), {"_partition_layers": partition_layers})


def _check_parameters(document: DeepspeedExport, model: nn.Sequential) -> None:
    for stage, (first, end) in enumerate(pairwise(document.parts)):
        if not any(parameter.requires_grad for layer in model[first:end] for parameter in layer.parameters()):
            raise ExportError(
                f"stage {stage} (layers {first} to {end - 1}) has no parameters to train: "
                "DeepSpeed's optimizers refuse an empty list",
                "Make a plan with fewer stages: pplan solve --runtime deepspeed --gpus N",
            )

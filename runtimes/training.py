"""Training by a plan: one object with the same methods for every runtime that pplan builds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from ..cost_models.errors import UsageError
from ..cost_models.runtime import RUNNABLE
from ..planner.plan_file import Plan
from .documents import BuiltExport, document_class
from .exports import load_document

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .pipelining.training import Training

__all__ = ["build"]


def build(
    source: Plan | BuiltExport | str | Path,
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    example_input: object,
    *,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    loss_reduction: Literal["mean", "sum"] = "mean",
    device: str | None = None,
    layer_names: Sequence[str] | None = None,
    sync_batch_norm: bool = False,
    **options: Any,
) -> Training:
    """Build a model for training by a plan. Every process of the job calls it.

    Where stages are processes and torch.distributed is not initialized, it is initialized, by the variables
    that torchrun sets, and `close` ends it. Inside `torch.autocast` the stages compute in its precision, then
    and in every step.

    Args:
        source: A plan, its export, or the path of the export's file. Its runtime trains.
        model: Any module, the same in every process.
        loss_fn: Called with the output and the target of a micro-batch (torchgpipe and FairScale: of the
            global batch). None: the model returns its loss, as `loss` of the output, under the key "loss",
            or as the only scalar.
        example_input: An input of the model, of any batch.
        optimizer: Called with groups of the parameters of this process, as torch.optim's classes with
            functools.partial. None: you make an optimizer of `parameters()`, and with DeepSpeed its
            configuration's is taken.
        loss_reduction: What `loss_fn` returns: the "mean" over samples, or a "sum".
        device: "cpu" or "cuda". None: the plan's.
        layer_names: Names of the layers in the profile, where the model does not know them.
        sync_batch_norm: Batch norms normalise a micro-batch over all replicas of its stage, which with
            torchgpipe and FairScale is one.
        options: Those of the runtime's own `build` (mesh, replicate, tensor_parallel), and for torchgpipe
            and FairScale `deferred_batch_norm`.

    Raises:
        UsageError: The runtime is none that pplan builds, or an option is wrong.
        ExportError: The model is not the plan's, or the runtime cannot train it.
        MachineError: The runtime's package, devices or processes are not there.
    """
    from . import deepspeed, torch_pipelining
    from .pipelining.training import build_training

    return build_training(
        _read_document(source),
        model,
        loss_fn,
        example_input,
        optimizer=optimizer,
        loss_reduction=loss_reduction,
        device=device,
        layer_names=layer_names,
        sync_batch_norm=sync_batch_norm,
        builders={"torch": torch_pipelining.build, "deepspeed": deepspeed.build},
        start=deepspeed.start,
        **options,
    )


def _read_document(source: Plan | BuiltExport | str | Path) -> BuiltExport:
    """The export that says how to train. Raises UsageError, FileError, ExportError."""
    if isinstance(source, Plan):
        runtime = source.runtime or RUNNABLE[0]
    elif isinstance(source, str | Path):
        try:
            runtime = json.loads(Path(source).read_text(encoding="utf-8"))["runtime"]
        except (OSError, ValueError, KeyError, TypeError):
            runtime = RUNNABLE[0]  # whose reader says what is wrong
    else:
        runtime = getattr(source, "runtime", RUNNABLE[0])
    if runtime not in RUNNABLE:
        raise UsageError(
            f"the plan is for {runtime}, which trains by itself", f"Export it for {', '.join(RUNNABLE)}."
        )
    return cast(BuiltExport, load_document(source, document_class(runtime)))

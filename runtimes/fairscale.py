"""FairScale 0.4.13 (https://github.com/facebookresearch/fairscale): torchgpipe's fork, same arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..planner.plan_file import Plan
from .documents import FairscaleExport
from .exports import load_document

if TYPE_CHECKING:
    import torch
    from fairscale.nn import Pipe
    from torch import nn

__all__ = ["FairscaleExport", "build"]


def build(
    source: Plan | FairscaleExport | str | Path,
    model: nn.Module,
    example_input: object = None,
    *,
    devices: Sequence[torch.device | str | int] | None = None,
    layer_names: Sequence[str] | None = None,
) -> Pipe:
    """The Pipe of a plan: `model` on its devices, by its balance, micro-batches and recomputation.

    `source`: a plan (or its best alternative for fairscale, of which a UserWarning tells), its export, or the
    export's file. `model`: any module, made sequential as `pplan.sequential` does it, or an nn.Sequential of
    the plan's layers. `example_input`: an input of it, of any batch; without one, `model` must be sequential,
    one tensor with a gradient crosses each cut, and every stage works on a clone of what it is handed (else
    only those that overwrite it). `devices`: of the stages, instead of the plan's. `layer_names`: those of
    the model's profile, where the model does not know them; an nn.Sequential without names must only have as
    many layers.

    Feed it global batches of the plan's size on `devices[0]` (a tensor, or the tuple of all tensors of the
    input); its output, the model's tensor or a tuple of its tensors, is on `devices[-1]`. Its parameters are
    the model's own. Drop the Pipe and call gc.collect() before the interpreter ends: its threads keep a
    living one from exiting. Join them, too: one whose end meets the interpreter's may abort it.

    Raises UsageError, FileError; ExportError where the model is not the one of the plan, stages on several
    devices share parameters, or the plan is not for fairscale; ModelError as `pplan.sequential` does;
    MachineError without FairScale or the devices.
    """
    from .pipelining.plan_layers import prepare_pipe

    document = load_document(source, FairscaleExport)
    prepared = prepare_pipe(document, model, example_input, devices, layer_names)
    pipe: Pipe = prepared.construct("fairscale", "fairscale.nn", "Pipe")
    return pipe

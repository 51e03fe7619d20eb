"""torchgpipe 0.0.7 (https://github.com/kakaobrain/torchgpipe): GPipe order, one process for all stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ..cost_models.document import MadeBy
from ..planner.plan_file import Plan
from .exported import check_layers, missing_package, opened
from .pipe import PipeExport, fields

if TYPE_CHECKING:
    from torch import nn
    from torchgpipe import GPipe


class TorchgpipeExport(PipeExport):
    """What `torchgpipe.GPipe` takes."""

    kind: ClassVar[str] = "torchgpipe"
    runtime: Literal["torchgpipe"]


def export(plan: Plan, *, device: str, made_by: MadeBy) -> tuple[TorchgpipeExport, str | None]:
    """The file's content, and a remark where it is not the plan itself. Raises ExportError."""
    content, remark = fields(plan, "torchgpipe", device)
    return TorchgpipeExport(**content, made_by=made_by), remark


def build(
    source: TorchgpipeExport | str | Path, model: nn.Sequential, *, layer_names: Sequence[str] | None = None
) -> GPipe:
    """`model`, one element a layer (as `pplan.sequential` makes it), on the devices of the file.

    The names of its layers must be the file's: `layer_names`, those of the model's profile, or by default
    what `pplan.sequential` called them. An nn.Sequential without names must only have as many.

    Feed it mini-batches of `source.mini_batch` samples on `devices[0]`; its output is on `devices[-1]`.
    Raises UsageError, FileError, ExportError where the model is not the one of the file, MachineError without
    torchgpipe.
    """
    document = opened(source, TorchgpipeExport)
    check_layers(document, sum(document.balance), model, layer_names)
    try:
        from torchgpipe import GPipe
    except ImportError as error:
        raise missing_package("torchgpipe", error) from error
    return GPipe(model, **document.arguments())

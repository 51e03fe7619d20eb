"""FairScale 0.4.13 (https://github.com/facebookresearch/fairscale): torchgpipe's fork, same arguments."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ..cost_models.document import MadeBy
from ..planner.plan_file import Plan
from .exported import check_layers, missing_package, opened
from .pipe import PipeExport, fields

if TYPE_CHECKING:
    from fairscale.nn import Pipe
    from torch import nn


class FairscaleExport(PipeExport):
    """What `fairscale.nn.Pipe` takes."""

    kind: ClassVar[str] = "fairscale"
    runtime: Literal["fairscale"]


def export(plan: Plan, *, device: str, made_by: MadeBy) -> tuple[FairscaleExport, str | None]:
    """The file's content, and a remark where it is not the plan itself. Raises ExportError."""
    content, remark = fields(plan, "fairscale", device)
    return FairscaleExport(**content, made_by=made_by), remark


def build(
    source: FairscaleExport | str | Path, model: nn.Sequential, *, layer_names: Sequence[str] | None = None
) -> Pipe:
    """`model`, one element a layer (as `pplan.sequential` makes it), on the devices of the file.

    The names of its layers must be the file's: `layer_names`, those of the model's profile, or by default
    what `pplan.sequential` called them. An nn.Sequential without names must only have as many.

    Feed it mini-batches of `source.mini_batch` samples on `devices[0]`; its output is on `devices[-1]`. Drop
    the Pipe and call gc.collect() before the interpreter ends: its threads keep a living one from exiting.
    Raises UsageError, FileError, ExportError where the model is not the one of the file, MachineError without
    FairScale.
    """
    document = opened(source, FairscaleExport)
    check_layers(document, sum(document.balance), model, layer_names)
    try:
        from fairscale.nn import Pipe
    except ImportError as error:
        raise missing_package("fairscale", error) from error
    with warnings.catch_warnings():
        # It points to a module that PyTorch has removed since.
        warnings.filterwarnings("ignore", "fairscale.nn.Pipe has been upstreamed", DeprecationWarning)
        return Pipe(model, **document.arguments())

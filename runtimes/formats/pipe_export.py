"""What torchgpipe's GPipe takes, and FairScale's Pipe, which is a fork of it: the same arguments."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ...cost_models.document import LayerCount, MadeBy, MicroBatches
from ...cost_models.runtime import find_runtime
from ...planner.plan_file import Plan
from .export_document import ExportDocument
from .plan_choice import Choice, choose, document_fields

Checkpoint = Literal["never", "always", "except_last"]


class PipeExport(ExportDocument):
    """`balance`, `devices`, `chunks` and `checkpoint` are the constructor's arguments, under its own names.

    `chunks` times `micro_batch_size` is `mini_batch`: a global batch of that many samples is cut into as many
    equal micro-batches (other sizes are not: `torch.chunk` makes 3, 3, 3 and 1 of 10 samples and 4 chunks).
    """

    balance: Annotated[list[LayerCount], Field(min_length=1)]
    """Layers of each stage."""
    devices: list[str]
    """By stage: "cpu" or "cuda:N"."""
    chunks: MicroBatches
    """Micro-batches."""
    checkpoint: Checkpoint
    """Which micro-batches are recomputed."""
    granularity: str = "block"
    """How the model is cut into layers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.devices) != len(self.balance):
            raise ValueError(f"devices are {len(self.devices)}, balance has {len(self.balance)} stages")
        for number, device in enumerate(self.devices):
            if not re.fullmatch(r"cpu|cuda:[0-9]+", device):
                raise ValueError(f"devices.{number}: must be 'cpu' or 'cuda:N', the value is {device!r}")
        if self.chunks * self.micro_batch_size != self.mini_batch:
            raise ValueError(
                f"chunks {self.chunks} times micro_batch_size {self.micro_batch_size} "
                f"do not make a mini_batch of {self.mini_batch}"
            )
        return self

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the constructor."""
        return self.model_dump(include={"balance", "devices", "chunks", "checkpoint"})


class TorchgpipeExport(PipeExport):
    """What `torchgpipe.GPipe` takes."""

    kind: ClassVar[str] = "torchgpipe"
    runtime: Literal["torchgpipe"]


class FairscaleExport(PipeExport):
    """What `fairscale.nn.Pipe` takes."""

    kind: ClassVar[str] = "fairscale"
    runtime: Literal["fairscale"]


def export_torchgpipe(plan: Plan, *, device: str, made_by: MadeBy) -> tuple[TorchgpipeExport, str | None]:
    """The file's content, and a remark where it is not the plan itself. Raises ExportError."""
    content, remark = pipe_fields(plan, "torchgpipe", device)
    return TorchgpipeExport(**content, made_by=made_by), remark


def export_fairscale(plan: Plan, *, device: str, made_by: MadeBy) -> tuple[FairscaleExport, str | None]:
    """The file's content, and a remark where it is not the plan itself. Raises ExportError."""
    content, remark = pipe_fields(plan, "fairscale", device)
    return FairscaleExport(**content, made_by=made_by), remark


def pipe_fields(plan: Plan, runtime: str, device: str) -> tuple[dict[str, Any], str | None]:
    """The fields of a PipeExport but `made_by`, for the plan or its best alternative, and the remark on it.

    `device` is "cuda" (stage by stage the plan's devices) or "cpu" (all stages on it, to try the file out).
    Raises ExportError.
    """
    choice, remark = choose(plan, find_runtime(runtime))
    return {
        **document_fields(plan, choice, runtime),
        "balance": list(choice.balance),
        "devices": _devices(choice, device),
        "chunks": choice.micro_batches,
        "checkpoint": choice.recompute,
        "granularity": plan.profile.granularity,
    }, remark


def _devices(choice: Choice, device: str) -> list[str]:
    if device == "cpu":
        return ["cpu"] * len(choice.balance)
    return [f"cuda:{number}" for number in choice.devices]

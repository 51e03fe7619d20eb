"""The file a training script reads: what every runtime's has in common, and the check of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from pydantic import model_validator

from ...cost_models.document import Document, MadeBy, MiniBatch, StepSeconds
from ...cost_models.errors import ExportError, MachineError, UsageError
from ...cost_models.text_files import sha256
from ...planner.plan_file import Plan

if TYPE_CHECKING:
    from torch import nn


class ExportDocument(Document):
    """A plan in a runtime's own words (`NAME.RUNTIME.json`); `kind` is the runtime's name."""

    runtime: str
    model: str
    layers_sha256: str = ""
    """Of the names of the model's layers, one a line, as in the plan."""
    mini_batch: MiniBatch
    micro_batch_size: MiniBatch
    step_seconds: StepSeconds
    """Predicted seconds of a step."""
    estimated: bool = False
    """Whether they follow from an estimated profile, and not from a measured one."""
    made_by: MadeBy = MadeBy()

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        replicas = getattr(self, "replicas", 1)
        if self.mini_batch % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} does not divide mini_batch {self.mini_batch}"
            )
        if self.micro_batch_size % replicas:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} is not shared evenly by {replicas} replicas"
            )
        return self


E = TypeVar("E", bound=ExportDocument)


def load_document(source: E | str | Path, kind: type[E]) -> E:
    """`source` itself, or the document of class `kind` in the file it names. Raises UsageError, FileError."""
    if isinstance(source, str | Path):
        return kind.load(source)
    if not isinstance(source, kind):
        raise UsageError(
            f"source is of type {type(source).__name__}, {kind.kind} takes a {kind.__name__} or a path",
            f'Give a plan, what pplan.export("{kind.kind}", plan) returns, or the path of its file.',
        )
    return source


def resolve_document(
    source: Plan | E | str | Path, kind: type[E], export: Callable[..., tuple[E, str | None]]
) -> E:
    """The document that `export` makes of a plan, with a UserWarning where that is not the plan itself; else
    as `load_document`.

    Raises UsageError, FileError, ExportError.
    """
    if not isinstance(source, Plan):
        return load_document(source, kind)
    document, remark = export(source, device=default_device(source), made_by=MadeBy())
    if remark:
        warnings.warn(remark, UserWarning, stacklevel=3)
    return document


def default_device(plan: Plan) -> str:
    """`cpu` or `cuda`: what the plan is for."""
    return "cpu" if plan.device_kind == "CPU" else "cuda"


def hash_layers(plan: Plan) -> str:
    """The hash of the plan's layer names; empty where the plan does not tell them."""
    return plan.profile.layers_sha256 or (hash_names(plan.layer_names) if plan.layer_names else "")


def hash_names(names: Sequence[str]) -> str:
    """SHA-256 of layer names, one a line."""
    return sha256("\n".join(names))


def check_layers(
    document: ExportDocument, layers: int, model: nn.Module, names: Sequence[str] | None
) -> nn.Sequential:
    """`model`. Raises ExportError where it is no nn.Sequential of the `layers` layers of the document.

    `names` are those of the model's layers in its profile; None takes those that `pplan.sequential` gave it.
    An nn.Sequential that knows none is only counted.
    """
    from torch import nn

    name = getattr(model, "model_name", "") or type(model).__name__
    if not isinstance(model, nn.Sequential):
        raise ExportError(
            f"{document.kind} takes an nn.Sequential of {document.model}'s {layers} layers, "
            f"the model is of type {name}",
            "Give an example_input, too, or pplan.sequential(model, example_input).",
        )
    if names is None:
        own_names = getattr(model, "layer_names", ())
        names = own_names if isinstance(own_names, tuple) and len(own_names) == layers else ()
    check_names(document, layers, len(model), names, name)
    return model


def check_names(document: ExportDocument, layers: int, count: int, names: Sequence[str], model: str) -> None:
    """Raises ExportError where the `count` layers of `model`, called `names` where it knows them, are not the
    `layers` that the document was made for."""
    if count != layers:
        raise ExportError(
            f"the {document.kind} file is for {document.model} with {layers} layers, "
            f"the model ({model}) has {count}",
            "Give it pplan.sequential(model, example_input) of that model, or make a plan for this one.",
        )
    if names and document.layers_sha256 not in ("", hash_names(names)):
        raise ExportError(
            f"the {document.kind} file is for {document.model}, whose layers have the hash "
            f"{document.layers_sha256[:12]}, those of the model ({model}) have {hash_names(names)[:12]} "
            f"({names[0]} to {names[-1]})",
            "Give it the model of the file, or make a plan for this one.",
        )


def missing_package(runtime: str, error: ImportError) -> MachineError:
    """The error for a runtime whose package cannot be imported."""
    return MachineError(
        f"{runtime} cannot be imported: {error}", f'Install it: pip install "pplan[{runtime}]"'
    )


def stage_bounds(balance: Sequence[int]) -> list[int]:
    """The bounds of the stages: stage i holds layers bounds[i] up to, not including, bounds[i + 1]."""
    return [0, *accumulate(balance)]

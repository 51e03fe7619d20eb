"""The file a training script reads: what every runtime's has in common, and the check of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self, TypeVar

from pydantic import Field, ValidationError

from ..cost_models.document import Document, sha256
from ..cost_models.errors import ExportError, FileError, MachineError
from ..planner.plan_file import Plan

if TYPE_CHECKING:
    from torch import nn

Count = Annotated[int, Field(ge=1)]


class Exported(Document):
    """A plan in a runtime's own words (`NAME.RUNTIME.json`); `kind` is the runtime's name."""

    schema_version: int = Field(default=1, alias="schema", ge=1, le=1)
    runtime: str
    model: str
    layers_sha256: str = ""
    """Of the names of the model's layers, one a line, as in the plan."""
    mini_batch: Count
    micro_batch_size: Count
    step_seconds: float
    """Predicted seconds of a step."""

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """The document in `text`; `where` names it in errors. Raises FileError for anything else.

        Not Document.parse, which tells files apart by their keys: here the value of `runtime` does.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            field = "".join(f"{part}: " for part in first["loc"][:1])
            raise FileError(
                f"{where}: not a file for {cls.kind}: {field}{first['msg']}",
                f"Make it with `pplan export {cls.kind}`, or name another file.",
            ) from error


E = TypeVar("E", bound=Exported)


def opened(source: E | Path, kind: type[E]) -> E:
    """`source` itself, or the document of class `kind` in the file it names. Raises FileError."""
    return kind.load(source) if isinstance(source, Path) else source


def layers_hash(plan: Plan) -> str:
    """The hash of the plan's layer names; empty where the plan does not tell them."""
    return plan.profile.layers_sha256 or (names_hash(plan.layer_names) if plan.layer_names else "")


def names_hash(names: Sequence[str]) -> str:
    """SHA-256 of layer names, one a line."""
    return sha256("\n".join(names))


def check_layers(document: Exported, layers: int, model: nn.Sequential, names: Sequence[str] | None) -> None:
    """Raises ExportError where `model` has not the `layers` layers the document was made for.

    `names` are those of the model's layers in its profile; None takes those that `pplan.sequential` gave it.
    An nn.Sequential that knows none is only counted.
    """
    name = getattr(model, "model_name", "") or type(model).__name__
    if len(model) != layers:
        raise ExportError(
            f"the {document.kind} file is for {document.model} with {layers} layers, "
            f"the model ({name}) has {len(model)}",
            "Give it pplan.sequential(model, example_input) of that model, or make a plan for this one.",
        )
    if names is None:
        known = getattr(model, "layer_names", ())
        names = known if isinstance(known, tuple) and len(known) == layers else ()
    if names and document.layers_sha256 not in ("", names_hash(names)):
        raise ExportError(
            f"the {document.kind} file is for {document.model}, whose layers have the hash "
            f"{document.layers_sha256[:12]}, those of the model ({name}) have {names_hash(names)[:12]} "
            f"({names[0]} to {names[-1]})",
            "Give it the model of the file, or make a plan for this one.",
        )


def missing_package(runtime: str, error: ImportError) -> MachineError:
    """The error for a runtime whose package cannot be imported."""
    return MachineError(
        f"{runtime} cannot be imported: {error}", f'Install it: pip install "pplan[{runtime}]"'
    )

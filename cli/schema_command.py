"""`pplan schema`: the JSON Schema of pplan's files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cost_models.errors import UsageError

if TYPE_CHECKING:
    from ..cost_models.document import Document

DIALECT = "https://json-schema.org/draft/2020-12/schema"
DOCUMENTS: Mapping[str, tuple[str, str]] = {
    "profile": ("profiler.profile_file", "Profile"),
    "plan": ("planner.plan_file", "Plan"),
    "simulation": ("api.simulate", "SimulationFile"),
    "explanation": ("planner.explanation.explanation", "Explanation"),
    "comparison": ("planner.explanation.compare", "PlanComparison"),
    "frontier": ("planner.objectives.frontier", "Frontier"),
    "sweep": ("planner.problem_grid", "SweepResult"),
    "check": ("runtimes.checking.records", "Check"),
    "machine": ("profiler.machine_file", "MachineFile"),
    "calibration": ("runtimes.checking.prediction", "Calibration"),
}
"""By kind of file, where its document is."""


def schema_command(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND", help=f"One of {', '.join(DOCUMENTS)}; default: lists them.", show_default=False
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of a kind of file.

    Editors and other programs use it.
    """
    from .streams import result

    if kind is None:
        result("".join(f"{name}\n" for name in DOCUMENTS))
    elif kind not in DOCUMENTS:
        raise UsageError(
            f"schema {kind}: there is no such kind of file", f"There are: {', '.join(DOCUMENTS)}."
        )
    else:
        result(json.dumps(document_schema(kind), indent=1) + "\n")


def document_schema(kind: str) -> dict[str, Any]:
    """The schema of a kind of file, in which keys that pplan does not know may stand, too."""
    module, name = DOCUMENTS[kind]
    document: type[Document] = getattr(import_module(f"pplan.{module}"), name)
    make: Callable[..., dict[str, Any]] = document.model_json_schema
    return {"$schema": DIALECT, "title": f"pplan {kind}", **make(by_alias=True)}

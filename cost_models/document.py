"""Versioned JSON files of pplan, written whole or not at all, and refused with a reason.

The types of their fields check every value against its range when it is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from pydantic_core import ErrorDetails, PydanticSerializationError

from .errors import FileError, short_repr
from .quantities import (
    LEAST_PREDICTED_SECONDS,
    MOST_BYTES,
    MOST_DEVICES,
    MOST_LAYERS,
    MOST_MEMBERS,
    MOST_MICRO_BATCHES,
    MOST_MINI_BATCH,
    MOST_NAME,
    MOST_PREDICTED_SECONDS,
    MOST_RATIO,
    MOST_SAMPLES,
    MOST_SECONDS,
    MOST_TOTAL_BYTES,
)
from .runtime import RUNTIMES
from .text_files import FOR_A_RUNTIME, add_hash, escape_surrogates, list_kinds, read_text, write_whole


def _not_too_short(seconds: float) -> float:
    """Refuse less than the shortest predicted time. pydantic would write the limit without an exponent."""
    if seconds < LEAST_PREDICTED_SECONDS:
        raise ValueError(f"Input should be at least {LEAST_PREDICTED_SECONDS:g}")
    return seconds


LayerName = Annotated[str, Field(min_length=1, max_length=MOST_NAME)]
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
PredictedSeconds = Annotated[float, Field(ge=0, le=MOST_PREDICTED_SECONDS)]
StepSeconds = Annotated[float, Field(gt=0, le=MOST_PREDICTED_SECONDS), AfterValidator(_not_too_short)]
Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]
TotalBytes = Annotated[int, Field(ge=0, le=MOST_TOTAL_BYTES)]
Ratio = Annotated[float, Field(ge=-MOST_RATIO, le=MOST_RATIO)]
Rate = Annotated[float, Field(ge=0, le=MOST_RATIO)]
"""Rate per second, such as samples per second."""
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
MiniBatch = Annotated[int, Field(ge=1, le=MOST_MINI_BATCH)]
"""Samples of a mini-batch or a micro-batch."""
Dimension = Annotated[int, Field(ge=1, le=MOST_MINI_BATCH)]
"""Size of a dimension of a tensor."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
MicroBatches = Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES)]
LayerCount = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
LayerIndex = Annotated[int, Field(ge=0, lt=MOST_LAYERS)]
LayerBound = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
"""Number of layers before a position."""
DeviceCount = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
MemberCount = Annotated[int, Field(ge=1, le=MOST_MEMBERS)]
"""Number of members of a level of links, such as a node."""
DeviceIndex = Annotated[int, Field(ge=0, lt=MOST_DEVICES)]
ZeroStage = Annotated[int, Field(ge=0, le=3)]


def _all_finite(content: dict[str, Any]) -> dict[str, Any]:
    """Refuse infinite and NaN values in foreign content. JSON has none, but 1e400 is read as infinity."""
    json.dumps(content, allow_nan=False, default=str)
    return content


JsonObject = Annotated[dict[str, Any], AfterValidator(_all_finite)]
"""Keys and values that pplan does not define."""


class Record(BaseModel):
    """Frozen part of a document. Unknown keys are ignored."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", allow_inf_nan=False, populate_by_name=True, defer_build=True
    )


class MadeBy(Record):
    """Origin of a document: versions and the time (ISO 8601, UTC), for a profile also the command line."""

    pplan: str = ""
    command: str = ""
    time: str = ""
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None

    @model_serializer(mode="wrap")
    def _without_command(self, write: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        """Omit the command line unless the document keeps it."""
        content = write(self)
        if not (info.context or {}).get(_KEEPS_COMMAND):
            content.pop("command", None)
        return content


_KEEPS_COMMAND = "keeps_command"


class Document(Record):
    """File of pplan.

    The kind of a file for a training runtime is the runtime's name.

    Attributes:
        kind: Name of this kind of file in messages.
        newest_schema: Newest known version.
    """

    kind: ClassVar[str] = "document"
    newest_schema: ClassVar[int] = 1
    keeps_command: ClassVar[bool] = False
    """True if the file records the command that made it. Files that people share do not."""

    schema_version: int = Field(default=1, alias="schema", ge=1, le=MOST_BYTES)

    def __str__(self) -> str:
        """Return the short `repr`. That of pydantic lists every field of a file."""
        return repr(self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and validate the file at `path`.

        Raises:
            FileError: The file is missing, unreadable, truncated, of another kind, or newer than this pplan,
                or a field has a value that is not allowed (named with what was expected).
        """
        return cls.parse(read_text(Path(path), cls.kind), str(path))

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """Read and validate the text of a file.

        Args:
            text: Text of the file.
            where: Name of the file for messages.

        Raises:
            FileError: See `load`.
        """
        _check_content(_parse_json(text, where, cls.kind), where, cls)
        try:
            # Strict: "0.01" is no number and 1.0 no count; a whole number may stand for seconds.
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise _refusal(error, where, cls.kind) from error

    def to_json(self) -> str:
        """Return the text of the file with the hash of its content (see text_files.py)."""
        context = {_KEEPS_COMMAND: self.keeps_command}
        try:
            text = self.model_dump_json(by_alias=True, indent=1, context=context)
        except PydanticSerializationError:
            content = escape_surrogates(self.model_dump(by_alias=True, context=context))
            text = (
                type(self).model_validate(content).model_dump_json(by_alias=True, indent=1, context=context)
            )
        return add_hash(text) + "\n"

    def files(self, path: Path) -> dict[Path, str]:
        """Return the texts by path: the file at `path`, and those that accompany it."""
        return {path: self.to_json()}

    def save(self, path: str | Path, *, force: bool) -> None:
        """Write the file and those that accompany it.

        Args:
            path: Path of the file.
            force: Whether existing files are replaced.

        Raises:
            FileError: A file exists or cannot be written.
        """
        for file, text in self.files(Path(path)).items():
            write_whole(file, text, force=force)


_VERBS = {
    "profile": "profile",
    "plan": "solve",
    "simulation": "simulate",
    "machine": "machine measure",
    "frontier": "solve frontier=True",
    **{name: f"export {name}" for name in RUNTIMES},
}


def _file_words(kind: str) -> str:
    return f"{kind} file" if kind in RUNTIMES else kind


def _again(kind: str) -> str:
    return f"Make it again with `pplan {_VERBS.get(kind, kind)}`, or name another file."


def _parse_json(text: str, where: str, kind: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = _again(kind)
        if kind == "profile" and where.lower().endswith((".csv", ".tsv", ".txt")):
            hint = f"A table of costs becomes a profile first: pplan import {where}"
        raise FileError(f"{where}: not a whole JSON file (line {error.lineno}: {error.msg})", hint) from error
    except RecursionError as error:
        raise FileError(
            f"{where}: not a {_file_words(kind)} of pplan: nested too deep", _again(kind)
        ) from error
    except ValueError as error:
        raise FileError(
            f"{where}: not a {_file_words(kind)} of pplan: a number is too long", _again(kind)
        ) from error


def _check_content(content: Any, where: str, document: type[Document]) -> None:
    """Check that the content is of this kind of file and not newer than this pplan.

    Raises:
        FileError: The file is of another kind or newer.
    """
    kind, name = document.kind, _file_words(document.kind)
    if not isinstance(content, dict) or "schema" not in content:
        raise FileError(f"{where}: not a {name} of pplan (it has no key 'schema')", _again(kind))
    kinds, expected = list_kinds(content), FOR_A_RUNTIME if kind in RUNTIMES else kind
    if kinds and expected not in kinds:
        raise FileError(f"{where}: this is a {kinds[0]}, a {name} is needed here", _again(kind))
    version = content["schema"]
    if isinstance(version, int) and version > document.newest_schema:
        raise FileError(
            f"{where}: schema is {version}, this pplan reads {name}s up to {document.newest_schema}",
            "Install the pplan that wrote it, or newer: pip install --upgrade pplan",
        )


def _refusal(error: ValidationError, where: str, kind: str) -> FileError:
    first = error.errors()[0]
    field = "".join(f"{part}." for part in first["loc"])
    at = f"{field[:-1]}: " if field else ""
    message = first["msg"].removeprefix("Value error, ")
    more = error.error_count() - 1
    return FileError(
        f"{where}: {at}{message}{_input_text(first)}" + (f" (and {more} more)" if more else ""),
        f"Mend the file, or make it again with `pplan {_VERBS.get(kind, kind)}`.",
    )


def _input_text(error: ErrorDetails) -> str:
    """Return the wrong value as text, or nothing if it is missing or a whole object."""
    value = error["input"]
    if error["type"] == "missing" or not error["loc"] or isinstance(value, dict):
        return ""
    return f", the value is {short_repr(value)}"

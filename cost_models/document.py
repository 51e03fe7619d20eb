"""A document: one of pplan's versioned JSON files, written whole or not at all, refused with a reason."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import FileError


class Record(BaseModel):
    """A frozen part of a document. Keys it does not know may stand beside its own."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)


class MadeBy(Record):
    """What wrote a document: versions, the command line and the time (ISO 8601, UTC)."""

    pplan: str = ""
    command: str = ""
    time: str = ""
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None


class Document(Record):
    """A whole file. `kind` is the word a message uses for it, `newest_schema` the newest version known."""

    kind: ClassVar[str] = "document"
    newest_schema: ClassVar[int] = 1

    schema_version: int = Field(default=1, alias="schema", ge=1)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads and validates the file at `path`.

        Raises FileError: missing, unreadable, truncated, of another kind, newer than this pplan, or with a
        field whose value is not allowed (named with what was expected).
        """
        return cls.parse(read_text(path, cls.kind), str(path))

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """As `load`, from the text of a file; `where` names it in errors."""
        content = _parse_object(text, where, cls.kind)
        version = content.get("schema")
        if isinstance(version, int) and version > cls.newest_schema:
            raise FileError(
                f"{where}: schema is {version}, this pplan reads {cls.kind}s up to {cls.newest_schema}",
                "Install the pplan that wrote it, or newer: pip install --upgrade pplan",
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise _refusal(error, where, cls.kind) from error

    def to_json(self) -> str:
        """The text of the file, keys as in the file."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"

    def save(self, path: Path, *, force: bool) -> None:
        """Writes the file; an existing one is replaced only with `force`. Raises FileError."""
        write_whole(path, self.to_json(), force=force)


def read_text(path: Path, kind: str) -> str:
    """The text of a file. Raises FileError, with `kind` in the message."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileError(f"{path}: no such {kind} file", f"Name an existing {kind} file.") from None
    except UnicodeDecodeError:
        raise FileError(
            f"{path}: not a text file, so not a {kind}", f"Name a {kind} file of pplan."
        ) from None
    except OSError as error:
        raise FileError(
            f"{path}: cannot be read: {error.strerror}", "Check the path and its rights."
        ) from error


def write_whole(path: Path, text: str, *, force: bool) -> None:
    """Writes `text` to a temporary file beside `path` and renames it: the file is whole or untouched.

    Raises FileError where `path` exists and `force` is not given, or where the disk refuses.
    """
    if path.exists() and not force:
        raise FileError(f"{path} exists already", "Give --force to replace it, or another name with -o.")
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        raise FileError(
            f"{path}: cannot be written: {error.strerror or error}",
            "Nothing was changed. Free some space, or name another place with -o.",
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def sha256(text: str) -> str:
    """Hexadecimal SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _parse_object(text: str, where: str, kind: str) -> dict[str, Any]:
    again = f"Make it again with `pplan {_VERBS.get(kind, kind)}`, or name another file."
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise FileError(
            f"{where}: not a whole JSON file (line {error.lineno}: {error.msg})", again
        ) from error
    if not isinstance(content, dict) or "schema" not in content:
        raise FileError(f"{where}: not a {kind} of pplan (it has no key 'schema')", again)
    other = next((name for name, key in _KEYS.items() if name != kind and key in content), None)
    if other is not None and _KEYS.get(kind, kind) not in content:
        raise FileError(f"{where}: this is a {other}, a {kind} is needed here", again)
    return content


_KEYS = {"profile": "layers", "plan": "prediction", "file for a runtime": "step_seconds"}
"""A key at the top of a file that only files of this kind have."""
_VERBS = {"profile": "profile", "plan": "solve"}


def _refusal(error: ValidationError, where: str, kind: str) -> FileError:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or kind
    value = repr(first["input"])
    seen = (
        "" if first["type"] == "missing" else f", the value is {value[:80]}{'…' if len(value) > 80 else ''}"
    )
    more = error.error_count() - 1
    return FileError(
        f"{where}: {field}: {first['msg']}{seen}" + (f" (and {more} more)" if more else ""),
        f"Mend the file, or make it again with `pplan {_VERBS.get(kind, kind)}`.",
    )

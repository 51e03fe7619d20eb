"""Errors that a user can meet. `pplan.cli.app.main` turns them into two lines and an exit status.

    PplanError                      2  the user or the machine must change something
    ├── UsageError                  2  invalid value of an option or argument
    ├── FileError                   2  unreadable, foreign or damaged file, or a file that cannot be written
    ├── ModelError                  2  unknown model, or one that cannot be built, cut or run
    ├── MachineError                2  missing package, device or memory
    ├── ExportError                 2  plan that the runtime cannot run
    └── InfeasibleError             3  no plan fits

A message names an option by its field, in Python's notation: `micro_batches=3: must divide 8`, "omit
`robust`". The command line turns fields into its options (`pplan.cli.field_names`). No other text names an
option.

Exit status 1 is reserved for defects of pplan (`DefectError` and unforeseen exceptions), 130 for an
interruption.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LONGEST_WORD, SHORT, LONGEST = 320, 80, 2_000
"""Most characters of a word (a path may be long), of the visible part of a longer word, and of a message."""


def short_repr(value: object) -> str:
    """Return `repr(value)`, cut to `SHORT` characters."""
    text = repr(value)
    return f"{text[:SHORT]}…" if len(text) > SHORT else text


def _shortened(text: str) -> str:
    """Shorten long words, which are mostly repeated input, and cut the message to `LONGEST` characters."""
    if len(text) > LONGEST_WORD:
        text = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda word: f"{word[0][:SHORT]}…", text)
    return f"{text[:LONGEST]}…" if len(text) > LONGEST else text


class PplanError(Exception):
    """Base class of all errors that a user can meet.

    Args:
        what: What happened, where, and with which value.
        hint: What to do about it.
    """

    exit_status = 2
    kind = "error"

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.what = _shortened(what)
        self.hint = _shortened(hint)

    def __str__(self) -> str:
        return f"{self.what}\n{self.hint}" if self.hint else self.what

    @property
    def as_json(self) -> dict[str, Any]:
        """Value that `json` output prints under the key `error`."""
        return {"status": self.exit_status, "kind": self.kind, "message": self.what, "advice": self.hint}


class UsageError(PplanError):
    """An option or an argument has a value that cannot be used."""

    kind = "usage"


class FileError(PplanError):
    """A file cannot be read, is not a file of pplan, is damaged, or cannot be written."""

    kind = "file"


class ModelError(PplanError):
    """A model is unknown, or its factory, its cutting into layers or its run failed."""

    kind = "model"


class MachineError(PplanError):
    """The machine lacks something: a package, a device, memory."""

    kind = "machine"


class ExportError(PplanError):
    """A plan cannot be run by the runtime it is exported for."""

    kind = "export"


class InfeasibleError(PplanError):
    """No plan of the searched space fits the limits.

    Args:
        details: JSON values. `stage` is the tightest stage of the plan that needs the least memory (number,
            stages, first and last layer, replicas, memory_bytes), `ledger` its bytes by term. `limit_bytes`
            and `missing_bytes` compare it with the limit. `would_fit` lists changes with which a plan fits.
    """

    exit_status = 3
    kind = "infeasible"

    def __init__(self, what: str, hint: str = "", details: Mapping[str, Any] | None = None) -> None:
        super().__init__(what, hint)
        self.details = dict(details or {})

    @property
    def as_json(self) -> dict[str, Any]:
        """Value under `error`, with the known `details` of the stage that is too large."""
        return super().as_json | self.details


class DefectError(Exception):
    """Two results of pplan contradict each other. This is a defect of pplan, never a user error."""

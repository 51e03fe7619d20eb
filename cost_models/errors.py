"""The errors a user can meet, as a tree; `pplan.cli.app.main` turns them into two lines and an exit status.

    PplanError                      2  what the user or the machine must change
    ├── UsageError                  2  an option or argument with a value that cannot be
    ├── FileError                   2  a file that cannot be read, is not ours, or cannot be written
    ├── ModelError                  2  a model that is unknown, cannot be built, cut or run
    ├── MachineError                2  a missing package, device or memory
    ├── ExportError                 2  a plan that the runtime cannot run
    └── InfeasibleError             3  no plan fits

A message names an option by its field, in Python's words: `micro_batches=3: must divide 8`, "omit `robust`".
The command line turns fields into its options (`pplan.cli.field_names`); no other text names an option.

Exit status 1 is kept for defects of pplan itself (`DefectError`, beside whatever else is raised unforeseen),
130 for an interruption.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LONGEST_WORD, SHORT, LONGEST = 320, 80, 2_000
"""Characters of a word of a message (a path may be long), of what is shown of a longer one, of a message."""


def short_repr(value: object) -> str:
    """The value as text, cut where it is long."""
    text = repr(value)
    return f"{text[:SHORT]}…" if len(text) > SHORT else text


def _shortened(text: str) -> str:
    """The message without most of what it repeats of a long input."""
    if len(text) > LONGEST_WORD:
        text = re.sub(rf"\S{{{LONGEST_WORD},}}", lambda word: f"{word[0][:SHORT]}…", text)
    return f"{text[:LONGEST]}…" if len(text) > LONGEST else text


class PplanError(Exception):
    """What happened, where and with which value (`what`), and what to do about it (`hint`)."""

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
        """What `json` prints under the key `error`."""
        return {"status": self.exit_status, "kind": self.kind, "message": self.what, "advice": self.hint}


class UsageError(PplanError):
    """An option or an argument has a value that cannot be used."""

    kind = "usage"


class FileError(PplanError):
    """A file cannot be read, is not one of ours, is damaged, or cannot be written."""

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

    `details`, as JSON holds them: the tightest `stage` of the plan that needs the least memory (number,
    stages, first and last layer, replicas, memory_bytes), its `ledger` (bytes by term), `limit_bytes` and
    `missing_bytes`; and `would_fit`, the changes with which a plan fits.
    """

    exit_status = 3
    kind = "infeasible"

    def __init__(self, what: str, hint: str = "", details: Mapping[str, Any] | None = None) -> None:
        super().__init__(what, hint)
        self.details = dict(details or {})

    @property
    def as_json(self) -> dict[str, Any]:
        """With the stage that is too large, its ledger, and what would fit, where they are known."""
        return super().as_json | self.details


class DefectError(Exception):
    """Two results of pplan contradict each other: an error in pplan itself, never the user's."""

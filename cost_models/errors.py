"""The errors a user can meet, as a tree; `pplan.cli.app.main` turns them into two lines and an exit status.

    PplanError                      2  what the user or the machine must change
    ├── UsageError                  2  an option or argument with a value that cannot be
    ├── FileError                   2  a file that cannot be read, is not ours, or cannot be written
    ├── ModelError                  2  a model that is unknown, cannot be built, cut or run
    ├── MachineError                2  a missing package, device or memory
    ├── ExportError                 2  a plan that the runtime cannot run
    └── InfeasibleError             3  no plan fits

Exit status 1 is kept for defects of pplan itself (`DefectError`, beside whatever else is raised unforeseen),
130 for an interruption.
"""

from __future__ import annotations


class PplanError(Exception):
    """What happened, where and with which value (`what`), and what to do about it (`hint`)."""

    exit_status = 2

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}\n{self.hint}" if self.hint else self.what


class UsageError(PplanError):
    """An option or an argument has a value that cannot be used."""


class FileError(PplanError):
    """A file cannot be read, is not one of ours, is damaged, or cannot be written."""


class ModelError(PplanError):
    """A model is unknown, or its factory, its cutting into layers or its run failed."""


class MachineError(PplanError):
    """The machine lacks something: a package, a device, memory."""


class ExportError(PplanError):
    """A plan cannot be run by the runtime it is exported for."""


class InfeasibleError(PplanError):
    """No plan of the searched space fits the limits."""

    exit_status = 3


class DefectError(Exception):
    """Two things that pplan computed contradict each other: a defect of pplan itself, never the user's."""

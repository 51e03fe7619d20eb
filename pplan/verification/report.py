"""What was checked, line by line: each is ok, differs, or was not checked, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Literal, NoReturn

from ..cost_models.errors import UsageError

TOLERANCE = 1e-9
"""Share by which a figure may differ: both sides add floats up, in another order."""
EXACT = 1e-8
"""The gap up to which a plan may be called exact."""
ROUNDING = 1.0
"""Bytes by which a term of a ledger may: terms are rounded."""

State = Literal["ok", "differs", "not checked"]
Value = float | int | str | None


@dataclass(frozen=True)
class Line:
    """`said`: what the plan says; `found`: what was worked out; None where there is nothing to compare.
    `detail`: what was checked, or why it was not."""

    name: str
    state: State
    detail: str
    said: Value = None
    found: Value = None


@dataclass(frozen=True)
class Report:
    """All lines of a plan."""

    plan: str
    profile: str
    lines: tuple[Line, ...]

    @property
    def agrees(self) -> bool:
        """Whether no line differs."""
        return not self.differing

    @property
    def differing(self) -> list[Line]:
        """The lines that differ."""
        return [line for line in self.lines if line.state == "differs"]

    @property
    def unchecked(self) -> list[Line]:
        """The lines that were not checked."""
        return [line for line in self.lines if line.state == "not checked"]

    def line(self, name: str) -> Line:
        """The line of that name. Raises KeyError."""
        found = {line.name: line for line in self.lines}
        return found[name]

    def to_json(self) -> str:
        """As text."""
        made = {"plan": self.plan, "profile": self.profile, "agrees": self.agrees}
        return json.dumps(made | {"lines": [asdict(line) for line in self.lines]}, indent=1) + "\n"


class _Stop(Exception):
    """A line is done."""

    def __init__(self, state: State, detail: str, said: Value = None, found: Value = None) -> None:
        super().__init__(detail)
        self.state, self.detail, self.said, self.found = state, detail, said, found


@dataclass
class LineCheck:
    """What a line compares; the first difference ends it. `detail`: what is said where all agrees."""

    detail: str

    def same(self, what: str, said: object, found: object) -> None:
        """Equal exactly."""
        if said != found:
            raise _Stop("differs", what, _plain(said), _plain(found))

    def near(self, what: str, said: float, found: float, *, around: float = 0.0) -> None:
        """Equal within `TOLERANCE` of the larger (of `around`, where that is larger still)."""
        fine = isfinite(found) and abs(said - found) <= TOLERANCE * max(abs(said), abs(found), around)
        if not fine:
            raise _Stop("differs", what, said, found)

    def bytes(self, what: str, said: float, found: float) -> None:
        """Equal within rounding."""
        if not abs(said - found) <= max(ROUNDING, TOLERANCE * abs(found)):
            raise _Stop("differs", what, said, round(found))

    def at_most(self, what: str, said: float, limit: float) -> None:
        """Not above a limit, but for rounding."""
        if said > limit + TOLERANCE * abs(limit):
            raise _Stop("differs", what, said, limit)

    def holds(self, what: str, fine: bool, said: object = None, found: object = None) -> None:
        """A condition; `what` in words where it does not hold."""
        if not fine:
            raise _Stop("differs", what, _plain(said), _plain(found))

    def leave(self, why: str) -> NoReturn:
        """The line cannot be checked."""
        raise _Stop("not checked", why)


@dataclass
class Sheet:
    """The lines so far."""

    lines: list[Line] = field(default_factory=list)

    @contextmanager
    def line(self, name: str, detail: str) -> Iterator[LineCheck]:
        """A line: `detail` says what is checked, where all of it agrees."""
        check = LineCheck(detail)
        try:
            yield check
        except _Stop as stop:
            self.lines.append(Line(name, stop.state, stop.detail, stop.said, stop.found))
        except NotLegal as error:
            self.lines.append(Line(name, "differs", str(error)))
        except NotChecked as error:
            self.lines.append(Line(name, "not checked", str(error)))
        except UsageError as error:
            self.lines.append(Line(name, "differs", error.what))
        else:
            self.lines.append(Line(name, "ok", check.detail))


def _plain(value: object) -> Value:
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Sequence):
        shown = ", ".join(map(str, value[:16]))
        return f"{shown}, … ({len(value)})" if len(value) > 16 else shown
    return str(value)


class NotLegal(Exception):
    """The plan says what cannot be."""


class NotChecked(Exception):
    """The files do not say enough, or too much to go through."""

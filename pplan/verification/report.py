"""The report of a verification, line by line: each is ok, differs, or was not checked, with the reason."""

from __future__ import annotations

import json
import warnings
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

OLD_NAMES = {"said": "plan_value", "found": "expected_value"}

State = Literal["ok", "differs", "not checked"]
Value = float | int | str | None


@dataclass(frozen=True)
class Line:
    """`plan_value`: in the plan; `expected_value`: computed here; None where there is nothing to compare.
    `detail`: what was checked, or why it was not."""

    name: str
    state: State
    detail: str
    plan_value: Value = None
    expected_value: Value = None

    def __getattr__(self, name: str) -> Value:
        """The values under the names that they had until 0.1; the next release knows them no more."""
        if name not in OLD_NAMES:
            raise AttributeError(name)
        warnings.warn(f"`{name}` of a line is called `{OLD_NAMES[name]}`", DeprecationWarning, stacklevel=2)
        value: Value = getattr(self, OLD_NAMES[name])
        return value


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
        return {line.name: line for line in self.lines}[name]

    def to_json(self) -> str:
        """As JSON; the values of a line also under their old names."""
        old_values = [{old: getattr(line, new) for old, new in OLD_NAMES.items()} for line in self.lines]
        lines = [asdict(line) | old for line, old in zip(self.lines, old_values, strict=True)]
        document = {"plan": self.plan, "profile": self.profile, "agrees": self.agrees, "lines": lines}
        return json.dumps(document, indent=1) + "\n"


class _LineDone(Exception):
    """Ends the checks of a line."""

    def __init__(
        self, state: State, detail: str, plan_value: Value = None, expected_value: Value = None
    ) -> None:
        super().__init__(detail)
        self.state, self.detail, self.plan_value, self.expected_value = (
            state,
            detail,
            plan_value,
            expected_value,
        )


@dataclass
class LineCheck:
    """The checks of a line; the first difference ends it. `detail`: the text of a line that agrees."""

    detail: str

    def same(self, what: str, plan_value: object, expected_value: object) -> None:
        """Equal exactly."""
        if plan_value != expected_value:
            raise _LineDone("differs", what, _plain(plan_value), _plain(expected_value))

    def near(self, what: str, plan_value: float, expected_value: float, *, around: float = 0.0) -> None:
        """Equal within `TOLERANCE` of the larger (of `around`, where that is larger still)."""
        fine = isfinite(expected_value) and abs(plan_value - expected_value) <= TOLERANCE * max(
            abs(plan_value), abs(expected_value), around
        )
        if not fine:
            raise _LineDone("differs", what, plan_value, expected_value)

    def bytes(self, what: str, plan_value: float, expected_value: float) -> None:
        """Equal within rounding."""
        if not abs(plan_value - expected_value) <= max(ROUNDING, TOLERANCE * abs(expected_value)):
            raise _LineDone("differs", what, plan_value, round(expected_value))

    def at_most(self, what: str, plan_value: float, limit: float) -> None:
        """Not above a limit, but for rounding."""
        if plan_value > limit + TOLERANCE * abs(limit):
            raise _LineDone("differs", what, plan_value, limit)

    def require(
        self, what: str, fine: bool, plan_value: object = None, expected_value: object = None
    ) -> None:
        """A condition; `what` in words where it does not hold."""
        if not fine:
            raise _LineDone("differs", what, _plain(plan_value), _plain(expected_value))

    def skip(self, why: str) -> NoReturn:
        """The line cannot be checked."""
        raise _LineDone("not checked", why)


@dataclass
class ReportBuilder:
    """The lines so far."""

    lines: list[Line] = field(default_factory=list)

    @contextmanager
    def line(self, name: str, detail: str) -> Iterator[LineCheck]:
        """A line: `detail` says what is checked, where all of it agrees."""
        check = LineCheck(detail)
        try:
            yield check
        except _LineDone as stop:
            self.lines.append(Line(name, stop.state, stop.detail, stop.plan_value, stop.expected_value))
        except ImpossiblePlan as error:
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
        text = ", ".join(map(str, value[:16]))
        return f"{text}, … ({len(value)})" if len(value) > 16 else text
    return str(value)


class ImpossiblePlan(Exception):
    """The plan has values that no plan can have."""


class NotChecked(Exception):
    """The files lack what a check needs, or hold too much to be checked."""

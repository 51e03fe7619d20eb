"""Options: what a user may ask for, each declared once, as a field with type, default, unit and help.

The fields of an `Options` are the keyword arguments of the Python API, the options of the command line
(`pplan.cli.option_parameters` makes them) and, of a plan's, what its file says under `wishes`. They are plain
frozen dataclasses: `--help` imports no pydantic. To add an option, add a field, and use it where it matters.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from .errors import UsageError

Check = Callable[[str, Any], Any]
Own = TypeVar("Own", bound="Options")


@dataclass(frozen=True)
class Option:
    """How a field is asked for. `check`: of its name and a value, returns the value as the field holds it.

    `help`: one sentence, empty where the command line has none or its own; `form`: what stands for the value;
    `panel`: the heading of the help that it stands under. `words`: all that may be typed; `least`: of whole
    numbers; `flag`: its name on the command line where that is not the field's; `typed`: whether it is typed
    in another way than it is held (auto, 30s, 16GiB).
    """

    check: Check
    help: str = ""
    form: str | None = None
    panel: str | None = None
    words: tuple[str, ...] = ()
    least: int | None = None
    flag: str = ""
    typed: bool = False


def option(default: Any, check: Check, help: str = "", form: str | None = None, **more: Any) -> Any:
    """A field of `Options` with its declaration."""
    return field(default=default, metadata={"option": Option(check, help, form, **more)})


@dataclass(frozen=True)
class Options:
    """Fields made by `option`, checked when they are set. Raises UsageError."""

    def __post_init__(self) -> None:
        for name, own in declared(type(self)).items():
            object.__setattr__(self, name, own.check(name, getattr(self, name)))


def declared(model: type[Options]) -> dict[str, Option]:
    """The declarations of a model's fields, by their names."""
    return {each.name: each.metadata["option"] for each in fields(model) if "option" in each.metadata}


def options_from(given: Mapping[str, Any], *models: type[Options], of: str = "solve") -> list[Any]:
    """A model of each kind, with what is given for its fields. `of` names in errors whose options they are.

    Raises UsageError for a name that none has.
    """
    known = [name for model in models for name in declared(model)]
    for name in given:
        if name not in known:
            raise unknown_option(name, known, of)
    return [model(**{name: given[name] for name in declared(model) if name in given}) for model in models]


def unknown_option(name: str, known: list[str], of: str) -> UsageError:
    """What to say of a name that is no option."""
    near = difflib.get_close_matches(str(name), known, n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    return UsageError(f"{name}: is no option of {of}", f"{guess}There are: {', '.join(known)}.")

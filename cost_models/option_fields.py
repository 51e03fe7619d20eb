"""Options of commands and of the Python API, each declared once: a field with type, default, unit and help.

The fields of an `Options` are the keyword arguments of the Python API, the options of the command line
(`pplan.cli.option_parameters` makes them) and, of a plan's, what its file says under `options`. They are
plain frozen dataclasses: the help of the command line imports no pydantic. To add an option, add a field, and
use it where it matters.
"""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from . import arguments
from .errors import UsageError
from .option_readers import read_choice, read_settings, read_whole_number

Check = Callable[[str, Any], Any]
"""Of a field's name and a value: the value as the field holds it. Raises UsageError."""
Function = TypeVar("Function", bound=Callable[..., Any])
Read = Callable[[Any, str], Any]
"""Of a typed text (all, where an option repeats) and the option's name: the value. Raises UsageError."""


@dataclass(frozen=True)
class Option:
    """How a field is asked for.

    `help`: one sentence; a field without it is no option of the command line. `form`: what stands for the
    value there; `panel`: the heading of the help that it stands under; `flag`: its name where that is not the
    field's; one that begins with "no-" makes the field False. `words`: all that may be typed; `least`: the
    smallest whole number that may be; `read`: how texts are read that are not just words or numbers.
    `repeats`: it may be given several times. `default_text`: the default as it is typed, where that is not
    the value itself. `aliases`: other names of the option, which people type.
    """

    check: Check
    help: str = ""
    form: str | None = None
    panel: str | None = None
    words: tuple[str, ...] = ()
    least: int | None = None
    flag: str = ""
    read: Read | None = None
    repeats: bool = False
    default_text: str | None = None
    aliases: tuple[str, ...] = ()

    @property
    def is_count(self) -> bool:
        """Whether it is a whole number."""
        return self.least is not None

    def value(self, typed: Any, flag: str) -> Any:
        """What was typed for `flag`, a text or all of them, as a value. Raises UsageError."""
        if self.read is not None:
            return self.read(typed, flag)
        if self.words:
            return read_choice(self.words)(typed, flag)
        return typed if self.least is None else read_whole_number(self.least)(typed, flag)


def option(default: Any, check: Check, help: str = "", form: str | None = None, **more: Any) -> Any:
    """A field of `Options` with its declaration."""
    return field(default=default, metadata={"option": Option(check, help, form, **more)})


def settings_option(help: str, check: Check = arguments.settings) -> Any:
    """A field of keywords: of a factory, or keys of a configuration, typed one by one as NAME=VALUE."""
    return option(None, check, help, "NAME=VALUE", flag="set", read=read_settings, repeats=True)


@dataclass(frozen=True)
class Options:
    """Fields made by `option`, checked when they are set. Raises UsageError."""

    def __post_init__(self) -> None:
        for name, own in list_declarations(type(self)).items():
            object.__setattr__(self, name, own.check(name, getattr(self, name)))


def list_declarations(model: type[Options]) -> dict[str, Option]:
    """The declarations of a model's fields, by their names."""
    return {each.name: each.metadata["option"] for each in fields(model) if "option" in each.metadata}


def options_from(
    values: Mapping[str, Any],
    *models: type[Options],
    of: str = "solve",
    takes: Collection[str] | None = None,
) -> list[Any]:
    """A model of each kind, with what is given for its fields. A name that several have is the first one's.

    `of` names in errors whose options they are, `takes` those that it has, where that are not all.
    Raises UsageError for a name that none has.
    """
    owners: dict[str, type[Options]] = {}
    for model in models:
        for name in list_declarations(model):
            if takes is None or name in takes:
                owners.setdefault(name, model)
    for name in values:
        if name not in owners:
            raise unknown_option(name, list(owners), of)
    return [
        model(**{name: value for name, value in values.items() if owners[name] is model}) for model in models
    ]


def describe_options(
    keywords: Any, *models: type[Options], refused: Collection[str] = ()
) -> Callable[[Function], Function]:
    """Adds to a function's docstring the options that it takes as `keywords`, a TypedDict, but for those that
    it refuses, as the `models` declare them."""
    declarations = {own.name: own for model in reversed(models) for own in fields(model)}
    lines = ["Options:"]
    for name in (name for name in keywords.__annotations__ if name not in refused):
        annotation, own = keywords.__annotations__[name], declarations[name]
        kind = getattr(annotation, "__forward_arg__", str(annotation))
        if kind.startswith("Required["):
            lines.append(f"    {name}: {kind.removeprefix('Required[').removesuffix(']')}")
        else:
            lines.append(f"    {name}: {kind} = {own.default!r}")
        lines += textwrap.wrap(
            own.metadata["option"].help, 100, initial_indent=" " * 8, subsequent_indent=" " * 8
        )

    def add(function: Function) -> Function:
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", *lines])
        return function

    return add


def check_values(values: Mapping[str, Any], *models: type[Options]) -> None:
    """Each value by itself, of fields that one of the models has. Raises UsageError."""
    for model in models:
        for name, own in list_declarations(model).items():
            if name in values:
                own.check(name, values[name])


def unknown_option(name: str, names: list[str], of: str) -> UsageError:
    """The error for a name that is no option."""
    near = difflib.get_close_matches(str(name), names, n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    return UsageError(f"{name}: is no option of {of}", f"{guess}There are: {', '.join(names)}.")

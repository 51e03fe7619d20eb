"""The verbs and the program as typer takes them.

A verb's module is imported, and its options are made, when they are first asked for: the list of the verbs
needs `verb_table` alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .field_names import ENTER_ALL
from .verb_table import PROGRAM, VERBS


def _process_value(parameter: Any, context: Any, value: Any) -> Any:
    """Return the value of a parameter as it was typed, or what its callback makes of it.

    pplan reads values itself: the readers of typer import pydantic, which takes longer than all else. A flag
    from the environment, a value of typer's own options and one that is missing go the usual way.
    """
    of_typer = context.parent is None and not isinstance(value, bool | None)
    if of_typer or (parameter.required and parameter.value_is_missing(value)):
        return type(parameter).process_value(parameter, context, value)
    value = () if value is None and parameter.multiple else value
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


class _TakesText:
    """A command whose parameters take values as they are typed."""

    def get_params(self, ctx: Any) -> Any:
        """List the parameters, typer's --help too."""
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            parameter.process_value = partial(_process_value, parameter)
        return parameters


class _MadeLate(_TakesText):
    """A command whose `params`, `callback` and `help` are made when one of them is first asked for."""

    def __init__(self, verb: str, **more: Any) -> None:
        self.verb, self.entry = verb, VERBS[verb]
        super().__init__(name=verb.rpartition(" ")[2], hidden=self.entry.panel is None, **more)  # type: ignore[call-arg]
        if self.entry.examples:
            del self.params, self.callback, self.help

    def __getattr__(self, name: str) -> Any:
        if name not in ("params", "callback", "help"):
            raise AttributeError(name)
        from .option_parameters import make_command

        command = make_command(self.verb, self.entry)
        self.params, self.callback, self.help = command.params, command.callback, command.help
        return getattr(self, name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from .help import write_help

        write_help(self, self.entry, ctx, formatter)


class Verb(_MadeLate, TyperCommand):
    """A verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words.

        An argument may be the arguments of a trainer in one word, `"--degree 4 --bf16"`: a space before it
        keeps it from being taken for an option.
        """
        return super().parse_args(ctx, [f" {word}" if re.match(_TRAINER, word) else word for word in args])


class Group(_MadeLate, TyperGroup):
    """A verb that holds others."""

    def __init__(self, verb: str) -> None:
        super().__init__(verb, commands=make_verbs(f"{verb} "), invoke_without_command=True)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; without any a group prints its help."""
        return super().parse_args(ctx, args or ["--help"])


def make_verbs(group: str = "") -> dict[str, Any]:
    """Make the verbs of a group by their last words; `group`: its name with a space."""
    names = [verb for verb in VERBS if verb.startswith(group) and " " not in verb.removeprefix(group)]
    return {verb.removeprefix(group): (Group if VERBS[verb].is_group else Verb)(verb) for verb in names}


_TRAINER = r"--[\w.-]+\s|--[\w.-]*(?:layout|module_fqns_per_model_part)="
"""An option with its value in one word. pplan has no option with such a name."""


@dataclass
class Session:
    """What the options before the verb say."""

    debug: bool = False


def _print_version(version: bool) -> None:
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        try:
            print(f"pplan {installed('pplan')}")
        except PackageNotFoundError:
            print("pplan (not installed)")
        raise typer.Exit


class _Program(_TakesText, TyperGroup):
    """The command before the verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; without any it prints its help."""
        return super().parse_args(ctx, args or ["--help"])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from .help import write_help

        write_help(self, PROGRAM, ctx, formatter)


app = typer.Typer(
    name="pplan",
    cls=_Program,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback()
def options_before_the_verb(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="PPLAN_DEBUG", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[  # noqa: ARG001  typer calls _print_version with it
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Measure a PyTorch model layer by layer, and find the fastest pipeline plan for your GPUs."""
    context.ensure_object(Session).debug = debug


root: Any = typer.main.get_command(app)
"""The command made of all the above."""
root.commands |= make_verbs()


def enter_all_fields(group: Any = root) -> None:
    """Have the options of all verbs made, which enters their fields in `FIELDS`."""
    for verb in group.commands.values():
        verb.params  # noqa: B018  made by being asked for
        if isinstance(verb, Group):
            enter_all_fields(verb)


ENTER_ALL.append(enter_all_fields)

"""Options of the command line from the fields that declare them.

A command takes models, as in `def solve_command(*, machine: MachineOptions, plan_options: PlanOptions)`;
`with_options` gives it an option for every field, and hands it the models made of what is typed. A command
that takes only some fields annotates which: `Annotated[MachineOptions, Without("gpus")]`.
"""

from __future__ import annotations

import functools
import inspect
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import typer

from ..cost_models.arguments import Option, Options, list_declarations
from ..cost_models.errors import UsageError
from .field_names import TYPED, as_options, name_field
from .help import ALL_OPTIONS
from .streams import be_quiet, remark
from .verb_table import Entry

Command = Callable[..., None]
T = TypeVar("T", bound=Options)
_CONTEXT = "typer_context"


class Only(tuple[str, ...]):
    """The fields of a model that a command takes."""

    def __new__(cls, *names: str) -> Only:
        return super().__new__(cls, names)


class Without(Only):
    """The fields of a model that a command does not take."""


@dataclass(frozen=True)
class Typed(Generic[T]):
    """Options typed for a model, which the command reads only where it needs them.

    A command takes it as in `plan_options: Typed[PlanOptions]`.
    """

    model: type[T]
    fields: dict[str, Option]
    values: dict[str, Any]
    stated: set[str]

    @property
    def names(self) -> set[str]:
        """Fields whose options are typed."""
        return self.stated & self.fields.keys()

    def read(self) -> T:
        """Make the model. Raises UsageError."""
        values: dict[str, Any] = {}
        for name, option in self.fields.items():
            typed, flag = self.values[name], option_flag(name, option)
            if isinstance(typed, bool):
                values[name] = typed is not flag.startswith("--no-")
            elif name in self.stated:
                values[name] = option.value(tuple(typed) if option.repeats else typed, flag)
                TYPED.get()[name] = (values[name], typed)
        return self.model(**values)


def make_command(verb: str, entry: Entry) -> Any:
    """Make the command of a verb, with its options, as typer runs it.

    A verb's function is in the module of its group, that of a group and of other verbs in their own.
    """
    words = verb.replace("-", "_").split()
    module = "_".join(words if entry.is_group else words[:-1] or words)
    commands = import_module(f".{module}_command", __package__)
    app = typer.Typer(add_completion=False)
    common = {name: own for name, own in _COMMON.items() if entry.common_options or name != "help_all"}
    app.command()(with_options(getattr(commands, f"{'_'.join(words)}_command"), **common))
    return typer.main.get_command(app)


def option_flag(name: str, option: Option) -> str:
    """The option of a field."""
    return "--" + (option.flag or name.replace("_", "-"))


def with_options(command: Command, **common: Any) -> Command:
    """The command as typer takes it: an option for every field of the models that it takes.

    Args:
        command: Takes models, and parameters that are annotated as typer wants them.
        common: The options that every verb has, by their names.
    """
    hints = get_type_hints(command, include_extras=True)
    models = {name: model for name, hint in hints.items() if (model := _find_model(hint)) is not None}
    parameters = {_CONTEXT: _parameter(_CONTEXT, inspect.Parameter.empty, typer.Context)}
    for name, parameter in inspect.signature(command).parameters.items():
        _name_options(name, hints[name], models.get(name))
        if name in models:
            for own in _parameters(*models[name]):
                parameters.setdefault(own.name, own)
        else:
            parameters[name] = _parameter(name, parameter.default, hints[name])
    plain = parameters.keys() & hints.keys() - models.keys()
    unread = {name for name in models if "Typed[" in str(hints[name])}
    parameters |= {name: _parameter(name, False, Annotated[bool, own]) for name, own in common.items()}

    @functools.wraps(command)
    def run(**typed: Any) -> None:
        context: typer.Context = typed.pop(_CONTEXT)
        if context.invoked_subcommand is not None:
            return  # of a group that is also a command
        stated = {name for name in typed if _is_typed(context, name)}
        _take_aliases(typed, stated)
        TYPED.set({})
        with _telling(**{name: typed.pop(name) for name in common}):
            values: dict[str, Any] = {name: _read(hints[name], typed[name]) for name in plain}
            for name, (model, fields) in models.items():
                of_model = Typed(model, fields, typed, stated)
                values[name] = of_model if name in unread else of_model.read()
            command(**values)

    run.__dict__["__signature__"] = inspect.Signature(list(parameters.values()))
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


def _is_typed(context: typer.Context, name: str) -> bool:
    """On the command line, or in the user's file of defaults."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")


def _read(hint: Any, typed: Any) -> Any:
    """Convert what was typed for a parameter that is not of a model. Raises what its parser raises."""
    kind, info = get_args(hint)[:2]
    parse = info.parser or (Path if "Path" in str(kind) else None)
    if parse is not None and isinstance(typed, list | tuple):
        return [parse(text) for text in typed]
    return parse(typed) if parse is not None and isinstance(typed, str) else typed


def _find_model(hint: Any) -> tuple[type[Options], dict[str, Option]] | None:
    """The model that an annotation names, with its fields that have an option; None of another annotation."""
    model, *limits = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    model = get_args(model)[0] if get_origin(model) is Typed else model
    if not (isinstance(model, type) and issubclass(model, Options)):
        return None
    fields = {name: option for name, option in list_declarations(model).items() if option.help}
    for limit in limits:
        if unknown := set(limit) - fields.keys():
            raise TypeError(f"{model.__name__} has no options {', '.join(sorted(unknown))}")
        keeps = isinstance(limit, Without)
        fields = {name: option for name, option in fields.items() if (name in limit) is not keeps}
    return model, fields


def _parameters(model: type[Options], fields: dict[str, Option]) -> Iterator[inspect.Parameter]:
    for name, option in fields.items():
        kind, default = _kind_and_default(option, model.__dataclass_fields__[name].default)
        parameter = typer.Option(
            option_flag(name, option),
            metavar=option.form,
            help=as_options(option.help),
            rich_help_panel=option.panel,
        )
        yield _parameter(name, default, Annotated[kind, parameter])
        if option.aliases:
            hidden = typer.Option(*option.aliases, hidden=True)
            yield _parameter(_ALIAS + name, default, Annotated[kind, hidden])


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_ALIAS = "alias_of_"


def _take_aliases(typed: dict[str, Any], stated: set[str]) -> None:
    """What is typed by another name of an option becomes the option's. Raises UsageError for both."""
    for alias in [name for name in typed if name.startswith(_ALIAS)]:
        value, name = typed.pop(alias), alias.removeprefix(_ALIAS)
        if alias not in stated:
            continue
        if name in stated:
            raise UsageError(f"{name}: is given by two of its names", "Omit one of them.")
        typed[name] = value
        stated.add(name)


def _kind_and_default(option: Option, default: Any) -> tuple[Any, Any]:
    """The type of what is typed, for typer, and its default."""
    if isinstance(default, bool):
        return bool, False
    if option.repeats:
        return list[str], []
    text = option.default_text or (None if default in (None, ()) else str(default))
    return (str | None, None) if text is None else (str, text)


def _name_options(name: str, hint: Any, model: tuple[type[Options], dict[str, Option]] | None) -> None:
    """Has messages that name fields print their options."""
    if model is not None:
        for field, option in model[1].items():
            name_field(field, option_flag(field, option))
        return
    for annotation in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        if isinstance(annotation, typer.models.OptionInfo):
            flags = [str(flag) for flag in (annotation.default, *(annotation.param_decls or ()))]
            name_field(name, next(flag for flag in flags if flag.startswith("--")))


def print_full_help(context: typer.Context, value: bool) -> None:
    """Print the help with all options, and end."""
    if value:
        context.meta[ALL_OPTIONS] = True
        print(context.get_help())
        raise typer.Exit


_COMMON = {
    "quiet": typer.Option(
        "--quiet", "-q", help="No remarks and no progress; errors and results are printed."
    ),
    "verbose": typer.Option("--verbose", "-v", help="Tell versions, the folder, and how long it took."),
    "help_all": typer.Option(
        "--help-all", is_eager=True, callback=print_full_help, help="Show all options and exit."
    ),
}


@contextmanager
def _telling(*, quiet: bool = False, verbose: bool = False, help_all: bool = False) -> Iterator[None]:  # noqa: ARG001
    """Run a verb with the options that all have."""
    if quiet:
        be_quiet()
    start = time.monotonic()
    if verbose:
        from ..api.provenance import installed

        remark(f"pplan {installed('pplan')}, Python {platform.python_version()}, in {Path.cwd()}")
    try:
        yield
    finally:
        if verbose:
            remark(f"Took {time.monotonic() - start:.2f} s")

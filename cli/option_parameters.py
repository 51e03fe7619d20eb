"""Options of the command line from the fields that declare them.

A command takes models, as in `def solve_command(*, machine: MachineOptions, plan_options: PlanOptions)`;
`with_options` gives it an option for every field, and hands it the models made of what is typed. A command
that takes only some fields annotates which: `Annotated[MachineOptions, Without("gpus")]`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperOption

from ..cost_models.arguments import Option, Options, list_declarations
from ..cost_models.errors import UsageError
from .field_names import TYPED, as_options, name_field
from .streams import be_quiet, remark

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
class _ModelParameters:
    """A model that a command takes: the fields that are its options, by name."""

    model: type[Options]
    fields: dict[str, Option]

    def build(self, typed: dict[str, Any], stated: set[str]) -> Options:
        """The model with what is typed. Raises UsageError."""
        values: dict[str, Any] = {}
        for name, option in self.fields.items():
            flag = option_flag(name, option)
            if isinstance(typed[name], bool):
                values[name] = typed[name] is not flag.startswith("--no-")
            elif name in stated:
                values[name] = option.value(tuple(typed[name]) if option.repeats else typed[name], flag)
                TYPED.get()[name] = (values[name], typed[name])
        return self.model(**values)


@dataclass(frozen=True)
class Typed(Generic[T]):
    """Options typed for a model, which the command reads only where it needs them.

    A command takes it as in `plan_options: Typed[PlanOptions]`.
    """

    parameters: _ModelParameters
    values: dict[str, Any]
    stated: set[str]

    @property
    def names(self) -> set[str]:
        """Fields whose options are typed."""
        return self.stated & self.parameters.fields.keys()

    def read(self) -> T:
        """Make the model. Raises UsageError."""
        return cast(T, self.parameters.build(self.values, self.stated))


class _Text(TyperOption):
    """An option whose model reads its text: making a reader of typer's for each takes 2 ms."""

    def process_value(self, ctx: Any, value: Any) -> Any:
        """Take the value as it was typed."""
        del ctx
        return () if value is None and self.multiple else value


def make_command(verb: str) -> Any:
    """The command of a verb, with its options, as typer runs it."""
    function = f"{verb.replace('-', '_')}_command"
    command = with_options(getattr(import_module(f".{function}", __package__), function))
    app = typer.Typer(add_completion=False)
    app.command()(with_common_options(command))
    typer_command: Any = typer.main.get_command(app)
    for parameter in typer_command.params:
        if parameter.name in command.__dict__[_TEXTS]:
            parameter.__class__ = _Text
    return typer_command


_TEXTS = "names_of_texts"


def option_flag(name: str, option: Option) -> str:
    """The option of a field."""
    return "--" + (option.flag or name.replace("_", "-"))


def with_options(command: Command) -> Command:
    """The command as typer takes it: an option for every field of the models that it takes."""
    hints = get_type_hints(command, include_extras=True)
    models_by_name: dict[str, _ModelParameters] = {}
    for name, hint in hints.items():
        if (own_model := _find_model(hint)) is not None:
            models_by_name[name] = own_model
        _name_options(name, hint, own_model)
    parameters = [inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    of_models: set[str] = set()
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in models_by_name:
            own = [each for each in _parameters(models_by_name[parameter.name]) if each.name not in of_models]
            parameters += own
            of_models |= {each.name for each in own}
        else:
            parameters.append(
                parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            )

    @functools.wraps(command)
    def run(**typed: Any) -> None:
        context: typer.Context = typed.pop(_CONTEXT)
        stated = {name for name in typed if _is_typed(context, name)}
        _take_aliases(typed, stated)
        TYPED.set({})
        models = {
            name: Typed[Any](model, typed, stated)
            if get_origin(hints[name]) is Typed
            else model.build(typed, stated)
            for name, model in models_by_name.items()
        }
        fields = {name for model in models_by_name.values() for name in model.fields}
        command(**{name: value for name, value in typed.items() if name not in fields}, **models)

    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__dict__[_TEXTS] = {
        parameter.name
        for model in models_by_name.values()
        for parameter in _parameters(model)
        if not isinstance(parameter.default, bool)
    }
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _is_typed(context: typer.Context, name: str) -> bool:
    """On the command line, or in the user's file of defaults."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")


def _find_model(hint: Any) -> _ModelParameters | None:
    """The model that an annotation names, with its fields that have an option; None of another annotation."""
    model, *limits = get_args(hint) if get_origin(hint) in (Annotated, Typed) else (hint,)
    if not (isinstance(model, type) and issubclass(model, Options)):
        return None
    names = {name for name, option in list_declarations(model).items() if option.help}
    for limit in limits:
        listed_names = set(limit)
        if unknown := listed_names - names:
            raise TypeError(f"{model.__name__} has no options {', '.join(sorted(unknown))}")
        names = names - listed_names if isinstance(limit, Without) else names & listed_names
    return _ModelParameters(
        model, {name: option for name, option in list_declarations(model).items() if name in names}
    )


def _parameters(model: _ModelParameters) -> Iterator[inspect.Parameter]:
    for name, option in model.fields.items():
        kind, default = _kind_and_default(option, model.model.__dataclass_fields__[name].default)
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
    text = option.default_text or (None if default is None else str(default))
    return (str | None, None) if text is None else (str, text)


def _name_options(name: str, hint: Any, model: _ModelParameters | None) -> None:
    """Has messages that name fields print their options."""
    if model is not None:
        for field, option in model.fields.items():
            name_field(field, option_flag(field, option))
        return
    for annotation in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        if isinstance(annotation, typer.models.OptionInfo):
            flags = [str(flag) for flag in (annotation.default, *(annotation.param_decls or ()))]
            name_field(name, next(flag for flag in flags if flag.startswith("--")))


_COMMON = {
    "quiet": typer.Option(
        "--quiet", "-q", help="No remarks and no progress; errors and results are printed."
    ),
    "verbose": typer.Option("--verbose", "-v", help="Tell versions, the folder, and how long it took."),
}


def with_common_options(command: Command) -> Command:
    """The command with the options that every verb has."""
    signature = inspect.signature(command)
    common = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
        )
        for name, option in _COMMON.items()
    ]
    parameters = [*signature.parameters.values(), *common]

    @functools.wraps(command)
    def run(*, quiet: bool, verbose: bool, **typed: Any) -> None:
        if quiet:
            be_quiet()
        start = time.monotonic()
        if verbose:
            from ..api.provenance import installed

            remark(f"pplan {installed('pplan')}, Python {platform.python_version()}, in {Path.cwd()}")
        try:
            command(**typed)
        finally:
            if verbose:
                remark(f"Took {time.monotonic() - start:.2f} s")

    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def action_parser(
    verb: str, actions: tuple[str, ...], list_names: Callable[[], Iterable[str]]
) -> Callable[[str], str]:
    """Make a parser of the action of a verb that lists things or shows one.

    Args:
        verb: The verb.
        actions: The words that it takes.
        list_names: Lists the things, for the advice to a user who omits the action.
    """

    def parse(text: str) -> str:
        if text in actions:
            return text
        near = [
            *difflib.get_close_matches(text, actions, n=1, cutoff=0.5),
            *(f"show {name}" for name in difflib.get_close_matches(text, list_names(), n=1)),
        ]
        guess = f"Did you mean pplan {verb} {near[0]}?" if near else f"To see it: pplan {verb} show {text}"
        raise UsageError(f"{verb} {text}: is not one of {', '.join(actions)}", guess)

    return parse

"""A wrong command line, in our two lines: what is wrong, and the nearest that is right.

typer 0.27 and newer carry their own copy of click and older ones import it, so the errors are told by what
they offer, not by their classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from ..cost_models.errors import UsageError


def is_usage_error(error: Exception) -> bool:
    """Whether typer refused the command line."""
    return isinstance(error, typer.Abort) or hasattr(error, "format_message")


def explain_usage(
    error: Exception, root: Any, words: Sequence[str], removed: Mapping[str, str]
) -> UsageError:
    """The refusal of the arguments `words`, with the nearest options or verbs of `root`, the program."""
    if isinstance(error, typer.Abort):
        return UsageError("aborted", "Nothing was done.")
    refusal: Any = error
    message = str(refusal.format_message()).rstrip(".")
    verb = next((word for word in words if word in root.commands), "")
    path, where = (f"pplan {verb}", f"{verb}: ") if verb else ("pplan", "")
    if message.startswith("No such command"):
        unknown = message.split("'")[1]
        if unknown in removed:
            now = removed[unknown]
            return UsageError(
                f"{unknown} is a part of {now} now", f"Use: pplan {now} config.json, with the same options."
            )
        return UsageError(f"no such verb: {unknown}", _near_verb(unknown, root))
    hint = f"See {path} --help"
    if hasattr(refusal, "possibilities"):
        message = f"no such option: {refusal.option_name}"
        hint = _near_option(refusal.option_name, verb, root) or hint
    elif message.startswith("Missing") and getattr(refusal, "param", None) is not None:
        hint = f"Give it: {path} {_form(refusal.param)}. {hint}"
    return UsageError(f"{where}{message[:1].lower()}{message[1:]}", hint)


def _near_verb(verb: str, root: Any) -> str:
    verbs: list[str] = list(root.commands)
    matches = difflib.get_close_matches(verb, verbs, n=2, cutoff=0.5)
    guess = f"Did you mean {' or '.join(matches)}? " if matches else ""
    return f"{guess}The verbs are: {', '.join(verbs)}."


def _near_option(option: str, verb: str, root: Any) -> str:
    commands: Mapping[str, Any] = root.commands
    options = _option_names(commands.get(verb, root))
    if verb and option in _option_names(root):
        return f"{option} stands before the verb: pplan {option} {verb} ..."
    starts = [name for name in options if name.startswith(option)]
    matches = starts or difflib.get_close_matches(option, options, n=3, cutoff=0.6)
    if matches:
        return f"Did you mean {' or '.join(matches)}? See {f'pplan {verb}'.rstrip()} --help"
    others = [name for name, command in commands.items() if option in _option_names(command)]
    return f"It is an option of: {', '.join(f'pplan {name}' for name in others)}." if others else ""


def _form(parameter: Any) -> str:
    """An option or argument as it is written: `--gpus N`."""
    option = next((name for name in parameter.opts if name.startswith("--")), "")
    return f"{option} {parameter.metavar or ''}".strip()


def _option_names(command: Any) -> list[str]:
    names = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)]
    return [name for name in (*names, "--help") if name.startswith("-")]

"""A wrong command line, in our two lines: what is wrong, and the nearest that is right.

typer 0.27 and newer carry their own copy of click and older ones import it, so the errors are told by what
they offer, not by their classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from ..cost_models.errors import UsageError


def is_usage_error(error: Exception) -> bool:
    """Whether typer refused the command line."""
    return isinstance(error, typer.Abort) or hasattr(error, "format_message")


def explain_usage(
    error: Exception, root: Any, words: Sequence[str], removed: Mapping[str, str]
) -> UsageError:
    """Explain why typer refused a command line.

    Args:
        error: What it raised.
        root: The program.
        words: The arguments of the program.
        removed: By verbs of earlier versions, the commands to use now.
    """
    if isinstance(error, typer.Abort):
        return UsageError("aborted", "Nothing was done.")
    refusal: Any = error
    message = str(refusal.format_message()).rstrip(".")
    verb, command = _find_command(root, words)
    path, where = (f"pplan {verb}", f"{verb}: ") if verb else ("pplan", "")
    if message.startswith("No such command"):
        unknown = message.split("'")[1]
        if not verb and unknown in removed:
            return UsageError(f"{unknown} is another command now", f"Use: {removed[unknown]}")
        return UsageError(f"no such verb: {f'{verb} {unknown}'.strip()}", _near_verb(unknown, path, command))
    hint = f"See {path} --help"
    if hasattr(refusal, "possibilities"):
        message = f"no such option: {refusal.option_name}"
        hint = _near_option(refusal.option_name, verb, command, root) or hint
    elif message.startswith("Missing") and getattr(refusal, "param", None) is not None:
        hint = f"Give it: {path} {_form(refusal.param)}. {hint}"
    return UsageError(f"{where}{message[:1].lower()}{message[1:]}", hint)


def _find_command(root: Any, words: Sequence[str]) -> tuple[str, Any]:
    """The verb that the words name, as in `machine list`, and its command; "" and the program for none."""
    verb, command = "", root
    for word in words:
        if word.startswith("-"):
            continue
        if word not in (commands := getattr(command, "commands", {})):
            break
        verb, command = f"{verb} {word}".strip(), commands[word]
    return verb, command


def list_verbs(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the verbs of a group, and those of the groups in it, as `machine list`, with their commands."""
    for name, command in group.commands.items():
        yield f"{prefix}{name}", command
        if hasattr(command, "commands"):
            yield from list_verbs(command, f"{prefix}{name} ")


def _near_verb(verb: str, path: str, group: Any) -> str:
    verbs = [name for name, command in group.commands.items() if not command.hidden]
    nearest = difflib.get_close_matches(verb, group.commands, n=2, cutoff=0.5)
    guess = f"Did you mean {' or '.join(f'{path} {name}' for name in nearest)}? " if nearest else ""
    return f"{guess}The verbs are: {', '.join(verbs)}."


def _near_option(option: str, verb: str, command: Any, root: Any) -> str:
    options = _option_names(command)
    if verb and option in _option_names(root):
        return f"{option} stands before the verb: pplan {option} {verb} ..."
    starts = [name for name in options if name.startswith(option)]
    matches = starts or difflib.get_close_matches(option, options, n=3, cutoff=0.6)
    if matches:
        return f"Did you mean {' or '.join(matches)}? See {f'pplan {verb}'.rstrip()} --help"
    others = [name for name, other in list_verbs(root) if option in _option_names(other)]
    return f"It is an option of: {', '.join(f'pplan {name}' for name in others)}." if others else ""


def _form(parameter: Any) -> str:
    """An option or argument as it is written: `--gpus N`."""
    option = next((name for name in parameter.opts if name.startswith("--")), "")
    return f"{option} {parameter.metavar or ''}".strip()


def _option_names(command: Any) -> list[str]:
    names = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)]
    return [name for name in (*names, "--help") if name.startswith("-")]

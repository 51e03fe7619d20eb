"""Fields of options, as the library's messages name them, in the words of the command line.

The library says `micro_batches=3: ...` and "omit `robust`"; a user of the command line typed --micro-batches
3. This is the one place that turns one into the other: in errors, and in notes and warnings that are printed.
Which field an option sets, the commands say: `cli/option_parameters.py`. What the user typed is noted here.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

ARGUMENTS: ContextVar[tuple[str, ...] | None] = ContextVar("ARGUMENTS", default=None)
"""Those that `main` was given; None outside of it."""

TYPED: ContextVar[dict[str, tuple[Any, Any]]] = ContextVar("TYPED")
"""By field, the value of an option that the user typed, and its text (or all of them, where it repeats)."""


def typed_text(field: str) -> str | None:
    """What the user typed for the option of a field; None where that is not given."""
    value_and_text = TYPED.get({}).get(field)
    return None if value_and_text is None else str(value_and_text[1])


def command_line() -> str:
    """The command as it was typed, without the values of --set and the home folder."""
    words, public = ARGUMENTS.get(), ["pplan"]
    for word in sys.argv[1:] if words is None else words:
        if public[-1] == "--set" or word.startswith("--set="):
            name = word.removeprefix("--set=").partition("=")[0]
            public.append(f"{'--set=' if word.startswith('--set=') else ''}{name}=...")
        else:
            public.append(word)
    line, home = shlex.join(public), str(Path("~").expanduser()) if "HOME" in os.environ else ""
    return line.replace(home, "~") if len(home) > 1 else line


FIELDS: dict[str, str] = {}
"""By the name of a field, the option that sets it. `with_options` enters those of a command."""

ENTER_ALL: list[Callable[[], None]] = []
"""Callbacks that fill `FIELDS` with the options of all verbs: `cli/verbs.py`, which builds verbs on demand,
registers one."""


def name_field(name: str, option: str) -> None:
    """Enters an option by its field's name, and by its own; of --no-cache, --cache is what is negated."""
    positive = option.replace("--no-", "--", 1)
    FIELDS[name] = positive
    FIELDS.setdefault(positive.removeprefix("--").replace("-", "_"), positive)


_VALUE = r"""\([^()]*\)|\{[^{}]*\}|'[^']*'|"[^"]*"|[^\s,;:()\[\]{}"'`]+(?<![.])"""
_SETTING = rf"(?:, )?(?<![\w.\-`/{{])settings(?:=(\{{[^{{}}]*\}})|\['(\w+)'\](?:=({_VALUE}))?)"
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_QUOTES = "'\""
_MARKS = ("=", "`", "pplan.", "settings[")
"""A text without any of these names no field. Most have none, and the patterns take long to compile."""
_CALL = r"\bpplan\.([a-z_]+)\(([^()]*)\)"
_NAME = r"(?<![\w.\-`/{])(\w+)[=\[]|`(\w+)"
"""Pattern of a field's name."""


def as_options(text: str) -> str:
    """The text with each `field=value` and each field in backquotes as an option of the command line, and
    each `pplan.solve(field=value)` as its command."""
    if not any(mark in text for mark in _MARKS):
        return text
    _find_fields(text)
    text = re.sub(_SETTING, _settings, re.sub(_CALL, _command, text))
    any_of = "|".join(sorted(_find_fields(text), key=len, reverse=True)) or "no field"
    # A field with its value, or a field in backquotes.
    pattern = rf"(?<![\w.\-`/{{])({any_of})=({_VALUE})|`({any_of})(?:=({_VALUE}))?`"
    return re.sub(pattern, _option, text)


def _find_fields(text: str) -> set[str]:
    """The fields that a text may name. Enters those of all verbs if it may name one of another verb."""
    names = {first or second for first, second in re.findall(_NAME, text)}
    if not names <= FIELDS.keys():
        for enter in ENTER_ALL:
            enter()
    return names & FIELDS.keys()


def _command(match: re.Match[str]) -> str:
    words = [_argument(word) for word in re.split(r",\s*", match[2]) if word not in ("", "...")]
    return " ".join(["pplan", _VERBS.get(match[1], match[1].replace("_", "-")), *words])


_VERBS = {
    "schedules": "simulate --list",
    "lint_layout": "lint",
    "import_plan": "import",
    "import_profile": "import",
}
"""By functions, the commands that have other names."""


def _argument(word: str) -> str:
    """An argument of a call as the shell takes it."""
    match = re.fullmatch(rf"(\w+)=({_VALUE})", word)
    if match is None or match[1] not in FIELDS:
        return shlex.quote(word.strip(_QUOTES))
    return _option_text(match[1], match[2], quote=True)


def _option(match: re.Match[str]) -> str:
    name, value = match[1] or match[3], match[2] or match[4]
    return FIELDS[name] if value is None else _option_text(name, value)


def _option_text(name: str, value: str, *, quote: bool = False) -> str:
    """A field's option with its value as it is typed; `quote`: as the shell takes it."""
    option = FIELDS[name]
    if (typed_value := _typed_form(name, value)) is not None:
        return f"{option} {shlex.quote(typed_value) if quote else typed_value}"
    if value == "True":
        return option
    if value == "False":
        return option.replace("--", "--no-", 1)
    if name == "pins" and value.startswith("("):
        layer, _, stage = value[1:-1].rpartition(", ")
        value = f"{layer[1:-1]}=stage{stage}"
    elif value.startswith("("):
        parts = [part.strip().strip(_QUOTES) for part in value[1:-1].split(",") if part.strip()]
        sides = "x" if name == "input_shape" else ","
        value = sides.join(map(_with_unit, parts) if name == "sizes" else parts)
    else:
        value = value.strip(_QUOTES)
    if name in ("memory", "memory_bytes"):
        value = _with_unit(value)
    if name == "recompute":
        value = value.replace("_", "-")
    return f"{option} {shlex.quote(value) if quote else value}"


def _typed_form(name: str, value: str) -> str | None:
    """The text that the user typed, where that is what the value was read from."""
    value_of_option, text = TYPED.get({}).get(name, (None, None))
    forms = (
        repr(value_of_option),
        str(value_of_option),
        f"{value_of_option:g}" if isinstance(value_of_option, float) else "",
    )
    return text if isinstance(text, str) and value in forms else None


def _with_unit(value: str) -> str:
    """A number of bytes as a user types it."""
    if not value.isdecimal() or len(value) > 18 or int(value) == 0:
        return value
    unit = next((unit for unit, size in _UNITS.items() if int(value) % size == 0), None)
    return value if unit is None else f"{int(value) // _UNITS[unit]}{unit}"


def _settings(match: re.Match[str]) -> str:
    """A dict of settings, or one of them, each as the option that is given for it."""
    before = " " if match[0].startswith(",") else ""
    if match[2]:
        value = f"={match[3].strip(_QUOTES)}" if match[3] else ""
        return f"{before}{FIELDS['settings']} {match[2]}{value}"
    try:
        pairs = ast.literal_eval(match[1]).items()
    except (ValueError, SyntaxError, AttributeError):
        return match[0]
    return before + " ".join(f"{FIELDS['settings']} {shlex.quote(f'{key}={value}')}" for key, value in pairs)

"""Defaults of options from a user's file, and `pplan config`, which shows them.

    [tool.pplan.solve]          # in pyproject.toml; in pplan.toml [solve]
    gpus = 8
    memory = "16GiB"

The nearest of the working directory and those above it counts, pplan.toml before pyproject.toml. What is
typed on the command line comes first. An option that names code to run, or a file to write, is of the command
line alone: a folder that was downloaded runs and overwrites nothing.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cost_models.errors import FileError

NOT_FROM_A_FILE = {"input_like", "loss", "model", "output", "force", "script", "csv", "trace", "plot", "json"}
"""Names of options and, of --json, what no file may ask for."""


@dataclass(frozen=True)
class Defaults:
    """By verb and option, the values of a file; `path` None: there is no such file."""

    path: Path | None
    values: dict[str, dict[str, Any]]


def read_defaults() -> Defaults:
    """Those of the nearest file. Raises FileError where it cannot be read."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        for name in ("pplan.toml", "pyproject.toml"):
            path = folder / name
            if path.is_file():
                table = _table(path)
                if table is not None:
                    return Defaults(path, dict(_verbs(table, path)))
    return Defaults(None, {})


def _table(path: Path) -> Any:
    """What the file says of pplan; None where it says nothing. Raises FileError."""
    from ..cost_models.text_files import parse_toml, read_text  # where there is a file

    try:
        content = parse_toml(read_text(path, "defaults"))
    except (FileError, ValueError) as error:
        if path.name != "pplan.toml":
            return None  # another tool's matter
        what = error.what if isinstance(error, FileError) else error
        raise FileError(f"{path}: cannot be read: {what}", "Mend it, or delete it.") from error
    if path.name == "pplan.toml":
        return content
    tool = content.get("tool")
    return tool.get("pplan") if isinstance(tool, dict) else None


def _verbs(table: Any, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(table, dict):
        raise FileError(
            f"{path}: pplan's defaults are no table", "Write [tool.pplan.solve], and below it gpus = 8."
        )
    for verb, values in table.items():
        if not isinstance(values, dict):
            raise FileError(
                f"{path}: {verb} stands outside of a verb's table",
                f"Put it below [{_heading(path)}solve], say.",
            )
        for key, value in _flat(values):
            each = value if isinstance(value, list) else [value]
            if any(isinstance(own, float) and not math.isfinite(own) for own in each):
                raise FileError(
                    f"{path}: {verb}: {key.removeprefix('--')} is {value}", "Write a number that is finite."
                )
        yield verb, values


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The options of a verb, and those of the verbs of a group as `show --gpus`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name} ")
        else:
            yield f"{prefix}--{name.replace('_', '-')}", value


def _heading(path: Path) -> str:
    return "" if path.name == "pplan.toml" else "tool.pplan."


def default_map(root: Any) -> dict[str, dict[str, Any]]:
    """The defaults by verb and parameter, as the parser takes them. Raises FileError for what no verb has."""
    defaults = read_defaults()
    return _map_verbs(root, "", defaults.values, defaults.path)


def _map_verbs(
    group: Any, prefix: str, tables: dict[str, dict[str, Any]], path: Path | None
) -> dict[str, Any]:
    """Map the verbs of a group to options, from the tables below that of the group."""
    from .verb_table import REMOVED

    result: dict[str, Any] = {}
    for verb, values in tables.items():
        command = group.commands.get(verb)
        if command is None:
            hint = f"Use: {REMOVED[verb]}" if verb in REMOVED else _nearest(verb, list(group.commands))
            table = f"{_heading(path or Path())}{prefix}{verb}"
            raise FileError(f"{path}: [{table}]: there is no such verb", hint)
        below = {name: value for name, value in values.items() if isinstance(value, dict)}
        if hasattr(command, "commands"):
            result[verb] = _map_verbs(command, f"{prefix}{verb}.", below, path)
            values = {name: value for name, value in values.items() if name not in below}
        result.setdefault(verb, {}).update(_parameters(command, f"{prefix}{verb}", values, path))
    return result


def _parameters(
    command: Any, verb: str, values: dict[str, Any], path: Path | None
) -> Iterator[tuple[str, Any]]:
    parameters = {
        flag.lstrip("-").replace("-", "_"): parameter
        for parameter in command.params
        for flag in parameter.opts
        if flag.startswith("--")
    }
    for key, value in values.items():
        parameter = parameters.get(key.replace("-", "_"))
        if parameter is None:
            names = sorted(name.replace("_", "-") for name in parameters)
            raise FileError(f"{path}: {verb}: there is no option {key}", _nearest(key, names))
        if NOT_FROM_A_FILE & {parameter.name, key.replace("-", "_")}:
            raise FileError(
                f"{path}: {verb}: {key} is not taken from a file",
                f"It may run code or write files: give it on the command line, as {parameter.opts[0]} ...",
            )
        yield parameter.name, _typed(value, parameter)


def _typed(value: Any, parameter: Any) -> Any:
    """A value as it would be typed."""
    if parameter.multiple:
        return [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, bool) else str(value)


def _nearest(name: str, names: list[str]) -> str:
    matches = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {matches[0]}?" if matches else f"There are: {', '.join(names) or 'none'}."


def config_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the defaults of options that are set here.

    They are in pplan.toml, or under [tool.pplan] in pyproject.toml.
    """
    from .streams import result

    defaults = read_defaults()
    if as_json:
        import json

        file = None if defaults.path is None else str(defaults.path)
        result(
            json.dumps({"schema": 1, "file": file, "defaults": defaults.values}, indent=1, default=str) + "\n"
        )
        return
    if defaults.path is None:
        result(
            "No defaults: there is no pplan.toml, and no [tool.pplan] in a pyproject.toml, here or above.\n"
        )
        return
    lines = [f"Defaults of {defaults.path}:"]
    for verb, values in defaults.values.items():
        lines += [f"  pplan {verb} {option} {value}" for option, value in _flat(values)]
    result("\n".join(lines) + "\n")

"""Options and their values in a trainer's command line, a launch script, an override or a piece of YAML."""

from __future__ import annotations

import json
import re
import shlex

from ...cost_models.errors import FileError
from .partition import partition_error

Options = dict[str, list[str]]
_KEY = re.compile(r"^(?:--)?((?:[A-Za-z]\w*[.-])*[A-Za-z]\w*)=(.+)$", re.DOTALL)
_YAML = re.compile(r"^(\s*)(\w+):\s*(.*)$")


def parse_options(text: str, where: str) -> Options:
    """The values that follow each option, or stand after its `=`.

    Names are without dashes and sections: `--parallelism.pipeline_parallel_degree 4` is
    {"pipeline_parallel_degree": ["4"]}. Raises FileError for quotes that do not end.
    """
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise partition_error(where, f"its quotes do not end ({error})") from error
    options: Options = {}
    last: list[str] | None = None
    for word in words:
        match = _KEY.match(word)
        if match:
            options[_name(match[1])] = [match[2]]
            last = None
        elif word.startswith("--"):
            last = options.setdefault(_name(word), [])
        elif last is not None and word not in ("\\", ")"):
            last.append(word)
    return options


def parse_yaml(text: str) -> Options:
    """The scalars of a piece of YAML by their last key, and of lists of lists their items by commas."""
    options: Options = {}
    key = ""
    for line in text.splitlines():
        line = line.split(" #")[0].rstrip()
        match = _YAML.match(line)
        if match:
            key = match[2]
            options[key] = [_plain(match[3])] if match[3] else []
        elif line.lstrip().startswith("- ") and key:
            _add_item(options[key], line.strip())
    return options


def _add_item(items: list[str], line: str) -> None:
    """`- [a, b]` and `- - a` begin a list, `- b` after the latter goes on with it."""
    item = line[2:].strip()
    if item.startswith("["):
        items.append(",".join(_plain(part) for part in item.strip("[]").split(",")))
    elif item.startswith("- "):
        items.append(_plain(item[2:]))
    elif items:
        items[-1] += f",{_plain(item)}"


def _plain(text: str) -> str:
    text = text.strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip("'\"")
    return text if isinstance(value, list | dict) else str(value)


def _name(option: str) -> str:
    return option.removeprefix("--").rpartition(".")[2].replace("-", "_")


def read_number(options: Options, name: str, where: str) -> int | None:
    """The whole number that an option is given; None where it is not there. Raises FileError."""
    values = options.get(name)
    if not values:
        return None
    if not re.fullmatch(r"[1-9]\d{0,17}", values[0]):
        raise _wrong(where, name, values[0])
    return int(values[0])


def _wrong(where: str, name: str, value: str) -> FileError:
    return partition_error(where, f"{name} is {value!r}, not a whole number", f"For example: {name} 8")

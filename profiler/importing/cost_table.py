"""A table of costs, CSV or JSON, one row a layer in the order in which they run.

    name,forward_seconds,backward_seconds,activation_bytes,parameter_bytes
    embed,1.1e-3,2.3e-3,3145728,154389504

`activation_bytes` is the layer's output. Optional: `saved_bytes`, `micro_batch_size`,
`backward_input_seconds`. Other units end the name, as in `forward_ms`, `backward_us` or `activation_mib`, and
columns may have other usual names, as `fwd_ms`, `Backward (ms)`, `layer` or `output_bytes`.
Rows of one name with different `micro_batch_size` are one layer at several sizes. JSON: a list of objects
with these keys, or {"layers": [...]}.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...cost_models.errors import FileError, short_repr
from .file_numbers import FilePosition, near, samples, seconds, whole_bytes

_SECONDS = {"seconds": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Of each unit in a second."""
_BYTES = {"bytes": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_OTHER_UNITS = {"s": "seconds", "sec": "seconds", "µs": "us", "μs": "us", "b": "bytes"}
_TIMES = {
    "forward": ("fwd", "forward_time", "fwd_time"),
    "backward": ("bwd", "backward_time", "bwd_time"),
    "backward_input": ("bwd_input",),
}
_SIZES = {
    "activation": ("activations", "act", "output", "outputs", "out"),
    "parameter": ("parameters", "param", "params", "weight", "weights"),
    "saved": ("saved_activation", "saved_activations"),
}
"""What is measured in seconds, and in bytes, with its other names."""
_PLAIN = {
    "name": ("layer", "layer_name", "module"),
    "micro_batch_size": ("batch_size", "mbs", "microbatch_size", "micro_batch"),
}
"""Columns without a unit."""
_OTHER_NAMES = {
    alias: own for names in (_TIMES, _SIZES, _PLAIN) for own, aliases in names.items() for alias in aliases
}
_UNITS = {**dict.fromkeys(_TIMES, tuple(_SECONDS)), **dict.fromkeys(_SIZES, tuple(_BYTES))}
_REQUIRED = ("name", "forward_seconds", "backward_seconds", "activation_bytes", "parameter_bytes")
_COLUMNS = (
    *(*_REQUIRED, "saved_bytes", "micro_batch_size", "backward_input_seconds", "forward_ms", "backward_ms"),
    *(f"{own}_{unit}" for own, units in _UNITS.items() for unit in units),
)
_OFFERED = 10
"""Of the columns, those that an error names."""
Number = TypeVar("Number", int, float)
_DELIMITERS = (",", ";", "\t")
_EXAMPLE = f"The columns are {', '.join(_REQUIRED)}; other units, as in forward_ms, are allowed, too."


@dataclass(frozen=True)
class Row:
    """A layer at one micro-batch size; None for what the table leaves out."""

    place: FilePosition
    name: str
    micro_batch_size: int | None
    forward_seconds: float
    backward_seconds: float
    backward_input_seconds: float | None
    activation_bytes: int
    saved_bytes: int | None
    parameter_bytes: int
    read_as: tuple[str, ...] = ()
    """Of columns with other names than ours: `fwd_ms as forward_ms`."""


def looks_like_csv(text: str) -> bool:
    """Whether the first line of `text` names a column of such a table."""
    return not {_column(part.strip().strip('"')) for part in _first_line(text)}.isdisjoint(_COLUMNS)


def read_csv(text: str, file: str) -> list[Row]:
    """The rows of a CSV table, separated by commas, semicolons or tabs; `file` names it in errors.

    Raises FileError with the line: an unknown, missing or repeated column, a row of another length, a figure
    that is missing, negative or no number.
    """
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
    records = _records(reader, file)
    place, header = next(records, (FilePosition(file, "line 1"), []))
    written = [column.strip() for column in header]
    columns = [_column(name) for name in written]
    _check_columns(place, columns)
    read_as = _renamed(written)
    return [replace(_of_csv(place, columns, values), read_as=read_as) for place, values in records]


def read_json(text: str, file: str) -> list[Row]:
    """The rows of a JSON table; `file` names it in errors. Raises FileError as `read_csv`, with the index."""
    try:
        content = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise FileError(f"{file}: line {error.lineno}: not JSON: {error.msg}", "Mend the file.") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{file}: not a table of costs: {error}", "Mend the file.") from error
    rows, at = content, ""
    if isinstance(content, _Pairs):
        _check_keys(FilePosition(file, "the whole file"), content, ("layers",))
        rows, at = dict(content.pairs).get("layers"), "layers"
    if not isinstance(rows, list):
        raise FileError(
            f"{file}: {at or 'the whole file'} is {short_repr(rows)}, not a list of objects",
            'Write a list of objects, one a layer, or {"layers": [...]}.',
        )
    return [_of_json(FilePosition(file, f"{at}[{index}]"), row) for index, row in enumerate(rows)]


@dataclass(frozen=True)
class _Pairs:
    """An object of a JSON file with all its keys: those that stand twice, too."""

    pairs: list[tuple[str, Any]]

    def __repr__(self) -> str:
        return repr(dict(self.pairs))


def _first_line(text: str) -> list[str]:
    line = next((line for line in text.splitlines() if line.strip()), "")
    return line.split(_delimiter(text))


def _delimiter(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "")
    return max(_DELIMITERS, key=line.count)


def _records(reader: Any, file: str) -> Iterator[tuple[FilePosition, list[str]]]:
    """Rows that are not blank, with the line that they end on."""
    try:
        for values in reader:
            if any(value.strip() for value in values):
                yield FilePosition(file, f"line {reader.line_num}"), values
    except csv.Error as error:
        raise FilePosition(file, f"line {reader.line_num}").refusal(
            f"not CSV: {error}", "Mend the line."
        ) from error


def _of_csv(place: FilePosition, columns: Sequence[str], values: Sequence[str]) -> Row:
    if len(values) != len(columns):
        raise place.refusal(
            f"has {len(values)} values for the {len(columns)} columns of the header",
            f"Give one for each: {', '.join(columns)}. Text with a separator in it stands in double quotes.",
        )
    stripped = {column: value.strip() for column, value in zip(columns, values, strict=True)}
    return _row(place, {column: value for column, value in stripped.items() if value})


def _of_json(place: FilePosition, row: object) -> Row:
    if not isinstance(row, _Pairs):
        raise place.refusal(f"is {short_repr(row)}, not an object", _EXAMPLE)
    written = [key for key, _ in row.pairs]
    _check_columns(place, [_column(name) for name in written])
    values = {_column(key): value for key, value in row.pairs if value is not None}
    return replace(_row(place, values), read_as=_renamed(written))


def _column(written: str) -> str:
    """Our name of a column, however it is written; as it is where it is none of ours."""
    name = "_".join(re.findall(r"[^\s_()\[\]-]+", written.lower()))
    if name in _PLAIN or name in _OTHER_NAMES:
        return _OTHER_NAMES.get(name, name) if _OTHER_NAMES.get(name, name) in _PLAIN else written
    what, _, unit = name.rpartition("_")
    what, unit = _OTHER_NAMES.get(what, what), _OTHER_UNITS.get(unit, unit)
    return f"{what}_{unit}" if unit in _UNITS.get(what, ()) else written


def _renamed(written: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name} as {_column(name)}" for name in written if _column(name) != name)


def _check_columns(place: FilePosition, columns: Sequence[str]) -> None:
    """Raises FileError for columns that are unknown, missing, or say the same as another."""
    _check_keys(place, columns, _COLUMNS)
    for what, units in _UNITS.items():
        own = [column for column in (f"{what}_{unit}" for unit in units) if column in columns]
        if len(own) > 1:
            raise place.refusal(f"has {' and '.join(own)}", "Omit all but one of them.")
        if not own and f"{what}_{units[0]}" in _REQUIRED:
            raise place.refusal(f"column {what}_{units[0]} is missing", _EXAMPLE)
    if "name" not in columns:
        raise place.refusal("column name is missing", _EXAMPLE)


def _check_keys(place: FilePosition, keys: Sequence[str] | _Pairs, allowed: Sequence[str]) -> None:
    names = [key for key, _ in keys.pairs] if isinstance(keys, _Pairs) else list(keys)
    for position, name in enumerate(names):
        if name not in allowed:
            raise place.refusal(f"unknown column {short_repr(name)}", near(name, allowed[:_OFFERED]))
        if name in names[:position]:
            raise place.refusal(f"column {name} stands twice", "Omit one of them.")


def _row(place: FilePosition, values: Mapping[str, object]) -> Row:
    """The row of these `values`, without those that are empty."""
    name = values.get("name", "")
    if not isinstance(name, str) or not name.strip():
        raise place.refusal(f"name is {short_repr(name)}, not a text", "Every layer has a name of its own.")
    size = values.get("micro_batch_size")
    backward = _needed(_time(place, "backward", values), place, "backward_seconds")
    return Row(
        place=place,
        name=name,
        micro_batch_size=None if size is None else samples(place, "micro_batch_size", size),
        forward_seconds=_needed(_time(place, "forward", values), place, "forward_seconds"),
        backward_seconds=backward,
        backward_input_seconds=_part(place, values, backward),
        activation_bytes=_needed(_size(place, "activation", values), place, "activation_bytes"),
        saved_bytes=_size(place, "saved", values),
        parameter_bytes=_needed(_size(place, "parameter", values), place, "parameter_bytes"),
    )


def _part(place: FilePosition, values: Mapping[str, object], backward: float) -> float | None:
    part = _time(place, "backward_input", values)
    if part is not None and part > backward:
        raise place.refusal(
            f"backward_input takes {part:g} s, the whole backward {backward:g} s",
            "backward_input_seconds is that part of backward_seconds which makes the input's gradient.",
        )
    return part


def _time(place: FilePosition, what: str, values: Mapping[str, object]) -> float | None:
    """Seconds, from the column in any unit; None where it is not there."""
    for unit, parts in _SECONDS.items():
        if (column := f"{what}_{unit}") in values:
            return seconds(place, column, values[column], parts)
    return None


def _size(place: FilePosition, what: str, values: Mapping[str, object]) -> int | None:
    """Bytes, likewise."""
    for unit, size in _BYTES.items():
        if (column := f"{what}_{unit}") in values:
            return whole_bytes(place, column, values[column], size)
    return None


def _needed(value: Number | None, place: FilePosition, column: str) -> Number:
    if value is None:
        raise _empty(place, column)
    return value


def _empty(place: FilePosition, column: str) -> FileError:
    return place.refusal(f"{column} is empty", "Give a number; 0 where it takes none.")

"""Profiles from elsewhere: another planner's graph, or a table of costs. Needs no torch."""

from __future__ import annotations

import csv
import difflib
import io
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from ..cost_models.errors import FileError, UsageError, short_repr
from ..cost_models.quantities import (
    MOST_BYTES,
    MOST_SAMPLES,
    MOST_SECONDS,
    either,
    format_count,
    format_seconds,
)
from ..cost_models.text_files import detect_kind, read_text
from ..cost_models.topology import UNKNOWN_DEVICE
from .profile_file import LayerMeasurement, Profile, ProfiledLayer, SharedLayers
from .profile_options import ProfileImportOptions

_MOST_NAMES = 12
"""Names that an error shows."""


@dataclass(frozen=True)
class FilePosition:
    """Where in a file something stands: `at` is its line or index."""

    file: str
    at: str

    def refusal(self, what: str, hint: str) -> FileError:
        """The error that names the place."""
        return FileError(f"{self.file}: {self.at}: {what}", hint)


def seconds(place: FilePosition, key: str, value: object, parts: float = 1.0) -> float:
    """The duration `value` under `key`, in such parts of a second. Raises FileError."""
    # Divided, so that 5 ms is the same float as 5e-3.
    duration = _number(place, key, value) / parts
    if duration > MOST_SECONDS:
        raise _out_of_bounds(place, key, value, f"at most {MOST_SECONDS:g} s")
    return duration


def whole_bytes(place: FilePosition, key: str, value: object, unit: int = 1) -> int:
    """The size `value` under `key`, in units of so many bytes, rounded: other tools write floats. Raises
    FileError."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value * unit
    else:
        size = round(min(_number(place, key, value) * unit, 2.0 * MOST_BYTES))
    if not 0 <= size <= MOST_BYTES:
        raise _out_of_bounds(place, key, value, "at least 0 and less than 2**63 bytes")
    return size


def samples(place: FilePosition, key: str, value: object) -> int:
    """The number of samples `value` under `key`. Raises FileError."""
    number = _number(place, key, value)
    if number != math.floor(number) or not 1 <= number <= MOST_SAMPLES:
        raise _out_of_bounds(place, key, value, f"a whole number from 1 to {MOST_SAMPLES}")
    return int(number)


def near(word: str, names: Collection[str]) -> str:
    """What to do about a name that is not known, with the nearest one that is."""
    nearest = difflib.get_close_matches(word.lower(), list(names), n=1, cutoff=0.5)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    guess = f"Did you mean {nearest[0]}? " if nearest else ""
    return f"{guess}There are: {', '.join(list(names)[:_MOST_NAMES])}{more}."


def _number(place: FilePosition, key: str, value: object) -> float:
    """A finite number of at least 0, as a number or as its text."""
    try:
        is_number = (
            isinstance(value, int | float | str) and not isinstance(value, bool) and "_" not in str(value)
        )
        number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        is_number = False
    if not is_number:
        raise place.refusal(
            f"{key} is {short_repr(value)}, not a number", "Write it as 12.5 or 1e-3, without a unit."
        )
    if not math.isfinite(number) or number < 0:
        raise _out_of_bounds(place, key, value, "finite and at least 0")
    return number


def _out_of_bounds(place: FilePosition, key: str, value: object, expected: str) -> FileError:
    return place.refusal(f"{key} is {short_repr(value)}, it must be {expected}", "Mend the file.")


# A table of costs, CSV or JSON, one row a layer in the order in which they run.
#
#       name,forward_seconds,backward_seconds,activation_bytes,parameter_bytes
#       embed,1.1e-3,2.3e-3,3145728,154389504
#
# `activation_bytes` is the layer's output. Optional: `saved_bytes`, `micro_batch_size`,
# `backward_input_seconds`. Other units end the name, as in `forward_ms`, `backward_us` or `activation_mib`,
# and
# columns may have other usual names, as `fwd_ms`, `Backward (ms)`, `layer` or `output_bytes`.
# Rows of one name with different `micro_batch_size` are one layer at several sizes. Columns such as
# `tp2_forward_ms` and `tp2_parameter_bytes` are those of one of two devices that share the layer (tp4_: of
# four); there are as many of them as without tp2_. JSON: a list of objects with these keys, or
# {"layers": [...]}.

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
_DEGREE = re.compile(r"tp([2-9]|[1-9]\d{1,5})_(.+)")
"""Before a column of one of so many devices that share the layer."""
_EXAMPLE = f"The columns are {', '.join(_REQUIRED)}; other units, as in forward_ms, are allowed, too."
_SAME = "Every number of devices that share the layers has the columns that one device has."


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
    tensor_parallel: int = 1
    """Devices that share the layer, of which this is one."""

    @property
    def prefix(self) -> str:
        """Of its columns."""
        return _prefix(self.tensor_parallel)


def looks_like_csv(text: str) -> bool:
    """Return whether the first line of `text` names a column of a table of costs."""
    return not {_column(part.strip().strip('"')) for part in _first_line(text)}.isdisjoint(_COLUMNS)


def read_csv(text: str, file: str) -> list[Row]:
    """The rows of a CSV table, separated by commas, semicolons or tabs; `file` names it in errors. A line
    is a row for one device, and one for each number of devices that share the layers.

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
    lines = (_of_csv(place, columns, values) for place, values in records)
    return [replace(row, read_as=read_as) for rows in lines for row in rows]


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
    objects = [_of_json(FilePosition(file, f"{at}[{index}]"), row) for index, row in enumerate(rows)]
    _check_degrees(objects)
    return [row for rows in objects for row in rows]


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


def _of_csv(place: FilePosition, columns: Sequence[str], values: Sequence[str]) -> list[Row]:
    if len(values) != len(columns):
        raise place.refusal(
            f"has {len(values)} values for the {len(columns)} columns of the header",
            f"Give one for each: {', '.join(columns)}. Text with a separator in it stands in double quotes.",
        )
    stripped = {column: value.strip() for column, value in zip(columns, values, strict=True)}
    return _rows(place, {column: value for column, value in stripped.items() if value}, columns)


def _of_json(place: FilePosition, row: object) -> list[Row]:
    if not isinstance(row, _Pairs):
        raise place.refusal(f"is {short_repr(row)}, not an object", _EXAMPLE)
    written = [key for key, _ in row.pairs]
    columns = [_column(name) for name in written]
    _check_columns(place, columns)
    values = {_column(key): value for key, value in row.pairs if value is not None}
    read_as = _renamed(written)
    return [replace(own, read_as=read_as) for own in _rows(place, values, columns)]


def _column(written: str) -> str:
    """Our name of a column, however it is written; as it is where it is none of ours."""
    name = "_".join(re.findall(r"[^\s_()\[\]-]+", written.lower()))
    if degree := _DEGREE.fullmatch(name):
        shared = f"tp{degree[1]}_{_plain_column(degree[2], '')}"
        return shared if _is_shared(shared) else written
    return _plain_column(name, written)


def _plain_column(name: str, written: str) -> str:
    """Return the field of a column in lower case with underscores, without a prefix such as tp2_."""
    if name in _PLAIN or name in _OTHER_NAMES:
        return _OTHER_NAMES.get(name, name) if _OTHER_NAMES.get(name, name) in _PLAIN else written
    what, _, unit = name.rpartition("_")
    what, unit = _OTHER_NAMES.get(what, what), _OTHER_UNITS.get(unit, unit)
    return f"{what}_{unit}" if unit in _UNITS.get(what, ()) else written


def _renamed(written: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name} as {_column(name)}" for name in written if _column(name) != name)


def _is_shared(column: str) -> bool:
    """Return whether the column holds costs on devices that share the layer, such as tp2_forward_ms."""
    degree = _DEGREE.fullmatch(column)
    return degree is not None and degree[2].rpartition("_")[0] in _UNITS and degree[2] in _COLUMNS


def _degrees(columns: Sequence[str]) -> list[int]:
    """One device, and the numbers of devices that share the layers."""
    return [1, *sorted({int(match[1]) for name in columns if (match := _DEGREE.fullmatch(name))})]


def _prefix(degree: int) -> str:
    return f"tp{degree}_" if degree > 1 else ""


def _check_columns(place: FilePosition, columns: Sequence[str]) -> None:
    """Raises FileError for columns that are unknown, missing, or say the same as another."""
    _check_keys(place, columns, (*_COLUMNS, *filter(_is_shared, columns)))
    if "name" not in columns:
        raise place.refusal("column name is missing", _EXAMPLE)
    degrees = _degrees(columns)
    for what, units in _UNITS.items():
        own = {n: [c for unit in units if (c := f"{_prefix(n)}{what}_{unit}") in columns] for n in degrees}
        for degree, names in own.items():
            if len(names) > 1:
                raise place.refusal(f"has {' and '.join(names)}", "Omit all but one of them.")
            is_required = f"{what}_{units[0]}" in _REQUIRED
            if not names and (is_required or any(own.values())):
                hint = _EXAMPLE if is_required and degree == 1 else _SAME
                raise place.refusal(f"column {_prefix(degree)}{what}_{units[0]} is missing", hint)


def _check_keys(place: FilePosition, keys: Sequence[str] | _Pairs, allowed: Sequence[str]) -> None:
    names = [key for key, _ in keys.pairs] if isinstance(keys, _Pairs) else list(keys)
    for position, name in enumerate(names):
        if name not in allowed:
            raise place.refusal(f"unknown column {short_repr(name)}", near(name, allowed[:_OFFERED]))
        if name in names[:position]:
            raise place.refusal(f"column {name} stands twice", "Omit one of them.")


def _check_degrees(objects: Sequence[Sequence[Row]]) -> None:
    """Raises FileError where some layers have columns of devices that share them, and others have not."""
    degrees = {row.tensor_parallel: row for rows in objects for row in rows}
    for rows in objects:
        own = [row.tensor_parallel for row in rows]
        for degree, other in degrees.items():
            if degree not in own:
                raise rows[0].place.refusal(
                    f"column {_prefix(degree)}forward_seconds is missing, and {other.place.at} has it",
                    "Give every layer the columns of the same numbers of devices.",
                )


def _rows(place: FilePosition, values: Mapping[str, object], columns: Sequence[str]) -> list[Row]:
    """Of one device, and of each number of devices that share the layer."""
    whole, *shared = (_row(place, values, degree) for degree in _degrees(columns))
    for row in shared:
        for what in ("saved_bytes", "backward_input_seconds"):
            names = [f"{own.prefix}{what}" for own in (whole, row) if getattr(own, what) is None]
            if len(names) == 1:
                raise place.refusal(f"{names[0]} is empty", _SAME)
    return [whole, *shared]


def _row(place: FilePosition, values: Mapping[str, object], degree: int) -> Row:
    """The row of these `values`, without those that are empty, for one of so many devices."""
    name, before = values.get("name", ""), _prefix(degree)
    if not isinstance(name, str) or not name.strip():
        raise place.refusal(f"name is {short_repr(name)}, not a text", "Every layer has a name of its own.")
    size = values.get("micro_batch_size")
    backward = _needed(_time(place, f"{before}backward", values), place, f"{before}backward_seconds")
    return Row(
        place=place,
        name=name,
        micro_batch_size=None if size is None else samples(place, "micro_batch_size", size),
        forward_seconds=_needed(_time(place, f"{before}forward", values), place, f"{before}forward_seconds"),
        backward_seconds=backward,
        backward_input_seconds=_part(place, values, backward, before),
        activation_bytes=_needed(
            _size(place, f"{before}activation", values), place, f"{before}activation_bytes"
        ),
        saved_bytes=_size(place, f"{before}saved", values),
        parameter_bytes=_needed(
            _size(place, f"{before}parameter", values), place, f"{before}parameter_bytes"
        ),
        tensor_parallel=degree,
    )


def _part(place: FilePosition, values: Mapping[str, object], backward: float, before: str) -> float | None:
    part = _time(place, f"{before}backward_input", values)
    if part is not None and part > backward:
        raise place.refusal(
            f"{before}backward_input takes {part:g} s, the whole backward {backward:g} s",
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


# Makes a chain of layers, with costs at all micro-batch sizes, of the rows of a table.


@dataclass(frozen=True)
class TableLayers:
    """The layers of a table, their micro-batch sizes, and what a reader should know of them."""

    layers: list[ProfiledLayer]
    sizes: list[int]
    notes: list[str]

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Each layer feeds the next."""
        return list(pairwise(layer.name for layer in self.layers))


def states_sizes(rows: Sequence[Row]) -> bool:
    """Return whether some row states its micro-batch size."""
    return any(row.micro_batch_size is not None for row in rows)


def group_rows(rows: Sequence[Row], file: str, micro_batch_size: int) -> TableLayers:
    """The rows by name, in the order in which the names come. `micro_batch_size` is that of a table that does
    not say its own.

    Raises FileError: no rows, a layer twice at one size, layers of different sizes, parameters that follow
    the micro-batch size, a row without the size that others have.
    """
    if not rows:
        raise FileError(f"{file}: has no rows", "Give one row a layer, below the names of the columns.")
    has_sizes = states_sizes(rows)
    grouped: dict[str, dict[int, Row]] = {}
    for row in rows:
        size = row.micro_batch_size if has_sizes else micro_batch_size
        if size is None:
            raise row.place.refusal(
                "micro_batch_size is empty, and other rows have one", "Give it to all rows."
            )
        of_name = grouped.setdefault(row.name, {})
        if size in of_name:
            raise _twice(row, of_name[size], size, has_sizes=has_sizes)
        of_name[size] = row
    sizes = sorted(next(iter(grouped.values())))
    before: dict[int, Row] = {}
    layers = []
    for of_name in grouped.values():
        _check(of_name, sizes)
        layers.append(_layer(of_name, sizes, before))
        before = of_name
    return TableLayers(layers, sizes, list(_notes(rows)))


def _layer(rows: Mapping[int, Row], sizes: Sequence[int], before: Mapping[int, Row]) -> ProfiledLayer:
    row = rows[sizes[0]]
    return ProfiledLayer(
        name=row.name,
        parameter_bytes=row.parameter_bytes,
        costs=[_measurement(rows[size], size, before.get(size)) for size in sizes],
    )


def _measurement(row: Row, size: int, before: Row | None) -> LayerMeasurement:
    """Where the layer before is taken to save its output, a stage that starts here keeps that besides."""
    part = row.backward_input_seconds
    return LayerMeasurement(
        micro_batch_size=size,
        forward_seconds=row.forward_seconds,
        backward_seconds=row.backward_seconds,
        backward_input_seconds=part,
        backward_weight_seconds=None if part is None else row.backward_seconds - part,
        output_bytes=row.activation_bytes,
        saved_bytes=row.activation_bytes if row.saved_bytes is None else row.saved_bytes,
        saved_input_bytes=before.activation_bytes if before and before.saved_bytes is None else 0,
    )


def _check(rows: Mapping[int, Row], sizes: Sequence[int]) -> None:
    first = next(iter(rows.values()))
    if sorted(rows) != sizes:
        raise first.place.refusal(
            f"layer {first.name!r} has the micro-batch sizes {_listed(sorted(rows))}, the first layer "
            f"{_listed(sizes)}",
            "Give every layer at the same sizes.",
        )
    for row in rows.values():
        if row.parameter_bytes != first.parameter_bytes:
            raise row.place.refusal(
                f"{row.prefix}parameter_bytes of {row.name!r} is {row.parameter_bytes}, and "
                f"{first.parameter_bytes} at {first.place.at}",
                "A layer has the same parameters at every micro-batch size.",
            )


def _twice(row: Row, other: Row, size: int, *, has_sizes: bool) -> FileError:
    at = f" with micro_batch_size {size}" if has_sizes else ""
    return row.place.refusal(
        f"layer {row.name!r} stands at {other.place.at} already{at}",
        "Give each layer a name of its own, or its rows different micro-batch sizes.",
    )


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    if rows[0].read_as:
        yield f"columns read by their usual names: {', '.join(rows[0].read_as)}"
    without = sum(row.saved_bytes is None for row in rows)
    if without:
        yield (
            f"{_how_many(without, rows)} no saved_bytes: it is taken to be activation_bytes, and a stage "
            "keeps its input besides"
        )
    without = sum(row.backward_input_seconds is None for row in rows)
    if 0 < without < len(rows):
        yield f"{_how_many(without, rows)} no backward_input_seconds: those of the others are not used"


def _how_many(without: int, rows: Sequence[Row]) -> str:
    if without == len(rows):
        return "the table has"
    return f"{format_count(without, 'row')} of {len(rows)} {'has' if without == 1 else 'have'}"


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


# PipeDream's `graph.txt`, and DAPPLE's variant of it: operations with their costs, and what feeds what.
#
#       n1 -- Input -- forward_compute_time=9, backward_compute_time=0, activation_size=64, parameter_size=0
#       n2 -- Linear -- forward_compute_time=0.4, backward_compute_time=0.9, activation_size=[8.0; 8.0], ...
#       \tn1 -- n2
#
# A node is one line, and may end with ` -- stage_id=N`. Times are milliseconds, sizes bytes with the batch
# included; a list stands for several tensors. The batch is not in the file. The format is that of the
# profiler
# of "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP'19.

_EXPECTED_LINE = (
    "Expected is a node, ID -- DESCRIPTION -- forward_compute_time=MS, backward_compute_time=MS, "
    "activation_size=BYTES, parameter_size=BYTES, or an edge, ID -- ID."
)
_FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_SEPARATOR = re.compile(r"(?:^|\s+)--(?:\s+|$)")
_INPUT = re.compile(r"inputs?(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Node:
    """An operation at the file's micro-batch size. `tensors` holds the bytes of each tensor that it makes."""

    name: str
    description: str
    forward_seconds: float
    backward_seconds: float
    tensors: tuple[int, ...]
    parameter_bytes: int
    line: int

    @property
    def output_bytes(self) -> int:
        """Bytes of all that it makes."""
        return sum(self.tensors)

    @property
    def is_called_input(self) -> bool:
        """Input, Input0 and the like; not InputEmbedding."""
        return _INPUT.match(self.description) is not None


@dataclass(frozen=True)
class Graph:
    """The nodes by name, in the order of the file, and the edges, each once."""

    nodes: Mapping[str, Node]
    edges: tuple[tuple[str, str], ...]


def is_graph(text: str) -> bool:
    """Return whether `text` looks like a graph: parts between dashes in line 1, or a line of a node."""
    lines = [line for line in text.splitlines() if line.strip()]
    return any(" -- " in line for line in lines[:1]) or any("forward_compute_time=" in line for line in lines)


def parse_graph(text: str, file: str) -> Graph:
    """The graph in `text`; `file` names it in errors.

    Raises FileError: a line that is neither a node nor an edge, a figure that is missing, negative or no
    number, a node that stands twice, an edge of a node that is not there, no nodes.
    """
    nodes: dict[str, Node] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = FilePosition(file, f"line {number}")
        parts = _SEPARATOR.split(line.strip())
        if not all(parts):
            raise place.refusal(f"{short_repr(line)} is neither a node nor an edge", _EXPECTED_LINE)
        if len(parts) == 2 and "=" not in parts[1]:
            edges.setdefault((parts[0], parts[1]), number)
            continue
        node = _node(place, parts, line, number)
        if node.name in nodes:
            first = nodes[node.name].line
            raise place.refusal(
                f"node {node.name!r} stands on line {first} already", "Every node has an ID of its own."
            )
        nodes[node.name] = node
    _check_graph(nodes, edges, file)
    return Graph(nodes, tuple(edges))


def _node(place: FilePosition, parts: list[str], line: str, number: int) -> Node:
    *rest, stage = parts
    # Which stage an earlier plan put it on says nothing of its costs.
    head = rest if stage.startswith("stage_id=") else parts
    if len(head) < 3 or "=" not in head[-1]:
        raise place.refusal(f"{short_repr(line)} is neither a node nor an edge", _EXPECTED_LINE)
    figures = _figures(place, head[-1])
    return Node(
        name=head[0],
        description=" -- ".join(head[1:-1]),
        forward_seconds=seconds(place, "forward_compute_time", figures["forward_compute_time"], 1e3),
        backward_seconds=seconds(place, "backward_compute_time", figures["backward_compute_time"], 1e3),
        tensors=_tensor_sizes(place, "activation_size", figures["activation_size"]),
        parameter_bytes=whole_bytes(place, "parameter_size", figures["parameter_size"]),
        line=number,
    )


def _figures(place: FilePosition, text: str) -> dict[str, str]:
    """`key=value, key=value` as a dict that has all keys of a node."""
    figures: dict[str, str] = {}
    for pair in re.split(r"\s*,\s*", text):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise place.refusal(f"{short_repr(pair)} is not KEY=VALUE", _EXPECTED_LINE)
        if key not in _FIGURES:
            raise place.refusal(f"unknown key {short_repr(key)}", near(key, _FIGURES))
        if key in figures:
            raise place.refusal(f"{key} stands twice", "Omit one of them.")
        figures[key] = value
    for key in _FIGURES:
        if key not in figures:
            raise place.refusal(f"{key} is missing in {short_repr(text)}", _EXPECTED_LINE)
    return figures


def _tensor_sizes(place: FilePosition, key: str, text: str) -> tuple[int, ...]:
    """`8.0`, or the sizes in `[8.0; 16.0]`."""
    is_list = text.startswith("[") and text.endswith("]")
    parts = text[1:-1].split(";") if is_list else [text]
    return tuple(whole_bytes(place, key, part.strip()) for part in parts)


def _check_graph(nodes: Mapping[str, Node], edges: Mapping[tuple[str, str], int], file: str) -> None:
    if not nodes:
        raise FilePosition(file, "the whole file").refusal("has no nodes", _EXPECTED_LINE)
    for edge, line in edges.items():
        for end in edge:
            if end not in nodes:
                raise FilePosition(file, f"line {line}").refusal(
                    f"the edge {edge[0]} -- {edge[1]} is of {end!r}, and there is no such node",
                    near(end, nodes),
                )
    if len(nodes) > 1 and not edges:
        raise FilePosition(file, "the whole file").refusal(
            f"has {len(nodes)} nodes and no edge", "Is it whole? Edges stand behind the nodes: ID -- ID."
        )


# From an imported graph of operations to a chain of layers, cut where the granularity says.

_NUMBERED = re.compile(r"(.*?)(\d{1,18})")
_PLAIN_WORDS = re.compile(r"[\w./\[\]:+-]+")
_KINDS = 2
"""So many kinds of operations are named for a layer of several."""


@dataclass(frozen=True)
class GraphLayers:
    """The layers of a graph, and the nodes called Input that feed them."""

    layers: list[ProfiledLayer]
    edges: list[tuple[str, str]]
    inputs: list[Node]

    @property
    def input_bytes(self) -> int:
        """Bytes of a micro-batch of the model's input."""
        return sum(node.output_bytes for node in self.inputs)


@dataclass(frozen=True)
class _Crossing:
    """What crosses the cut behind each operation: bytes and tensors, each tensor counted once."""

    bytes: list[int]
    tensors: list[int]


def cut_into_layers(graph: Graph, file: str, granularity: str, micro_batch_size: int) -> GraphLayers:
    """The operations in a topological order: `fine`, each is a layer; `block`, a layer is what lies between
    places that one tensor crosses.

    Raises FileError where the graph has a cycle, or nothing but inputs.
    """
    order = _ordered(graph, file)
    fed = {target for _, target in graph.edges}
    inputs = [node for node in order if node.is_called_input and node.name not in fed]
    work = [node for node in order if node not in inputs]
    if not work:
        raise FileError(f"{file}: has inputs and no operation", "Name the graph of a whole model.")
    crossing = _crossing(work, inputs, graph.edges)
    cuts = [i for i, count in enumerate(crossing.tensors[:-1]) if granularity == "fine" or count <= 1]
    runs = list(pairwise([0, *(cut + 1 for cut in cuts), len(work)]))
    names = _node_names(work)
    layer_names = [_run_name([names[node.name] for node in work[first:end]]) for first, end in runs]
    received = [sum(node.output_bytes for node in inputs), *(crossing.bytes[end - 1] for _, end in runs[:-1])]
    layers = [
        _graph_layer(name, work[first:end], received_bytes, crossing, end - 1, micro_batch_size)
        for name, (first, end), received_bytes in zip(layer_names, runs, received, strict=True)
    ]
    owner = {node.name: layer_names[i] for i, (first, end) in enumerate(runs) for node in work[first:end]}
    pairs = ((owner.get(source), owner.get(target)) for source, target in _by_source(graph.edges, work))
    edges = [(source, target) for source, target in pairs if source and target and source != target]
    return GraphLayers(layers, list(dict.fromkeys(edges)), inputs)


def _ordered(graph: Graph, file: str) -> list[Node]:
    """The nodes in a topological order: by the numbers in their IDs (the order in which the model ran), or
    where they have none by their lines. Raises FileError at a cycle."""
    numbered = {name: _NUMBERED.fullmatch(name) for name in graph.nodes}
    ranks = {name: int(match[2]) for name, match in numbered.items() if match}
    if len(ranks) < len(numbered) or len({match[1] for match in numbered.values() if match}) > 1:
        ranks = {name: node.line for name, node in graph.nodes.items()}
    import networkx as nx  # here: only graphs need it, and it takes 0.15 s

    edges = nx.DiGraph()
    edges.add_nodes_from(graph.nodes)
    edges.add_edges_from(graph.edges)
    try:
        order = list(nx.lexicographical_topological_sort(edges, key=ranks.__getitem__))
    except nx.NetworkXUnfeasible:
        cycle = [source for source, _ in nx.find_cycle(edges)]
        path = " -- ".join([*cycle[:8], *(["..."] if len(cycle) > 8 else []), cycle[0]])
        raise FileError(
            f"{file}: the edges form a cycle: {path}", "Mend the file: a graph feeds forward."
        ) from None
    return [graph.nodes[name] for name in order]


def _crossing(work: Sequence[Node], inputs: Sequence[Node], edges: Iterable[tuple[str, str]]) -> _Crossing:
    """An operation's tensors cross the cuts up to its last consumer; those of an input, from the start on."""
    place = {node.name: index for index, node in enumerate(work)}
    last: dict[str, int] = {}
    for source, target in edges:
        last[source] = max(last.get(source, 0), place[target])
    sizes, tensors = [0] * (len(work) + 1), [0] * (len(work) + 1)
    for node in chain(inputs, work):
        start, end = place.get(node.name, 0), last.get(node.name)
        if end is not None:
            for changes, amount in ((sizes, node.output_bytes), (tensors, len(node.tensors))):
                changes[start] += amount
                changes[end] -= amount
    return _Crossing(list(accumulate(sizes[:-1])), list(accumulate(tensors[:-1])))


def _graph_layer(
    name: str, nodes: Sequence[Node], received: int, crossing: _Crossing, cut: int, size: int
) -> ProfiledLayer:
    """`nodes` as one layer in front of the cut behind operation `cut`. Each saves what it makes, so that a
    stage that starts here keeps what it receives besides."""
    is_last = cut == len(crossing.bytes) - 1
    return ProfiledLayer(
        name=name,
        kind=_run_kind(nodes),
        parameter_bytes=sum(node.parameter_bytes for node in nodes),
        crossing=crossing.tensors[cut],
        costs=[
            LayerMeasurement(
                micro_batch_size=size,
                forward_seconds=sum(node.forward_seconds for node in nodes),
                backward_seconds=sum(node.backward_seconds for node in nodes),
                output_bytes=nodes[-1].output_bytes if is_last else crossing.bytes[cut],
                saved_bytes=sum(node.output_bytes for node in nodes),
                saved_input_bytes=received,
            )
        ],
    )


def _node_names(work: Sequence[Node]) -> Mapping[str, str]:
    """Names of operations: their descriptions, where these are words and all different; else their IDs."""
    words = {node.description for node in work}
    are_distinct = len(words) == len(work) and all(_PLAIN_WORDS.fullmatch(word) for word in words)
    return {node.name: node.description if are_distinct else node.name for node in work}


def _run_name(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"


def _run_kind(nodes: Sequence[Node]) -> str:
    """`Conv2d` of `Conv2d(3, 64, ...)` or `Conv2d_1_1`; of a layer of many, their number."""
    matches = (re.match(r"\w+", node.description) for node in nodes)
    kinds = list(dict.fromkeys(re.sub(r"(_\d+)+$", "", match[0]) for match in matches if match))
    return " + ".join(kinds) if len(kinds) <= _KINDS else f"{len(nodes)} operations"


def _by_source(edges: Iterable[tuple[str, str]], work: Sequence[Node]) -> list[tuple[str, str]]:
    """The edges in the order of the operations, whatever that of the file."""
    place = {node.name: index for index, node in enumerate(work)}
    inner = [edge for edge in edges if edge[0] in place]
    return sorted(inner, key=lambda edge: (place[edge[0]], place[edge[1]]))


Format = Literal["pipedream", "csv", "json"]

PIPEDREAM_SAMPLES = 128
"""Of the profiles of image models that PipeDream publishes; the file does not say."""
TABLE_SAMPLES = 1
"""Of a table that does not say: then a sample stands for whatever was measured."""


COST_FORMATS = (
    "a PipeDream graph, or CSV or JSON with name, forward_seconds, backward_seconds, activation_bytes, "
    "parameter_bytes"
)


def looks_like_costs(text: str) -> bool:
    """Return whether a text has the form of a file of costs, or of a profile."""
    try:
        content = json.loads(text)
    except RecursionError:
        return True
    except ValueError:
        return is_graph(text) or looks_like_csv(text)
    if isinstance(content, list):
        return not content or any(isinstance(row, dict) for row in content)
    return isinstance(content, dict) and "layers" in content


def import_profile(path: Path, options: ProfileImportOptions) -> Profile:
    """The profile of the file at `path`, without `made_by`.

    Raises UsageError for options that cannot be, or do not go with the file, FileError for the file.
    """
    options.check()
    options = replace(options, model=options.model or path.name.split(".")[0] or path.name)
    text = read_text(path, "costs")
    form = options.format or _recognised(text, path)
    try:
        if form == "pipedream":
            return _of_graph(text, path, options)
        rows = read_csv(text, str(path)) if form == "csv" else read_json(text, str(path))
        return _of_table(rows, path, options)
    except ValidationError as error:
        first = error.errors()[0]
        field = "".join(f"{part}." for part in first["loc"])
        at = f"{field[:-1]}: " if field else ""
        message = first["msg"].removeprefix("Value error, ")
        raise FileError(f"{path}: {at}{message}", "Mend the file: pplan plans with what it says.") from error


def _recognised(text: str, path: Path) -> Format:
    """The format, by the content. Raises FileError."""
    if not text.strip():
        raise FileError(f"{path}: is empty", "Name a file of costs.")
    kind = detect_kind(text)
    # A table has the key `layers`, too; what pplan writes always has a schema.
    if kind is not None and "schema" in json.loads(text):
        raise FileError(
            f"{path}: this is a {kind} of pplan already",
            "Give it to pplan show, or name a file of another tool.",
        )
    if text.lstrip().startswith(("{", "[")):
        return "json"
    if is_graph(text):
        return "pipedream"
    if looks_like_csv(text):
        return "csv"
    raise FileError(
        f"{path}: line 1: {text.strip().splitlines()[0][:80]!r} begins no format that is known",
        f"Write {COST_FORMATS}. `format` names the format.",
    )


def _of_graph(text: str, path: Path, options: ProfileImportOptions) -> Profile:
    size = options.micro_batch_size or PIPEDREAM_SAMPLES
    granularity = options.granularity or "block"
    graph = parse_graph(text, str(path))
    layers = cut_into_layers(graph, str(path), granularity, size)
    loading = sum(node.forward_seconds for node in layers.inputs)
    notes = [f"imported from {path.name}, a PipeDream graph of {format_count(len(graph.nodes), 'node')}"]
    if options.micro_batch_size is None:
        notes.append(
            f"the graph does not say its micro-batch size: {size} is assumed, as in PipeDream's own; "
            "`micro_batch_size` gives another"
        )
    if loading:
        notes.append(f"loading the data, {format_seconds(loading)} in the graph, is not counted")
    if len(layers.layers) == 1 and len(graph.nodes) > 2 and granularity == "block":
        notes.append("one tensor alone crosses no place of the graph: granularity='fine' cuts at the others")
    notes.append(
        "the graph has no saved bytes: each operation is taken to save its output, and a stage keeps its "
        "input besides"
    )
    return _profile(
        options,
        layers.layers,
        layers.edges,
        notes,
        granularity=granularity,
        input_bytes_per_sample=round(layers.input_bytes / size),
    )


def _of_table(rows: list[Row], path: Path, options: ProfileImportOptions) -> Profile:
    if options.granularity is not None:
        raise UsageError(
            f"granularity={options.granularity!r}: {path} is a table, its rows are the layers",
            "Omit it: it is for graphs.",
        )
    has_sizes = states_sizes(rows)
    if has_sizes and options.micro_batch_size is not None:
        raise UsageError(
            f"micro_batch_size={options.micro_batch_size}: {path} has a column micro_batch_size",
            "Omit it, or take the column out.",
        )
    size = options.micro_batch_size or TABLE_SAMPLES
    degrees = sorted({row.tensor_parallel for row in rows}) or [1]
    layers, *others = (
        group_rows([row for row in rows if row.tensor_parallel == degree], str(path), size)
        for degree in degrees
    )
    shared = [
        SharedLayers(tensor_parallel=degree, layers=own.layers)
        for degree, own in zip(degrees[1:], others, strict=True)
    ]
    _refuse_degrees(degrees, options, path)
    notes = [f"imported from {path.name}, a table of {format_count(len(layers.layers), 'layer')}"]
    if not has_sizes and options.micro_batch_size is None:
        notes.append(
            f"the table does not say its micro-batch size: {size} is assumed; "
            "`micro_batch_size` gives another"
        )
    if shared:
        notes.append(
            f"also of layers that {either(degrees[1:])} devices share: solve chooses one, or `tp` does"
        )
    return _profile(options, layers.layers, layers.edges, [*notes, *layers.notes], shared=shared)


def _refuse_degrees(degrees: list[int], options: ProfileImportOptions, path: Path) -> None:
    """Raises UsageError where the plain columns are to be of as many devices as others."""
    if options.tensor_parallel in degrees[1:] or options.tensor_parallel > min(degrees[1:], default=inf):
        raise UsageError(
            f"tensor_parallel={options.tensor_parallel}: {path} has columns of tp{degrees[1]}_ besides",
            "Those without tp are of fewer devices: of 1, where it is omitted.",
        )


def _profile(
    options: ProfileImportOptions,
    layers: list[ProfiledLayer],
    edges: list[tuple[str, str]],
    notes: list[str],
    *,
    granularity: str = "block",
    input_bytes_per_sample: int = 0,
    shared: Sequence[SharedLayers] = (),
) -> Profile:
    """The profile, with what no such file says: the device, its host's time, workspace."""
    sizes = [cost.micro_batch_size for cost in layers[0].costs]
    if len(sizes) == 1:
        notes.append(
            f"there is one micro-batch size, {sizes[0]}: at any other, costs scale with the samples, which "
            "flatters small ones"
        )
    notes.append(
        "the device, its launch times and workspace are not in the file; solve takes `gpu` or `memory_bytes`"
    )
    return Profile(
        model=options.model or "model",
        device=UNKNOWN_DEVICE,
        dtype=options.dtype,
        tensor_parallel=options.tensor_parallel,
        scales_with_samples=len(sizes) == 1,
        granularity=granularity,
        input_bytes_per_sample=input_bytes_per_sample,
        layers=layers,
        shared_layers=list(shared),
        edges=edges,
        notes=notes,
    )

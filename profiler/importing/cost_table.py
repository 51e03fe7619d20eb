"""A table of costs, CSV or JSON, one row a layer in the order in which they run."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

from ...cost_models.errors import FileError, short_repr
from ...cost_models.quantities import format_count
from ..profile_file import LayerMeasurement, ProfiledLayer
from .file_numbers import FilePosition, near, samples, seconds, whole_bytes

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
    """Whether the first line of `text` names a column of such a table."""
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
    """The same of a name in small letters with underscores, without tp2_ before it."""
    if name in _PLAIN or name in _OTHER_NAMES:
        return _OTHER_NAMES.get(name, name) if _OTHER_NAMES.get(name, name) in _PLAIN else written
    what, _, unit = name.rpartition("_")
    what, unit = _OTHER_NAMES.get(what, what), _OTHER_UNITS.get(unit, unit)
    return f"{what}_{unit}" if unit in _UNITS.get(what, ()) else written


def _renamed(written: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{name} as {_column(name)}" for name in written if _column(name) != name)


def _is_shared(column: str) -> bool:
    """Whether it is one of our columns for devices that share the layer."""
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
    """Whether the table has the micro-batch size of some row."""
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

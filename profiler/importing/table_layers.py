"""Makes a chain of layers, with costs at all micro-batch sizes, of the rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...cost_models.errors import FileError
from ...cost_models.quantities import format_count
from ..profile_records import LayerMeasurement, ProfiledLayer
from .cost_table import Row


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

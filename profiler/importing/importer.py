"""`pplan import`: recognises a file of costs by its content and makes a profile of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from ...cost_models.errors import FileError, UsageError
from ...cost_models.quantities import either, format_count, format_seconds
from ...cost_models.text_files import detect_kind, read_text
from ...cost_models.topology import UNKNOWN_DEVICE
from ..profile_file import Profile, ProfiledLayer, SharedLayers
from ..profile_options import ProfileImportOptions
from . import cost_table, pipedream_graph
from .cost_table import Row, looks_like_csv, read_csv, read_json
from .pipedream_graph import is_graph, parse_graph

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
    layers = pipedream_graph.cut_into_layers(graph, str(path), granularity, size)
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
    has_sizes = cost_table.states_sizes(rows)
    if has_sizes and options.micro_batch_size is not None:
        raise UsageError(
            f"micro_batch_size={options.micro_batch_size}: {path} has a column micro_batch_size",
            "Omit it, or take the column out.",
        )
    size = options.micro_batch_size or TABLE_SAMPLES
    degrees = sorted({row.tensor_parallel for row in rows}) or [1]
    layers, *others = (
        cost_table.group_rows([row for row in rows if row.tensor_parallel == degree], str(path), size)
        for degree in degrees
    )
    shared = [
        SharedLayers(tensor_parallel=degree, layers=own.layers)
        for degree, own in zip(degrees[1:], others, strict=True)
    ]
    _check_degrees(degrees, options, path)
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


def _check_degrees(degrees: list[int], options: ProfileImportOptions, path: Path) -> None:
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

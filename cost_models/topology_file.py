"""The topology as a TOML file, in the words of the command line's options.

    gpu = "a100-40gb"                   # or: memory = "40GiB", or both
    gpus = 16
    gpus_per_node = 8
    bandwidth = ["300GB/s", "25GB/s"]   # inside a node, between nodes
    latency = ["5us", "20us"]

Every key may be left out; the options of the command line go before the file.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .document import read_text
from .errors import FileError, UsageError
from .presets import find_preset
from .quantities import parse_bytes, parse_rate, parse_seconds

Count = Annotated[int, Field(ge=1)]
Levels = Annotated[list[str], Field(min_length=1, max_length=2)]


class _Keys(BaseModel):
    """What may stand in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    gpu: str | None = None
    memory: str | None = None
    gpus: Count | None = None
    gpus_per_node: Count | None = None
    bandwidth: Levels | None = None
    latency: Levels | None = None


class TopologyFile(BaseModel):
    """A topology file as read: None for what it leaves out.

    Bandwidths are bytes per second, latencies seconds: inside a node and, where there is a second, between.
    """

    model_config = ConfigDict(frozen=True)

    gpu: str | None = None
    memory_bytes: int | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    bandwidth: tuple[float, ...] | None = None
    latency: tuple[float, ...] | None = None


def load_topology(path: Path) -> TopologyFile:
    """Reads and validates the file.

    Raises FileError: missing, not TOML, a key that is not known (with the nearest that is), a value that is
    not allowed.
    """
    keys = _read_keys(path)
    try:
        return TopologyFile(
            gpu=None if keys.gpu is None else find_preset(keys.gpu, "gpu").name,
            memory_bytes=None if keys.memory is None else parse_bytes(keys.memory, "memory"),
            gpus=keys.gpus,
            gpus_per_node=keys.gpus_per_node,
            bandwidth=None
            if keys.bandwidth is None
            else tuple(parse_rate(x, "bandwidth") for x in keys.bandwidth),
            latency=None
            if keys.latency is None
            else tuple(parse_seconds(x, "latency") for x in keys.latency),
        )
    except UsageError as error:
        raise FileError(f"{path}: {error.what}", error.hint) from error


def _read_keys(path: Path) -> _Keys:
    try:
        content = tomllib.loads(read_text(path, "topology"))
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"{path}: not a TOML file: {error}", _EXAMPLE) from error
    # One level may be given without the brackets.
    levels = {key: [content[key]] for key in ("bandwidth", "latency") if isinstance(content.get(key), str)}
    try:
        return _Keys.model_validate(content | levels)
    except ValidationError as error:
        raise _refusal(path, content, error) from error


_EXAMPLE = 'Write lines such as: gpu = "a100-40gb", or bandwidth = ["300GB/s", "25GB/s"].'


def _refusal(path: Path, content: dict[str, Any], error: ValidationError) -> FileError:
    first = error.errors()[0]
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _Keys.model_fields, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        return FileError(f"{path}: unknown key {key!r}", f"{guess}Keys: {', '.join(_Keys.model_fields)}.")
    return FileError(f"{path}: {key}: {first['msg']}, the value is {content[key]!r}", _EXAMPLE)

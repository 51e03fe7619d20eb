"""A TOML file with the figures of a GPU, for `device="analytic:my.toml"`, and the reader of its keys.

    name = "My GPU"           # as its driver names it: plans take links of its preset, where there is one
    memory = "48GiB"
    bandwidth = "864GB/s"     # of its memory
    launch = "1.5us"          # for each kernel on the device; may be left out
    host_launch = "40us"      # for each operation on the host; may be left out
    float32 = 91.6e12         # FLOP/s of dense products
    bfloat16 = 181e12

FLOP/s are needed of the dtypes that the model computes in: float32, tf32, float16, bfloat16 and float64. Keys
that are not known are refused. Topology files are read by the same functions.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import FileError, UsageError
from .machines import HOST_LAUNCH, LAUNCH, Figure, Roofline
from .quantities import parse_bytes, parse_rate, parse_seconds
from .text_files import parse_toml, read_text

_DTYPES = ("float32", "tf32", "float16", "bfloat16", "float64")
_EXAMPLE = 'Write lines such as: name = "My GPU", memory = "48GiB", bandwidth = "864GB/s", float32 = 91.6e12'

Peak = Annotated[float, Field(ge=1e6, le=1e20)]


class _RooflineKeys(BaseModel):
    """Keys of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    name: Annotated[str, Field(min_length=1)]
    memory: str
    bandwidth: str
    launch: str | None = None
    host_launch: str | None = None
    float32: Peak | None = None
    tf32: Peak | None = None
    float16: Peak | None = None
    bfloat16: Peak | None = None
    float64: Peak | None = None


def load_roofline(path: Path) -> Roofline:
    """Read and validate a roofline file.

    Raises:
        FileError: The file is missing or not TOML, a key is missing or unknown, or a value is not allowed.
    """
    content = read_toml(read_text(path, "roofline"), path, _EXAMPLE)
    keys, source = read_keys(content, path, _RooflineKeys, _EXAMPLE), str(path)
    peaks = {dtype: Figure(peak, source) for dtype in _DTYPES if (peak := getattr(keys, dtype)) is not None}
    if not peaks:
        raise FileError(f"{path}: no FLOP/s are given", f"Give at least one of {', '.join(_DTYPES)}.")
    try:
        return Roofline(
            name=keys.name,
            device_name=keys.name,
            memory_bytes=parse_bytes(keys.memory, "memory"),
            peaks=peaks,
            bandwidth=_finite(parse_rate(keys.bandwidth, "bandwidth"), keys.bandwidth, source),
            launch=_launch(keys.launch, "launch", source) or LAUNCH,
            host_launch=_launch(keys.host_launch, "host_launch", source) or HOST_LAUNCH,
        )
    except UsageError as error:
        raise FileError(f"{path}: {error.what}", error.hint) from error


def _launch(text: str | None, key: str, source: str) -> Figure | None:
    return None if text is None else Figure(parse_seconds(text, key), source)


def _finite(rate: float, text: str, source: str) -> Figure:
    if not math.isfinite(rate):
        raise UsageError(f"bandwidth {text}: no memory is endlessly fast", _EXAMPLE)
    return Figure(rate, source)


Keys = TypeVar("Keys", bound=BaseModel)


def read_keys(
    content: dict[str, Any],
    path: Path,
    model: type[Keys],
    example: str,
    tables: Mapping[str, tuple[type[BaseModel], str]] | None = None,
) -> Keys:
    """Return the keys of a TOML file.

    Args:
        content: Content of the file.
        path: Path for messages.
        model: Keys of the file.
        example: Example for messages.
        tables: Keys of each kind of table in the file, with an example.

    Raises:
        FileError: A key is missing or unknown (the message names a similar one), or a value is not allowed.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
    loc, where, keys = first["loc"], "", model.model_fields
    if len(loc) > 2:  # the key of a table: ("level", 0, "size")
        where, keys = f"{loc[0]} {int(loc[1]) + 1}: ", (tables or {})[str(loc[0])][0].model_fields
    if str(loc[0]) in (tables or {}):
        example = (tables or {})[str(loc[0])][1]
    key = str(loc[2] if where else loc[0])
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, keys, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        raise FileError(f"{path}: {where}unknown key {key!r}", f"{guess}Keys: {', '.join(keys)}.")
    if first["type"] == "missing":
        raise FileError(f"{path}: {where}has no {key}", example)
    value = first["input"] if where else content[key]
    raise FileError(f"{path}: {where}{key}: {first['msg']}, the value is {value!r}", example)


def read_toml(text: str, path: Path, example: str) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        FileError: The text is not TOML.
    """
    try:
        return parse_toml(text)
    except ValueError as error:
        raise FileError(f"{path}: not a TOML file: {error}", example) from error

"""A GPU's limits as a TOML file, for `device="analytic:my.toml"`.

    name = "My GPU"           # as its driver names it: plans take links of its preset, where there is one
    memory = "48GiB"
    bandwidth = "864GB/s"     # of its memory
    launch = "1.5us"          # for each kernel on the device; may be left out
    host_launch = "40us"      # for each operation on the host; may be left out
    float32 = 91.6e12         # FLOP/s of dense products
    bfloat16 = 181e12

Of FLOP/s those of the dtypes that the model computes in are needed, of float32, tf32, float16, bfloat16 and
float64. Keys that are not known are refused.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..document import read_text
from ..errors import FileError, UsageError
from ..quantities import parse_bytes, parse_rate, parse_seconds
from .presets import Figure
from .rooflines import HOST_LAUNCH, LAUNCH, Roofline

_DTYPES = ("float32", "tf32", "float16", "bfloat16", "float64")
_EXAMPLE = 'Write lines such as: name = "My GPU", memory = "48GiB", bandwidth = "864GB/s", float32 = 91.6e12'

Peak = Annotated[float, Field(ge=1e6, le=1e20)]


class _RooflineKeys(BaseModel):
    """What may stand in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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
    """Reads and validates the file.

    Raises FileError: missing, not TOML, a key that is missing or not known, a value that is not allowed.
    """
    keys, source = _read_keys(path), str(path)
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


def _launch(given: str | None, key: str, source: str) -> Figure | None:
    return None if given is None else Figure(parse_seconds(given, key), source)


def _finite(rate: float, given: str, source: str) -> Figure:
    if not math.isfinite(rate):
        raise UsageError(f"bandwidth {given}: no memory is endlessly fast", _EXAMPLE)
    return Figure(rate, source)


def _read_keys(path: Path) -> _RooflineKeys:
    try:
        content = tomllib.loads(read_text(path, "roofline"))
    except (ValueError, RecursionError) as error:  # ValueError: not TOML, or a number that is too long
        raise FileError(f"{path}: not a TOML file: {error}", _EXAMPLE) from error
    try:
        return _RooflineKeys.model_validate(content)
    except ValidationError as error:
        raise _refusal(path, content, error) from error


def _refusal(path: Path, content: dict[str, Any], error: ValidationError) -> FileError:
    first = error.errors()[0]
    key = str(first["loc"][0])
    if first["type"] == "missing":
        return FileError(f"{path}: the key {key!r} is missing", _EXAMPLE)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _RooflineKeys.model_fields, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        known = ", ".join(_RooflineKeys.model_fields)
        return FileError(f"{path}: unknown key {key!r}", f"{guess}Keys: {known}.")
    return FileError(f"{path}: {key}: {first['msg']}, the value is {content[key]!r}", _EXAMPLE)

"""Numbers of an imported file, checked against the bounds of a profile; errors name the place in the file."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from dataclasses import dataclass

from ...cost_models.errors import FileError, short_repr
from ...cost_models.quantities import MOST_BYTES, MOST_SAMPLES, MOST_SECONDS

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

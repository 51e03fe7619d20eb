"""Figures of an imported file: within the bounds of a profile, or refused with their place in the file."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from dataclasses import dataclass

from ...cost_models.errors import FileError, short_repr
from ...cost_models.quantities import MOST_BYTES, MOST_SAMPLES, MOST_SECONDS

_NAMED = 12
"""Names that an error shows."""


@dataclass(frozen=True)
class Place:
    """Where in a file something stands: `at` is its line or index."""

    file: str
    at: str

    def refusal(self, what: str, hint: str) -> FileError:
        """The error that names the place."""
        return FileError(f"{self.file}: {self.at}: {what}", hint)


def seconds(place: Place, key: str, seen: object, *, milliseconds: bool = False) -> float:
    """The duration `seen` under `key`. Raises FileError."""
    number = _number(place, key, seen)
    # Divided, so that 5 ms is the same float as 5e-3.
    found = number / 1e3 if milliseconds else number
    if found > MOST_SECONDS:
        raise _out_of_bounds(place, key, seen, f"at most {MOST_SECONDS:g} s")
    return found


def whole_bytes(place: Place, key: str, seen: object) -> int:
    """The size `seen` under `key`, rounded: other tools write floats. Raises FileError."""
    found = seen if isinstance(seen, int) and not isinstance(seen, bool) else round(_number(place, key, seen))
    if not 0 <= found <= MOST_BYTES:
        raise _out_of_bounds(place, key, seen, "at least 0 and less than 2**63 bytes")
    return found


def samples(place: Place, key: str, seen: object) -> int:
    """The number of samples `seen` under `key`. Raises FileError."""
    number = _number(place, key, seen)
    if number != math.floor(number) or not 1 <= number <= MOST_SAMPLES:
        raise _out_of_bounds(place, key, seen, f"a whole number from 1 to {MOST_SAMPLES}")
    return int(number)


def near(word: str, known: Collection[str]) -> str:
    """What to do about a name that is not known, with the nearest one that is."""
    found = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    guess = f"Did you mean {found[0]}? " if found else ""
    return f"{guess}There are: {', '.join(list(known)[:_NAMED])}{more}."


def _number(place: Place, key: str, seen: object) -> float:
    """A finite number of at least 0, as a number or as its text."""
    try:
        is_number = (
            isinstance(seen, int | float | str) and not isinstance(seen, bool) and "_" not in str(seen)
        )
        number = float(seen) if is_number else math.nan  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        is_number = False
    if not is_number:
        raise place.refusal(
            f"{key} is {short_repr(seen)}, not a number", "Write it as 12.5 or 1e-3, without a unit."
        )
    if not math.isfinite(number) or number < 0:
        raise _out_of_bounds(place, key, seen, "finite and at least 0")
    return number


def _out_of_bounds(place: Place, key: str, seen: object, expected: str) -> FileError:
    return place.refusal(f"{key} is {short_repr(seen)}, it must be {expected}", "Mend the file.")

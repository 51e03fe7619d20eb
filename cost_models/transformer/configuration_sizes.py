"""Values of a configuration by their keys, each of the kind that it must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError, short_repr
from .model_families import Flag

_LARGEST = 2**31
"""Of any size of a configuration: far above what is trained."""
_LONGEST = 100
"""Characters of a model's name."""
NO_DECODER = "Give the config.json of a decoder-only transformer."


def wrong_value(key: str, value: object, expected: str) -> UsageError:
    is_huge = isinstance(value, int) and abs(value) > 10**40
    text = "a number of more than 40 digits" if is_huge else short_repr(value)
    return UsageError(f"{key}={text}: must be {expected}", "Give the model's own config.json.")


class ConfigurationSizes:
    """Whole numbers by any of several keys."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self.keys = keys

    def optional(self, *names: str) -> int:
        """0 where none of them is given."""
        for name in names:
            value = self.keys.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
                raise wrong_value(name, value, f"a whole number from 0 to {_LARGEST}")
            return value
        return 0

    def needed(self, *names: str) -> int:
        size = self.optional(*names)
        if not size:
            raise UsageError(f"the key {' or '.join(names[:2])} is missing, or 0", NO_DECODER)
        return size

    def flag(self, flag: Flag) -> bool:
        """What it says of the model."""
        if isinstance(flag, bool):
            return flag
        value = self.keys.get(flag[0])
        if value is None:
            return flag[1]
        if not isinstance(value, int) or value not in (0, 1):
            raise wrong_value(flag[0], value, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        """A word; empty where it is missing."""
        value = self.keys.get(name)
        if value is not None and not (isinstance(value, str) and len(value) <= _LONGEST):
            raise wrong_value(name, value, f"a text of up to {_LONGEST} characters")
        return value or ""

    def members(self, name: str, kind: type, expected: str) -> list[Any] | None:
        """A list of this kind of values; None where it is missing."""
        values = self.keys.get(name)
        if values is None:
            return None
        if not isinstance(values, list) or any(type(each) is not kind for each in values):
            raise wrong_value(name, values, expected)
        return values

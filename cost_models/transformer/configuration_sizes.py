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
    """Values of a configuration by their keys. It notes which keys are used."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self._keys = keys
        self.used: set[str] = set()

    def value(self, name: str) -> Any:
        """The value of a key; None where it is missing."""
        self.used.add(name)
        return self._keys.get(name)

    def has(self, name: str) -> bool:
        """Return whether there is a key, be it null."""
        self.used.add(name)
        return name in self._keys

    def ignore(self, *names: str) -> None:
        """Take keys for used that mean nothing next to others."""
        self.used.update(names)

    def optional(self, *names: str) -> int:
        """The size under the first of these keys that has one; 0 where none has."""
        for name in names:
            value = self._keys.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
                raise wrong_value(name, value, f"a whole number from 0 to {_LARGEST}")
            # Another spelling with another value is not used.
            self.used.update(each for each in names if self._keys.get(each) == value)
            return value
        return 0

    def needed(self, *names: str) -> int:
        """Return a required size. Raises UsageError if it is missing or null."""
        size = self.optional(*names)
        if not size:
            self.refuse_null(*names)
            raise UsageError(f"the key {' or '.join(names[:2])} is missing, or 0", NO_DECODER)
        return size

    def refuse_null(self, *names: str) -> None:
        """Raise UsageError where one of these keys is null."""
        if null := next((name for name in names if name in self._keys and self._keys[name] is None), None):
            raise UsageError(f"{null}=null: must be a whole number", "Give the model's own config.json.")

    def flag(self, flag: Flag) -> bool:
        """What it says of the model."""
        if isinstance(flag, bool):
            return flag
        value = self.value(flag[0])
        if value is None:
            return flag[1]
        if not isinstance(value, int) or value not in (0, 1):
            raise wrong_value(flag[0], value, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        """A word; empty where it is missing."""
        value = self.value(name)
        if value is not None and not (isinstance(value, str) and len(value) <= _LONGEST):
            raise wrong_value(name, value, f"a text of up to {_LONGEST} characters")
        return value or ""

    def members(self, name: str, kind: type, expected: str) -> list[Any] | None:
        """A list of this kind of values; None where it is missing."""
        values = self.value(name)
        if values is None:
            return None
        if not isinstance(values, list) or any(type(each) is not kind for each in values):
            raise wrong_value(name, values, expected)
        return values

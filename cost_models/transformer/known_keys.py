"""Keys of a config.json that change no cost, and the refusal of those that might.

`known_keys.toml` is the table.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import UsageError
from .model_families import FAMILIES

_MOST_NAMED = 20
"""Keys in a message."""
_LONGEST_VALUE = 24
"""Characters of a value in a message."""


def is_part(key: str) -> bool:
    """Return whether a key belongs to what reads pictures, video or sound."""
    return _matches(key, "parts")


def unknown_keys(keys: Mapping[str, Any], used: Collection[str], family: str) -> dict[str, Any]:
    """Return the keys that are neither used nor harmless, with their values.

    Args:
        keys: A configuration, or a section of one.
        used: The keys that its reader uses.
        family: The `model_type`; empty where it has none.
    """
    return {
        str(key): value
        for key, value in keys.items()
        if value is not None and key not in used and not _is_harmless(str(key), value, keys, family)
    }


def refuse_unknown(keys: Mapping[str, Any]) -> None:
    """Raise UsageError if there are any. It names them, with the values that are short."""
    if not keys:
        return
    names = ", ".join(f"{key[:60]}{_value_text(value)}" for key, value in list(keys.items())[:_MOST_NAMED])
    more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    raise UsageError(
        f"these keys are not known, so the cost of the model cannot be stated: {names}{more}",
        "Remove the keys that change none of its layers. If one does, the model is not supported.",
    )


def _value_text(value: object) -> str:
    is_short = isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**_LONGEST_VALUE)
    is_short |= isinstance(value, str) and len(value) <= _LONGEST_VALUE
    return f"={json.dumps(value)}" if is_short else ""


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("known_keys.toml").read_text(encoding="utf-8"))


def _matches(key: str, *sections: str) -> bool:
    """Return whether a section of names holds the key."""
    names, patterns = _names(sections)
    return key in names or any(fnmatchcase(key, pattern) for pattern in patterns)


@cache
def _names(sections: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Names of the sections, whole and with wildcards."""
    lists = (names for section in sections for names in _table()[section].values() if isinstance(names, list))
    every = [name for names in lists for name in names]
    return frozenset(name for name in every if "*" not in name), tuple(name for name in every if "*" in name)


def _values(key: str, family: str) -> list[Any]:
    """The values at which the key is harmless in this family, where not at every value."""
    table = _table()
    tables = [table["family"].get(family, {}), table["at"]]
    tables += [] if family in FAMILIES else [table["unknown"]["at"]]
    return [value for each in tables for value in each.get(key, [])]


def _is_harmless(key: str, value: object, keys: Mapping[str, Any], family: str) -> bool:
    if _matches(key, "any", "parts", "known" if family in FAMILIES else "unknown"):
        return True
    allowed = _values(key, family)
    others = [keys.get(name[1:]) for name in allowed if isinstance(name, str) and name[:1] == "="]
    members = value if isinstance(value, list) else [value]
    return bool(allowed) and all(member in [*allowed, *others] for member in members)

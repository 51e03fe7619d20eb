"""Checks of the Python API's arguments: a value of the expected type is returned, others raise UsageError."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping, Sequence
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any

from .errors import UsageError
from .option_readers import read_slow_devices
from .quantities import LEAST_RATE, MOST_DEVICES, MOST_RATE, MOST_SLOWDOWN


def whole(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None, example: str = "") -> int:
    """A whole number, numpy's too. Raises UsageError."""
    hint = f"Give a whole number, as in {name}={example or max(at_least, 8)}."
    if isinstance(value, bool):
        raise _wrong(name, value, "a whole number", hint)
    try:
        number = operator.index(value)
    except TypeError:
        raise _wrong(name, value, "a whole number", hint) from None
    if number < at_least:
        raise UsageError(f"{name}={_short_number(number)}: must be at least {at_least}", hint)
    if at_most is not None and number > at_most:
        raise UsageError(f"{name}={_short_number(number)}: must be at most {at_most}", hint)
    return number


def optional_whole(name: str, value: Any, *, example: str = "") -> int | None:
    """A whole number or None. Raises UsageError."""
    return None if value is None else whole(name, value, example=example)


def whole_or_auto(name: str, value: Any) -> int | None:
    """A whole number; None for None and for "auto". Raises UsageError."""
    return None if value == "auto" else optional_whole(name, value)


def wholes(name: str, values: Any) -> tuple[int, ...] | None:
    """Whole numbers of at least 1, or None. Raises UsageError."""
    if values is None:
        return None
    if not _goes_through(values):
        raise _wrong(name, values, "a list of whole numbers", f"For example: {name}=[1, 2, 4].")
    return tuple(whole(f"{name}[{index}]", value) for index, value in enumerate(values))


def number(name: str, value: Any) -> float:
    """A number, numpy's too. Raises UsageError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong(name, value, "a number", f"For example: {name}=60.")
    return _as_float(name, value)


def flag(name: str, value: Any) -> bool:
    """True or False, numpy's too. Raises UsageError."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise _wrong(name, value, "True or False", f"For example: {name}=True.")


def optional_number(name: str, value: Any) -> float | None:
    """A number or None. Raises UsageError."""
    return None if value is None else number(name, value)


def optional_rate(name: str, value: Any) -> float | None:
    """Bytes per second or None. Raises UsageError."""
    rate = optional_number(name, value)
    if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
        raise UsageError(
            f"{name}={rate:g}: must be from {LEAST_RATE:g} to {MOST_RATE:g} bytes per second",
            f"For example: {name}=50e9.",
        )
    return rate


def pins(name: str, values: Any) -> tuple[tuple[str, int], ...]:
    """Names of layers with the numbers of their stages. Raises UsageError."""
    example = f'For example: {name}=[("features.10", 1)], a layer and the number of its stage, from 0.'
    if isinstance(values, Mapping) or not _goes_through(values):
        raise _wrong(name, values, "a list of layers with their stages", example)
    pairs = []
    for index, pin in enumerate(values):
        at = f"{name}[{index}]"
        if not isinstance(pin, tuple | list) or len(pin) != 2 or not isinstance(pin[0], str):
            raise _wrong(at, pin, "a layer and the number of its stage", example)
        pairs.append((pin[0], whole(f"{at}[1]", pin[1], at_least=0, at_most=MOST_DEVICES)))
    return tuple(pairs)


def slow_devices(name: str, value: Any) -> tuple[float, float] | None:
    """A share of the devices and how many times as long they take, also as a text, or None. Raises
    UsageError."""
    if value is None:
        return None
    hint = f"For example: {name}='5%:1.5', each device takes 1.5 times as long with a probability of 5 %."
    if isinstance(value, str):
        value = read_slow_devices(value, name)
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise _wrong(name, value, "a share of the devices and how many times as long they take", hint)
    share, times = (number(f"{name}[{index}]", own) for index, own in enumerate(value))
    if not 0 < share < 1:
        raise UsageError(
            f"{name}={share:g}:{times:g}: the share must be above 0 and below 1",
            "Of devices that are always slow, the topology says so: speed = 0.67.",
        )
    if not 1 < times <= MOST_SLOWDOWN:
        raise UsageError(
            f"{name}={share:g}:{times:g}: must be above 1 and at most {MOST_SLOWDOWN:g} times as long", hint
        )
    return share, times


def watts(name: str, value: Any) -> dict[str, tuple[float, float]] | None:
    """By kind of device the watts while it computes and while it waits, also as a text, or None. Raises
    UsageError."""
    hint = f"For example: {name}='A100=400/60,T4=70/10', computing and waiting."
    if value is None:
        return None
    kinds = value
    if isinstance(value, str):
        pairs = [own.partition("=")[::2] for own in value.split(",")]
        kinds = {kind.strip(): power.split("/") for kind, power in pairs}
    if not isinstance(kinds, Mapping) or not kinds:
        raise _wrong(name, value, "watts by kind of device", hint)
    powers = {}
    for kind, both in kinds.items():
        try:
            busy, idle = (float(own) for own in both)
        except (TypeError, ValueError):
            raise UsageError(f"{name}={value!r}: {kind} has not two numbers of watts", hint) from None
        if not 0 <= idle <= busy < inf:
            raise UsageError(f"{name}={value!r}: {kind} must have 0 <= waiting <= computing", hint)
        powers[str(kind)] = (busy, idle)
    return powers


def settings(name: str, value: Any) -> dict[str, object] | None:
    """Values by their names, or None. Raises UsageError."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, value, "values by their names", f'For example: {name}={{"depth": 24}}.')
    return dict(value)


def function(name: str, value: Any) -> None:
    """Raises UsageError for what is neither None nor can be called."""
    if value is not None and not callable(value):
        raise _wrong(name, value, "a function", f"For example: {name}=print.")


def by_level(name: str, values: Any, example: str) -> Sequence[float] | None:
    """One number, or numbers inside a node and between nodes, or None. Raises UsageError."""
    if values is None:
        return None
    items = (values,) if isinstance(values, Real) else tuple(values) if _goes_through(values) else ("",)
    if not all(isinstance(value, Real) and not isinstance(value, bool) for value in items):
        raise _wrong(name, values, "a number or two", f"For example: {name}={example}.")
    return tuple(_as_float(name, value) for value in items)


def word(name: str, value: Any) -> str:
    """A text. Raises UsageError."""
    if not isinstance(value, str):
        raise _wrong(name, value, "a text", f'For example: {name}="auto".')
    return value


def optional_word(name: str, value: Any) -> str | None:
    """A text or None. Raises UsageError."""
    return None if value is None else word(name, value)


def unknown_word(name: str, value: str, choices: Sequence[str], more: str = "") -> UsageError:
    """The error for a word that is none of the `choices`, with the nearest; `more` ends their list."""
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.7)
    guess = f"Did you mean {near[0]}? " if near else ""
    return UsageError(f"{name}={value!r}: not known", f"{guess}Use one of: {', '.join(choices)}{more}.")


def words(name: str, values: Any) -> tuple[str, ...]:
    """Texts. Raises UsageError."""
    if not _goes_through(values):
        raise _wrong(name, values, "a list of texts", f'For example: {name}=("layer1.*",).')
    return tuple(word(f"{name}[{index}]", value) for index, value in enumerate(values))


def path(name: str, value: Any) -> Path:
    """A path, also as a text. Raises UsageError."""
    if not isinstance(value, str | Path):
        raise _wrong(name, value, "a path", f'For example: {name}="a file".')
    return Path(value)


def optional_path(name: str, value: Any) -> Path | None:
    """A path, also as a text, or None. Raises UsageError."""
    return None if value is None else path(name, value)


def instance(name: str, value: Any, kind: type, hint: str) -> None:
    """Raises UsageError where `value` is not a `kind`."""
    if not isinstance(value, kind):
        raise _wrong(name, value, f"a {kind.__name__}", hint)


def _as_float(name: str, value: Any) -> float:
    """It as a float. Raises UsageError for what is too large for one."""
    try:
        converted = float(value)
    except OverflowError:
        raise UsageError(f"{name}: the number is too large", f"For example: {name}=60.") from None
    return converted


def _short_number(number: int) -> str:
    """The number; Python writes none of more than 4300 digits."""
    return str(number) if number.bit_length() <= 256 else f"(a number of {number.bit_length()} bits)"


def _goes_through(values: Any) -> bool:
    """Whether it is a list or the like; a text is none."""
    try:
        iter(values)
    except TypeError:
        return False
    return not isinstance(values, str)


def _wrong(name: str, value: Any, expected_type: str, hint: str) -> UsageError:
    text = repr(value)
    text = f"{text[:60]}…" if len(text) > 60 else text
    return UsageError(f"{name}={text}: is not {expected_type} but of type {type(value).__name__}", hint)

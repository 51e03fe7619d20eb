"""Sizes, rates, durations and plain numbers: their ranges, as people write them, and as tables print them.

Every quantity is held to its range where it enters: in a file, on the command line, in a call. Inside these
ranges sums and products of any plan stay finite, so that no later code has to check it.
`docs/file-formats.md` lists them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from numbers import Integral

from .errors import UsageError

MOST_SECONDS = 1e9
"""Measured, or typed by a user: about 30 years."""
LEAST_PREDICTED_SECONDS, MOST_PREDICTED_SECONDS = 1e-30, 1e30
"""Of sums over layers and micro-batches."""
MOST_BYTES = 2**63 - 1
"""Of one figure, such as the parameters of a layer."""
MOST_TOTAL_BYTES = 2**100
"""Of sums of such figures."""
LEAST_RATE, MOST_RATE = 1.0, 1e18
"""Bytes per second of a link, unless its bandwidth is infinite."""
LEAST_SPEED, MOST_SPEED = 1e-6, 1e6
"""Of a device, relative to the profiled one."""
MOST_SLOWDOWN = 1e3
"""Times as long as usual, of a device that is slow at times."""
MOST_RATIO = 1e100
"""Of two predictions."""
LEAST_PRICE, MOST_PRICE = 1e-9, 1e9
"""Dollars of a device hour."""
MOST_SHARE = 1e9
"""Per cent that a step may be longer."""
MOST_SAMPLES = 2**24
"""Of a measured micro-batch."""
MOST_MINI_BATCH = 2**40
MOST_MICRO_BATCHES = 2**20
"""Of a step in a file: orders of actions are written out."""
MOST_ACTIONS = 2_000_000
"""Forwards, backwards and weight gradients of a step, where every one is simulated."""
MOST_LAYERS = 2**17
MOST_NAME = 10_000
"""Characters of a layer's name."""
MOST_DEVICES = 65_536
"""Of a topology."""
MOST_MEMBERS = 2**24
"""Of a level of links."""


_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BYTES = _DECIMAL | _BINARY
_PER_SECOND = {"ns": 1e9, "us": 1e6, "µs": 1e6, "ms": 1e3}
_SECONDS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_GREEK_MU = "\u03bc"
"""Keyboards write either the micro sign or the Greek letter; the table above holds the sign."""

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*")
_RATE_UNIT = re.compile(r"([kmgt]?i?)(b|bit|bits)(?:/s|ps)", re.IGNORECASE)


def parse_bytes(text: str, name: str = "size") -> int:
    """Bytes of a size such as `16GiB` (2**30 each) or `40 GB` (10**9 each), rounded to whole bytes.

    Units B, kB, MB, GB, TB, KiB, MiB, GiB and TiB, in upper or lower case. `name` is what errors call it.
    Raises UsageError for anything else, a negative or endless size, and 0.
    """
    example = "Give a size with its unit, such as 16GiB or 40GB."
    number, unit = _split(text, name, "a size", example)
    factor = _BYTES.get(unit.lower())
    if factor is None:
        raise _unknown_unit(text, name, unit, "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB", example)
    if not number * factor <= MOST_BYTES:
        raise UsageError(f"{name} {text}: too large for a size", example)
    size = round(number * factor)
    if size == 0:
        raise UsageError(f"{name} {text}: must be at least one byte", example)
    return size


def parse_rate(text: str, name: str = "rate") -> float:
    """Bytes per second of a rate such as `300GB/s`; `inf` stands for transfers that take no time.

    Bits per second (`Gb/s`, `Gbit/s`, `Gbps`: networks are sold by them) are refused with what they are in
    bytes. `name` is what errors call it. Raises UsageError, for a rate of 0 too.
    """
    example = "Give bytes per second, such as 25GB/s; inf for transfers that take no time."
    if text.strip().lower() == "inf":
        return math.inf
    number, unit = _split(text, name, "a rate", example)
    match = _RATE_UNIT.fullmatch(unit)
    if match is None:
        raise _unknown_unit(text, name, unit, "B/s, kB/s, MB/s, GB/s, TB/s, KiB/s, MiB/s, GiB/s", example)
    prefix, base = match.groups()
    factor = _BYTES.get(f"{prefix}b".lower())
    if factor is None:
        raise _unknown_unit(text, name, unit, "B/s, kB/s, MB/s, GB/s, TB/s, KiB/s, MiB/s, GiB/s", example)
    rate = number * factor
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise UsageError(
            f"{name} {text}: must be from {LEAST_RATE:g} to {MOST_RATE:g} bytes per second", example
        )
    if base != "B":
        raise _bits_refused(text, name, rate, f"{number:g}{prefix}B/s")
    return rate


def parse_seconds(text: str, name: str = "duration") -> float:
    """Seconds of a duration such as `5us`, `1.5ms`, `60s`, `2m` (minutes) or `1h`; `0` needs no unit.

    `name` is what errors call it. Raises UsageError for anything else, and for what is negative or endless.
    """
    example = "Give a duration with its unit, such as 5us, 1.5ms, 60s or 2m (minutes)."
    number, unit = _split(text, name, "a duration", example)
    if number == 0 and not unit:
        return 0.0
    unit = unit.replace(_GREEK_MU, "µ")
    if unit not in _PER_SECOND and unit not in _SECONDS:
        raise _unknown_unit(text, name, unit, "ns, us, ms, s, m, h", example)
    # Divided, so that 15us is the same float as 15e-6.
    seconds = number / _PER_SECOND[unit] if unit in _PER_SECOND else number * _SECONDS[unit]
    if not seconds <= MOST_SECONDS:
        raise UsageError(f"{name} {text}: too long for a duration", example)
    return seconds


def parse_time(text: str, name: str = "time") -> float:
    """Seconds of a time such as `20`, `20s` or `2min`: a number without a unit is in seconds.

    Raises UsageError, as `parse_seconds` does.
    """
    return parse_seconds(text if re.search("[^0-9.]", text.strip()) else f"{text.strip()}s", name)


def format_bytes(size: float) -> str:
    """A size in binary units: `512 B`, `1.50 KiB`, `1.25 GiB`."""
    if abs(size) < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        # 1,023.999 KiB would be printed as 1024.00 KiB: it belongs to the next unit.
        if round(abs(size), 2) < 1024:
            return f"{size:.2f} {unit}"
    return f"{size / 1024:.2f} TiB"


def format_rate(bytes_per_second: float) -> str:
    """A rate in decimal units, as links are sold: `300 GB/s`, `15.75 GB/s`; an endless one is `unlimited`."""
    if math.isinf(bytes_per_second):
        return "unlimited"
    unit, factor = "B", 1
    for name, step in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12)):
        if bytes_per_second >= step:
            unit, factor = name, step
    return f"{bytes_per_second / factor:.4g} {unit}/s"


def format_seconds(seconds: float, *, short: bool = False) -> str:
    """A duration to three significant digits: `1.23 s`, `12.3 ms`, `45.6 µs`; `short` drops closing zeros."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    for unit, factor in (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        number = float(f"{seconds / factor:.3g}")
        if abs(number) < 1000 or unit == "s":
            break
    if abs(number) >= 1000:
        return f"{seconds:.0f} s"
    digits = 2 - math.floor(math.log10(abs(number)))
    printed = f"{number:.{max(digits, 0)}f}"
    if short and "." in printed:
        printed = printed.rstrip("0").rstrip(".")
    return f"{printed} {unit}"


def _split(text: str, name: str, kind: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UsageError(f"{name} {text!r}: not {kind}", example)
    number = float(match[1])
    if number < 0:
        raise UsageError(f"{name} {text}: must not be negative", example)
    return number, match[2]


def _unknown_unit(text: str, name: str, unit: str, units: str, example: str) -> UsageError:
    what = f"the unit {unit!r} is none of {units}" if unit else "the unit is missing"
    return UsageError(f"{name} {text}: {what}", example)


def _bits_refused(text: str, name: str, bits_per_second: float, as_bytes: str) -> UsageError:
    return UsageError(
        f"{name} {text}: must be in bytes, not bits, per second",
        f"{text.strip()} is {format_rate(bits_per_second / 8).replace(' ', '')} in bytes: give that, "
        f"or {as_bytes} if you meant bytes.",
    )


def format_count(count: int, thing: str) -> str:
    """`1 layer`, `3 layers`, `2 micro-batches`."""
    if count == 1:
        return f"1 {thing}"
    return f"{count} {thing}{'es' if thing.endswith('ch') else 's'}"


SAME = 1e-9
"""Share of a step by which another may differ and still take as long."""


def format_batch(micro_batches: int, size: int, *, short: bool = False) -> str:
    """`32 micro-batches x 8`: their number, and the samples of a whole one; `short`, in a table: `32 x 8`."""
    return f"{micro_batches if short else format_count(micro_batches, 'micro-batch')} x {size}"


def percent(share: float) -> str:
    """`0.0612` as `6.1 %`."""
    return f"{100 * share:.1f} %"


def percent_at_most(share: float) -> str:
    """`0.06123` as `6.2 %`, rounded up: what is at most that. Below 0.05 % with more digits."""
    digits = 1
    while digits < 7 and 0 < 100 * share <= 0.5 * 10**-digits:
        digits += 1
    return f"{math.ceil(round(100 * share * 10**digits, 6)) / 10**digits:.{digits}f} %"


USEFUL = 1.0
"""Gap above which a bound says next to nothing."""


def describe_gap(gap: float, bound: str) -> str:
    """`at most 6.2 % from the proven bound of 3.00 ms`; of a large gap `no useful bound is proven`."""
    if gap > USEFUL:
        return "no useful bound is proven"
    return f"at most {percent_at_most(gap)} from the proven bound of {bound}"


def whole_percent(share: float) -> str:
    """`0.0612` as `6 %`."""
    return f"{100 * share:.0f} %"


def three_digits(value: float) -> str:
    """A number with three digits that count, never in powers of ten below a million."""
    size = abs(value)
    if size < 9.995:
        return f"{value:.2f}"
    if size < 99.95:
        return f"{value:.1f}"
    return f"{value:.0f}"


def format_amount(count: float) -> str:
    """A large number in words: `144 million`, `7.02 billion`."""
    for name, size in ((" trillion", 1e12), (" billion", 1e9), (" million", 1e6)):
        if count >= 0.9995 * size:
            return f"{three_digits(count / size)}{name}"
    return f"{count:.0f}"


def compare_steps(step: float, reference: float) -> str:
    """A step against one's own: `1.25 x slower`; in percent where the factor would read 1.00."""
    factor = max(step, reference) / min(step, reference)
    if factor - 1 <= SAME:
        return "the same"
    if (digits := three_digits(factor)) == "1.00":
        return compare_percent(step, reference)
    return f"{digits} x {'slower' if step > reference else 'faster'}"


def compare_percent(step: float, reference: float) -> str:
    """A step against one's own: `3.1 % slower`."""
    share = step / reference - 1
    if abs(share) <= SAME:
        return "the same"
    if abs(share) < 5e-4:
        return "nearly the same"
    return f"{percent(share)} slower" if share > 0 else f"{percent(1 - step / reference)} faster"


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def either(choices: Sequence[object]) -> str:
    """`[1, 2, 4]` as `1, 2 or 4`."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last


def html_table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as a notebook shows it."""
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f"<table><caption>{escape(caption)}</caption>{table}</table>"


def is_positive(number: object) -> bool:
    """Return whether it is a whole number of at least 1, of Python's or of numpy's."""
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= 1

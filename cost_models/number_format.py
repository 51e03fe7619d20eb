"""Numbers without a unit as the tables print them, and tables of a notebook."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

SAME = 1e-9
"""Share of a step by which another may differ and still take as long."""


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

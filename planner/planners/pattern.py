"""A regular expression that ends: Python's backtracks, and one out of a file may take for ever.

The time of a search is bounded by the ways in which the expression can be matched to a text, times the places
where it may begin. The ways are counted from its parts: an alternation adds, what follows multiplies, and a
repetition of what can be matched in one way has as many ways as the text has lengths.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import reduce
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

MOST_STEPS = 1e9
"""Of all searches together: some ten seconds."""
LONGEST = 1000
"""Characters of an expression."""


def compiled(pattern: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """The expression. Raises ValueError with what is wrong with it."""
    if len(pattern) > LONGEST:
        raise ValueError(f"more than {LONGEST} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{error} in the regular expression") from None


def matching(pattern: str, texts: Sequence[str]) -> list[bool]:
    """In which of the texts the expression is found, in any case.

    Raises ValueError where it is none, or where looking for it could take longer than MOST_STEPS.
    """
    search = compiled(pattern, ignore_case=True).search
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = _parser.parse(pattern, re.IGNORECASE)
    steps = 0.0
    for length in map(len, texts):
        steps += (length + 1) * _ways(parts, length)
        if steps > MOST_STEPS:
            raise ValueError("it repeats what repeats, or repeats too often: matching it could take for ever")
    return [search(text) is not None for text in texts]


def _ways(parts: Any, length: int) -> float:
    """At most so many ways to match the parts, one after another, to a text of that length."""
    return reduce(lambda ways, part: min(ways * _count_ways(part, length), MOST_STEPS * 2), parts, 1.0)


def _count_ways(part: tuple[Any, Any], length: int) -> float:
    kind, about = part
    if kind is _constants.BRANCH:
        return sum(_ways(branch, length) for branch in about[1])
    if kind is _constants.SUBPATTERN:
        return _ways(about[3], length)
    if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
        least, most, parts = about
        return _ways_to_repeat(least, most, parts, length)
    if kind in (_constants.ASSERT, _constants.ASSERT_NOT):
        return _ways(about[1], length)
    if kind is _constants.ATOMIC_GROUP:
        return _ways(about, length)
    if kind is _constants.GROUPREF_EXISTS:
        return MOST_STEPS * 2
    return 1.0


def _ways_to_repeat(least: int, most: int, parts: Any, length: int) -> float:
    """Rounds of a part that may be empty do not go on for ever: at most one a character."""
    longest = max(min(int(most), length), int(least))
    ways = _ways(parts, length)
    if ways <= 1.0 and _is_single(parts):
        return float(longest - int(least) + 1)
    # A part of any length is divided into rounds in every way.
    one = max(ways, 1.0) if int(most) <= 1 else max(ways, 2.0)
    return min(one ** min(longest, 64) + (longest - int(least)), MOST_STEPS * 2)


def _is_single(parts: Any) -> bool:
    """Whether all that it matches has one length: then a text is divided into rounds in one way."""
    least, most = parts.getwidth()
    return bool(least == most and least > 0)

"""Rows of layers whose kinds repeat: one kind, or several in turn (local and global attention).

What a layer saves and needs depends on the layers around it, too: on its neighbours, and on which of the
tensors that are handed on it is the first or the last to use. So a period and one more at each end of a row
stand for themselves, and of the others one period for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

_LONGEST = 100
"""Kinds that take turns."""


class RepeatingRow(NamedTuple):
    """From `start` to before `stop` each kind is that of `period` places before."""

    start: int
    stop: int
    period: int

    @property
    def end(self) -> int:
        """So many at each end stand for themselves."""
        return self.period + 1

    def repeated(self, behind: int = 0) -> range:
        """Whole periods that the one before them stands for; at least `behind` more than the end stay."""
        start = self.start + self.end + self.period
        room = max(0, self.stop - self.end - behind - start)
        return range(start, start + room // self.period * self.period)

    def between(self, start: int, stop: int) -> RepeatingRow:
        """Its part there."""
        return RepeatingRow(max(self.start, start), min(self.stop, stop), self.period)


def find_rows(kinds: Sequence[Hashable]) -> list[RepeatingRow]:
    """All that are as long as they can be and have places that others stand for, of short periods first."""
    numbers: dict[Hashable, int] = {}
    places = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    rows = [
        row
        for period in range(1, min(_LONGEST, len(places) // 4) + 1)
        for row in _rows_of_period(places, period)
    ]
    return [row for row in rows if row.repeated()]


def disjoint_rows(kinds: Sequence[Hashable]) -> list[RepeatingRow]:
    """Rows that do not overlap, first that in which most is repeated, in their order."""
    rows = find_rows(kinds)
    apart: list[RepeatingRow] = []
    free = [(0, len(kinds))]
    while free and rows:
        start, stop = free.pop()
        parts = [row.between(start, stop) for row in rows]
        best = max(parts, key=lambda row: len(row.repeated()))
        if best.repeated():
            apart.append(best)
            free += [(start, best.start), (best.stop, stop)]
    return sorted(apart)


def _rows_of_period(places: Sequence[int], period: int) -> Iterator[RepeatingRow]:
    start = None
    for place in range(len(places) - period + 1):
        is_same = place + period < len(places) and places[place] == places[place + period]
        if is_same and start is None:
            start = place
        elif not is_same and start is not None:
            yield RepeatingRow(start, place + period, period)
            start = None

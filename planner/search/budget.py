"""What a search may spend: work that is counted, and processor time after which everything stops.

Counted work ends a search in the normal case, so that the same input always gives the same answer. The time
is there for what is not counted: whatever is under way when it is over stops with what is known by then, and
the answer says so, as it may then differ from run to run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

WORK_A_SECOND = 1e9
"""Of counted work: about what one core does in a second."""

Clock = Callable[[], float]
"""Seconds of processor time since any moment."""


class OutOfTime(Exception):
    """The time of a budget is over; whatever was computed is incomplete."""


class SearchBudget:
    """What may still be spent: counted work, in nanoseconds or so, and seconds of processor time.

    Everything that is done for one answer shares a budget, in parts: a part spends from the whole.
    """

    def __init__(
        self,
        work: float = inf,
        seconds: float = inf,
        clock: Clock = time.process_time,
        whole: SearchBudget | None = None,
    ) -> None:
        self._work, self._clock, self._whole = work, clock, whole
        self.end = inf if seconds == inf else clock() + seconds
        self._over = self._stopped = False

    @classmethod
    def of_seconds(cls, seconds: float, clock: Clock = time.process_time) -> SearchBudget:
        """Of a time limit: as much work as one core does in it, and no more time."""
        return cls(seconds * WORK_A_SECOND, seconds, clock)

    def part(self, work: float = inf, share: float | None = None) -> SearchBudget:
        """At most so much work, and at most that share of the time that is left."""
        budget = SearchBudget(work, inf, self._clock, self)
        budget.end = self.end
        if share is not None and self.end < inf:
            now = self._clock()
            budget.end = now + share * max(self.end - now, 0.0)
        return budget

    @property
    def remaining(self) -> float:
        """Work that may still be spent."""
        return self._work if self._whole is None else min(self._work, self._whole.remaining)

    @property
    def seconds_left(self) -> float:
        """Of the time."""
        return inf if self.end == inf else max(self.end - self._clock(), 0.0)

    @property
    def over(self) -> bool:
        """Whether the time is over: what is under way then stops."""
        if not self._over and self.end < inf and self._clock() >= self.end:
            self._over = True
            self._stop()
        return self._over

    @property
    def was_interrupted(self) -> bool:
        """Whether the time was over, of this or of a part, while something was under way."""
        return self._stopped

    @property
    def spent(self) -> bool:
        """Whether a search is to end: its work is done, or the time is over."""
        return self.remaining <= 0 or self.over

    def check(self) -> None:
        """Raises OutOfTime where the time is over."""
        if self.over:
            raise OutOfTime

    def extend(self, entries: int) -> None:
        """Bounds were computed for so many unfinished plans and next stages."""
        self.spend(200_000 + 1_000 * entries)

    def simulate(self, plans: int, actions: int) -> None:
        """So many plans of so many actions were simulated side by side."""
        self.spend(100_000 + actions * (1_500 if plans == 1 else 3_000 + 25 * plans))

    def spend(self, work: float) -> None:
        """So much was done."""
        self._work -= work
        if self._whole is not None:
            self._whole.spend(work)

    def _stop(self) -> None:
        self._stopped = True
        if self._whole is not None:
            self._whole._stop()

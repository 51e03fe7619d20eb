"""Budget of a search: counted work, and processor time after which everything stops.

Counted work ends a search in the normal case, so that the same input always gives the same answer. The time
limit covers what is not counted. A computation that is under way at the limit stops with what it knows, and
the answer says so, because it may then differ from run to run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

WORK_A_SECOND = 1e9
"""Counted work that one core does in about one second."""

Clock = Callable[[], float]
"""Function that returns seconds of processor time."""


class OutOfTime(Exception):
    """The time of a budget is over. Results that were under way are incomplete."""


class SearchBudget:
    """Counted work (about nanoseconds) and processor seconds that may still be spent.

    All computations for one answer share one budget. A part of it spends from the whole.

    Args:
        work: Work that may be spent.
        seconds: Seconds until the end.
        clock: Source of processor time.
        whole: Budget of which this one is a part.
    """

    def __init__(
        self,
        work: float = inf,
        seconds: float = inf,
        clock: Clock = time.process_time,
        whole: SearchBudget | None = None,
    ) -> None:
        """Start a budget now."""
        self._work, self._clock, self._whole = work, clock, whole
        self.end = inf if seconds == inf else clock() + seconds
        self._over = self._stopped = False

    @classmethod
    def of_seconds(cls, seconds: float, clock: Clock = time.process_time) -> SearchBudget:
        """Create the budget of a time limit: as much work as one core does in it, and no more time."""
        return cls(seconds * WORK_A_SECOND, seconds, clock)

    def part(self, work: float = inf, share: float | None = None) -> SearchBudget:
        """Return a budget that spends from this one.

        Args:
            work: Most work of the part.
            share: Share of the remaining time that the part may take. None for all of it.
        """
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
        """Seconds until the end; inf without a time limit."""
        return inf if self.end == inf else max(self.end - self._clock(), 0.0)

    @property
    def over(self) -> bool:
        """True if the time is over, so that computations under way must stop."""
        if not self._over and self.end < inf and self._clock() >= self.end:
            self._over = True
            self._stop()
        return self._over

    @property
    def was_interrupted(self) -> bool:
        """True if the time ran out during a computation that used this budget or a part of it."""
        return self._stopped

    @property
    def spent(self) -> bool:
        """True if a search must end because its work or its time is spent."""
        return self.remaining <= 0 or self.over

    def check(self) -> None:
        """Stop a computation whose time is over.

        Raises:
            OutOfTime: The time is over.
        """
        if self.over:
            raise OutOfTime

    def extend(self, entries: int) -> None:
        """Count the work of computing bounds for `entries` unfinished plans and next stages."""
        self.spend(200_000 + 1_000 * entries)

    def simulate(self, plans: int, actions: int) -> None:
        """Count the work of simulating `plans` plans of `actions` actions each."""
        self.spend(100_000 + actions * (1_500 if plans == 1 else 3_000 + 25 * plans))

    def spend(self, work: float) -> None:
        """Subtract `work` from this budget and from the one it is a part of."""
        self._work -= work
        if self._whole is not None:
            self._whole.spend(work)

    def _stop(self) -> None:
        self._stopped = True
        if self._whole is not None:
            self._whole._stop()

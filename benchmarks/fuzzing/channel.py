"""What a process that runs cases tells of them: counts and the case that it is at in shared memory, findings
through a pipe. So one that dies, or that a case hangs in for KILLED_AFTER seconds, has told all."""

from __future__ import annotations

import faulthandler
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

KILLED_AFTER = 600
"""Seconds of a case that answers no signal: its process ends."""
_WATCHED_ANEW = 1.0
"""Seconds after which the watch, a thread, is set anew: of quick cases not for each."""
Told = tuple[str, str, str]
"""A finding: its kind, what went wrong (empty where one of its kind was told before), and the case."""


class Tallies:
    """By kind of case how many there were, how many commands ran, and how many of these (of a reader alone:
    of the cases) found nothing to refuse; processes share them."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = list(kinds)
        self._counts = multiprocessing.RawArray("q", 3 * len(self.kinds))

    def add(self, number: int, ran: int, fine: int) -> None:
        """Of the case of this number: kinds take turns."""
        at = 3 * (number % len(self.kinds))
        self._counts[at] += 1
        self._counts[at + 1] += ran
        self._counts[at + 2] += fine

    @property
    def by_kind(self) -> dict[str, tuple[int, ...]]:
        return {kind: tuple(self._counts[3 * at : 3 * at + 3]) for at, kind in enumerate(self.kinds)}


@dataclass
class Channel:
    """The end of the process that runs the cases."""

    pipe: Connection
    current: Any
    tallies: Tallies
    _watched: float = field(default=0.0)

    def begin(self, number: int) -> None:
        """A case is begun."""
        self.current.value = number
        now = time.monotonic()
        if now - self._watched > _WATCHED_ANEW:
            self.watch(KILLED_AFTER)

    def watch(self, seconds: float) -> None:
        """The process ends after so long, unless another case begins."""
        faulthandler.dump_traceback_later(seconds, exit=True)
        self._watched = time.monotonic()

    def end(self, number: int, ran: int, fine: int, told: Told | None) -> None:
        """Of the case that was begun, how many commands ran and how many of them were fine; what is wrong."""
        self.tallies.add(number, ran, fine)
        if told is not None:
            self.pipe.send((number, told))

    def close(self) -> None:
        """After the last case."""
        faulthandler.cancel_dump_traceback_later()
        self.pipe.send(None)


Work = Callable[[range, Channel], None]


def findings(run: Work, numbers: range, tallies: Tallies, seed: int) -> Iterator[tuple[int, Told]]:
    """Of the cases of these numbers, in a process that is started anew behind a case in which it dies."""
    while numbers:
        receiving, sending = multiprocessing.Pipe(duplex=False)
        current = multiprocessing.RawValue("q", numbers[0])
        process = multiprocessing.Process(target=run, args=(numbers, Channel(sending, current, tallies)))
        process.start()
        sending.close()
        try:
            while (told := receiving.recv()) is not None:
                yield told
            numbers = numbers[:0]
        except EOFError:
            number = current.value
            tallies.add(number, 0, 0)
            yield number, ("killed", f"case {number} of seed {seed}: the process died", "")
            numbers = range(number + 1, numbers.stop)
        process.join()

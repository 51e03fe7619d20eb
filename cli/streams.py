"""The two streams: results on standard output, progress and remarks on standard error."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..cost_models.quantities import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

UNCONFINED_WIDTH = 120
"""Columns of a table that goes into a file or a pipe."""


def console() -> Console:
    """Where tables are printed: no markup, so that names with brackets come out as they are."""
    from rich.console import Console

    confined = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = None if confined else UNCONFINED_WIDTH
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)


def printable(text: str) -> str:
    """`text` with its control characters escaped: a name in a file may not steer the terminal."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    return repr(character)[1:-1] if unicodedata.category(character) in _STEERS else character


_STEERS = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Control, format (also the reversing of text), halves of characters, ends of lines and paragraphs."""


_PRINTED = [False]
_QUIET = [False]


def begin() -> None:
    """Prepare the streams and the width for a command.

    A stream that the shell closed (`>&-`) becomes the null device. Characters that a stream cannot encode are
    written as JSON escapes. A `COLUMNS` that is no positive number counts as not set, as in shells.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    codecs.register_error(_JSON_ESCAPES, _escape_as_json)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_JSON_ESCAPES)
    columns = os.environ.get("COLUMNS", "1")
    if not columns.isdecimal() or int(columns) == 0:
        del os.environ["COLUMNS"]
    _PRINTED[0] = _QUIET[0] = False


_JSON_ESCAPES = "pplan-json-escapes"


def _escape_as_json(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks by JSON escapes, so that `--json` stays valid."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def be_quiet() -> None:
    """No remarks and no progress from now on; errors stay."""
    _QUIET[0] = True


def remark(text: str) -> None:
    """One line on standard error, with fields in the words of the command line."""
    from .field_names import as_options

    if _QUIET[0]:
        return
    _clear_line()
    print(printable(as_options(text)), file=sys.stderr, flush=True)


def printed_result() -> bool:
    """Whether the command printed its result as it is: an error does not go behind it."""
    return _PRINTED[0]


def result(text: str) -> None:
    """Text on standard output as it is, without wrapping."""
    _PRINTED[0] = True
    sys.stdout.write(text)


def is_interactive() -> bool:
    """Whether somebody watches standard error: a bar makes sense."""
    return sys.stderr.isatty() and not _QUIET[0]


SILENCE, PACE = 1.0, 0.5
"""Seconds before the first line of what is being done, and between two."""
_CLEAR = "\r\x1b[2K"
_LINE = [False]
"""Whether standard error ends with a line of `waiting`."""


class Waiting:
    """What is being done, for how long already, and how long it may still take."""

    def __init__(self, doing: str, at_most: float | None = None) -> None:
        self.doing, self.at_most = doing, at_most
        self._begin = time.monotonic()
        self._end: float | None = None
        self._best: float | None = None

    def tell_share(self, done: float) -> None:
        """Of all the work, so much of 1 is done: the rest goes on at that pace."""
        if done > 0:
            self.tell_left((time.monotonic() - self._begin) * (1 - done) / done)

    def tell_left(self, seconds: float, doing: str | None = None) -> None:
        """About so many seconds are left."""
        self._end = time.monotonic() + seconds
        self.doing = self.doing if doing is None else doing

    def tell_best(self, step_seconds: float) -> None:
        """Show the step of the best plan so far."""
        self._best = step_seconds

    def __str__(self) -> str:
        now = time.monotonic()
        best = "" if self._best is None else f" (best so far {format_seconds(self._best)} a step)"
        if self._end is not None:
            left = f", about {format_clock(self._end - now)} more"
        elif self.at_most is not None:
            left = f", at most about {format_clock(self.at_most - (now - self._begin))} more"
        else:
            left = ""
        return f"{printable(self.doing)}{best}: {format_clock(now - self._begin)}{left}"


def format_clock(seconds: float) -> str:
    """42 s, or 3 min 20 s; 0 s for less than none."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextmanager
def waiting(doing: str, at_most: float | None = None) -> Iterator[Waiting]:
    """Says, where somebody watches, what is being done, for how long already, and how long it may take: one
    line on standard error, from the second second on, which goes when the work is done."""
    wait = Waiting(doing, at_most)
    if not is_interactive():
        yield wait
        return
    done = threading.Event()
    thread = threading.Thread(target=_show, args=(wait, done), daemon=True)
    thread.start()
    try:
        yield wait
    finally:
        done.set()
        thread.join()


@contextmanager
def counting(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Says, where somebody watches, how many of how many are done: one line on standard error, drawn only
    when it is told, so that nothing that is timed is disturbed."""

    def tell(done: int, count: int) -> None:
        if is_interactive():
            _LINE[0] = True
            sys.stderr.write(f"{_CLEAR}{printable(doing)}: {done} of {count}")
            sys.stderr.flush()

    try:
        yield tell
    finally:
        _clear_line()


def _show(wait: Waiting, done: threading.Event) -> None:
    pause = SILENCE
    while not done.wait(pause):
        _LINE[0] = True
        sys.stderr.write(f"{_CLEAR}{wait}")
        sys.stderr.flush()
        pause = PACE
    _clear_line()


def _clear_line() -> None:
    if _LINE[0]:
        _LINE[0] = False
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()

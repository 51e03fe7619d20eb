"""The two streams: results on standard output, progress and remarks on standard error."""

from __future__ import annotations

import os
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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
    """Nothing was printed yet by the command that begins. A stream that the shell closed (`>&-`) is the null
    device."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    _PRINTED[0] = _QUIET[0] = False


def be_quiet() -> None:
    """No remarks and no progress from now on; errors stay."""
    _QUIET[0] = True


def remark(text: str) -> None:
    """One line on standard error, with fields in the words of the command line."""
    from .field_names import as_options

    if _QUIET[0]:
        return
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


@contextmanager
def waiting(doing: str, at_most: float | None = None) -> Iterator[None]:
    """Says, where somebody watches, what is being done, for how long already, and how long it may take: one
    line on standard error, from the second second on, which goes when the work is done."""
    if not is_interactive():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_tell, args=(doing, at_most, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tell(doing: str, at_most: float | None, done: threading.Event) -> None:
    begin, pause, clear = time.monotonic(), SILENCE, ""
    while not done.wait(pause):
        seconds = time.monotonic() - begin
        left = "" if at_most is None else f", at most about {max(at_most - seconds, 0.0):.0f} s more"
        sys.stderr.write(f"\r\x1b[2K{doing}: {seconds:.0f} s{left}")
        sys.stderr.flush()
        pause, clear = PACE, "\r\x1b[2K"
    sys.stderr.write(clear)
    sys.stderr.flush()

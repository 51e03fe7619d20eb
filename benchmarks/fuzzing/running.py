"""A command line in this process, and what may not happen: a crash, silence for long, nonsense, a loss."""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import signal
import sys
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from pplan.cli.app import main

STATUSES = (0, 2, 3, 4)
LONGEST = 10.0
"""Seconds of processor time."""
LARGEST = 2**30
"""Bytes more than before."""
LONGEST_LINE = 1200
"""Characters of a message."""
_FRAME = re.compile(
    r'File "[^"]*/((?:cli|cost_models|planner|pplan|profiler|runtimes)/[\w/]+\.py)", line \d+, in (\S+)'
)
_NAMED = re.compile(rb"[\"',\n][^\"',\n]*\b(nan|inf)\b[^\"',\n]*[\"',\n]")
"""A name in a file that tables print."""
_NO_NUMBER = re.compile(r"(?<![\w.'\"/-])-?(nan|inf)(?![\w.'\"/-])")


@dataclass(frozen=True)
class Finding:
    """What went wrong; two of one `kind` are one defect."""

    kind: str
    text: str


class TooLong(BaseException):
    """The time is over; not an Exception, which pplan might take for its own."""


def run(command: list[str], *, debug: bool = True) -> tuple[int | None, str, str]:
    """Status (None: it took too long), standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    given = ["--debug", *command] if debug else command
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            warnings.simplefilter("error", RuntimeWarning)
            sys.argv = ["pplan", *given]
            with limited_time():
                status: int | None = main(given)
    except TooLong as error:
        err.write(_where(error))
        status = None
    return status, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Raises TooLong after LONGEST seconds of processor time."""
    signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def judge(command: list[str], folder: Path, inputs: Collection[str]) -> tuple[int | None, Finding | None]:
    """Runs the command in the folder, which is the working directory; the status, and what is wrong with it.
    Without --force it may change no file of `inputs`."""
    before, memory = {name: (folder / name).read_bytes() for name in inputs}, peak_memory()
    status, out, err = run(command)
    return status, _finding(command, status, out, err, before, folder, memory)


def _finding(
    command: list[str],
    status: int | None,
    out: str,
    err: str,
    before: dict[str, bytes],
    folder: Path,
    memory: int,
) -> Finding | None:
    if status is None:
        return Finding(f"time: {command[0]}: {last_frame(err)}", err[-3000:])
    if status not in STATUSES:
        return Finding(f"{_error_name(err)}: {last_frame(err)}", err[-3000:])
    if peak_memory() - memory > LARGEST:
        return Finding(f"memory: {command[0]}", f"{(peak_memory() - memory) / 2**30:.1f} GiB more")
    told = err[err.rfind("\npplan: ") + 1 :] if "\npplan: " in err or err.startswith("pplan: ") else ""
    if status == 2 and not told.startswith("pplan: "):
        return Finding(f"silent: {command[0]}", err[-500:])
    longest = max(map(len, told.splitlines()), default=0)
    if longest > LONGEST_LINE:
        return Finding(f"long message: {command[0]}: {last_frame(err)}", f"{longest}: {told[:300]}")
    if (wrong := _nonsense(command, status, out, before)) is not None:
        return wrong
    changed = [name for name, content in before.items() if not _same(folder / name, content)]
    if changed and "--force" not in command:
        return Finding(f"lost a file: {command[0]}", str(changed))
    return None


def _nonsense(command: list[str], status: int, out: str, files: dict[str, bytes]) -> Finding | None:
    if "--json" in command:
        try:
            json.loads(out, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            return Finding(f"JSON: {command[0]}: {str(error)[:30]}", out[:300])
        return None
    named = any(_NAMED.search(content) for content in files.values())
    if status == 0 and not named and (found := _NO_NUMBER.search(out)):
        line = next(line for line in out.splitlines() if _NO_NUMBER.search(line))
        return Finding(f"{found[1]} in a table: {command[0]}", line[:300])
    return None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} in JSON")


def _same(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def peak_memory() -> int:
    """Bytes, of this process until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _give_up(*_: object) -> None:
    raise TooLong


def _where(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


def last_frame(err: str) -> str:
    """The innermost of pplan's own."""
    frames = _FRAME.findall(err)
    return ":".join(frames[-1]) if frames else "nowhere"


def _error_name(err: str) -> str:
    found = re.findall(r"^(\w+(?:\.\w+)*(?:Error|Warning|Exception)\b[^:\n]*)", err, re.MULTILINE)
    return found[-1] if found else "status"

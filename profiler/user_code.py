"""The line of the user's own code behind an exception."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import torch

_OURS = Path(__file__).resolve().parent.parent
_NOT_THE_USERS = (
    Path(torch.__file__).resolve().parent,
    Path(sysconfig.get_path("stdlib")).resolve(),
    *(_OURS / folder for folder in ("pplan", "profiler", "runtimes", "cli")),
)
_PACKAGES = tuple(Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib"))


def user_line(error: BaseException) -> str:
    """`file:line, in function: code` of the innermost frame outside torch, pplan and the standard library.

    Empty where no such frame is in the traceback. A syntax error names the line that does not parse.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}: {(error.text or '').strip()}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{_shown(last.filename)}:{last.lineno}, in {last.name}: {(last.line or '').strip()}"


def first_line(error: BaseException) -> str:
    """`Type: message`, the message cut to its first line and 200 characters."""
    text = str(error).strip().split("\n", 1)[0].strip()
    text = text[:200] + ("…" if len(text) > 200 else "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def at_user_line(error: BaseException) -> str:
    """` (file:line, in function: code)`, or nothing: to be put behind a message."""
    line = user_line(error)
    return f" ({line})" if line else ""


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if any(path.is_relative_to(folder) for folder in _PACKAGES):
        return not any(path.is_relative_to(folder) for folder in (_NOT_THE_USERS[0], *_NOT_THE_USERS[2:]))
    return not any(path.is_relative_to(folder) for folder in _NOT_THE_USERS)


def _shown(filename: str) -> str:
    path = Path(filename)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)

"""What wrote a file, versions and the time; and what a file discloses."""

from __future__ import annotations

import getpass
import json
import platform
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..cost_models.document import MadeBy


def made_by(origin: MadeBy, *, measured: MadeBy | None = None) -> MadeBy:
    """`origin` with its gaps filled: this pplan, this Python, now.

    The versions of torch, CUDA and the driver are those the figures were `measured` with.
    """
    measured = measured or origin
    return MadeBy(
        pplan=origin.pplan or installed("pplan") or "",
        command=origin.command,
        time=origin.time or datetime.now(UTC).isoformat(timespec="seconds"),
        python=origin.python or platform.python_version(),
        torch=origin.torch or measured.torch,
        cuda=origin.cuda or measured.cuda,
        driver=origin.driver or measured.driver,
    )


def installed(package: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_ORIGIN_KEYS = (
    "made_by",
    "device",
    "device_name",
    "device_kind",
    "model",
    "settings",
    "input_like",
    "loss",
    "profile",
)
"""Keys at the top of a document that say who made it of what."""
_PATH = re.compile(
    r"(?<![\w:/.<])(?:~|/[\w.~-]+)(?:/[\w.~-]+)+"  # /home/me/a.json, ~/a.json
    r"|\b[A-Za-z]:[\\/](?!/)[\w.\\/~-]+"  # C:\Users\me, C:/Users/me
    r"|\bfile://[\w./~-]+"
    r"|\b\w+://[^\s/@]+@[\w.-]+"  # https://me:password@example.com
    r"|\b[\w.+-]+@[\w-]+\.[\w.]+\b"  # me@example.com
)
"""An absolute path or an e-mail address."""


@dataclass(frozen=True)
class Disclosure:
    """What a file discloses.

    Attributes:
        origin: By key, what it says of its origin: versions, time, devices, model, names of other files.
        private: Paths, e-mail addresses, and the names of this user and computer, wherever they stand in it.
    """

    origin: dict[str, str]
    private: list[str]


def disclose(text: str) -> Disclosure:
    """List what the text of a file discloses.

    Args:
        text: Content of any file, pplan's or not. One that is no JSON says nothing of its origin.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    origin = {}
    if isinstance(content, dict):
        text = "\n".join(value for _, value in _texts(content))
        origin = dict(_texts({key: content[key] for key in _ORIGIN_KEYS if key in content}))
    names = _own_names()
    own = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names)) if names else None
    private = [match[0] for pattern in (_PATH, own) if pattern for match in pattern.finditer(text)]
    return Disclosure(origin, list(dict.fromkeys(private)))


def _texts(content: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The texts and numbers of a document, with their keys."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict | list):
            yield from _texts(value, where)
        elif value not in (None, "", False):
            yield where, str(value)


def _own_names() -> list[str]:
    """The names of this user and this computer, where they are more than a common word."""
    names = []
    for name in (getpass.getuser, socket.gethostname, Path.home):
        with suppress(OSError, RuntimeError, KeyError, ImportError):
            names.append(str(name()))
    return [name for name in names if len(name) > 4 and name != "localhost"]

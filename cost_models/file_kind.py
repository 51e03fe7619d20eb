"""What kind of file a text is, by its content: nothing is written over a file of another kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import FileError

FOR_A_RUNTIME = "file for a runtime"
KINDS = {
    "profile": "layers",
    "plan": "prediction",
    "simulation": "bubble_rate_span",
    "frontier": "points",
    FOR_A_RUNTIME: "step_seconds",
}
"""A key at the top of a file that only files of this kind have, and those named before it."""
_OTHER_KINDS = {"calibration": "corrections", "check": "cases", "sweep": "rows", "trace": "traceEvents"}
"""The same of files that no verb takes for another."""
COSTS, SVG, TEXT = "table or graph of costs", "SVG drawing", "text"


def kinds_of(content: dict[str, Any]) -> list[str]:
    """The kinds that a document may be of, by its keys."""
    return [name for name, key in KINDS.items() if key in content]


def detect_kind(text: str) -> str | None:
    """Which of pplan's files this is, by the keys that only one kind has; None where they do not tell."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return next(iter(kinds_of(content)), None) if isinstance(content, dict) else None


def file_kind(text: str) -> str:
    """In words: one of pplan's kinds, or what else it is; a text where nothing tells."""
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith(("{", "[")):
        return detect_kind(text) or _other_json(text)
    if start.startswith(("<svg", "<?xml")):
        return SVG
    first = start.partition("\n")[0]
    return COSTS if "forward_" in first and ("," in first or "--" in first) else TEXT


def check_same_kind(path: Path, kind: str) -> None:
    """Raises FileError where a file of another kind is at the path; an empty one is of any."""
    if not path.is_file():
        return
    content = path.read_bytes()
    try:
        old_kind = file_kind(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        old_kind = "binary file"
    if content.strip() and old_kind != kind:
        raise FileError(
            f"{path}: is a {old_kind}, and a {kind} is written only over a {kind}",
            "Name another file, or delete that one first.",
        )


def _other_json(text: str) -> str:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return TEXT
    names = (name for name, key in _OTHER_KINDS.items() if isinstance(content, dict) and key in content)
    return next(names, "JSON file")

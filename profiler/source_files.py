"""The user's own source files that decide how a model computes."""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from ..cost_models.text_files import sha256

_HERE = Path(__file__).resolve().parents[1]
_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders of packages, whichever environments are stacked."""
_VERSIONED = (
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")),
    *(_HERE / folder for folder in ("pplan", "profiler", "runtimes", "planner", "cost_models", "cli")),
)
"""Python's own files and pplan's."""


def hash_sources(modules: Iterable[str]) -> dict[str, str]:
    """SHA-256 by the name of each of these Python modules, and of all that they import, that is the user's.

    Imports inside functions count where they have been run. Installed packages and Python's own modules
    have versions, and are left out with what they import.
    """
    found: dict[str, str] = {}
    pending = list(modules)
    while pending:
        name = pending.pop()
        module = sys.modules.get(name)
        file = None if module is None or name in found else _own_file(module)
        if module is None or file is None:
            continue
        with suppress(OSError, ValueError, SyntaxError):
            text = file.read_bytes()
            found[name] = sha256(text.decode("utf-8", errors="replace"))
            pending += _imported(ast.parse(text), module)
    return found


def list_versions(modules: Iterable[str]) -> dict[str, str]:
    """What the installed packages of these modules call their versions."""
    packages = {name.partition(".")[0] for name in modules}
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
    return {name: version for name, version in versions.items() if isinstance(version, str)}


def _own_file(module: ModuleType) -> Path | None:
    """None for what is installed, and for what has no source."""
    named = getattr(module, "__file__", None)
    if not isinstance(named, str) or not named.endswith(".py"):
        return None
    file = Path(named).resolve()
    if _INSTALLED.intersection(file.parts) or any(file.is_relative_to(folder) for folder in _VERSIONED):
        return None
    return file


def _imported(tree: ast.Module, module: ModuleType) -> Iterator[str]:
    """Names of what a file imports anywhere, modules and what may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield from (".".join(parts[: end + 1]) for end in range(len(parts)))
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):
                relative = "." * node.level + (node.module or "")
                base = importlib.util.resolve_name(relative, getattr(module, "__package__", None))
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)

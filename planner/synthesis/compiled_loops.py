"""Loops compiled by numba where it is installed: once, and kept on disk as numba keeps what it compiles.

Where nothing can be kept, or what is kept cannot be read, they are compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

from ...cost_models.simulator import loops

Loop = Callable[..., Any]


def can_compile() -> bool:
    """Whether numba is installed."""
    return loops.available()


@lru_cache(maxsize=8)
def compile_loops(functions: tuple[Loop, ...]) -> tuple[Loop, ...]:
    """Each with those before it that it calls."""
    try:
        compiled = _compile(functions, on_disk=True)
    except RuntimeError:  # no folder that numba may write to
        return _compile(functions, on_disk=False)
    return tuple(partial(_run, functions, number, loop) for number, loop in enumerate(compiled))


def _run(functions: tuple[Loop, ...], number: int, loop: Loop, *own: Any) -> Any:
    """A loop that raises nothing of its own: what is raised is of a file that numba cannot read, such as one
    of another version of pplan."""
    if _unreadable:
        return _compile_again(functions)[number](*own)
    try:
        return loop(*own)
    except Exception:
        _unreadable.append(True)
        return _compile_again(functions)[number](*own)


_unreadable: list[bool] = []
"""Whether a file could not be read."""


@lru_cache(maxsize=8)
def _compile_again(functions: tuple[Loop, ...]) -> tuple[Loop, ...]:
    return _compile(functions, on_disk=False)


def _compile(functions: tuple[Loop, ...], *, on_disk: bool) -> tuple[Loop, ...]:
    import numba

    compiled = list[Loop]()
    names = dict(functions[0].__globals__)
    for own in functions:
        names[own.__name__] = numba.njit(cache=on_disk)(FunctionType(own.__code__, names, own.__name__))
        compiled.append(names[own.__name__])
    return tuple(compiled)

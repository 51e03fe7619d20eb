"""Loops compiled by numba where it is installed: once, and kept on disk as numba keeps what it compiles.

Where nothing can be kept, or what is kept cannot be read, they are compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, cast

from ...cost_models.simulator import loops

Loop = Callable[..., Any]


def can_compile() -> bool:
    """Whether numba is installed."""
    return loops.available()


@lru_cache(maxsize=8)
def compile_loops(functions: tuple[Loop, ...], called: int) -> tuple[Loop, ...]:
    """The last so many of the functions, each of which calls those before it: the others are called by them
    alone, so that numba makes nothing by which Python calls them, which takes a third of its time."""
    try:
        compiled = _compile(functions, called, on_disk=True)
    except RuntimeError:  # no folder that numba may write to
        return _compile(functions, called, on_disk=False)
    return tuple(partial(_run, functions, called, number, loop) for number, loop in enumerate(compiled))


def _run(functions: tuple[Loop, ...], called: int, number: int, loop: Loop, *own: Any) -> Any:
    """A loop that raises nothing of its own: what is raised is of a file that numba cannot read, such as one
    of another version of pplan."""
    if _unreadable:
        return _compile_again(functions, called)[number](*own)
    try:
        return loop(*own)
    except Exception:
        _unreadable.append(True)
        return _compile_again(functions, called)[number](*own)


_unreadable: list[bool] = []
"""Whether a file could not be read."""


@lru_cache(maxsize=8)
def _compile_again(functions: tuple[Loop, ...], called: int) -> tuple[Loop, ...]:
    return _compile(functions, called, on_disk=False)


def _compile(functions: tuple[Loop, ...], called: int, *, on_disk: bool) -> tuple[Loop, ...]:
    import numba

    names, njit = dict(functions[0].__globals__), cast(Any, numba.njit)  # its types lack some options
    inner = len(functions) - called
    for number, own in enumerate(functions):
        compiled = njit(cache=on_disk, no_cfunc_wrapper=True, no_cpython_wrapper=number < inner)
        names[own.__name__] = compiled(FunctionType(own.__code__, names, own.__name__))
    return tuple(names[own.__name__] for own in functions[inner:])

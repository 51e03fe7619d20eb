"""Loops compiled by numba where it is installed: once, and kept on disk as numba keeps what it compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
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
    import numba

    compiled = list[Loop]()
    names = dict(functions[0].__globals__)
    for own in functions:
        names[own.__name__] = numba.njit(cache=True)(FunctionType(own.__code__, names, own.__name__))
        compiled.append(names[own.__name__])
    return tuple(compiled)

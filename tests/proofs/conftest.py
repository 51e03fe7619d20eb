"""A bounded run of the attack, and what of the planner it reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from cProfile import Profile
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest
from attack.attack import attacked, quickly_solved, solved
from attack.problems import KINDS, case_of
from attack.registry import BOUNDS
from attack.results import Result

PLANNER = Path(__file__).parents[2] / "planner"
EACH = 2
"""Problems of every kind, and those of `NOTED`; of long chains, which take longest, one."""
NOTED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("plain", "levels", "many", "least memory", "frontier"), (0,)),
    "cost": (2, 3),
    "tied": (4,),
    "explain": (0, 1),
    "throughput": (0, 1, 6, 10),
    "runtimes": (2,),
    "schedules": (5,),
}
"""Problems that reached every bound together: what runs in them is noted, which takes twice as long."""


@dataclass(frozen=True)
class BoundedRun:
    """The results by kind, and the functions of planner/ that ran, as the registry names them."""

    by_kind: dict[str, list[Result]]
    reached: frozenset[str]


@pytest.fixture(scope="session")
def bounded_run() -> BoundedRun:
    """Some problems of every kind, attacked."""
    codes = set[CodeType]()
    by_kind = {
        kind: [_attacked(kind, seed, codes if seed in NOTED.get(kind, ()) else None) for seed in _seeds(kind)]
        for kind in KINDS
    }
    for kind in KINDS:  # others may reach what these do not
        for seed in _seeds(kind):
            if not _names(codes).issuperset(BOUNDS) and seed not in NOTED.get(kind, ()):
                _attacked(kind, seed, codes)
    return BoundedRun(by_kind, _names(codes))


def _seeds(kind: str) -> list[int]:
    return sorted({*range(1 if kind == "long" else EACH), *NOTED.get(kind, ())})


def _attacked(kind: str, seed: int, codes: set[CodeType] | None) -> Result:
    """`codes`: to which what runs is added."""
    # What an answer is compared with is attacked in a few: it takes as long again.
    solver = (solved, quickly_solved, quickly_solved)[seed % 3]
    with nullcontext() if codes is None else _noting(codes):
        return attacked(case_of(seed, kind), solver)


@contextmanager
def _noting(codes: set[CodeType]) -> Iterator[None]:
    """Adds what is called meanwhile."""
    profiler = Profile(subcalls=False, builtins=False)
    with profiler:
        yield
    codes.update(entry.code for entry in profiler.getstats() if isinstance(entry.code, CodeType))


def _names(codes: set[CodeType]) -> frozenset[str]:
    return frozenset(name for code in codes if (name := _name(code)))


def _name(code: CodeType) -> str:
    path = Path(code.co_filename)
    if PLANNER not in path.parents:
        return ""
    return f"{path.relative_to(PLANNER).as_posix()}:{code.co_qualname}"

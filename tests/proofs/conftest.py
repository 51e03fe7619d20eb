"""A bounded run of the attack, and what of the planner it reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from cProfile import Profile
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest
from attack.attack import attacked, quickly_solved, solved
from attack.problems import KINDS, case_of
from attack.results import Result

PLANNER = Path(__file__).parents[2] / "planner"
EACH = 2
"""Problems of every kind."""
OTHERWISE = {"many": 2, "long": 1, "throughput": 11, "runtimes": 3, "schedules": 6}
"""Of some kinds: those of many devices take longest; few of the highest throughput name a planner."""
TRACED = 1
"""Of which it is noted what runs, which takes longer; of some kinds of all."""
ALL_TRACED = ("throughput", "explain", "schedules", "kinds", "runtimes", "levels")


@dataclass(frozen=True)
class BoundedRun:
    """The results by kind, and the functions of planner/ that ran, as the registry names them."""

    by_kind: dict[str, list[Result]]
    reached: frozenset[str]


@pytest.fixture(scope="session")
def bounded_run() -> BoundedRun:
    """Some problems of every kind, attacked."""
    codes = set[CodeType]()
    by_kind = {kind: list(_attacked(kind, codes)) for kind in KINDS}
    return BoundedRun(by_kind, frozenset(name for code in codes if (name := _name(code))))


def _attacked(kind: str, codes: set[CodeType]) -> Iterator[Result]:
    # What an answer is compared with is attacked in a few: it takes as long again.
    solvers = (solved, quickly_solved, quickly_solved)
    for seed in range(OTHERWISE.get(kind, EACH)):
        if seed < TRACED or kind in ALL_TRACED:
            with _noting(codes):
                yield attacked(case_of(seed, kind), solvers[seed % 3])
        else:
            yield attacked(case_of(seed, kind), solvers[seed % 3])


@contextmanager
def _noting(codes: set[CodeType]) -> Iterator[None]:
    """Adds what is called meanwhile."""
    profiler = Profile(subcalls=False, builtins=False)
    with profiler:
        yield
    codes.update(entry.code for entry in profiler.getstats() if isinstance(entry.code, CodeType))


def _name(code: CodeType) -> str:
    path = Path(code.co_filename)
    if PLANNER not in path.parents:
        return ""
    return f"{path.relative_to(PLANNER).as_posix()}:{code.co_qualname}"

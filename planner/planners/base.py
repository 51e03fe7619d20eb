"""What a planner is: a way to plan by its name, which may say why it makes no plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ..candidate import Proposal
    from ..problem import Problem


class Planner(Protocol):
    """A way to plan, by its name."""

    @property
    def name(self) -> str:
        """As `planner` takes it."""
        ...

    def propose(self, problem: Problem) -> Iterable[Proposal]:
        """The plans it would make of the problem, in any order: all are scored, and the fastest that fits
        counts. None where it cannot make one."""
        ...


@runtime_checkable
class Refusing(Protocol):
    """A planner that says why it proposes nothing."""

    def refusal(self, problem: Problem) -> str:
        """In words; for a problem of which it proposed nothing."""
        ...


def refusal(planner: Planner, problem: Problem) -> str:
    """Why a planner proposed nothing for the problem, in words."""
    if isinstance(planner, Refusing):
        return planner.refusal(problem)
    return "makes no plan of these layers, devices and wishes"

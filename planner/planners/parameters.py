"""Parameters: the stage with the most parameters has as few as can be, as DeepSpeed's `parameters` means it.

Exact, and with forbidden cuts. DeepSpeed's own `partition_balanced` is not: version 0.19.8 builds up the
least difference between its largest and smallest stage, of the partitions that it meets on the way; on random
weights its largest stage was heavier than ours in a tenth of the cases, by an eighth at worst, and never
lighter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..balance import balance
from ..candidate import Proposal
from .equal_pipelines import Ends, all_pipelines, ends_of, straight_settings

if TYPE_CHECKING:
    from ..problem import Problem


class Parameters:
    """Balances the bytes of parameters."""

    name = "parameters"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages from two on, also with the same number of replicas of every stage on all
        devices; one stage where there can be no more."""
        chain = problem.space.chain

        def ends(stages: int, _: int) -> Ends:
            return ends_of(balance(chain.parameter_bytes, stages, cut_after=chain.cut_after))

        yield from all_pipelines(problem, straight_settings(problem), ends)


PLANNER = Parameters()

"""Even: the same number of layers on every stage, as it is done by hand and by DeepSpeed's `uniform`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ...cost_models.layer import Chain
from ..balance import balance
from ..candidate import Proposal
from .equal_pipelines import Ends, all_pipelines, ends_of, linear_configs
from .nearest_cuts import allows

if TYPE_CHECKING:
    from ..problem import Problem


class Even:
    """Layer counts that differ by one at most."""

    name = "even"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages from two on, also with the same number of replicas of every stage on all
        devices; one stage where there can be no more."""
        configs = linear_configs(problem)
        yield from all_pipelines(problem, configs, lambda stages, _: even_ends(problem.space.chain, stages))


def even_ends(chain: Chain, stages: int) -> Ends:
    """Ends of stages with as equal numbers of layers as can be, the first ones having one more.

    Where that needs a forbidden cut: with the fewest layers in the largest stage. Raises InfeasibleError.
    """
    ends = spread_evenly(len(chain), stages)
    if allows(chain, ends):
        return ends
    return ends_of(balance(np.ones(len(chain)), stages, cut_after=chain.cut_after))


def spread_evenly(items: int, stages: int) -> Ends:
    """Ends of stages of items // stages each, the first ones of one more."""
    each, rest = divmod(items, stages)
    return tuple(each * stage + min(stage, rest) for stage in range(1, stages + 1))


PLANNER = Even()

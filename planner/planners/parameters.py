"""Parameters: DeepSpeed's `parameters`, which balances the trainable parameters of the stages.

DeepSpeed 0.19.8 makes no best partition of them, but the one of `deepspeed_balance`: so does this planner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..candidate import Proposal
from .deepspeed_balance import DeepSpeedBalance, deepspeed_ends
from .equal_pipelines import Ends, all_pipelines, linear_configs

if TYPE_CHECKING:
    from ..problem import Problem


class Parameters:
    """Balances the bytes of trainable parameters."""

    name = "parameters"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages from two on, also with the same number of replicas of every stage on all
        devices; one stage where there can be no more."""
        chain = problem.space.chain
        made = DeepSpeedBalance(chain.trainable_bytes)

        def ends(stages: int, _: int) -> Ends | None:
            return deepspeed_ends(chain, made, stages)

        yield from all_pipelines(problem, linear_configs(problem), ends)


PLANNER = Parameters()

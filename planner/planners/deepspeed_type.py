"""DeepSpeed's `type:REGEX`: about the same number of layers that match on every stage.

`planner="deepspeed-type:REGEX"` searches the regular expression in the layers' names, in any case, where
DeepSpeed searches it in the names of their classes. Without one, the first layers of the transformer blocks
are counted, where the names tell them. The cuts are those that DeepSpeed 0.19.8 makes of weights of 1 and 0
(`deepspeed_balance`): of equal ones the latest, so that what does not match stays with the matching layer
before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...cost_models.errors import UsageError
from ...cost_models.layer import Chain
from ..candidate import Proposal
from .deepspeed_balance import DeepSpeedBalance, deepspeed_ends
from .equal_pipelines import Ends, all_pipelines, linear_configs
from .pattern import compiled, matching
from .repeated_blocks import repeated_blocks

if TYPE_CHECKING:
    from ..problem import Problem

KIND = "deepspeed-type"
_SHOWN = 80


@dataclass(frozen=True)
class DeepSpeedType:
    """Balances the number of layers whose names match `pattern`; None: of transformer blocks."""

    pattern: str | None = None

    def __post_init__(self) -> None:
        try:
            compiled(self.pattern or "")
        except ValueError as error:
            raise UsageError(
                f"planner='{self.name[:_SHOWN]}': {error}",
                "Give one that matches names of layers, as in deepspeed-type:attention.",
            ) from None

    @property
    def name(self) -> str:
        """With the pattern."""
        return KIND if self.pattern is None else f"{KIND}:{self.pattern}"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages from two on that the matching layers fill, also with the same number of
        replicas of every stage on all devices; one stage where there can be no more. Raises UsageError where
        there is a pattern and no layer matches."""
        chain = problem.space.chain
        counted = self.counted(chain)
        if self.pattern is not None and not counted.any():
            raise UsageError(
                f"planner='{self.name}': no layer's name matches (the first is {chain.names[0]!r}, the last "
                f"{chain.names[-1]!r})",
                "pplan show PROFILE lists the names.",
            )

        made = DeepSpeedBalance(counted.astype(np.float64))

        def ends(stages: int, _: int) -> Ends | None:
            return deepspeed_ends(chain, made, stages) if stages <= counted.sum() else None

        yield from all_pipelines(problem, linear_configs(problem), ends)

    def refusal(self, problem: Problem) -> str:
        """Why it proposes nothing."""
        matching = int(self.counted(problem.space.chain).sum())
        if not matching:
            return (
                "the names of the layers tell no transformer blocks; say what to count: deepspeed-type:REGEX"
            )
        return f"the layers that it counts ({matching}) make no stages that the devices and the wishes leave"

    def counted(self, chain: Chain) -> npt.NDArray[np.bool_]:
        """Which layers are counted: (layers,)."""
        if self.pattern is not None:
            try:
                return np.array(matching(self.pattern, chain.names), dtype=np.bool_)
            except ValueError as error:
                raise UsageError(
                    f"planner='{self.name[:_SHOWN]}': {error}",
                    "Give a simpler one, as in deepspeed-type:attention.",
                ) from None
        counted = np.zeros(len(chain), dtype=np.bool_)
        if (blocks := repeated_blocks(chain)) is not None:
            counted[list(blocks.starts[:-1])] = True
        return counted


PLANNER = DeepSpeedType()

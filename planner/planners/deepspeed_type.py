"""DeepSpeed's `type:REGEX`: the same number of layers that match on every stage.

`--planner deepspeed-type:REGEX` searches the regular expression in the layers' names, in any case, where
DeepSpeed searches it in the names of their classes. Without one, the first layers of the transformer blocks
are counted, where the names tell them. DeepSpeed builds up the least difference between its largest and
smallest stage, of the partitions that it meets on the way; ours is exact. What does not match stays with the
matching layer before it, as DeepSpeed's ties have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...cost_models.errors import UsageError
from ...cost_models.layer import Chain
from ..balance import balance
from ..candidate import Proposal
from .equal_pipelines import Ends, all_pipelines, ends_of, straight_settings
from .even import spread_evenly
from .nearest_cuts import allows
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
                f"--planner {self.name[:_SHOWN]}: {error}",
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
                f"--planner {self.name}: no layer's name matches (the first is {chain.names[0]!r}, the last "
                f"{chain.names[-1]!r})",
                "pplan show PROFILE lists the names.",
            )

        def ends(stages: int, _: int) -> Ends | None:
            return type_ends(chain, counted, stages) if stages <= counted.sum() else None

        yield from all_pipelines(problem, straight_settings(problem), ends)

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
                    f"--planner {self.name[:_SHOWN]}: {error}",
                    "Give a simpler one, as in deepspeed-type:attention.",
                ) from None
        counted = np.zeros(len(chain), dtype=np.bool_)
        if (blocks := repeated_blocks(chain)) is not None:
            counted[list(blocks.starts[:-1])] = True
        return counted


def type_ends(chain: Chain, counted: npt.NDArray[np.bool_], stages: int) -> Ends:
    """Ends of stages with as equal numbers of counted layers as can be, at least as many as the stages.

    Each ends at the last allowed cut before the next one's first counted layer. Where there is none: with the
    fewest in the largest stage. Raises InfeasibleError.
    """
    where = np.flatnonzero(counted)
    inner = spread_evenly(len(where), stages)[:-1]
    ends = (*(_last_cut(chain, int(where[n - 1]) + 1, int(where[n])) for n in inner), len(chain))
    if allows(chain, ends):
        return ends
    return ends_of(balance(counted.astype(np.float64), stages, cut_after=chain.cut_after))


def _last_cut(chain: Chain, first: int, last: int) -> int:
    """The last allowed end of a stage from `first` to `last`; `last` where there is none."""
    return next((end for end in range(last, first - 1, -1) if chain.cut_after[end - 1]), last)


PLANNER = DeepSpeedType()

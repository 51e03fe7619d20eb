"""The cuts that DeepSpeed 0.19.8 makes of weights by `partition_balanced`: `parameters` and `type:REGEX`.

Stage by stage it keeps, for the first i layers in j stages, one partition: of those that add a last stage to
the partitions kept for j - 1 stages the one whose heaviest and lightest stage differ least, of equal ones
that with the latest cut. It is no optimum, neither of the difference nor of the heaviest stage: a partition
that is kept need not be the beginning of a good one. It knows no forbidden cuts.

`planner="deepspeed-type:REGEX"` searches the regular expression in the layers' names, in any case, where
DeepSpeed searches it in the names of their classes. Without one, the first layers of the transformer blocks
are counted, where the names tell them. Weights are 1 and 0: of equal cuts the latest are taken, so that what
does not match stays with the matching layer before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...cost_models.errors import UsageError
from ...cost_models.layer import Chain
from ..candidate import Proposal
from .base import Ends, all_pipelines, allows, linear_configs, nearest_cuts
from .megatron import repeated_blocks
from .pattern import compiled, matching

if TYPE_CHECKING:
    from ..problem import Problem


MOST_LAYERS, MOST_ENTRIES = 3_000, 1e9
"""Of the tables of all layers by all layers by stages, beyond which DeepSpeed itself would take hours."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DeepSpeedBalance:
    """DeepSpeed's partitions of layers of these weights, for any number of stages."""

    weights: Sequence[float] | Floats
    _latest: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """By stage but the first, (layers + 1,): where it begins, where so many layers are done after it."""

    def ends(self, stages: int) -> Ends | None:
        """By stage, the number of layers before its end; None for more stages than layers, which DeepSpeed
        leaves empty, and for so many layers that it would take hours."""
        layers = len(self.weights)
        if stages > layers or layers > MOST_LAYERS or float(layers) ** 2 * stages > MOST_ENTRIES:
            return None
        if stages == layers:
            return tuple(range(1, layers + 1))
        while len(self._latest) < stages - 1:
            self._add_stage()
        ends = [layers]
        for begins in reversed(self._latest[: stages - 1]):
            ends.append(int(begins[ends[-1]]))
        return tuple(reversed(ends))

    def _add_stage(self) -> None:
        """Where one more stage begins, after each number of layers that it may end at."""
        stages, (heaviest, lightest) = len(self._latest) + 1, self._tables[-1]
        heavy, light = np.maximum(heaviest, self._last), np.minimum(lightest, self._last)
        count = np.arange(len(heaviest))
        is_stage = (count >= stages) & (count[None, :] < count[:, None])
        differ = np.where(is_stage, heavy - light, np.inf)
        begins = differ.shape[1] - 1 - np.argmin(differ[:, ::-1], axis=1)
        self._latest.append(begins)
        self._tables.append((heavy[count, begins], light[count, begins]))

    @cached_property
    def _last(self) -> Floats:
        """(layers + 1, layers + 1): the weight of a stage that ends after [i] layers and begins after [j]."""
        differences: Floats = self._before[:, None] - self._before[None, :]
        return differences

    @cached_property
    def _before(self) -> Floats:
        return np.concatenate([[0.0], np.cumsum(np.asarray(self.weights, dtype=np.float64))])

    @cached_property
    def _tables(self) -> list[tuple[Floats, Floats]]:
        """By number of stages, (layers + 1,) each: the heaviest and the lightest stage of what is kept."""
        return [(self._before, self._before)]


def deepspeed_ends(chain: Chain, balance: DeepSpeedBalance, stages: int) -> Ends | None:
    """DeepSpeed's ends of so many stages; each that the profile forbids at the nearest allowed cut."""
    ends = balance.ends(stages)
    if ends is None or allows(chain, ends):
        return ends
    return nearest_cuts(chain, ends)


class Parameters:
    """Balances the bytes of trainable parameters."""

    name = "parameters"

    def propose(self, problem: Problem) -> Iterator[Proposal]:
        """Each number of stages from two on, also with the same number of replicas of every stage on all
        devices; one stage where there can be no more."""
        chain = problem.space.chain
        balance = DeepSpeedBalance(chain.trainable_bytes)

        def ends(stages: int, _: int) -> Ends | None:
            return deepspeed_ends(chain, balance, stages)

        yield from all_pipelines(problem, linear_configs(problem), ends)


PARAMETERS = Parameters()


KIND = "deepspeed-type"
_SHORT = 80


@dataclass(frozen=True)
class DeepSpeedType:
    """Balances the number of layers whose names match `pattern`; None: of transformer blocks."""

    pattern: str | None = None

    def __post_init__(self) -> None:
        try:
            compiled(self.pattern or "")
        except ValueError as error:
            raise UsageError(
                f"planner='{self.name[:_SHORT]}': {error}",
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
        counted = self.matching_layers(chain)
        if self.pattern is not None and not counted.any():
            raise UsageError(
                f"planner='{self.name}': no layer's name matches (the first is {chain.names[0]!r}, the last "
                f"{chain.names[-1]!r})",
                "pplan show PROFILE lists the names.",
            )

        balance = DeepSpeedBalance(counted.astype(np.float64))

        def ends(stages: int, _: int) -> Ends | None:
            return deepspeed_ends(chain, balance, stages) if stages <= counted.sum() else None

        yield from all_pipelines(problem, linear_configs(problem), ends)

    def refusal(self, problem: Problem) -> str:
        """Why it proposes nothing."""
        matching = int(self.matching_layers(problem.space.chain).sum())
        if not matching:
            return "no transformer blocks recognised; say what to count: deepspeed-type:REGEX"
        return f"the layers that it counts ({matching}) make no stages that the devices and the options allow"

    def matching_layers(self, chain: Chain) -> npt.NDArray[np.bool_]:
        """Which layers are counted: (layers,)."""
        if self.pattern is not None:
            try:
                return np.array(matching(self.pattern, chain.names), dtype=np.bool_)
            except ValueError as error:
                raise UsageError(
                    f"planner='{self.name[:_SHORT]}': {error}",
                    "Give a simpler one, as in deepspeed-type:attention.",
                ) from None
        counted = np.zeros(len(chain), dtype=np.bool_)
        if (blocks := repeated_blocks(chain)) is not None:
            counted[list(blocks.starts[:-1])] = True
        return counted


TYPE = DeepSpeedType()

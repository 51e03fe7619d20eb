"""The cuts that DeepSpeed 0.19.8 makes of weights by `partition_balanced`: `parameters` and `type:REGEX`.

Stage by stage it keeps, for the first i layers in j stages, one partition: of those that add a last stage to
the partitions for j - 1 stages the one whose heaviest and lightest stage differ least, of equal ones that
with the latest cut. It minimizes neither the difference nor the heaviest stage: a partition that it keeps
need not be the beginning of a good one. It knows no forbidden cuts.

`planner="deepspeed-type:REGEX"` searches the regular expression in the layers' names, ignoring case, where
DeepSpeed searches it in the names of their classes. Without an expression, the first layer of every
transformer block is counted, where the names show them. Weights are 1 and 0: of equal cuts the latest are
taken, so that layers that do not match stay with the matching layer before them.

Python's regular expressions backtrack, and one from a file may never end. The time of a search is bounded by
the ways in which the expression can match a text, times the places where the match may begin. The ways are
counted from its parts: an alternation adds, a sequence multiplies, and a repetition of something that matches
in one way has as many ways as the text has lengths.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...cost_models.errors import UsageError
from ...cost_models.layer import Chain
from ..candidate import Proposal
from ..stage_table import Floats
from .base import Ends, all_pipelines, allows, linear_configs, nearest_cuts
from .megatron import repeated_blocks

if TYPE_CHECKING:
    from ..problem import Problem


MOST_LAYERS, MOST_ENTRIES = 3_000, 1e9
"""Of the tables of all layers by all layers by stages, beyond which DeepSpeed itself would take hours."""


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


MOST_MATCH_STEPS = 1e9
"""Of all searches together: about ten seconds."""
LONGEST_PATTERN = 1000
"""Characters of an expression."""


def compile_pattern(pattern: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """The expression. Raises ValueError with what is wrong with it."""
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"more than {LONGEST_PATTERN} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{error} in the regular expression") from None


def match_names(pattern: str, texts: Sequence[str]) -> list[bool]:
    """In which of the texts the expression is found, in any case.

    Raises ValueError where it is none, or where looking for it could take longer than MOST_MATCH_STEPS.
    """
    search = compile_pattern(pattern, ignore_case=True).search
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = _parser.parse(pattern, re.IGNORECASE)
    steps = 0.0
    for length in map(len, texts):
        steps += (length + 1) * _ways(parts, length)
        if steps > MOST_MATCH_STEPS:
            raise ValueError("it repeats what repeats, or repeats too often: matching it could take for ever")
    return [search(text) is not None for text in texts]


def _ways(parts: Any, length: int) -> float:
    """At most so many ways to match the parts, one after another, to a text of that length."""
    return reduce(lambda ways, part: min(ways * _count_ways(part, length), MOST_MATCH_STEPS * 2), parts, 1.0)


def _count_ways(part: tuple[Any, Any], length: int) -> float:
    kind, about = part
    if kind is _constants.BRANCH:
        return sum(_ways(branch, length) for branch in about[1])
    if kind is _constants.SUBPATTERN:
        return _ways(about[3], length)
    if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
        least, most, parts = about
        return _ways_to_repeat(least, most, parts, length)
    if kind in (_constants.ASSERT, _constants.ASSERT_NOT):
        return _ways(about[1], length)
    if kind is _constants.ATOMIC_GROUP:
        return _ways(about, length)
    if kind is _constants.GROUPREF_EXISTS:
        return MOST_MATCH_STEPS * 2
    return 1.0


def _ways_to_repeat(least: int, most: int, parts: Any, length: int) -> float:
    """Rounds of a part that may be empty do not go on for ever: at most one a character."""
    longest = max(min(int(most), length), int(least))
    ways = _ways(parts, length)
    if ways <= 1.0 and _is_single(parts):
        return float(longest - int(least) + 1)
    # A part of any length is divided into rounds in every way.
    one = max(ways, 1.0) if int(most) <= 1 else max(ways, 2.0)
    return min(one ** min(longest, 64) + (longest - int(least)), MOST_MATCH_STEPS * 2)


def _is_single(parts: Any) -> bool:
    """Whether all that it matches has one length: then a text is divided into rounds in one way."""
    least, most = parts.getwidth()
    return bool(least == most and least > 0)


KIND = "deepspeed-type"
_SHORT = 80


@dataclass(frozen=True)
class DeepSpeedType:
    """Balances the number of layers whose names match `pattern`; None: of transformer blocks."""

    pattern: str | None = None

    def __post_init__(self) -> None:
        try:
            compile_pattern(self.pattern or "")
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
        is_counted = self.matching_layers(chain)
        if self.pattern is not None and not is_counted.any():
            raise UsageError(
                f"planner='{self.name}': no layer's name matches (the first is {chain.names[0]!r}, the last "
                f"{chain.names[-1]!r})",
                "pplan show PROFILE lists the names.",
            )

        balance = DeepSpeedBalance(is_counted.astype(np.float64))

        def ends(stages: int, _: int) -> Ends | None:
            return deepspeed_ends(chain, balance, stages) if stages <= is_counted.sum() else None

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
                return np.array(match_names(self.pattern, chain.names), dtype=np.bool_)
            except ValueError as error:
                raise UsageError(
                    f"planner='{self.name[:_SHORT]}': {error}",
                    "Give a simpler one, as in deepspeed-type:attention.",
                ) from None
        is_counted = np.zeros(len(chain), dtype=np.bool_)
        if (blocks := repeated_blocks(chain)) is not None:
            is_counted[list(blocks.starts[:-1])] = True
        return is_counted


TYPE = DeepSpeedType()

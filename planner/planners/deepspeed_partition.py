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
counted from its parts: an alternation adds, a sequence multiplies, and a repetition has as many ways as the
text has lengths. A repetition of what matches in several ways is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf, prod
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...cost_models.errors import UsageError
from ...cost_models.layer import Chain
from ..candidate import Proposal
from ..stage_table import Floats
from .base import Ends, Planner, all_pipelines, allows, nearest_cuts
from .rules import repeated_blocks

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


def _pipelines(problem: Problem, weights: Floats, most_stages: float = inf) -> Iterator[Proposal]:
    """The cuts of these weights in each number of stages, up to the most."""
    chain, balance = problem.space.chain, DeepSpeedBalance(weights)

    def ends(stages: int, _: int) -> Ends | None:
        return deepspeed_ends(chain, balance, stages) if stages <= most_stages else None

    return all_pipelines(problem, ends)


def _parameters(problem: Problem) -> Iterator[Proposal]:
    """Balance the bytes of trainable parameters."""
    return _pipelines(problem, problem.space.chain.trainable_bytes)


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
    """Ways to match the parts, one after another, to a text of that length; there are no more."""
    ways = 1.0
    for kind, about in parts:
        inner = [_ways(part, length) for part in _nested_parts(about)]
        if kind is _constants.BRANCH:
            ways *= sum(inner)
        elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            least, most = int(about[0]), min(int(about[1]), length + int(about[0]))
            ways *= most - least + 1 if inner[0] == 1 else inner[0] + 1 if most <= 1 else inf
        else:
            ways *= prod(inner)
    return ways


def _nested_parts(about: Any) -> Iterator[Any]:
    """Expressions inside of a part of one."""
    if isinstance(about, _parser.SubPattern):
        yield about
    elif isinstance(about, list | tuple):
        for each in about:
            yield from _nested_parts(each)


_SHORT = 80


def matching_layers(chain: Chain, pattern: str | None) -> npt.NDArray[np.bool_]:
    """(layers,): which layers' names match; without a pattern, the first of each transformer block.

    Raises:
        UsageError: Looking for matches could take too long.
    """
    if pattern is None:
        blocks = repeated_blocks(chain)
        return np.isin(np.arange(len(chain)), () if blocks is None else blocks.starts[:-1])
    try:
        return np.array(match_names(pattern, chain.names), dtype=np.bool_)
    except ValueError as error:
        raise UsageError(
            f"planner='{_type_name(pattern)[:_SHORT]}': {error}",
            "Give a simpler one, as in deepspeed-type:attention.",
        ) from None


def deepspeed_type(pattern: str | None = None) -> Planner:
    """Make the planner that balances the number of layers whose names match, or of transformer blocks.

    Args:
        pattern: Regular expression; None for transformer blocks.

    Raises:
        UsageError: It is no regular expression. Proposing raises it where no layer matches.
    """
    try:
        compile_pattern(pattern or "")
    except ValueError as error:
        raise UsageError(
            f"planner='{_type_name(pattern)[:_SHORT]}': {error}",
            "Give one that matches names of layers, as in deepspeed-type:attention.",
        ) from None
    return Planner(_type_name(pattern), partial(_propose_type, pattern), partial(_refuse_type, pattern))


def _type_name(pattern: str | None) -> str:
    return "deepspeed-type" if pattern is None else f"deepspeed-type:{pattern}"


def _propose_type(pattern: str | None, problem: Problem) -> Iterator[Proposal]:
    chain = problem.space.chain
    is_counted = matching_layers(chain, pattern)
    if pattern is not None and not is_counted.any():
        raise UsageError(
            f"planner='{_type_name(pattern)}': no layer's name matches (the first is {chain.names[0]!r}, the "
            f"last {chain.names[-1]!r})",
            "pplan show PROFILE lists the names.",
        )
    return _pipelines(problem, is_counted.astype(np.float64), is_counted.sum())


def _refuse_type(pattern: str | None, problem: Problem) -> str:
    matching = int(matching_layers(problem.space.chain, pattern).sum())
    if not matching:
        return "no transformer blocks recognised; say what to count: deepspeed-type:REGEX"
    return f"the layers that it counts ({matching}) make no stages that the devices and the options allow"


PLANNERS = (Planner("parameters", _parameters), deepspeed_type())

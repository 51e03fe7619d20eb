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
the ways in which the expression can match a text of n characters: at most n + 1 for each repetition and for
the place where the match begins, and 2 for each alternative or optional part. A group is not
repeated where an operator stands before its end, and verbose expressions, which hide operators, are refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf
from typing import TYPE_CHECKING

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
        before = self._tables[0][0]
        last, count = before[:, None] - before, np.arange(len(before))
        heavy, light = np.maximum(self._tables[-1][0], last), np.minimum(self._tables[-1][1], last)
        is_stage = (count > len(self._latest)) & (count < count[:, None])
        differ = np.where(is_stage, heavy - light, np.inf)
        begins = differ.shape[1] - 1 - np.argmin(differ[:, ::-1], axis=1)
        self._latest.append(begins)
        self._tables.append((heavy[count, begins], light[count, begins]))

    @cached_property
    def _tables(self) -> list[tuple[Floats, Floats]]:
        """By number of stages, (layers + 1,) each: the heaviest and the lightest stage of what is kept."""
        before = np.concatenate([[0.0], np.cumsum(np.asarray(self.weights, dtype=np.float64))])
        return [(before, before)]


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


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The expression, in any case. Raises ValueError with what is wrong with it."""
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"more than {LONGEST_PATTERN} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{error} in the regular expression") from None


def match_names(pattern: str, texts: Sequence[str]) -> list[bool]:
    """In which of the texts the expression is found, in any case.

    Raises ValueError where it is none, or where looking for it could take longer than MOST_MATCH_STEPS.
    """
    search, steps = compile_pattern(pattern).search, 0.0
    is_flat = re.search(r"[(\[\\]", pattern) is None
    for branch in pattern.split("|") if is_flat else [pattern]:
        repeats, forks = len(re.findall(r"[*+{]", branch)), len(re.findall(r"[|?]", branch))
        steps += sum(float(len(text) + 1) ** (1 + repeats) for text in texts) * 2.0**forks
    ends = [end.start() for end in re.finditer(r"\)\s*[*+{]", pattern)]
    inside = pattern[pattern.find("(") : ends[-1]].replace("(?:", "(") if ends else ""
    if steps > MOST_MATCH_STEPS or re.search(r"[*+{|?]", inside) or re.search(r"\(\?[aiLmsu-]*x", pattern):
        raise ValueError("it repeats what repeats, or repeats too often: matching it could take for ever")
    return [search(text) is not None for text in texts]


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
        raise _pattern_error(pattern, error, "Give a simpler one") from None


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
        raise _pattern_error(pattern, error, "Give one that matches names of layers") from None
    return Planner(_type_name(pattern), partial(_propose_type, pattern), partial(_refuse_type, pattern))


def _pattern_error(pattern: str | None, error: ValueError, remedy: str) -> UsageError:
    what = f"planner='{_type_name(pattern)[:80]}': {error}"
    return UsageError(what, f"{remedy}, as in deepspeed-type:attention.")


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

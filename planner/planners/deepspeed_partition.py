"""Partitions of DeepSpeed 0.19.8's `partition_balanced`: `parameters` and `type:REGEX`.

Stage by stage it keeps one partition for the first i layers in j stages. Of those that add a last stage to
the partitions for j - 1 stages, it keeps the one whose heaviest and lightest stage differ least, and of equal
ones that with the latest cut. It minimizes neither the difference nor the heaviest stage, because a partition
that it keeps need not be the beginning of a good one. It ignores forbidden cuts.

`planner="deepspeed-type:REGEX"` searches the regular expression in the layers' names, ignoring case, while
DeepSpeed searches it in the names of their classes. Without an expression, the first layer of every
transformer block is counted, if the names show them. Weights are 1 and 0. Of equal cuts the latest wins, so
layers that do not match stay with the matching layer before them.

Python's regular expressions backtrack, and one from a file may never end. The time of a search is limited by
the number of ways in which the expression can match a text of n characters: at most n + 1 for each repetition
and for the start of the match, and 2 for each alternative or optional part. Repeated groups with an operator
inside, and verbose expressions, which hide operators, are refused.
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
"""Most layers, and entries of the tables of layers x layers x stages. DeepSpeed would take hours beyond."""


@dataclass(frozen=True, eq=False)
class DeepSpeedBalance:
    """DeepSpeed's partitions of layers with these weights, for any number of stages."""

    weights: Sequence[float] | Floats
    _latest: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """By stage except the first, (layers + 1,) begins of the last stage by the number of layers up to its
    end."""

    def ends(self, stages: int) -> Ends | None:
        """Return the number of layers up to the end of each stage.

        None for more stages than layers, which DeepSpeed leaves empty, and if DeepSpeed would take hours.
        """
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
        """Compute where one more stage begins, for each number of layers where it may end."""
        running = self._tables[0][0]
        last, count = running[:, None] - running, np.arange(len(running))
        heavy, light = np.maximum(self._tables[-1][0], last), np.minimum(self._tables[-1][1], last)
        is_stage = (count > len(self._latest)) & (count < count[:, None])
        differ = np.where(is_stage, heavy - light, np.inf)
        begins = differ.shape[1] - 1 - np.argmin(differ[:, ::-1], axis=1)
        self._latest.append(begins)
        self._tables.append((heavy[count, begins], light[count, begins]))

    @cached_property
    def _tables(self) -> list[tuple[Floats, Floats]]:
        """(layers + 1,) heaviest and lightest stages of kept partitions, by number of stages."""
        running = np.concatenate([[0.0], np.cumsum(np.asarray(self.weights, dtype=np.float64))])
        return [(running, running)]


def deepspeed_ends(chain: Chain, balance: DeepSpeedBalance, stages: int) -> Ends | None:
    """Return DeepSpeed's ends of `stages` stages, each forbidden one moved to the nearest allowed cut."""
    ends = balance.ends(stages)
    if ends is None or allows(chain, ends):
        return ends
    return nearest_cuts(chain, ends)


def _pipelines(problem: Problem, weights: Floats, most_stages: float = inf) -> Iterator[Proposal]:
    """Return the pipelines with these weights, for each number of stages up to `most_stages`."""
    chain, balance = problem.space.chain, DeepSpeedBalance(weights)

    def ends(stages: int, _: int) -> Ends | None:
        return deepspeed_ends(chain, balance, stages) if stages <= most_stages else None

    return all_pipelines(problem, ends)


def _parameters(problem: Problem) -> Iterator[Proposal]:
    """Balance the bytes of trainable parameters."""
    return _pipelines(problem, problem.space.chain.trainable_bytes)


MOST_MATCH_STEPS = 1e9
"""Most steps of all searches together: about ten seconds."""
LONGEST_PATTERN = 1000
"""Most characters of an expression."""


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the compiled expression, ignoring case.

    Raises:
        ValueError: It is not a regular expression.
    """
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"more than {LONGEST_PATTERN} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern, re.IGNORECASE)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{error} in the regular expression") from None


def match_names(pattern: str, texts: Sequence[str]) -> list[bool]:
    """Return which of the texts contain a match of the expression, ignoring case.

    Raises:
        ValueError: It is not a regular expression, or the search could take longer than `MOST_MATCH_STEPS`.
    """
    search, steps = compile_pattern(pattern).search, 0.0
    is_flat = re.search(r"[(\[\\]", pattern) is None
    for branch in pattern.split("|") if is_flat else [pattern]:
        repeats, forks = len(re.findall(r"[*+{]", branch)), len(re.findall(r"[|?]", branch))
        steps += sum(float(len(text) + 1) ** (1 + repeats) for text in texts) * 2.0**forks
    ends = [end.start() for end in re.finditer(r"\)\s*[*+{]", pattern)]
    inside = pattern[pattern.find("(") : ends[-1]].replace("(?:", "(") if ends else ""
    if steps > MOST_MATCH_STEPS or re.search(r"[*+{|?]", inside) or re.search(r"\(\?[aiLmsu-]*x", pattern):
        raise ValueError("it nests repetitions, or has too many: matching it could take forever")
    return [search(text) is not None for text in texts]


def matching_layers(chain: Chain, pattern: str | None) -> npt.NDArray[np.bool_]:
    """Return a (layers,) mask of the names that match.

    Without a pattern, the first of each transformer block.

    Raises:
        UsageError: The search could take too long.
    """
    if pattern is None:
        blocks = repeated_blocks(chain)
        return np.isin(np.arange(len(chain)), () if blocks is None else blocks.starts[:-1])
    try:
        return np.array(match_names(pattern, chain.names), dtype=np.bool_)
    except ValueError as error:
        raise _pattern_error(pattern, error, "Give a simpler one") from None


def deepspeed_type(pattern: str | None = None) -> Planner:
    """Return the planner that balances the number of layers whose names match, or of transformer blocks.

    Args:
        pattern: Regular expression. None for transformer blocks.

    Raises:
        UsageError: It is not a regular expression. Proposing raises it if no layer matches.
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

"""Exact min-max contiguous partition: cut a chain so that its most expensive stage is as cheap as possible.

There are two forms, each exact and with exactly the requested number of stages.

- `balance`: a longer stage never costs less, so a limit is tested greedily with the fewest stages. Bisection
  over floats finds the best limit to the last bit.
- `balance_table`: any cost of a stage, with stages that are not allowed (memory), by dynamic programming.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..cost_models.errors import InfeasibleError, UsageError

Floats = npt.NDArray[np.float64]


def balance(
    costs: Sequence[float] | Floats,
    stages: int,
    *,
    cut_after: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
) -> list[int]:
    """Return the layer counts of `stages` stages that minimise the most expensive stage.

    Args:
        costs: (layers,) costs, not negative.
        stages: Number of stages.
        cut_after: (layers - 1,) or longer mask, false if a stage must not end after the layer. None for all
            cuts.

    Raises:
        UsageError: A cost is negative or not finite, or `stages` is not positive.
        InfeasibleError: The allowed cuts do not make this many stages.
    """
    layers = _check_costs(costs)
    places = _places(len(layers), cut_after)
    _check_stages(stages, len(places) - 1, len(layers))
    work = np.concatenate([[0.0], np.cumsum(layers)])[places]
    return [int(count) for count in np.diff([0, *places[_by_greed(work.tolist(), stages)]])]


def balanced_ends(
    costs: Sequence[float] | Floats,
    stages: int,
    cut_after: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
) -> tuple[int, ...]:
    """Return the number of layers up to the end of each stage, see `balance`."""
    return tuple(np.cumsum(balance(costs, stages, cut_after=cut_after)).tolist())


def balance_table(cost: Callable[[int], Floats], stages: int) -> list[int]:
    """Return the ends (places 1 to n, ascending) of the stages that minimise the largest cost.

    The earliest starts win a tie.

    Args:
        cost: Function from the stage k to a (n + 1, n + 1) table: entry [i, j] is its cost from place i to
            place j, inf if it is not allowed.
        stages: Number of stages.

    Raises:
        InfeasibleError: No such stages are allowed.
    """
    best, choices = None, []
    for stage in range(stages):
        table = cost(stage)
        ordered = np.where(np.triu(np.ones(table.shape, dtype=bool), 1), table, np.inf)
        if best is None:
            best = np.where(np.arange(len(table)) == 0, 0.0, np.inf)
        reach = np.maximum(best[:, None], ordered)
        choices.append(reach.argmin(axis=0))
        best = reach.min(axis=0)
    if best is None or not np.isfinite(best[-1]):
        raise InfeasibleError(f"no {stages} stages are allowed", "Use fewer stages, or raise the limits.")
    ends = [len(best) - 1]
    for choice in reversed(choices[1:]):
        ends.append(int(choice[ends[-1]]))
    return ends[::-1]


def _check_costs(costs: Sequence[float] | Floats) -> Floats:
    array = np.asarray(costs, dtype=np.float64)
    bad = array[~(np.isfinite(array) & (array >= 0))]
    if bad.size:
        raise UsageError(f"costs holds {bad[0]}", "Costs must be finite and not negative.")
    return array


def _places(layers: int, cut_after: Sequence[bool] | npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int64]:
    """Return where a stage may end, as numbers of layers before the end, with 0 and `layers`."""
    if cut_after is None:
        return np.arange(layers + 1)
    inner = np.flatnonzero(np.asarray(cut_after, dtype=bool)[: layers - 1]) + 1
    return np.concatenate([[0], inner, [layers]])


def _check_stages(stages: int, most: int, layers: int) -> None:
    if stages < 1:
        raise UsageError(f"{stages} stages: there must be at least 1", "Ask for one stage or more.")
    if stages > most:
        raise InfeasibleError(
            f"{stages} stages of {layers} layers: the allowed cuts make at most {most}",
            f"Ask for at most {most} stages.",
        )


def _by_greed(work: list[float], stages: int) -> list[int]:
    """Return the ends of the stages; `work` are the running sums of the costs at the places."""
    low = max(work[-1] / stages, max(b - a for a, b in pairwise(work))) * (1 - 1e-15)
    high = work[-1]
    ends = _greedy(work, stages, high)
    while (middle := (low + high) / 2) > low and middle < high:
        if greedy_ends := _greedy(work, stages, middle):
            ends, high = greedy_ends, min(middle, _largest(work, greedy_ends))
        else:
            low = middle
    return ends


def _greedy(work: list[float], stages: int, limit: float) -> list[int]:
    """Return ends of stages of at most `limit` each, or nothing if none exist.

    Each stage is as long as possible while one place is left for every later stage.
    """
    end, ends, last = 0, [], len(work) - 1
    for later in range(stages - 1, -1, -1):
        reach = bisect_right(work, work[end] + limit, end) - 1
        while reach > end and work[reach] - work[end] > limit:
            reach -= 1
        if reach == end:
            return []
        end = min(reach, last - later)
        ends.append(end)
    return ends if end == last else []


def _largest(work: list[float], ends: list[int]) -> float:
    return max(work[b] - work[a] for a, b in pairwise([0, *ends]))

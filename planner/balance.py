"""Exact min-max contiguous partition: the cut of a chain whose most expensive stage is cheapest.

Two forms of the same problem, each exact and with exactly the number of stages asked for:

`balance`: a stage that grows never gets cheaper, so a limit is tested greedily with the fewest stages. The
best limit is found by bisection over floats down to the last bit.

`balance_table`: any cost of a stage, and stages that are not allowed (memory), by dynamic programming.
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
    """Layer counts of `stages` stages, the most expensive as cheap as possible.

    costs: (layers,), not negative. cut_after: (layers - 1,) or longer, false where a stage may not end.

    Raises UsageError for a cost that is negative or not finite, and InfeasibleError where the allowed cuts do
    not make so many stages.
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
    """Return the number of layers before the end of each stage; see `balance`."""
    return tuple(np.cumsum(balance(costs, stages, cut_after=cut_after)).tolist())


def balance_table(cost: Callable[[int], Floats], stages: int) -> list[int]:
    """Ends (places 1 to n, ascending) of `stages` stages that minimise the largest cost of a stage.

    cost(k): (n + 1, n + 1), entry [i, j] what stage k costs from place i to place j, inf where it may not be.
    The earliest starts win a tie. Raises InfeasibleError where no such stages are allowed.
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
        raise InfeasibleError(f"no {stages} stages are allowed", "Use other stages, or raise the limits.")
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
    """Where a stage may end, as numbers of layers before it, with 0 and `layers`."""
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
    """Ends of the stages; `work` is the running sum of the costs at the places."""
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
    """Ends of stages of at most `limit`, each as long as it may be while a place stays for each later one."""
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

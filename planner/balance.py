"""Exact min-max contiguous partition: the cut of a chain whose most expensive stage is cheapest.

Three forms of the same problem, each exact and with exactly the number of stages asked for:

`balance` without costs at the cuts: a stage that grows never gets cheaper, so a limit can be tested greedily
with the fewest stages, and the best limit is found by bisection over floats down to the last bit.

`balance` with costs at the cuts (each paid by both neighbours): a longer stage may be cheaper, as its cut may
be. A limit is tested by the sets of places that exactly 1, 2, ... stages can end at, each made from the set
before, kept inside the window that the layers' costs alone allow.

`balance_table`: any cost of a stage, and stages that are not allowed (memory), by dynamic programming.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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
    cut_costs: Sequence[float] | Floats | None = None,
    cut_after: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
) -> list[int]:
    """Layer counts of `stages` stages, the most expensive as cheap as possible.

    costs: (layers,), not negative. cut_costs: (layers - 1,), paid by both stages beside a cut, not negative.
    cut_after: (layers - 1,) or longer, false where a stage may not end.

    Raises UsageError for a cost that is negative or not finite, and InfeasibleError where the allowed cuts do
    not make so many stages.
    """
    layers = _check_values("costs", costs)
    places = _places(len(layers), cut_after)
    _check_stages(stages, len(places) - 1, len(layers))
    work = np.concatenate([[0.0], np.cumsum(layers)])[places]
    if cut_costs is None:
        ends = _by_greed(work.tolist(), stages)
    else:
        at_cuts = np.concatenate([[0.0], _check_values("cut_costs", cut_costs), [0.0]])
        if len(at_cuts) != len(layers) + 1:
            raise UsageError(
                f"{len(at_cuts) - 2} cut_costs for {len(layers)} layers", "Give one between each two layers."
            )
        ends = _by_reach(work, at_cuts[places], stages)
    return [int(count) for count in np.diff([0, *places[ends]])]


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


def _check_values(name: str, values: Sequence[float] | Floats) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    bad = array[~(np.isfinite(array) & (array >= 0))]
    if bad.size:
        raise UsageError(f"{name} holds {bad[0]}", "Costs must be finite and not negative.")
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


def _by_reach(work: Floats, at_cuts: Floats, stages: int) -> list[int]:
    """Ends of the stages, where stage i..j costs work[j] - work[i] + at_cuts[i] + at_cuts[j]."""
    until, since = work + at_cuts, work - at_cuts
    # Limits below what the layers alone need fail at once, so grow from there: the first limit that holds is
    # near the best one, and the windows, which hold for all smaller limits, are narrow from the start.
    low = _largest(work.tolist(), _by_greed(work.tolist(), stages)) * (1 - 1e-12)
    high, growth, levels = np.inf, 0.01, list[_Level]()
    rounding = 4 * float(np.spacing(until.max()))
    while not levels:
        limit = low * (1 + growth) if low else float(at_cuts.max()) * growth
        windows = _windows(work.tolist(), stages, limit)
        levels, growth = _reach(until, since, windows, limit), 2 * growth
    while True:
        if levels:
            ends = _walk_back(levels, until, since, limit)
            high = min(limit, float(np.max(until[ends] - since[[0, *ends[:-1]]])))
            windows = _narrow_windows(until, since, levels, limit)
        else:
            low = limit
        if high - low <= rounding:
            return ends
        limit = (low + high) / 2
        levels = _reach(until, since, windows, limit)


_Level = tuple[int, npt.NDArray[np.bool_]]
"""The first place that k stages reach, and whether they reach each from it to the last they reach."""


def _reach(until: Floats, since: Floats, windows: list[tuple[int, int]], limit: float) -> list[_Level]:
    """The places that k = 1, 2, ... stages of at most `limit` can end at inside the windows; nothing where
    the last place is not among them."""
    start, best = 0, since[:1]
    levels = []
    for low, high in windows:
        low = max(low, start + 1)
        # The cheapest start of a stage that ends at a place: the best of the reached places before it.
        best = np.maximum.accumulate(best)
        if high - start > len(best):
            best = np.concatenate([best, np.full(high - start - len(best), best[-1])])
        reachable = best[low - start - 1 : high - start] >= until[low : high + 1] - limit
        where = reachable.nonzero()[0]
        if not len(where):
            return []
        start, end = low + int(where[0]), low + int(where[-1]) + 1
        reachable = reachable[start - low : end - low]
        levels.append((start, reachable))
        best = np.where(reachable, since[start:end], -np.inf)
    return levels


def _windows(work: list[float], stages: int, limit: float) -> list[tuple[int, int]]:
    """First and last place that k = 1, 2, ... stages can end at, by the layers' costs alone."""
    end, last, ahead = 0, len(work) - 1, list[int]()
    for _ in range(stages):
        end = max(bisect_right(work, work[end] + limit) - 1, end)
        ahead.append(end)
    start, behind = last, [last]
    for _ in range(stages - 1):
        start = min(bisect_left(work, work[start] - limit), start)
        behind.append(start)
    return [
        (max(low, k), min(high, last - (stages - k)))
        for k, (low, high) in enumerate(zip(reversed(behind), ahead, strict=True), start=1)
    ]


def _narrow_windows(
    until: Floats, since: Floats, levels: list[_Level], limit: float
) -> list[tuple[int, int]]:
    """The windows of `levels`, less the places from which the end is not reached in the stages that are left:
    the same search, run backwards. They hold for every smaller limit."""
    last = len(until) - 1
    mirrored = [(last - start - len(starts) + 1, last - start) for start, starts in levels[-2::-1]]
    back = _reach(-since[::-1], -until[::-1], mirrored, limit)
    return [(last - start - len(starts) + 1, last - start) for start, starts in back[::-1]] + [(last, last)]


def _walk_back(levels: list[_Level], until: Floats, since: Floats, limit: float) -> list[int]:
    """Ends of the stages, from the last place back: the nearest reached place that allows the stage."""
    ends = [len(until) - 1]
    for start, starts in levels[-2::-1]:
        stop = min(start + len(starts), ends[-1])
        allowed = starts[: stop - start] & (since[start:stop] >= until[ends[-1]] - limit)
        ends.append(start + int(allowed.nonzero()[0][-1]))
    return ends[::-1]

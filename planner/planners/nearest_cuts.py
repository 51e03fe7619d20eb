"""Cuts of a rule that knows no forbidden ones, moved to where a stage may end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ...cost_models.layer import Chain, joined


def nearest_cuts(chain: Chain, ends: Sequence[int]) -> tuple[int, ...]:
    """The ends of stages, ascending, each moved to the nearest allowed one (of two as near, the earlier).

    From the first on, each stays behind the one before and leaves an allowed end to every later one; so ends
    that do not ascend become stages of a layer or more, too. `ends`: numbers of layers before the end of each
    stage, the last len(chain), of at most `chain.max_stages` stages.
    """
    cut_points, stages = joined(chain), len(ends)
    moved, least = list[int](), 1
    for later, end in zip(range(stages - 2, -1, -1), ends, strict=False):
        most = len(cut_points) - 2 - later
        right = min(max(bisect_left(cut_points, end), least), most)
        left = max(right - 1, least)
        chosen = left if end - cut_points[left] <= cut_points[right] - end else right
        moved.append(cut_points[chosen])
        least = chosen + 1
    return (*moved, len(chain))


def allows(chain: Chain, ends: Sequence[int]) -> bool:
    """Whether these ends of stages ascend, from a layer on to the last, and none is a forbidden cut."""
    first = (0, *ends)
    rising = all(a < b for a, b in zip(first, ends, strict=False))
    return rising and ends[-1] == len(chain) and all(chain.cut_after[end - 1] for end in ends[:-1])

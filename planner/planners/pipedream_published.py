"""PipeDream as the code that its authors published counts, which is not as the paper does.

Of a stage on m components: compute and all-reduce add up, and the all-reduce of m copies sends 4 (m-1) / m
times the weights; what a cut sends is divided among the components of the stage behind it. Cuts are charged,
which that code does where it is told to; memory and unused machines are as in `pipedream`.
"""

from __future__ import annotations

from .pipedream import PipeDream
from .pipedream_table import Floats, Recurrence


def _stage(seconds: Floats, weights: Floats, machines: int, bandwidth: float) -> Floats:
    return (seconds + 4 * (machines - 1) * weights / (bandwidth * machines)) / machines


def _cut(crossing: Floats, machines: int, bandwidth: float) -> Floats:
    return 2 * crossing / (bandwidth * machines)


PUBLISHED = Recurrence(_stage, _cut)
PLANNER = PipeDream("pipedream-published", PUBLISHED)

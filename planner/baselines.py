"""What simpler tools would do, under the same costs and limits: a fixed partition with its best setting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..cost_models.errors import InfeasibleError
from ..cost_models.layer import Chain
from .balance import balance
from .bound import Ends, Instance, bound_of
from .search import Candidate, Space, score
from .setting import Setting


def even(chain: Chain, stages: int) -> list[int]:
    """Layer counts as equal as the allowed cuts let them be. Raises InfeasibleError."""
    return balance(np.ones(len(chain)), stages, cut_after=chain.cut_after)


def by_parameters(chain: Chain, stages: int) -> list[int]:
    """Layer counts with the least parameters in the largest stage, as DeepSpeed's `parameters` balances.

    Raises InfeasibleError.
    """
    return balance(chain.parameter_bytes, stages, cut_after=chain.cut_after)


PARTITIONS = {"even": even, "parameters": by_parameters}


def fixed_partition(
    space: Space, settings: Sequence[Setting], name: str, stages: int
) -> tuple[Candidate | None, str]:
    """The named partition into `stages` with its fastest setting that fits, or None and the reason."""
    try:
        counts = PARTITIONS[name](space.chain, stages)
    except InfeasibleError as error:
        return None, error.what
    return best_setting(space, settings, counts)


def best_setting(
    space: Space, settings: Sequence[Setting], counts: Sequence[int]
) -> tuple[Candidate | None, str]:
    """A straight plan with these layer counts and its fastest setting that fits, or None and the reason."""
    best: Candidate | None = None
    trained = True
    for setting in settings:
        instance = space.instance(setting)
        places = list(instance.table.places)
        ends = [places.index(end) for end in np.cumsum(counts).tolist()]
        stages = len(ends)
        bounds = list(pairwise([0, *ends]))
        trained = trained and all(instance.usable[bound] for bound in bounds)
        fits = all(instance.allowed(stages - s, stages)[bound] for s, bound in enumerate(bounds))
        plan = np.array([ends])
        if not fits or (best is not None and not _may_beat(instance, plan, best.step_seconds)):
            continue
        step = float(score(instance, plan)[0])
        if best is None or step < best.step_seconds:
            best = Candidate(setting, tuple(ends), step)
    if best is not None:
        return best, ""
    return (
        None,
        "does not fit" if trained else "a stage has nothing to train, and the runtime trains every stage",
    )


def _may_beat(instance: Instance, plan: Ends, limit: float) -> bool:
    """Whether its bounds leave one whole plan below `limit`, the cheap one first. plan: (1, stages)."""
    stages = plan.shape[1]
    return instance.quick_bound(stages) < limit and bound_of(instance, stages).finished(plan)[0] < limit

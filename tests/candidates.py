"""Costs of many candidates in one, as the searches make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pplan.cost_models.step_costs import Costs


def side_by_side(candidates: Sequence[Costs]) -> Costs:
    """Costs of candidates of one runtime and the same links, all with the same arrays."""
    arrays = [costs.arrays() for costs in candidates]
    stacked: dict[str, Any] = {
        name: np.stack(np.broadcast_arrays(*(own[name] for own in arrays)), axis=-1) for name in arrays[0]
    }
    return replace(candidates[0], **stacked)

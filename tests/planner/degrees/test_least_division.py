"""The division of the least bound under 1F1B, against the bounds of all divisions."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from pplan.cost_models.transformer.training_setting import block_ranges
from pplan.planner.degrees.division_bound import least_division
from pplan.planner.degrees.stage_degree_bound import stage_bound

from .test_exact_bounds import NO_LIMIT, table


@pytest.mark.parametrize("more", [{}, {"recompute": "full"}, {"predictors": 1}])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_least_bound_of_all_divisions(stages: int, more: dict[str, Any]) -> None:
    """Of each stage what comes before it, its own bound, and the longer of its update and the least; of those
    whose stages all have room."""
    for seed in range(4):
        layers = table(seed, stages, blocks=5, **more)
        setting, every = layers.setting, dict[tuple[int, ...], tuple[float, float]]()
        for counts in product(range(6), repeat=stages):
            if sum(counts) != 5 or not all(counts[1:-1]):
                continue
            own = [layers.stage((blocks,), slot) for slot, blocks in enumerate(block_ranges(counts))]
            both = [stage.forward_seconds + stage.backward_seconds for stage in own]
            cuts = [layers.transfer_seconds(slot) for slot in range(stages - 1)]
            bound = 0.0
            for slot, stage in enumerate(own):
                before = sum(both[:slot]) + 2 * sum(cuts[:slot])
                behind = sum(both[slot + 1 :]) + 2 * sum(cuts[slot:])
                enter, leave = [0.0, *cuts, 0.0][slot : slot + 2]
                alone = stage_bound(
                    *(stage.forward_seconds, stage.backward_seconds, enter, leave, behind),
                    *(stages - 1 - slot, setting.micro_batches),
                )
                update = max(stage.update_seconds, layers.least_update_seconds)
                bound = max(bound, before + float(alone) + update)
            every[counts] = bound, max(stage.bytes for stage in own)
        needs = sorted(bytes for _, bytes in every.values())
        for limit in (NO_LIMIT, needs[-1] * 0.999, needs[len(needs) // 2] * (1 + 1e-9), needs[0] * 0.99):
            fitting = [bound for bound, bytes in every.values() if bytes <= limit]
            bound, divided = least_division(layers, limit)
            assert bound == pytest.approx(min(fitting, default=NO_LIMIT), rel=1e-9)
            assert (divided is None) == (not fitting)
            if divided is not None:
                assert every[divided][0] == pytest.approx(bound, rel=1e-9)
                assert every[divided][1] <= limit

"""The idle share of the longest stage, from the actions' own starts and ends."""

from __future__ import annotations

import numpy as np
import pytest

from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import linear_costs
from pplan.cost_models.timeline import simulate


def test_the_longest_stage_is_from_its_first_start_to_its_last_end() -> None:
    """Of random seconds, with a first stage that is short or long: the longest is not always the same one."""
    longest = set()
    for seed in range(12):
        random = np.random.default_rng(seed)
        scale = np.array([1.0, 0.3, 2.0])[np.roll(range(3), seed)]
        forward = random.uniform(0.5, 1.5, (3, 4, 1)) * scale[:, None, None]
        costs = linear_costs(forward, 2 * forward, occupancy=np.zeros((2, 1)), latency=np.zeros((2, 1)))
        timeline = simulate(find_schedule("1f1b").program(3, 4), costs.candidate(0))
        starts, ends, busy = ([[] for _ in range(3)] for _ in "seb")  # type: ignore[var-annotated]
        for stage, start, end in zip(
            timeline.order.device.tolist(), timeline.run.start, timeline.run.end, strict=True
        ):
            starts[stage].append(float(start))
            ends[stage].append(float(end))
            busy[stage].append(float(end - start))
        spans = [max(ends[stage]) - min(starts[stage]) for stage in range(3)]
        stage = spans.index(max(spans))
        assert timeline.bubble_rate_span == pytest.approx(1 - sum(busy[stage]) / spans[stage])
        longest.add(stage)
    assert 0 in longest

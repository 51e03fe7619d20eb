"""The mean of the bounds of virtual stages, with loops."""

from __future__ import annotations

import pytest

from pplan.planner.degrees.interleaved_bound import MEANS, _mean_times, mean_interleaved

from .test_exact_bounds import table


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (3, 2), (2, 3), (4, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_the_largest_of_several_means(seed: int, stages: int, virtual: int) -> None:
    """What has its place counts as often as the mean says of that, a block as often as where that is least,
    and every transfer both ways."""
    layers = table(seed, stages, virtual)
    blocks = sum(layers.block_seconds(kind, again=False).both for kind in layers.shape.routed)
    fixed = [sum(n * part.both for n, part in layers.fixed_parts(slot)) for slot in range(layers.slots)]
    times, waits = _mean_times(stages, virtual, layers.setting.micro_batches)
    assert len(times) == MEANS
    means = [
        sum(own * each for own, each in zip(row, fixed, strict=True))
        + min(row) * blocks
        + 2 * wait * layers.transfer_seconds(0)
        for row, wait in zip(times.tolist(), waits.tolist(), strict=True)
    ]
    assert mean_interleaved(layers) == pytest.approx(max(means))

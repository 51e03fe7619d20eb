"""All stages side by side against the engine, action by action: the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.simulator import LinearCosts, linear_ends
from pplan.cost_models.step_costs import linear_costs
from pplan.cost_models.timeline import device_ends


def random_costs(rng: np.random.Generator, stages: int, candidates: int = 3) -> LinearCosts:
    """Some without transfers, some whose transfers take longer than the stages; links of their own, shared by
    a stage's two directions, or by several stages."""
    traffic = rng.choice([0.0, 0.3, 3.0])
    cuts = (stages - 1, candidates)
    links = np.full((stages, stages), -1)
    kind = rng.integers(4)
    for stage in range(stages - 1):
        links[stage, stage + 1] = stage if kind < 3 else stage % 2
        links[stage + 1, stage] = (stage + 1 if kind == 1 else stage + 100) if kind < 3 else 7
    occupancy = traffic * rng.random(cuts)
    occupancy[rng.random(stages - 1) < 0.2] = 0.0
    hosts = {f"{name}_launch": 1.5 * rng.random((stages, candidates)) for name in ("forward", "backward")}
    return LinearCosts(
        forward=rng.random((stages, candidates)),
        backward=rng.random((stages, candidates)) + 0.5,
        accumulation=0.5 * rng.random((stages, candidates)),
        occupancy=occupancy,
        latency=0.2 * rng.random(cuts),
        links=None if kind == 0 else links,
        **(hosts if kind % 2 else {}),
    )


def engine_ends(schedule: str, micro_batches: int, own: LinearCosts) -> np.ndarray | None:
    def each(values: np.ndarray) -> np.ndarray:
        return np.repeat(values[:, None], micro_batches, axis=1)

    costs = linear_costs(
        forward=each(own.forward),
        backward=each(own.backward),
        occupancy=own.occupancy,
        latency=own.latency,
        accumulation=own.accumulation,
        forward_launch=None if own.forward_launch is None else each(own.forward_launch),
        backward_launch=None if own.backward_launch is None else each(own.backward_launch),
        hosts="each",
    )
    program = find_schedule(schedule).program(len(own.forward), micro_batches)
    return device_ends(program, replace(costs, links=own.links))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_same_bits_as_action_by_action(schedule: str) -> None:
    rng, refused = np.random.default_rng(0), 0
    for _ in range(150):
        stages, micro_batches = int(rng.integers(1, 9)), int(rng.integers(1, 12))
        costs = random_costs(rng, stages)
        found, expected = (own(schedule, micro_batches, costs) for own in (linear_ends, engine_ends))
        assert (found is None) == (expected is None)
        if found is None or expected is None:
            refused += 1
        else:
            assert (found == expected).all(), (stages, micro_batches)
    assert refused > 5


@pytest.mark.slow
def test_of_as_many_stages_as_16_384_devices_make() -> None:
    """128 stages of 128 devices, 512 micro-batches: as the whole simulation of 131,072 actions."""
    costs = random_costs(np.random.default_rng(4), 128, 1)
    costs = replace(costs, links=None)
    found, expected = linear_ends("1f1b", 512, costs), engine_ends("1f1b", 512, costs)
    assert found is not None
    assert expected is not None
    assert (found == expected).all()

"""The rows of memory of the linear programme of divisions, against the bytes of every division."""

from __future__ import annotations

import numpy as np
import pytest

from pplan.planner.degrees.linear_bound import DivisionProgramme

from .test_exact_bounds import divisions, table


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (3, 2), (2, 3)])
def test_divisions_that_have_room(stages: int, virtual: int, recompute: str) -> None:
    """By each row, in gigabytes: all that fit into the memory, and none that need much more: what kinds of
    blocks need together is not in the rows."""
    for seed in range(3):
        layers = table(seed, stages, virtual, recompute=recompute)
        every = [tuple(own) for own in divisions(layers.shape.blocks, layers.slots)]
        needs = sorted({layers.peak_bytes(own) for own in every})
        fitting = set()
        for place in (0, len(needs) // 2, len(needs) - 2):
            memory = (needs[place] + needs[place + 1]) / 2
            programme = DivisionProgramme(layers, memory)
            rows, rooms = programme._memory(memory)
            for own in every:
                amounts = programme.whole_amounts(own).ravel()
                has_room = bool(np.all(rows @ amounts <= rooms))
                need = layers.peak_bytes(own)
                assert has_room or need > memory, (seed, own)
                assert not has_room or need <= memory + (needs[-1] - needs[0]) / 4, (seed, own)
                fitting.add(has_room)
        assert fitting == {False, True}
        assert programme._memory(float("inf"))[0].size == 0

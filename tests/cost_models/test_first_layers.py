"""A stage that runs its first layers again, against its backward layer by layer, and against other sets."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.memory import (
    FRAGMENTATION_RESERVE,
    StageBytes,
    Training,
    count_first_layers,
    device_ledger,
    first_layers_word,
    ledger,
    recompute_first,
    total,
)
from pplan.cost_models.schedules import find_schedule
from tests.stage_bytes import stage_workspace


class Layers:
    """Random bytes of a few layers: what each saves, of its input besides, needs while it runs, takes in."""

    def __init__(self, seed: int, count: int = 5) -> None:
        rng = np.random.default_rng(seed)
        self.saved, self.saved_input, self.workspace, self.input = rng.integers(0, 50, (4, count)).tolist()

    def stage(self, first: int, end: int) -> StageBytes:
        """Of layers without weights."""
        own = slice(first, end)
        workspace = stage_workspace(self.saved[own], self.workspace[own])
        saved, at_start = sum(self.saved[own]), self.saved_input[first]
        return StageBytes(0.0, 0.0, 0.0, saved, at_start, self.input[first], 0.0, 0.0, workspace)

    def again(self, first: int) -> StageBytes:
        """The whole stage, whose first layers run again."""
        count = len(self.saved)
        return recompute_first(self.stage(0, count), self.stage(0, first), self.stage(first, count))

    def peak(self, segments: list[tuple[int, int, bool]], in_flight: int) -> float:
        """The most that the stage holds of so many micro-batches, where backward goes through these segments
        from the last to the first, and some (True) run again from their input; others keep what they save."""
        held = [
            self.input[first] if again else sum(self.saved[first:end]) + self.saved_input[first]
            for first, end, again in segments
        ]
        most = in_flight * sum(held)
        for index, (first, end, again) in enumerate(segments):
            others = (in_flight - 1) * sum(held) + sum(held[:index])
            # A segment that runs again has its input twice: as kept, and among what its first layer saves.
            start = others + self.saved_input[first] + (self.input[first] if again else 0)
            for layer in range(first, end):
                most = max(most, start + sum(self.saved[first : layer + 1]) + self.workspace[layer])
            most = max(most, start + sum(self.saved[first:end]))
        return float(most)


@pytest.mark.parametrize("seed", range(20))
def test_it_holds_what_a_backward_layer_by_layer_does(seed: int) -> None:
    layers = Layers(seed)
    for first, in_flight in product(range(1, 5), (1, 2, 4)):
        stage = layers.again(first)
        terms = ledger(stage, in_flight=in_flight, recompute="always", optimizer="sgd")
        expected = layers.peak([(0, first, True), (first, 5, False)], in_flight)
        assert total(terms) == pytest.approx(expected * (1 + FRAGMENTATION_RESERVE))
        assert min(float(own) for own in terms.values()) >= 0


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_action_by_action_it_holds_as_much(name: str) -> None:
    schedule = find_schedule(name)
    program = schedule.program(3, 5)
    for device, first in product(range(3), range(1, 5)):
        stage = Layers(7 * device + first).again(first)
        counted = device_ledger(program, device, [stage], Training(), recompute="always")
        in_flight = schedule.in_flight(device, 3, 5)
        terms = ledger(stage, in_flight=in_flight, recompute="always", optimizer="sgd")
        assert total(counted) == pytest.approx(total(terms))
        assert counted["stage_inputs"] == pytest.approx(terms["stage_inputs"])


def test_first_layers_need_no_more_than_any_run_of_as_many_behind_them() -> None:
    """Of layers that are all alike: what is kept before those that run again adds to them at their turn."""
    for seed in range(10):
        layers = Layers(seed)
        for values in (layers.saved, layers.saved_input, layers.workspace, layers.input):
            values[:] = [values[0]] * 5
        for first, end in product(range(5), range(1, 6)):
            if first < end < 5:
                bounds = pairwise([0, first, end, 5])
                behind = [(a, b, a == first) for a, b in bounds if a < b]
                ahead = [(0, end - first, True), (end - first, 5, False)]
                more = layers.saved_input[0]  # a piece before them saves its own input
                assert layers.peak(ahead, 3) <= layers.peak(behind, 3) + more


def test_the_word_has_a_number_of_layers() -> None:
    assert [count_first_layers(first_layers_word(count)) for count in (1, 3, 12)] == [1, 3, 12]
    for word in ("first_0", "first_", "first_3x", "first_-1", "never", "first_layers", "first_99999999"):
        assert count_first_layers(word) is None
    stage = Layers(0).stage(0, 5)
    with pytest.raises(UsageError):
        ledger(stage, in_flight=1, recompute="first_3", optimizer="sgd")

"""What crosses a cut between stages of different degrees, against the owner of every element."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from random import Random

import numpy as np
import pytest

from pplan.cost_models.topology import Device, Link, Topology, two_level_topology
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.resharding import StageDevices, message_bytes, resharding_seconds

INSIDE, BETWEEN = Link(1e6, 1e-3), Link(1e5, 4e-3)


def machine(devices: int, per_node: int) -> Topology:
    return two_level_topology(Device("GPU", None), devices, per_node, INSIDE, BETWEEN)


def owner(degrees: ParallelDegrees, sequence: int, samples: int, sample: int, token: int) -> int:
    """The one device of a stage that holds a token's hidden state."""
    context, tensor = degrees.context, degrees.tensor
    device, place = 0, token
    if context > 1:
        half = sequence // (2 * context)
        piece, inside = divmod(token, half)
        device = min(piece, 2 * context - 1 - piece)
        place = inside + (half if piece >= context else 0)
    share = place * tensor * context // sequence
    replica = sample * degrees.data // samples
    return (replica * context + device) * tensor + share


def random_stage(random: Random, samples: int) -> ParallelDegrees:
    data = random.choice([own for own in (1, 2, 3, 4) if samples % own == 0])
    return ParallelDegrees(random.choice((1, 2, 3, 4)), random.choice((1, 1, 2, 4)), 1, 1, data)


@pytest.mark.parametrize("seed", range(80))
def test_every_element_goes_from_its_owner_to_its_owner(seed: int) -> None:
    random = Random(seed)
    samples, sequence, hidden = random.choice((2, 4, 6, 12)), random.choice((96, 192)), 8
    before, after = random_stage(random, samples), random_stage(random, samples)
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for sample, token in product(range(samples), range(sequence)):
        counts[tuple(owner(own, sequence, samples, sample, token) for own in (before, after))] += 1  # type: ignore[index]
    first = StageDevices(before, 0)
    second = StageDevices(after, first.size)
    bytes = message_bytes(first, second, sequence, samples, hidden)
    assert bytes.shape == (first.size, second.size)
    for (sender, receiver), own in np.ndenumerate(bytes):
        assert own == 2 * hidden * counts.get((sender, receiver), 0)
    topology = machine(first.size + second.size, random.choice((1, 4, 8, 1000)))
    sent, received = defaultdict[int, float](float), defaultdict[int, float](float)
    for (sender, receiver), number in counts.items():
        link = topology.link(sender, first.size + receiver)
        sent[sender] += link.seconds(2 * hidden * number)
        received[receiver] += link.seconds(2 * hidden * number)
    seconds = resharding_seconds(topology, first, second, sequence, samples, hidden)
    assert seconds == pytest.approx(max(*sent.values(), *received.values()), rel=1e-12)


def test_equal_degrees_send_to_their_counterpart() -> None:
    degrees = ParallelDegrees(2, 2, 1, 1, 2)
    first, second = StageDevices(degrees, 0), StageDevices(degrees, 8)
    bytes = message_bytes(first, second, 64, 4, 16)
    assert (bytes == np.eye(8) * 64 * 4 * 16 * 2 / 8).all()
    seconds = resharding_seconds(machine(16, 8), first, second, 64, 4, 16)
    assert seconds == BETWEEN.seconds(64 * 4 * 16 * 2 / 8)


def test_by_hand() -> None:
    """Of 2 samples of 4 tokens, TP 2 holds tokens 0-1 and 2-3 of both, DP 2 a sample each: every device
    sends two messages of two tokens."""
    first, second = StageDevices(ParallelDegrees(tensor=2), 0), StageDevices(ParallelDegrees(data=2), 2)
    assert message_bytes(first, second, 4, 2, 10).tolist() == [[40, 40], [40, 40]]
    assert resharding_seconds(machine(4, 4), first, second, 4, 2, 10) == 2 * INSIDE.seconds(40)
    one = StageDevices(ParallelDegrees(), 2)
    assert resharding_seconds(machine(3, 4), first, one, 4, 2, 10) == 2 * INSIDE.seconds(80)

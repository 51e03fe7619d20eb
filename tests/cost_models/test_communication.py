"""Transfers, DDP's buckets against torch's, and reducing during the backward against an event loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pplan.cost_models.collectives import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    MIB,
    all_reduce_seconds,
    exposed_all_reduce_seconds,
    gradient_buckets,
)
from pplan.cost_models.topology import Device, Link, two_level_topology

INSIDE, BETWEEN = Link(8e9, 1e-3), Link(1e9, 2e-3)
TOPOLOGY = two_level_topology(Device("GPU", None), 8, 4, INSIDE, BETWEEN)
PAIR = [0, 1]


def test_a_transfer() -> None:
    assert BETWEEN.seconds(3e9) == pytest.approx(3.002)
    assert BETWEEN.seconds(np.array([1e9, 2e9])).tolist() == pytest.approx([1.002, 2.002])


def fastest_by_steps(replicas: int, link: Link, size: float) -> float:
    """Ring: every device sends one chunk to the next, r - 1 steps to add up, r - 1 to hand around. Trees: as
    many levels up and down as halve the devices to one, and the bytes twice."""
    levels, left = 0, replicas
    while left > 1:
        levels, left = levels + 1, (left + 1) // 2
    tree = 2 * levels * link.latency_seconds + 2 * size / link.bandwidth_bytes_per_second
    now = 0.0
    for _ in ("reduce-scatter", "all-gather"):
        for _ in range(replicas - 1):
            now += link.seconds(size / replicas)
    return min(now, tree)


def test_bucket_sizes_are_ddps() -> None:
    assert (FIRST_BUCKET_BYTES, BUCKET_BYTES) == (1_048_576, 26_214_400)


def test_buckets_by_hand() -> None:
    # The first closes at 1 MiB or more, the others at 25 MiB or more, whatever the last gradient adds.
    sizes = [0.5 * MIB, 0.5 * MIB, 20 * MIB, 4 * MIB, 400 * MIB, 30 * MIB, 1 * MIB]
    assert gradient_buckets(sizes) == [(0, 2), (2, 5), (5, 6), (6, 7)]
    assert gradient_buckets([]) == []
    assert gradient_buckets([0.0, 0.0]) == []


@pytest.mark.parametrize("seed", range(20))
def test_buckets_are_those_of_torch(seed: int) -> None:
    torch = pytest.importorskip("torch")
    numbers = (4.0 ** np.random.default_rng(seed).uniform(1, 12, size=60)).astype(int)
    tensors = [torch.empty(int(number), device="meta") for number in numbers]
    expected, _ = torch.distributed._compute_bucket_assignment_by_size(
        tensors, [FIRST_BUCKET_BYTES, BUCKET_BYTES], [False] * len(tensors)
    )
    assert len(expected) > 2
    buckets = gradient_buckets([4.0 * int(number) for number in numbers])
    assert [list(range(*bucket)) for bucket in buckets] == expected


def test_exposed_seconds_by_hand() -> None:
    # Backward: layer 2 ends at 1 s, layer 1 at 3 s, layer 0 at 3.5 s; each layer fills a bucket of 8 GB,
    # which takes 1.002 s: 1 to 2.002, 3 to 4.002, 4.002 to 5.004.
    assert exposed_all_reduce_seconds([0.5, 2.0, 1.0], [8e9, 8e9, 8e9], TOPOLOGY, PAIR) == pytest.approx(
        1.504
    )


def test_buckets_over_several_nodes() -> None:
    # All eight devices: 8 GB by the hierarchy take 3.51 s (as one ring 14.028 s), all after the backward.
    assert exposed_all_reduce_seconds([1.0], [8e9], TOPOLOGY, range(8)) == pytest.approx(3.51)


def test_small_gradients_share_the_last_bucket() -> None:
    # 1 MiB closes the first bucket; the two other layers share the second, reduced at the end.
    sizes = [100_000.0, 100_000.0, float(MIB)]
    shared = all_reduce_seconds(TOPOLOGY, PAIR, 200_000.0)
    assert exposed_all_reduce_seconds([1.0, 1.0, 1.0], sizes, TOPOLOGY, PAIR) == pytest.approx(shared)


def test_first_layers_without_parameters_hide_the_reduction() -> None:
    assert exposed_all_reduce_seconds([5.0, 1.0], [0.0, 8e9], TOPOLOGY, PAIR) == 0.0
    # A bucket that is never filled is complete with its last gradient, before those layers too.
    assert exposed_all_reduce_seconds([0.001, 1.0], [0.0, 8e5], TOPOLOGY, PAIR) == pytest.approx(0.0011)


def test_nothing_is_exposed_without_replicas_or_parameters() -> None:
    assert exposed_all_reduce_seconds([1.0, 1.0], [8e9, 8e9], TOPOLOGY, [0]) == 0.0
    assert exposed_all_reduce_seconds([1.0, 1.0], [0.0, 0.0], TOPOLOGY, PAIR) == 0.0


def by_event_loop(backward: list[float], parameters: list[float], devices: list[int]) -> float:
    """DDP by its events: gradients arrive and fill buckets, and a queue reduces full ones in order."""
    now, free, open_bucket, limit = 0.0, 0.0, [], float(FIRST_BUCKET_BYTES)
    queue: list[tuple[float, float]] = []
    for layer in reversed(range(len(backward))):
        now += backward[layer]
        if parameters[layer] == 0:
            continue
        open_bucket.append((now, parameters[layer]))
        if sum(size for _, size in open_bucket) >= limit:
            queue.append((now, sum(size for _, size in open_bucket)))
            open_bucket, limit = [], float(BUCKET_BYTES)
    if open_bucket:
        queue.append((open_bucket[-1][0], sum(size for _, size in open_bucket)))
    link = INSIDE if len({device // 4 for device in devices}) == 1 else BETWEEN
    for ready, size in queue:
        free = max(free, ready) + fastest_by_steps(len(devices), link, size)
    return max(0.0, free - now)


CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""No verdict by elapsed time."""

LAYERS = st.lists(
    st.tuples(st.floats(0, 0.1), st.one_of(st.just(0), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB))),
    min_size=1,
    max_size=40,
)


@CALM
@given(LAYERS, st.sampled_from([[0, 1], [0, 1, 2, 3], [3, 4], [0, 2, 4, 6, 7]]))
def test_exposed_seconds_are_those_of_an_event_loop(
    layers: list[tuple[float, int]], devices: list[int]
) -> None:
    backward = [seconds for seconds, _ in layers]
    parameters = [float(size) for _, size in layers]
    exposed = exposed_all_reduce_seconds(backward, parameters, TOPOLOGY, devices)
    assert exposed == pytest.approx(by_event_loop(backward, parameters, devices), abs=1e-12)


@CALM
@given(LAYERS)
def test_exposed_seconds_lie_between_the_last_bucket_and_the_whole(layers: list[tuple[float, int]]) -> None:
    backward = np.array([seconds for seconds, _ in layers])
    parameters = np.array([float(size) for _, size in layers])
    exposed = exposed_all_reduce_seconds(backward, parameters, TOPOLOGY, PAIR)
    buckets = len(gradient_buckets(parameters[::-1]))
    whole = float(parameters.sum()) / INSIDE.bandwidth_bytes_per_second + buckets * 2 * INSIDE.latency_seconds
    assert max(0.0, whole - float(backward.sum())) - 1e-9 <= exposed <= whole + 1e-9


def test_many_backward_passes_are_the_single_ones() -> None:
    rng = np.random.default_rng(0)
    backward, gradients = rng.random((6, 9)), 1e10 * rng.random(9) * (rng.random(9) < 0.8)
    many = exposed_all_reduce_seconds(backward, gradients, TOPOLOGY, PAIR)
    each = [exposed_all_reduce_seconds(row, gradients, TOPOLOGY, PAIR) for row in backward]
    assert many.tolist() == pytest.approx(each)
    assert len(set(each)) > 3
    assert exposed_all_reduce_seconds(backward, gradients, TOPOLOGY, [0]).tolist() == [0.0] * 6
    assert exposed_all_reduce_seconds(backward, np.zeros(9), TOPOLOGY, PAIR).tolist() == [0.0] * 6

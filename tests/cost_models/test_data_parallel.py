"""Data parallelism's formulas against a simulation of every push and pull."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import pytest

from pplan.cost_models.data_parallel import (
    Pace,
    Workers,
    asynchronous,
    hogwild,
    stale_synchronous,
    synchronous,
)
from pplan.cost_models.errors import UsageError

ROUNDS = 240


@dataclass
class Port:
    """Of the servers: requests are served in the order in which they come."""

    free: float = 0.0

    def serve(self, ready: float, service: float, own: float) -> float:
        """When a request has been served that takes the servers so long, and the worker's port `own`."""
        self.free = max(self.free, ready) + service
        return max(self.free, ready + own)


@dataclass
class Simulation:
    """Workers that fetch, compute and push one after another, at most `bound` gradients ahead of the slowest.

    `one_port`: pulls and pushes go by one port, as in a memory that all share.
    """

    workers: Workers
    push_every: int = 1
    fetch_every: int = 1
    bound: float = inf
    one_port: bool = False
    ended: list[tuple[float, int]] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)

    def run(self) -> Pace:
        """Gradients a second and the mean staleness, in the second half of the time."""
        own, count = self.workers, len(self.workers.compute_seconds)
        into, out = Port(), Port()
        into = out if self.one_port else into
        done, pushes = [0] * count, list[tuple[float, int]]()
        fetched: list[list[float]] = [[] for _ in range(count)]
        events = [(0.0, worker, "start") for worker in range(count)]
        waiting: list[int] = []
        while events and min(done) < ROUNDS:
            now, worker, what = heapq.heappop(events)
            if what == "start" and done[worker] - min(done) > self.bound:
                waiting.append(worker)
            elif what == "start":
                if done[worker] % self.fetch_every == 0:
                    fetched[worker] = [*fetched[worker], now][-2:]
                    now = out.serve(
                        now + own.latency_seconds, own.pull_seconds / own.servers, own.pull_seconds
                    )
                computed = now + own.compute_seconds[worker]
                heapq.heappush(events, (computed, worker, "push"))
            elif what == "push" and (done[worker] + 1) % self.push_every == 0:
                ready = now + own.latency_seconds
                applied = into.serve(ready, own.push_seconds / own.servers, own.push_seconds)
                heapq.heappush(events, (applied, worker, "applied"))
            else:
                if what == "applied":
                    pushes.append((now, worker))
                    since = fetched[worker][-1]
                    self.missed.append(sum(since < t <= now and v != worker for t, v in pushes[-4 * count :]))
                done[worker] += 1
                self.ended.append((now, worker))
                heapq.heappush(events, (now, worker, "start"))
                events += [(now, other, "start") for other in waiting]
                heapq.heapify(events)
                waiting = []
        half = len(self.ended) // 2
        rate = (len(self.ended) - half) / (self.ended[-1][0] - self.ended[half - 1][0])
        late = self.missed[len(self.missed) // 2 :]
        return Pace(rate, sum(late) / len(late))


EQUAL = {
    "computing counts": Workers((1.0,) * 4, 10, 10, 1000, 0.001),
    "servers count": Workers((0.1,) * 6, 100, 100, 1000, 0.001),
    "two servers": Workers((0.1,) * 6, 100, 60, 1000, 0.0, 2),
    "pulls count": Workers((0.05,) * 5, 10, 90, 1000),
}
UNLIKE = Workers((1.0, 1.5, 2.2, 3.1), 10, 10, 1000, 0.001)


@pytest.mark.parametrize("workers", EQUAL.values(), ids=EQUAL)
def test_asynchronous(workers: Workers) -> None:
    """Equal workers reach the bounds, and a gradient misses one update of each other worker."""
    simulated, pace = Simulation(workers).run(), asynchronous(workers)
    assert simulated.gradients_per_second == pytest.approx(pace.gradients_per_second, rel=0.01)
    assert pace.staleness == len(workers.compute_seconds) - 1
    assert simulated.staleness == pytest.approx(pace.staleness, abs=0.3)


def test_unlike_workers_stay_below_the_bound() -> None:
    simulated, pace = Simulation(UNLIKE).run(), asynchronous(UNLIKE)
    assert 0.97 * pace.gradients_per_second < simulated.gradients_per_second
    assert simulated.gradients_per_second <= pace.gradients_per_second * 1.01
    assert simulated.staleness == pytest.approx(pace.staleness, abs=0.3)


@pytest.mark.parametrize("workers", [*EQUAL.values(), UNLIKE], ids=[*EQUAL, "unlike"])
def test_synchronous(workers: Workers) -> None:
    """Equal to workers of which none may be ahead of another, whatever they compute."""
    simulated = Simulation(workers, bound=0).run()
    assert simulated.gradients_per_second == pytest.approx(
        synchronous(workers).gradients_per_second, rel=0.01
    )
    assert synchronous(workers).staleness == 0
    assert stale_synchronous(workers, 0) == synchronous(workers)


@pytest.mark.parametrize("bound", [1, 3])
def test_stale_synchronous_goes_at_the_pace_of_the_slowest(bound: int) -> None:
    simulated, pace = Simulation(UNLIKE, bound=bound).run(), stale_synchronous(UNLIKE, bound)
    assert simulated.gradients_per_second == pytest.approx(pace.gradients_per_second, rel=0.03)
    assert (pace.staleness, pace.bounded) == (bound, True)
    assert synchronous(UNLIKE).gradients_per_second < pace.gradients_per_second
    assert pace.gradients_per_second < asynchronous(UNLIKE).gradients_per_second


@pytest.mark.parametrize(("push_every", "fetch_every"), [(4, 4), (1, 3), (4, 1), (2, 4)])
@pytest.mark.parametrize("workers", EQUAL.values(), ids=EQUAL)
def test_downpour(workers: Workers, push_every: int, fetch_every: int) -> None:
    """At most the bounds, which bursts of several requests may miss."""
    simulated = Simulation(workers, push_every, fetch_every).run()
    pace = asynchronous(workers, push_every, fetch_every)
    assert simulated.gradients_per_second <= pace.gradients_per_second * 1.01
    assert simulated.gradients_per_second >= pace.gradients_per_second * 0.93
    assert pace.gradients_per_second >= asynchronous(workers).gradients_per_second


def test_staleness_of_downpour() -> None:
    """Of 5 workers: with equal periods 4 updates; fetching every third, 1 to 3 times 4 of them."""
    workers = Workers((1.0,) * 5, 10, 10, 1000)
    assert asynchronous(workers, 4, 4).staleness == 4
    assert asynchronous(workers, 1, 3).staleness == 4 * (1 + 2 + 3) / 3
    assert asynchronous(workers, 4, 1).staleness == 4
    assert Simulation(workers, 1, 3).run().staleness == pytest.approx(8, abs=0.3)


@pytest.mark.parametrize("rate", [1e3, 2e4])
def test_hogwild(rate: float) -> None:
    """Workers that read and write by one memory."""
    workers = Workers((0.1,) * 8, 100, 100, rate)
    simulated, pace = Simulation(workers, one_port=True).run(), hogwild(workers, rate)
    assert simulated.gradients_per_second == pytest.approx(pace.gradients_per_second, rel=0.01)
    assert pace.staleness == 7


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Workers((), 1, 1, 1), "there must be a worker"),
        (lambda: Workers((1.0,), 1, 1, 1, servers=0), "servers=0"),
        (lambda: asynchronous(UNLIKE, push_every=0), "push_every=0"),
        (lambda: stale_synchronous(UNLIKE, -1), "staleness=-1"),
        (lambda: hogwild(UNLIKE, 0), "memory_bandwidth=0"),
    ],
)
def test_refusals(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()

"""Seconds and staleness of data parallelism: all-reduces, parameter servers, and lock-free shared memory.

Every one of n workers has the whole model and computes a gradient of its samples in c seconds; nothing
overlaps. G and W are the bytes of the gradients and of the weights, B is the bandwidth of a port, a its
latency.

- `ring`, `tree`: a step is the slowest c and the all-reduce of G (`collectives`: Patarasuk and Yuan 2009;
  Sanders, Speck and Traeff 2009).
- `synchronous`: when the last gradient has come all pull, in the order of their ranks, compute and push (Li
  et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014). k servers have a k-th
  of the weights each and serve one worker after another, for W / (k B) and G / (k B); the port of a worker
  takes W / B and G / B at the least.
- `asynchronous`: a worker pushes, pulls and goes on, whatever the others do (Dean et al., "Large Scale
  Distributed Deep Networks", NeurIPS 2012). A cycle takes L = c + G / B + W / B + 2 a, and all together make
  min(sum of 1 / L, k B / G, k B / W) gradients a second: the asymptotic bounds of a closed network (Denning
  and Buzen, "The Operational Analysis of Queueing Network Models", 1978, section 4), which equal workers
  reach; unlike ones come close as long as no server is loaded. A gradient misses what the others push from
  the fetch of its weights to its own push: n - 1 updates in the mean, also of unlike workers (that of worker
  i misses (X - X_i) / X_i, of X gradients a second).
- `stale-synchronous`: a worker may be at most s updates (clocks) ahead of the slowest (Ho et al., "More
  Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013); s = 0 is
  `synchronous`. With seconds that do not vary all end up at the pace of the slowest: min(n / max L, ...).
- `downpour`: gradients are pushed after every p and weights fetched before every f of them (Dean et al. 2012,
  section 4.1, n_push and n_fetch), L = c + (G / B + a) / p + (W / B + a) / f.
- `hogwild`: one machine whose workers read and write the weights in shared memory without locks (Recht, Re,
  Wright, Niu, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NeurIPS 2011),
  at the memory's bandwidth: L = c + (W + G) / B_mem, and at most B_mem / (W + G) a second together.

What stale gradients do to the loss is not said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, lcm

from .errors import UsageError


@dataclass(frozen=True)
class Workers:
    """Workers of data parallelism and their parameter servers.

    Attributes:
        compute_seconds: Seconds of a gradient on each worker.
        gradient_bytes: Bytes of all gradients.
        weight_bytes: Bytes of all weights.
        bandwidth_bytes_per_second: Bandwidth of the port of every worker and server.
        latency_seconds: Latency of these ports.
        servers: Number of parameter servers.

    Raises:
        UsageError: There is no worker or no server, or a worker's seconds are negative.
    """

    compute_seconds: tuple[float, ...]
    gradient_bytes: float
    weight_bytes: float
    bandwidth_bytes_per_second: float
    latency_seconds: float = 0.0
    servers: int = 1

    def __post_init__(self) -> None:
        if not self.compute_seconds or min(self.compute_seconds) < 0:
            raise UsageError(
                f"compute_seconds={self.compute_seconds}: there must be a worker, none below 0 s",
                "Give the seconds of a gradient on every worker.",
            )
        if self.servers < 1:
            raise UsageError(f"servers={self.servers}: must be at least 1", "Give servers=1, say.")

    @property
    def push_seconds(self) -> float:
        """Seconds of a gradient through the port of a worker."""
        return self.gradient_bytes / self.bandwidth_bytes_per_second

    @property
    def pull_seconds(self) -> float:
        """Seconds of the weights through the port of a worker."""
        return self.weight_bytes / self.bandwidth_bytes_per_second


@dataclass(frozen=True)
class Pace:
    """Gradients a second of all workers together; `staleness`: updates of others that a gradient misses in
    the mean, or at the most where that is `bounded`."""

    gradients_per_second: float
    staleness: float
    bounded: bool = False

    def seconds(self, gradients: int) -> float:
        """Return the seconds of `gradients` gradients."""
        return gradients / self.gradients_per_second


def synchronous(workers: Workers) -> Pace:
    """Return the pace of consecutive synchronous parameter-server steps."""
    latency, ends, port = workers.latency_seconds, [], 0.0
    for seconds in workers.compute_seconds:
        port = max(port, latency) + workers.pull_seconds / workers.servers
        ends.append(max(port, latency + workers.pull_seconds) + seconds)
    port = done = 0.0
    for start in (seconds + latency for seconds in sorted(ends)):
        port = max(port, start) + workers.push_seconds / workers.servers
        done = max(done, port, start + workers.push_seconds)
    return Pace(len(ends) / done, 0.0)


def asynchronous(workers: Workers, push_every: int = 1, fetch_every: int = 1) -> Pace:
    """Return the pace of workers that wait for nobody. With periods of several gradients this is Downpour.

    Args:
        workers: Workers and servers.
        push_every: Gradients per push.
        fetch_every: Gradients per fetch of the weights.

    Raises:
        UsageError: A period is not positive.
    """
    for name, period in (("push_every", push_every), ("fetch_every", fetch_every)):
        if period < 1:
            raise UsageError(f"{name}={period}: must be at least 1", "Give 1 for every gradient.")
    latency, n = workers.latency_seconds, len(workers.compute_seconds)
    exchange = (workers.push_seconds + latency) / push_every + (workers.pull_seconds + latency) / fetch_every
    busiest = max(workers.push_seconds / push_every, workers.pull_seconds / fetch_every)
    rate = _rate([seconds + exchange for seconds in workers.compute_seconds], busiest / workers.servers)
    return Pace(rate, (n - 1) * _mean_age(push_every, fetch_every) / push_every)


def _rate(cycles: Sequence[float], busiest: float) -> float:
    """Return the gradients per second: one per cycle, limited by the busiest port.

    Args:
        cycles: Seconds of a cycle of each worker.
        busiest: Seconds for which one gradient occupies the busiest port.
    """
    return min(sum(1 / cycle for cycle in cycles), 1 / busiest if busiest else inf)


def _mean_age(push_every: int, fetch_every: int) -> float:
    """Return the mean number of gradients from the fetch for a push's first gradient to that push.

    Weights are fetched before gradient 0, f, 2 f, ..., and pushed after gradient p - 1, 2 p - 1, ...
    """
    pushes = range(push_every, lcm(push_every, fetch_every) + 1, push_every)
    return sum(push - (push - push_every) // fetch_every * fetch_every for push in pushes) / len(pushes)


def stale_synchronous(workers: Workers, bound: int) -> Pace:
    """Workers at most `bound` updates ahead of the slowest. Raises UsageError."""
    if bound < 0:
        raise UsageError(f"staleness={bound}: must be at least 0", "Give 0 for synchronous steps.")
    if bound == 0:
        return synchronous(workers)
    count = len(workers.compute_seconds)
    slowest = replace(workers, compute_seconds=(max(workers.compute_seconds),) * count)
    return Pace(asynchronous(slowest).gradients_per_second, bound, bounded=True)


def hogwild(workers: Workers, memory_bytes_per_second: float) -> Pace:
    """Return the pace of workers of one machine on weights in its memory.

    Args:
        workers: Workers.
        memory_bytes_per_second: Bandwidth of the memory.

    Raises:
        UsageError: The bandwidth is not positive.
    """
    if memory_bytes_per_second <= 0:
        raise UsageError(
            f"memory_bandwidth={memory_bytes_per_second:g}: must be above 0", "Give 200GB/s, say."
        )
    moved = (workers.weight_bytes + workers.gradient_bytes) / memory_bytes_per_second
    rate = _rate([seconds + moved for seconds in workers.compute_seconds], moved)
    return Pace(rate, len(workers.compute_seconds) - 1)

"""HetPipe: several pipelines of different devices that share parameter servers.

Park et al., "HetPipe: Enabling Large DNN Training on (Whimpy) Heterogeneous GPU Clusters through Integration
of Pipelined Model Parallelism and Data Parallelism", USENIX ATC 2020. A virtual worker is a pipeline of one
device per stage, with N_m mini-batches in flight. Policies for virtual workers (section 8.1):

    NP, node partition             every node is one
    ED, equal distribution         one device of every node each
    HD, hybrid distribution        half of the fastest and half of the slowest node each, and so on inwards

Each has its own partition, whose slowest stage, computing and receiving, is as fast as can be among those
that fit (section 7), here over all orders of up to `MOST_PERMUTED` devices too. Of N_m mini-batches one ends
each

    max(slowest stage, sum of the stages / N_m)

and under wave synchronous parallel (section 5) a virtual worker pushes once in N_m of them, and is at most D
waves ahead of the slowest: in the long run all go at the pace of the slowest. A gradient misses up to
s_local = N_m - 1 mini-batches of its own pipeline and s_global = (D + 1) (s_local + 1) + s_local - 1 in all.

Ours: the weights lie on all nodes in equal parts, whose ports take all pushes and pulls of a wave beside the
computing, but never faster; a stage holds as many mini-batches, and weights for each, as 1F1B would. N_m is
the one with the most samples a second. Not a plan of pplan: its pipelines differ, and nothing is synchronous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ...cost_models.memory import LedgerOptions
from ...cost_models.quantities import format_count
from ..search.space import Space
from ..stage_table import Floats, ledger_options
from .replica_groups import even_stages, stage_entries, thin_cuts

if TYPE_CHECKING:
    from ..problem import Problem

MOST_PERMUTED = 4
"""Most devices of a virtual worker for which every order is tried."""
BLOCKS = 60
"""Most blocks of layers between which a search may cut."""
POLICIES = ("NP", "ED", "HD")


@dataclass(frozen=True)
class VirtualWorker:
    """A pipeline of one device per stage.

    Attributes:
        devices: Devices of its stages.
        ends: Number of layers up to the end of each stage.
        stage_seconds: Seconds of the stages.
        memory_bytes: Bytes of the fullest device.
    """

    devices: tuple[int, ...]
    ends: tuple[int, ...]
    stage_seconds: tuple[float, ...]
    memory_bytes: float

    def interval(self, concurrent: int) -> float:
        """Return the seconds between the ends of two mini-batches, with `concurrent` in flight."""
        return max(*self.stage_seconds, sum(self.stage_seconds) / concurrent)


@dataclass(frozen=True)
class HetPipePlan:
    """Virtual workers of a policy.

    Attributes:
        policy: NP, ED or HD.
        workers: The virtual workers.
        mini_batch_size: Samples of a mini-batch.
        concurrent: Mini-batches in flight in each.
        wave_seconds: Seconds of `concurrent` mini-batches in every worker.
        distance: Clock distance in waves.
    """

    policy: str
    workers: tuple[VirtualWorker, ...]
    mini_batch_size: int
    concurrent: int
    wave_seconds: float
    distance: int

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all virtual workers."""
        return len(self.workers) * self.concurrent * self.mini_batch_size / self.wave_seconds

    @property
    def local_staleness(self) -> int:
        """Mini-batches of its pipeline that a gradient misses."""
        return self.concurrent - 1

    @property
    def global_staleness(self) -> int:
        """Most mini-batches that a gradient misses in all."""
        return (self.distance + 1) * (self.local_staleness + 1) + self.local_staleness - 1


def find_hetpipe_plan(problem: Problem, policy: str, distance: int = 0) -> HetPipePlan | str:
    """Return the plan with the most samples per second, or why none exists."""
    groups = virtual_workers(problem, policy)
    if isinstance(groups, str):
        return groups
    space, depth = thin_cuts(problem.space, BLOCKS), len(groups[0])
    if depth > space.chain.max_stages:
        stages = format_count(space.chain.max_stages, "stage")
        return f"virtual workers of {format_count(depth, 'device')}: the cuts make {stages}"
    plans = [
        plan
        for size in problem.sizes
        for concurrent in range(1, 2 * depth + 1 if space.fits_someone(size, 1) else 1)
        if (plan := _plan(space, policy, groups, size, concurrent, distance)) is not None
    ]
    return max(plans, key=lambda plan: plan.samples_per_second, default="does not fit")


def virtual_workers(problem: Problem, policy: str) -> list[tuple[int, ...]] | str:
    """Return the devices of each virtual worker, or why the policy makes none."""
    topology, gpus = problem.topology, problem.gpus
    per_node = min(topology.gpus_per_node, gpus)
    nodes = [tuple(range(first, min(first + per_node, gpus))) for first in range(0, gpus, per_node)]
    if len({len(node) for node in nodes}) > 1:
        return "the nodes have different numbers of devices"
    if policy == "NP":
        return nodes
    if len(nodes) == 1:
        return "one node: as NP"
    if policy == "ED":
        return list(zip(*nodes, strict=True))
    if len(nodes) % 2 or per_node % 2:
        return "takes half of each of two nodes"
    scale = {node: sum(topology.device(rank).speed for rank in node) for node in nodes}
    ordered, half = sorted(nodes, key=lambda node: -scale[node]), per_node // 2
    pairs = [(ordered[i], ordered[-1 - i]) for i in range(len(nodes) // 2)]
    return [fast[part] + slow[part] for fast, slow in pairs for part in (slice(half), slice(half, None))]


def _plan(
    space: Space, policy: str, groups: Sequence[tuple[int, ...]], size: int, concurrent: int, distance: int
) -> HetPipePlan | None:
    by_kind: dict[object, tuple[tuple[int, ...], VirtualWorker | None]] = {}
    workers = []
    for ranks in groups:
        levels = [space.topology.shared_level(a, b) for a, b in combinations(ranks, 2)]
        key = tuple(map(space.topology.device, ranks)), tuple(levels)
        if key not in by_kind:
            by_kind[key] = ranks, best_partition(space, ranks, size, concurrent)
        first, worker = by_kind[key]
        if worker is None:
            return None
        workers.append(replace(worker, devices=tuple(ranks[first.index(rank)] for rank in worker.devices)))
    slowest = max(worker.interval(concurrent) for worker in workers)
    wave = max(concurrent * slowest, exchange_seconds(space, len(groups)))
    return HetPipePlan(policy, tuple(workers), size, concurrent, wave, distance)


def exchange_seconds(space: Space, workers: int) -> float:
    """Return the seconds of the pushes and pulls of a wave through the port of each node.

    Each node holds an equal part of the weights.
    """
    per_node = min(space.topology.gpus_per_node, space.topology.gpus)
    nodes = space.topology.gpus // per_node
    if nodes < 2:
        return 0.0
    trainable = float(space.chain.trainable_bytes.sum())
    moved = trainable + float(space.gradients(np.array([trainable]))[0])
    bandwidth = space.topology.link(0, per_node).bandwidth_bytes_per_second
    return workers * moved * (nodes - 1) / nodes**2 / bandwidth


def best_partition(space: Space, ranks: Sequence[int], size: int, concurrent: int) -> VirtualWorker | None:
    """Return the partition whose slowest stage is fastest over the orders of these devices.

    None if none fits.

    Of equivalent orders the first is tried, and of many devices only the given order.
    """
    orders = dict[object, tuple[int, ...]]()
    for order in permutations(ranks) if len(ranks) <= MOST_PERMUTED else [tuple(ranks)]:
        alike = [(space.topology.device(rank), rank // space.topology.gpus_per_node) for rank in order]
        orders.setdefault(tuple(alike), order)
    workers = [_partition(space, order, size, concurrent) for order in orders.values()]
    fitting = [worker for worker in workers if worker is not None]
    return min(fitting, key=lambda worker: max(worker.stage_seconds), default=None)


def _partition(space: Space, order: tuple[int, ...], size: int, concurrent: int) -> VirtualWorker | None:
    space.budget.check()
    stages = [stage_times(space, order, stage, size, concurrent) for stage in range(len(order))]
    seconds, needs = zip(*stages, strict=True)
    if (ends := even_stages(seconds)) is None:
        return None
    cut_points = space.table(space.chain.sizes[0]).cut_points
    layers = tuple(cut_points[end] for end in ends)
    return VirtualWorker(order, layers, tuple(stage_entries(seconds, ends)), max(stage_entries(needs, ends)))


def stage_times(
    space: Space, order: Sequence[int], stage: int, size: int, concurrent: int
) -> tuple[Floats, Floats]:
    """Return (cut points, cut points) seconds of a stage (compute and receive), and its bytes.

    The seconds are inf if the stage does not fit.
    """
    kind, depth, link = space.topology.device(order[stage]), len(order), space.topology.link
    table, scale = space.kind_table(kind, size), kind.seconds_scale
    seconds = (table.forward + table.backward) * scale
    if stage:
        seconds = seconds + link(order[stage - 1], order[stage]).seconds(table.crossing)[:, None]
    if stage + 1 < depth:
        seconds = seconds + link(order[stage + 1], order[stage]).seconds(table.crossing)
    in_flight = min(concurrent, max(concurrent, depth) - stage)
    options: LedgerOptions = {
        **ledger_options(kind, space.dtype, space.number_bytes),
        "weight_versions": in_flight,
    }
    need = table.memory(in_flight, "never", space.optimizer, 1, **options)
    fits = (need <= space.limit([order[stage]])) & space.usable
    return np.where(fits, seconds, inf), need

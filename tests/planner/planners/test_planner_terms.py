"""Terms of planners, worked out with loops or by hand: shares of unlike devices, HetPipe's waves, Alpa's
tables and cuts that are thinned."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain, list_cut_points
from pplan.cost_models.program_order import resolve_order
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.balance import balance
from pplan.planner.cut_limits import CutLimits
from pplan.planner.planners import asteroid, hetpipe
from pplan.planner.planners.asteroid import ShareTables
from pplan.planner.planners.critical_stages import _run, autopipe_partition, master_stage
from pplan.planner.planners.hetpipe import HetPipePlan, VirtualWorker, exchange_seconds, find_hetpipe_plan
from pplan.planner.planners.replica_groups import MicroBatchChoice, thin_cuts
from pplan.planner.search.space import Space

MakeChain = Callable[..., Chain]
Patch = pytest.MonkeyPatch


def test_parts_of_a_micro_batch() -> None:
    """The most of 32 that divide it and of which one can be costed; of a device as many as can be."""
    for size, least, most, parts, unit, each in (
        (96, 1, 96, 32, 3, 32),
        (96, 4, 96, 24, 4, 24),
        (34, 1, 34, 17, 2, 17),
        (33, 1, 33, 11, 3, 11),
        (31, 1, 31, 31, 1, 31),
        (31, 2, 31, 1, 31, 1),
        (64, 1, 20, 32, 2, 10),
        (7, 9, 20, 0, 7, 0),
    ):
        space: Any = SimpleNamespace(
            fits_someone=lambda own, replicas, least=least, most=most: replicas == 1 and least <= own <= most
        )
        tables = ShareTables(space, MicroBatchChoice("1f1b", 4, size, ("never",)))
        assert (tables.parts, tables.unit, tables.most) == (parts, unit, each), (size, least, most)
    for modes, again in ((("never", "always"), False), (("by_stage",), False), (("always",), True)):
        choice = MicroBatchChoice("1f1b", 4, 8, modes)  # type: ignore[arg-type]
        assert (ShareTables(space, choice).mode == "always") == again
    assert asteroid.MOST_SHARES == 32


def test_a_virtual_worker_and_its_wave() -> None:
    """Of 1 + 3 + 2 seconds: the slowest stage, or the whole way shared by what is under way. Staleness as in
    the paper: with two local and a distance of 1, 2 x 3 + 1."""
    worker = VirtualWorker((0, 1, 2), (1, 2, 3), (1.0, 3.0, 2.0), 5.0)
    assert [worker.interval(count) for count in (1, 2, 3)] == [6.0, 3.0, 3.0]
    plan = HetPipePlan("NP", (worker,) * 4, 8, 3, 12.0, 1)
    assert plan.samples_per_second == 4 * 3 * 8 / 12.0
    assert (plan.local_staleness, plan.global_staleness) == (2, 7)


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 0.0), (2, 3 * 24 / 4 / 8), (4, 3 * 24 * 3 / 16 / 8)])
def test_weights_through_the_ports(nodes: int, seconds: float) -> None:
    """Three workers move 24 bytes each of weights and gradients, of which each node has its part; what it has
    itself, and sends to itself, goes through no port."""
    levels = (Level("node", 2, Link(40.0, 0.0)), Level("network", None, Link(8.0, 0.01)))
    topology = Topology((Group(Device("a", None), 2 * nodes),), levels)
    chain = SimpleNamespace(trainable_bytes=np.array([4.0, 8.0]))
    space: Any = SimpleNamespace(topology=topology, chain=chain, gradients=lambda own: own)
    assert exchange_seconds(space, 3) == pytest.approx(seconds)


def test_the_plan_of_the_most_samples_a_second(monkeypatch: Patch) -> None:
    """Of each size that can be costed, and one to twice as many under way as there are stages."""
    asked = list[tuple[int, int]]()

    def plan(_: Any, policy: str, groups: Any, size: int, concurrent: int, distance: int) -> Any:
        assert (policy, groups, distance) == ("ED", [(0, 2), (1, 3)], 3)
        asked.append((size, concurrent))
        rate = {(2, 3): 9.0, (4, 1): 8.0}.get((size, concurrent), 1.0)
        return SimpleNamespace(samples_per_second=rate) if size + concurrent != 5 or size == 4 else None

    monkeypatch.setattr(hetpipe, "virtual_workers", lambda *_: [(0, 2), (1, 3)])
    monkeypatch.setattr(hetpipe, "_plan", plan)
    space = SimpleNamespace(fits_someone=lambda size, replicas: replicas == 1 and size < 5)
    space.chain = SimpleNamespace(max_stages=2)
    monkeypatch.setattr(hetpipe, "thin_cuts", lambda own, blocks: own if blocks == 60 else None)
    problem: Any = SimpleNamespace(space=space, sizes=[2, 4, 8])
    best: Any = find_hetpipe_plan(problem, "ED", 3)
    assert asked == [(size, count) for size in (2, 4) for count in (1, 2, 3, 4)]
    assert best.samples_per_second == 8.0
    monkeypatch.setattr(hetpipe, "_plan", lambda *_: None)
    assert find_hetpipe_plan(problem, "ED") == "does not fit"
    monkeypatch.setattr(hetpipe, "virtual_workers", lambda *_: "no reason")
    assert find_hetpipe_plan(problem, "ED") == "no reason"


@pytest.mark.parametrize("blocks", [2, 5, 10])
def test_thinned_cuts_one_by_one(
    blocks: int, make_chain: MakeChain, make_topology: Callable[..., Topology]
) -> None:
    """Each the first cut behind which a share of the seconds lies, where stages must end also there."""
    for seed in range(4):
        chain = make_chain(seed, 24, cuts=0.7)
        places = list_cut_points(chain)
        must = int(places[2]) - 1
        space = Space(chain, make_topology(2), "sgd", limits=CutLimits(must_cut=(must,)))
        costs = space.table(chain.sizes[-1]).costs
        seconds = (costs.forward_seconds + costs.backward_seconds).tolist()
        done = [sum(seconds[:place]) for place in places]
        expected = {0, must + 1, len(chain)}
        for number in range(1, blocks):
            target = done[-1] * number / blocks
            first = next(n for n, before in enumerate(done) if before >= target * (1 - 1e-12))
            expected.add(int(places[min(max(first, 1), len(places) - 2)]))
        assert set(map(int, list_cut_points(thin_cuts(space, blocks).chain))) == expected


def simulate_1f1b(forward: list[float], backward: list[float], *, micro_batches: int) -> tuple[float, int]:
    """The step and the master stage; micro-batches beyond two a stage take what the slowest stage takes."""
    stages = len(forward)
    order = resolve_order(find_schedule("1f1b").program(stages, min(micro_batches, 2 * stages), 1))
    times = _run(order, forward, backward, [0.0] * stages)
    slowest = max(f + b for f, b in zip(forward, backward, strict=True))
    return max(times.end) + max(micro_batches - 2 * stages, 0) * slowest, master_stage(order, times)


@pytest.mark.parametrize(
    ("forward", "backward", "count", "seconds", "master"),
    [
        ([1.0], [2.0], 5, 15.0, 0),
        ([1.0, 1.0], [2.0, 2.0], 4, 15.0, 1),  # (4 + 1) (1 + 2)
        ([1.0, 1.0], [2.0, 2.0], 6, 21.0, 1),  # two more than are simulated
        ([3.0, 1.0], [3.0, 1.0], 2, 12.0, 0),  # 2 x 6 s on the first, beside which the second runs
        ([1.0, 3.0], [1.0, 3.0], 2, 14.0, 1),
        ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0], 1, 12.0, 2),
    ],
)
def test_a_step_as_autopipe_simulates_it(
    forward: list[float], backward: list[float], count: int, seconds: float, master: int
) -> None:
    assert simulate_1f1b(forward, backward, micro_batches=count) == (seconds, master)


def shortest_of_autopipe(
    forward: list[float], backward: list[float], stages: int, count: int
) -> tuple[float, Any]:
    """The first block of the master stage goes to the stages before it, again and again."""
    work = np.array(forward) + backward
    ends, seen = tuple(np.cumsum(balance(work, stages)).tolist()), dict[Any, float]()
    while ends not in seen:
        bounds = list(pairwise((0, *ends)))
        own = [[sum(part[a:b]) for a, b in bounds] for part in (forward, backward)]
        seen[ends], master = simulate_1f1b(*own, micro_batches=count)
        first, last = bounds[master]
        if master == 0 or last == first + 1:
            break
        ends = (*np.cumsum(balance(work[: first + 1], master)).tolist(), *ends[master:])
    return min((seconds, ends) for ends, seconds in seen.items())


def test_blocks_move_away_from_the_master_stage() -> None:
    """Until it is the first, has one block, or a partition comes again; the shortest step counts."""
    moved = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        blocks, stages = 5 + seed % 6, 2 + seed % 4
        forward, backward = ((random.integers(1, 9, blocks) / 4).tolist() for _ in "fb")
        count = 1 + seed % 9
        ends, seconds = autopipe_partition(np.array(forward), np.array(backward), stages, count)
        assert (seconds, ends) == shortest_of_autopipe(forward, backward, stages, count)
        moved += ends != tuple(np.cumsum(balance(np.array(forward) + backward, stages)).tolist())
    assert moved > 3

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
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.balance import balance
from pplan.planner.cut_limits import CutLimits
from pplan.planner.planners import asteroid, hetpipe
from pplan.planner.planners.alpa import _Enumeration, _spaced
from pplan.planner.planners.asteroid import ShareTables, _by_speed, _offload
from pplan.planner.planners.critical_stages import autopipe_partition, simulate_1f1b
from pplan.planner.planners.hetpipe import HetPipePlan, VirtualWorker, exchange_seconds, find_hetpipe_plan
from pplan.planner.planners.replica_groups import MicroBatchChoice, thin_cuts
from pplan.planner.search.space import Space

MakeChain = Callable[..., Chain]
Patch = pytest.MonkeyPatch


def shared_by_loops(seconds: list[list[float]], room: list[int], parts: int) -> tuple[list[int], list[int]]:
    """Parts by speed, what is left one by one to whoever ends first with it; then parts of the slowest device
    to whoever is faster with it."""
    devices = range(len(seconds))
    speeds = [1 / own[-1] for own in seconds]
    shares = [min(int(parts * speeds[d] / sum(speeds)), room[d]) for d in devices]

    def receiver() -> tuple[float, int]:
        able = [(seconds[d][shares[d] + 1], d) for d in devices if shares[d] < room[d]]
        return min(able, default=(np.inf, 0))

    while sum(shares) < parts and receiver()[0] < np.inf:
        shares[receiver()[1]] += 1
    first = list(shares)
    while True:
        longest = max(seconds[d][shares[d]] for d in devices)
        slowest = next(d for d in devices if seconds[d][shares[d]] == longest)
        longer, to = receiver()
        if not longer < longest:
            return first, shares
        shares[slowest] -= 1
        shares[to] += 1


def test_shares_of_unlike_devices() -> None:
    """Of many stages at once each as alone, in room for all parts and for fewer."""
    moved = short = 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        devices, parts, cells = 2 + seed % 3, 6, 9
        adds = (
            random.integers(1, 9, (devices, parts, cells))
            * (1 + np.arange(devices) * (seed % 4))[:, None, None]
        )
        seconds = np.concatenate([np.zeros((devices, 1, cells)), adds.cumsum(axis=1)], axis=1)
        room = random.integers(0, parts + 1, (devices, cells))
        if seed % 2:
            room[:] = parts
        speed = _by_speed(seconds, room, parts)
        own = _offload(seconds, room, speed.copy())
        for cell in range(cells):
            first, last = shared_by_loops(seconds[:, :, cell].tolist(), room[:, cell].tolist(), parts)
            assert speed[:, cell].tolist() == first, (seed, cell)
            assert own[:, cell].tolist() == last, (seed, cell)
            moved += first != last
            short += sum(last) < parts
    assert min(moved, short) > 3, (moved, short)


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


def test_equal_devices_share_evenly() -> None:
    """Seven parts among three: 3, 2 and 2, which take what 3 take where 3 have room; none where too few can
    be costed."""
    table = np.ones((2, 2))
    times = np.arange(8.0)[:, None, None] * table
    room = np.array([[2, 3], [7, -1]])
    tables = ShareTables(SimpleNamespace(usable=table), SimpleNamespace(size=7))  # type: ignore[arg-type]
    tables.__dict__.update(parts=7, most=7)
    kind = Device("a", None)
    tables._times[kind] = times, 2 * times
    tables._fits[kind, 5] = room
    own = tables.share([kind] * 3, 5)
    assert own.shares[:, 1, 1].tolist() == [3, 2, 2]
    assert own.forward.tolist() == [[np.inf, 3.0], [3.0, np.inf]]
    assert own.backward.tolist() == [[np.inf, 6.0], [6.0, np.inf]]
    tables.__dict__.update(most=2)
    assert np.isinf(tables.share([kind] * 3, 5).forward).all()
    assert np.isinf(tables.share([kind] * 3, 5).backward).all()


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


def test_orders_of_devices() -> None:
    """All of up to four that differ in kind or node; more as they stand."""
    levels = (Level("node", 2, Link(40.0, 0.0)), Level("network", None, Link(8.0, 0.01)))
    fast, slow = Device("fast", None), Device("slow", None, 0.5)
    space: Any = SimpleNamespace(topology=Topology((Group(fast, 3), Group(slow, 3)), levels))
    assert list(hetpipe._orders(space, (0, 1))) == [(0, 1)]
    assert set(hetpipe._orders(space, (0, 2))) == {(0, 2), (2, 0)}
    assert set(hetpipe._orders(space, (2, 3))) == {(2, 3), (3, 2)}
    assert len(list(hetpipe._orders(space, (0, 1, 2, 3)))) == 4 * 3
    assert list(hetpipe._orders(space, (0, 1, 2, 3, 4))) == [(0, 1, 2, 3, 4)]


def test_values_that_are_apart() -> None:
    """The largest of those within a width of the first that is left."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        values = np.unique(random.integers(0, 40, 12) / 4)
        for width in (0.0, 0.25, 1.0, 3.0):
            left, expected = values.tolist(), list[float]()
            while left:
                near = [own for own in left if own <= left[0] + width]
                expected.append(near[-1])
                left = left[len(near) :]
            assert list(_spaced(values, width)) == expected


class Table(_Enumeration):
    """Of three blocks on two groups, with seconds that stand here."""

    cut_points: Any = 4


def test_the_least_sum_under_a_limit() -> None:
    """Of all divisions of three blocks into one or two stages on both groups."""
    for seed in range(30):
        random = np.random.default_rng(seed)
        seconds = []
        for _ in range(2):
            tables = {size: np.full((4, 4), np.inf) for size in (1, 2)}
            for table in tables.values():
                for i in range(4):
                    table[i, i + 1 :] = random.choice(
                        [1.0, 2.0, 3.0, 5.0, np.inf], 3 - i, p=[0.3, 0.2, 0.2, 0.2, 0.1]
                    )
            seconds.append(tables)
        work = {size: SimpleNamespace(never=np.zeros((4, 4))) for size in (1, 2)}
        choice = MicroBatchChoice("1f1b", 4, 8, ("never",))
        space: Any = SimpleNamespace(budget=SimpleNamespace(check=lambda: None))
        own = Table(space, choice, 2, 3, [1, 2], 2)
        own.__dict__.update(seconds=seconds, stage_work=work)
        values = sorted({v for tables in seconds for t in tables.values() for v in t.ravel() if v < np.inf})
        every: list[Any] = [([seconds[0][2][0, 3]], (3,), (2,))]
        every += [([seconds[1][1][0, c], seconds[0][1][c, 3]], (c, 3), (1, 1)) for c in (1, 2)]
        for limit in (*values, np.inf):
            fitting = [one for one in every if max(one[0]) <= limit and max(one[0]) < np.inf]
            found = own._least_sum(limit)
            assert (found is None) == (not fitting)
            if found is not None:
                plan, least = found
                assert least == min(sum(times) for times, _, _ in fitting)
                times, _, replicas = next(one for one in every if one[1] == plan.ends)
                assert sum(times) == least
                assert plan.replicas == tuple(3 * size for size in replicas)
                assert plan.seconds == sum(times) + 3 * max(times)
                assert plan.recomputes
        possible = [limit for limit in values if own._least_sum(limit) is not None]
        if possible:
            best = own.best(None)
            cost = min(sum(times) + 3 * max(times) for times, _, _ in every)
            assert best is not None
            assert best.seconds == cost
        else:
            assert own.best(None) is None


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

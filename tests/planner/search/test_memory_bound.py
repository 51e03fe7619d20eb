"""The bound on all pipelines, with memory and priced devices, against every plan of small problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, product
from itertools import count as count_from
from math import inf
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.collectives import all_reduce_seconds, reduce_scatter_seconds
from pplan.cost_models.layer import Chain, TiedWeight
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import Mode, PipelineConfig, Proposal
from pplan.planner.scoring import fastest
from pplan.planner.search import space as space_module
from pplan.planner.search.bound import FamilyBound, MemoryBound
from pplan.planner.search.branch_and_bound import search
from pplan.planner.search.budget import SearchBudget
from pplan.planner.search.family import SAFE, Family, bounded_counts, quick_bound
from pplan.planner.search.least_collectives import all_reduce_pace, least_all_reduce_seconds
from pplan.planner.search.placements import list_placements
from pplan.planner.search.reach_bound import ReachBound
from pplan.planner.search.space import Space
from pplan.planner.search.stage_figures import make_stage_figures

MakeChain = Callable[..., Chain]
SIZES = (1, 2, 4, 8)
SLACK = 1 + 1e-9
WAYS: tuple[tuple[str, Mode], ...] = (
    ("1f1b", "by_stage"),
    ("1f1b", "never"),
    ("1f1b", "always"),
    ("gpipe", "by_stage"),
    ("gpipe", "except_last"),
)


def random_chain(rng: np.random.Generator, layers: int) -> Chain:
    """Layers of which some cost a start at every size, and some nothing; their hosts are late, or not."""
    own = rng.spawn(1)[0]
    launches = own.choice([0, 2e-3, 2e-2]) * own.random((2, layers, 1)) * np.ones(len(SIZES))
    sizes = np.array(SIZES, dtype=np.float64)

    def line(each: float, start: float = 0.0) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        there = rng.random((layers, 1)) < 0.8
        return rng.uniform(0, 1, (layers, 1)) * each * sizes * there + start * rng.uniform(0, 1, (layers, 1))

    weights = rng.uniform(0, 1, layers) * 1e8 * (rng.random(layers) < 0.8)
    return Chain(
        names=tuple(f"l{index}" for index in range(layers)),
        sizes=SIZES,
        parameter_bytes=weights,
        trainable_bytes=weights,
        buffer_bytes=np.zeros(layers),
        cut_after=np.append(rng.random(layers - 1) < 0.85, False),
        input_bytes_per_sample=1e6,
        forward_seconds=line(1e-3, float(rng.choice([0, 1e-3, 5e-3]))),
        backward_seconds=line(2e-3, float(rng.choice([0, 1e-3, 5e-3]))),
        output_bytes=line(2e6),
        saved_bytes=line(3e7),
        saved_input_bytes=line(1e6),
        workspace_bytes=line(1e7),
        forward_host_seconds=launches[0],
        backward_host_seconds=launches[1],
    )


def random_topology(rng: np.random.Generator, devices: int) -> Topology:
    """One or two kinds in any order, on nodes of up to three, whose network adapter may be shared."""
    memory = [None if rng.random() < 0.4 else int(rng.uniform(1e8, 1.2e9)) for _ in range(2)]
    kinds = [Device(f"k{i}", memory[i], speed=float(rng.choice([0.5, 1, 2]))) for i in range(2)]
    groups, left = [], devices
    while left:
        count = int(rng.integers(1, left + 1))
        groups.append(Group(kinds[rng.integers(2)], count))
        left -= count
    node, latency = int(rng.integers(1, 4)), float(rng.choice([0, 1e-4]))
    inside = Link(float(rng.choice([1e9, 1e10, inf])), latency)
    between = Link(float(rng.choice([1e8, 1e9, 1e10])), latency)
    shared = int(rng.choice([1, node]))
    return Topology(tuple(groups), (Level("node", node, inside), Level("network", None, between, shared)))


def assignments(devices: int, stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to give each stage some devices of its own."""
    for own in product(range(-1, stages), repeat=devices):
        if len({stage for stage in own if stage >= 0}) == stages:
            yield tuple(
                tuple(rank for rank in range(devices) if own[rank] == stage) for stage in range(stages)
            )


def every_plan(chain: Chain, config: PipelineConfig, devices: int) -> Iterator[Proposal]:
    """All cuts, on all devices in any assignment."""
    cuts = [int(layer) + 1 for layer in np.flatnonzero(chain.cut_after)]
    for stages in range(1, min(devices, len(cuts) + 1) + 1):
        for chosen, own in product(combinations(cuts, stages - 1), assignments(devices, stages)):
            yield Proposal(config, (*chosen, len(chain)), own)


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("seed", [*range(16), 1125, 2057, 2414])
def test_no_plan_on_any_devices_is_below_the_bound(
    seed: int, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the bound on long chains."""
    rng = np.random.default_rng(seed)
    layers, devices = int(rng.integers(2, 5)), int(rng.integers(2, 5))
    chain, topology = random_chain(rng, layers), random_topology(rng, devices)
    size, count = int(rng.choice([2, 3, 4, 6, 8])), int(rng.choice([1, 2, 3, 4, 6, 9]))
    schedule, mode = WAYS[rng.integers(len(WAYS))]
    config = PipelineConfig(schedule, mode, count, size)
    more = np.random.default_rng([seed, 1])
    if layers > 2 and more.random() < 0.3:
        tied = TiedWeight("shared", chain.parameter_bytes[0], chain.trainable_bytes[0], (0, layers - 1))
        chain = replace(chain, tied=(tied,))
    zero = int(more.choice([0, 0, 1, 2]))
    space = Space(chain=chain, topology=topology, optimizer="adam", past_largest=True, zero=zero)
    every = tuple(range(1, devices + 1))
    families = [Family(config, own, every, any_count=True) for own in list_placements(topology)]
    best = fastest(space, every_plan(chain, config, devices))
    step = 1e3 if best is None else best.step_seconds
    if is_long:
        monkeypatch.setattr(space_module, "MOST_BLOCKS", 0)
    counts = range(1, min(devices, chain.max_stages) + 1)
    bound = MemoryBound(space, families, counts, False, space.budget.part(2e8)).least(10 * step)
    assert bound <= step * SLACK or best is None
    assert all(quick_bound(space, family) <= step * SLACK for family in families)


def test_all_reduces_take_no_less_than_the_least() -> None:
    rng, sizes = np.random.default_rng(0), np.array([0.0, 1e3, 1e6, 1e8, 1e10])
    tight = 0
    for case in range(150):
        devices = int(rng.integers(2, 25))
        topology = random_topology(rng, devices) if case % 2 else random_levels(rng, devices)
        count = int(rng.integers(2, devices + 1))
        least = least_all_reduce_seconds(topology, count, sizes)
        ranks = rng.choice(devices, count, replace=False).tolist()
        for own in (ranks, range(count)):
            seconds = all_reduce_seconds(topology, own, sizes)
            assert (seconds * SLACK >= least).all()
            assert seconds[3] * SLACK >= 1e8 * all_reduce_pace(topology, count)
        fewer = least_all_reduce_seconds(topology, int(rng.integers(1, count + 1)), sizes)
        assert (fewer <= least * SLACK).all()
        halves = 2 * reduce_scatter_seconds(topology, ranks, sizes)
        assert (halves * SLACK >= least).all()
        tight += np.allclose(seconds, least, rtol=1e-9)
    assert tight > 30


def test_the_least_all_reduce_by_hand() -> None:
    """Of two and of four devices a ring over the middle level, whose links are the fastest: 1000 bytes there
    and back at 100 B/s, and two latencies of a second for each device but one."""
    links = Link(5.0, 0.05), Link(100.0, 1.0), Link(1.0, 0.05)
    levels = (Level("a", 2, links[0]), Level("b", 2, links[1]), Level("c", None, links[2]))
    topology = Topology((Group(Device("toy", None), 8),), levels)
    for replicas, seconds in ((2, 2 / 2 * 10 + 2), (4, 2 * 3 / 4 * 10 + 6)):
        least = least_all_reduce_seconds(topology, replicas, np.array([1000.0, 0.0]))
        assert least.tolist() == pytest.approx([seconds, 0.0])


def random_levels(rng: np.random.Generator, devices: int) -> Topology:
    """Three levels of alike devices, that outside slower, with shared ports."""
    paces = -np.sort(-rng.uniform(1e9, 1e11, 3))
    latencies = rng.choice([0.0, 1e-6, 2e-5], 3)
    links = [Link(float(pace), float(latency)) for pace, latency in zip(paces, latencies, strict=True)]
    inner, middle = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    port = int(rng.choice([n for n in (1, 2, 4) if inner % n == 0]))
    levels = (
        Level("node", inner, links[0]),
        Level("rack", middle, links[1], port),
        Level("all", None, links[2]),
    )
    return Topology((Group(Device("gpu", None), devices),), levels)


def test_counts_with_one_share_are_bounded_by_their_fewest() -> None:
    topology = Topology((Group(Device("gpu", None), 70),), (Level("node", None, Link(1e9, 0.0)),))
    placement = list_placements(topology)[0]
    family = Family(PipelineConfig("1f1b", "never", 2, 48), placement, (2, 4), any_count=True)
    shares = {-(-48 // count): count for count in range(70, 0, -1) if count <= 48}
    assert bounded_counts(family) == sorted(shares.values())
    assert bounded_counts(Family(family.config, placement, (2, 4, 96))) == [2, 4]


def test_time_that_is_over_ends_the_search_of_a_long_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it is over: the clock shows a second more at each look."""
    monkeypatch.setattr(space_module, "MOST_BLOCKS", 0)
    topology = Topology((Group(Device("gpu", None), 4),), (Level("node", None, Link(1e10, 0.0)),))
    chain, config = random_chain(np.random.default_rng(1), 6), PipelineConfig("1f1b", "never", 4, 2)
    families = [Family(config, list_placements(topology)[0], (1, 2))]
    answers = set[bool]()
    for seconds in (*range(1, 60, 3), 10_000):
        budget = SearchBudget.of_seconds(seconds, clock=partial(next, count_from()))
        space = Space(chain, topology, "adam", past_largest=True, budget=budget)
        result = search(space, families, range(1, 5))
        answers.add(result.best is None)
        assert result.best is None or result.bound_seconds <= result.best.step_seconds * SLACK
    assert answers == {False, True}


@pytest.mark.parametrize("seed", range(12))
def test_a_long_chain_with_one_large_output(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that ends before the large output, or sends it, may not fit where one that ends later does."""
    rng, layers, devices = np.random.default_rng([seed, 5]), 6, 2
    chain = random_chain(rng, layers)
    outputs = np.full((layers, len(SIZES)), 1e5)
    outputs[rng.integers(1, layers - 1)] = 4e8
    chain = replace(chain, output_bytes=outputs, cut_after=np.arange(layers) < layers - 1)
    topology = Topology((Group(Device("gpu", int(8e8)), devices),), (Level("node", None, Link(1e10, 0.0)),))
    config = PipelineConfig("1f1b", "never", 2, 2)
    space = Space(chain, topology, "sgd", past_largest=True)
    best = fastest(space, every_plan(chain, config, devices))
    monkeypatch.setattr(space_module, "MOST_BLOCKS", 0)
    result = search(space, [Family(config, list_placements(topology)[0], (1, 2))], range(1, devices + 1))
    assert best is None or result.bound_seconds <= best.step_seconds * SLACK


@pytest.mark.parametrize("seed", [1, 3, 7])
def test_a_long_chain_uses_both_kinds_of_devices(
    seed: int, make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline takes no more devices of the fast kind than there are, and leaves the slow ones layers."""
    monkeypatch.setattr(space_module, "MOST_BLOCKS", 0)
    fast = Device("fast", None)
    groups = Group(fast, 4), Group(replace(fast, name="slow", speed=0.5), 4)
    topology = Topology(groups, (Level("node", None, Link(1e4, 0.0)),))
    space = Space(make_chain(seed, 40, cuts=1.1, traffic=0.01), topology, "sgd", past_largest=True)
    config = PipelineConfig("1f1b", "never", 128, 1)
    families = [Family(config, placement, (1,)) for placement in list_placements(topology)]
    result = search(space, families, range(1, 9))
    assert result.best is not None
    assert result.best.step_seconds <= 1.04 * result.bound_seconds


def least_room(space: Space, family: Family) -> float:
    """The step of the best pipeline of one device a stage by the formulas of `reach_bound`, of all cuts."""
    config, table, least = family.config, space.table(family.config.micro_batch_size), inf
    costs, count = table.costs, config.micro_batches
    gpipe = config.schedule == "gpipe" or count == 1
    once = costs.accumulation if count > 1 else 0.0 * costs.accumulation
    forward, x = costs.forward_seconds, costs.forward_seconds + costs.mean_backward(float(count == 1))
    host = costs.forward_host_seconds + costs.backward_host_seconds
    cuts, last = range(1, len(table.cut_points) - 1), len(table.cut_points) - 1
    devices = len(family.placement.ranks)
    for inner in (each for number in range(devices) for each in combinations(cuts, number)):
        steps = list[float]()
        for index, (start, end) in enumerate(pairwise((0, *inner, last))):
            following = len(inner) - index
            i, j = table.cut_points[start], table.cut_points[end]
            own, held = slice(i, j), count if gpipe else min(count, following + 1)
            memory = table.memory(held, "never", space.optimizer)[start, end]
            lead = forward[:i].sum() + (count * x - once)[own].sum()
            steps += [lead, count * host[own].sum()] if memory <= space.limit([0]) else [inf]
            if gpipe or following < count - 1:
                times, weight = (count, 1) if gpipe else (count - following, 2)
                before, after = (x - once)[:i].sum(), (weight * x - once)[j:].sum()
                steps.append(before + (times * x - once)[own].sum() + after)
        least = min(least, max(steps))
    return least


@pytest.mark.parametrize("seed", range(6))
def test_the_shortest_step_that_has_room_is_that_of_the_best_pipeline(seed: int) -> None:
    rng = np.random.default_rng([seed, 3])
    chain, device = random_chain(rng, 6), Device("gpu", int(rng.uniform(2e8, 1e9)))
    topology = Topology((Group(device, 3),), (Level("node", None, Link(inf, 0.0)),))
    space, compared = Space(chain, topology, "adam", past_largest=True), 0
    for schedule, count in (("1f1b", 6), ("1f1b", 2), ("1f1b", 1), ("gpipe", 4)):
        family = Family(PipelineConfig(schedule, "never", count, 2), list_placements(topology)[0], (1,))
        reach, low, high = ReachBound(space, family), 0.0, 1e3
        for _ in range(60):
            step = (low + high) / 2
            is_short = reach.fewest_devices(step, lambda _: True) > reach.capacity
            low, high = (step, high) if is_short else (low, step)
        least = least_room(space, family)
        assert high == pytest.approx(min(least, 1e3), rel=1e-6)
        compared += least < inf
    assert compared


def least_priced(
    bound: FamilyBound, low: float, high: float, prices: np.ndarray[Any, np.dtype[np.float64]], count: int
) -> float:
    """The least priced sum of all pipelines of `count` stages, with every s that may be the longest."""
    figures, m, gpipe, rows = bound.figures, bound.micro_batches, not bound.is_1f1b, dict[Any, list[Any]]()
    modes = list(figures.room)
    for row in range(len(figures.start)):
        rows.setdefault((int(figures.start[row]), int(figures.end[row])), []).append(row)
    least = inf
    for inner in combinations(range(1, bound.places - 1), count - 1):
        pairs = list(pairwise((0, *inner, bound.places - 1)))
        for chosen in product(*(rows.get(pair, []) for pair in pairs)):
            stages = list[tuple[float, float, float, float]]()
            for index, row in enumerate(chosen):
                in_flight = m if gpipe else min(m, count - index)
                fitting = [mode for mode in modes if in_flight <= figures.room[mode][row]]
                once = float(figures.accumulation[row]) if m > 1 else 0.0
                x = float(figures.forward[row] + figures.backward[row]) - (m == 1) * figures.accumulation[row]
                if not fitting or x + (fitting[0] != "never") * figures.forward[row] > high:
                    break
                paid = (
                    prices[figures.kind[figures.choice[row]]] * figures.replicas[figures.choice[row]] - once
                )
                exposed = 0.0 if index else float(figures.exposed_allreduce[row])
                x += float((fitting[0] != "never") * figures.forward[row])
                stages.append((x, 2 * float(figures.cut[row]), float(paid), exposed))
            if len(stages) < count:
                continue
            for s, (x, cut, paid, exposed) in enumerate(stages):
                following = count - 1 - s
                known = gpipe or following < m - 1
                takes_its_place = not gpipe and following == m - 2 and count > m - 1
                if not known or (x < low and not takes_its_place):
                    continue
                weight = 1 if gpipe else 2
                times = m if gpipe else m - following
                total = times * x + weight * cut + paid + exposed
                total += sum(own + c + p + e for own, c, p, e in stages[:s])
                total += sum(weight * (own + c) + p for own, c, p, _ in stages[s + 1 :])
                least = min(least, total)
    return least


@pytest.mark.parametrize("seed", range(8))
def test_the_dynamic_programme_is_the_least_of_all_pipelines(seed: int) -> None:
    """A mistake that only weakens the bound breaks no plan: here it must be its formula."""
    rng = np.random.default_rng([seed, 2])
    chain, topology = random_chain(rng, 4), random_topology(rng, 3)
    finite = 0
    for schedule, count in (("1f1b", 6), ("1f1b", 2), ("1f1b", 1), ("gpipe", 4)):
        config = PipelineConfig(schedule, "by_stage", count, 2)
        space = Space(chain=chain, topology=topology, optimizer="adam", past_largest=True)
        family = Family(config, list_placements(topology)[0], (1, 2, 3))
        figures = make_stage_figures(space, family, inf)
        assert figures is not None
        bound = FamilyBound(space, family, figures, inf)
        longest = bound.longest
        for low, high in ((0.0, longest), (0.4 * longest, 0.8 * longest)):
            prices = figures.speed * longest * float(rng.uniform(0, 2))
            sums = bound.price(low, high, prices).padded(3)
            for stages in range(2, min(3, bound.most_stages) + 1):
                least = least_priced(bound, low, high, prices, stages)
                expected = (least - float(prices @ figures.devices)) * SAFE
                assert sums[stages - 1] == pytest.approx(expected, rel=1e-7, abs=1e-9)
                finite += bool(np.isfinite(expected))
    assert finite

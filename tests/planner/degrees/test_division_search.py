"""The search of interleaved divisions, and the linear programmes that it rests on, against every division."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, product
from random import Random
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, Overheads, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_setting import TrainingSetting
from pplan.cost_models.transformer.training_step import StepEstimate, estimate_stages
from pplan.cost_models.transformer.transformer_shape import AttentionShape, ExpertShape, TransformerShape
from pplan.planner.degrees.division_box import DivisionBox
from pplan.planner.degrees.division_search import DivisionSearch
from pplan.planner.degrees.linear_bound import DivisionProgramme

NO_LIMIT = float("inf")
SAME = 1e-6


def seeds(quick: int, every: int) -> list[Any]:
    """The first so many are quick together; the others are slow."""
    return [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= quick)) for seed in range(every)]


@pytest.fixture(autouse=True)
def offload_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of these models are small."""
    monkeypatch.setattr("pplan.cost_models.transformer.layer_work.LEAST_OFFLOADED", 1)


def interleaved_table(random: Random) -> LayerTable:
    """Of one kind of blocks or two, with every way to recompute, predictors, links that matter."""
    stages, virtual = random.choice(((2, 2), (2, 3), (3, 2), (2, 4)))
    blocks = random.randint(max(stages * virtual - 1, 5), 9)
    hidden = 64 * random.choice((1, 4, 16))
    experts = ExpertShape(8, 2, 512, random.choice((0, 64)))
    dense = random.choice((0, 1, 2, blocks))
    routed = tuple(place >= dense for place in range(blocks))
    if random.random() < 0.3:
        routed = tuple(random.random() < 0.5 for _ in range(blocks))
    shape = TransformerShape(
        *("random", hidden, random.choice((256, 32000)), 4 * hidden, AttentionShape(8, 8, 16, 16), routed),
        experts if any(routed) else None,
        tied=random.random() < 0.3,
    )
    recompute: Any = random.choice(("none", "selective", "partial", "partial", "full", "offload"))
    again = random.randint(1, 3) if recompute == "partial" else None
    setting = TrainingSetting(
        stages * random.randint(1, 4),
        Tokens(64),
        "full" if recompute == "partial" else recompute,
        virtual,
        again,
        random.choice((0, 0, 0, 1)),
        random.choice((0, 1)),
    )
    if not setting.predictors:
        setting = replace(setting, predictor_offset=0)
    link = Link(10 ** random.uniform(8, 11), 10 ** random.uniform(-6, -4))
    topology = two_level_topology(Device("GPU", None), 8, 4, link, Link(10 ** random.uniform(8, 10), 1e-5))
    limits = DeviceLimits(10 ** random.uniform(11, 14), 10 ** random.uniform(10, 12))
    overheads = Overheads(10 ** random.uniform(-7, -4))
    costs = RankCosts(
        limits, TopologyLinks(topology), overheads=overheads, host_bandwidth=10 ** random.uniform(8, 12)
    )
    degrees = ParallelDegrees(pipeline=stages, data=2, zero=random.choice((0, 1)))
    return LayerTable(shape, degrees, setting, costs)


def divisions(layers: LayerTable) -> Iterator[tuple[int, ...]]:
    """All, with no block or any number on the first virtual stage, the last, and that of predictors, and at
    least one on each between if there are enough."""
    blocks, slots = layers.shape.blocks, layers.slots
    place = layers.setting.predictor_slot(slots)
    for ends in combinations_with_replacement(range(blocks + 1), slots - 1):
        counts = [b - a for a, b in pairwise((0, *ends, blocks))]
        behind = slots - 1 if place is None else place
        inner = counts[1:behind]
        if (all(inner) or len(inner) > blocks) and not any(counts[behind + 1 :]):
            yield tuple(counts)


def all_steps(layers: LayerTable) -> dict[tuple[int, ...], StepEstimate]:
    return {counts: estimate_stages(layers, counts) for counts in divisions(layers)}


def memory_limit(random: Random, steps: dict[tuple[int, ...], StepEstimate]) -> float:
    peaks = sorted(own.peak_bytes for own in steps.values())
    return random.choice(
        (NO_LIMIT, peaks[0], peaks[0] * 0.999, peaks[len(peaks) // 3], peaks[len(peaks) // 2])
    )


def search_to_the_end(layers: LayerTable, limit: float, fastest: float) -> DivisionSearch:
    """Looks for what is faster than the best by more than a millionth; no bound on the way is above the
    fastest."""
    search = DivisionSearch(layers, limit)
    for _ in range(5000):
        best = NO_LIMIT if search.best is None else search.best[1].step_seconds
        before = search.boxes
        search.advance(best * (1 - SAME))
        assert search.bound_seconds <= fastest * (1 + 1e-9)
        if search.boxes == before:
            return search
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", [*seeds(10, 25), 151])  # of the last one a box without any that fits
def test_the_fastest_division_that_fits(seed: int) -> None:
    """It is found, and that it is the fastest is known to a millionth."""
    random = Random(seed)
    layers = interleaved_table(random)
    steps = all_steps(layers)
    limit = memory_limit(random, steps)
    fitting = {counts: own for counts, own in steps.items() if own.peak_bytes <= limit}
    fastest = min((own.step_seconds for own in fitting.values()), default=NO_LIMIT)
    search = search_to_the_end(layers, limit, fastest)
    if not fitting:
        assert search.best is None
        assert search.bound_seconds == NO_LIMIT
        return
    assert search.best is not None
    counts, estimate = search.best
    assert estimate.step_seconds == fitting[counts].step_seconds
    assert estimate.step_seconds <= fastest * (1 + 2 * SAME)
    assert search.bound_seconds >= fastest * (1 - 2 * SAME)


def test_a_bound_that_is_one_percent_too_high_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the search to the end above, of most problems."""
    value = DivisionProgramme.value
    monkeypatch.setattr(DivisionProgramme, "value", lambda *own: 1.01 * value(*own))
    seen = 0
    for seed in range(10):
        layers = interleaved_table(Random(seed))
        fastest = min(own.step_seconds for own in all_steps(layers).values())
        try:
            search_to_the_end(layers, NO_LIMIT, fastest)
        except AssertionError:
            seen += 1
    assert seen >= 5


@pytest.mark.parametrize("seed", seeds(6, 12))
def test_no_prices_are_above_a_division(seed: int) -> None:
    """Whatever the prices, of every part of the divisions: weak duality needs no solution."""
    random, numbers = Random(seed), np.random.default_rng(seed)
    layers = interleaved_table(random)
    steps = all_steps(layers)
    limit = memory_limit(random, steps)
    programme = DivisionProgramme(layers, limit)
    for counts in random.sample(list(steps), min(4, len(steps))):
        programme.add_path(programme.stage_seconds(programme.whole_amounts(counts)))
    rows = len(programme.matrix)
    for _ in range(30):
        box = random_box(random, programme.whole_box())
        prices = numbers.laplace(size=rows) * (numbers.random(rows) < numbers.random())
        least = min(
            (
                own.step_seconds
                for counts, own in steps.items()
                if own.peak_bytes <= limit and holds(box, counts)
            ),
            default=NO_LIMIT,
        )
        assert programme.value(prices, box) <= least * (1 + 1e-9)
        assert programme.solve(box).seconds <= least * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(5, 12))
def test_one_bound_for_every_number_of_blocks_that_run_again(seed: int) -> None:
    """No division that fits is faster, however many first blocks of a stage run again."""
    random = Random(seed)
    drawn = interleaved_table(random)
    setting = replace(drawn.setting, recompute="full", recompute_blocks=1)
    layers = LayerTable(drawn.shape, drawn.degrees, setting, drawn.costs)
    every = dict[tuple[int, tuple[int, ...]], StepEstimate]()
    for number in range(1, drawn.shape.blocks):
        own = layers.with_setting(replace(setting, recompute_blocks=number))
        every |= {(number, counts): estimate_stages(own, counts) for counts in divisions(own)}
    peaks = sorted(own.peak_bytes for own in every.values())
    for limit in (NO_LIMIT, peaks[len(peaks) // 2], peaks[len(peaks) // 20], peaks[0], peaks[0] * 0.999):
        fastest = min(
            (own.step_seconds for own in every.values() if own.peak_bytes <= limit), default=NO_LIMIT
        )
        bound = DivisionSearch(layers, limit, any_again=True).bound_root(NO_LIMIT)
        assert bound <= fastest * (1 + 1e-9)


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS writes its banner past Python's standard output, where `pplan solve --json` writes."""
    programme = DivisionProgramme(interleaved_table(Random(0)), NO_LIMIT)
    assert programme.solve(programme.whole_box()).seconds > 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("seed", seeds(6, 12))
def test_bounds_are_as_close_as_the_solver(seed: int) -> None:
    """The bound from the dual prices is the solver's objective value to 1e-7, and above all divisions where
    the solver says that none fits."""
    random = Random(seed)
    layers = interleaved_table(random)
    steps = all_steps(layers)
    slowest = max(own.step_seconds for own in steps.values())
    programme = DivisionProgramme(layers, memory_limit(random, steps))
    for _ in range(20):
        solution = programme.solve(random_box(random, programme.whole_box()))
        if programme._solver.modelStatusToString(programme._solver.getModelStatus()) == "Infeasible":
            assert solution.seconds > slowest
        else:
            objective = programme._solver.getInfo().objective_function_value
            assert solution.seconds == pytest.approx(objective, rel=1e-7)


def random_box(random: Random, box: DivisionBox) -> DivisionBox:
    """After some splits."""
    for _ in range(random.randint(0, 4)):
        slot, device = random.randrange(len(box.low)), random.randrange(len(box.device_low))
        if random.random() < 0.5 and box.low[slot] < box.high[slot]:
            parts = box.split_slot(slot, random.randrange(box.low[slot], box.high[slot]))
        elif box.device_low[device] < box.device_high[device]:
            parts = box.split_device(
                device, random.randrange(box.device_low[device], box.device_high[device])
            )
        else:
            continue
        box = random.choice([own for own in parts if not own.is_empty] or [box])
    return box


def holds(box: DivisionBox, counts: tuple[int, ...]) -> bool:
    devices = len(box.device_low)
    each = [sum(counts[device::devices]) for device in range(devices)]
    own = all(low <= count <= high for low, count, high in zip(box.low, counts, box.high, strict=True))
    return own and all(
        low <= count <= high for low, count, high in zip(box.device_low, each, box.device_high, strict=True)
    )


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_a_box_have_all_of_its_divisions(seed: int) -> None:
    """Each division is in exactly one of both; no stage has, or begins with, another block than it may."""
    random = Random(seed)
    devices, virtual, blocks = random.choice((1, 2, 3)), random.choice((1, 2)), random.randint(3, 7)
    slots = devices * virtual
    fewest = [random.choice((0, 1)) if slots * 1 <= blocks else 0 for _ in range(slots)]
    box = DivisionBox.of_fewest(blocks, fewest, [blocks] * slots, devices)
    every = [
        own
        for own in product(range(blocks + 1), repeat=slots)
        if sum(own) == blocks and all(a >= b for a, b in zip(own, fewest, strict=True))
    ]
    assert all(holds(box, own) for own in every)
    for _ in range(5):
        inside = [own for own in every if holds(box, own)]
        first, last = box.places()
        for counts in inside:
            starts = np.append(0, np.cumsum(counts))
            assert (first <= starts).all()
            assert (starts <= last).all()
        assert box.is_empty == (not inside) or not inside
        assert box.counts is None or inside in ([box.counts], [])
        stages = [slot for slot in range(slots) if box.low[slot] < box.high[slot]]
        owners = [own for own in range(devices) if box.device_low[own] < box.device_high[own]]
        parts = [
            *(list(box.split_slot(own, random.randrange(box.low[own], box.high[own]))) for own in stages),
            *(
                list(box.split_device(own, random.randrange(box.device_low[own], box.device_high[own])))
                for own in owners
            ),
        ]
        for both in parts:
            for counts in inside:
                assert sum(holds(own, counts) for own in both) == 1
        if not parts:
            break
        box = random.choice([own for own in random.choice(parts) if not own.is_empty])


@pytest.mark.parametrize("seed", range(8))
def test_rows_and_stages_take_as_long_as_their_division(seed: int) -> None:
    """Rows and virtual stages take as long as the stages of the division."""
    layers = interleaved_table(Random(seed))
    programme = DivisionProgramme(layers, NO_LIMIT)
    for counts in list(divisions(layers))[:20]:
        amounts = programme.whole_amounts(counts)
        assert (amounts.sum(axis=0) == counts).all()
        seconds = programme.stage_seconds(amounts).sum(axis=0)
        ends = np.append(0, np.cumsum(counts))
        for slot in range(layers.slots):
            own = layers.seconds(range(int(ends[slot]), int(ends[slot + 1])), slot)
            assert seconds[slot] == pytest.approx(own.both)

"""The search of degrees against every division of the layers under every combination."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import InfeasibleError, UsageError
from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ContextExchange, ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, Overheads, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_setting import TrainingSetting, block_ranges
from pplan.cost_models.transformer.training_step import estimate_stages
from pplan.cost_models.transformer.transformer_shape import AttentionShape, ExpertShape, TransformerShape
from pplan.planner.degrees.degree_combinations import list_combinations
from pplan.planner.degrees.degree_options import DegreeOptions
from pplan.planner.degrees.degree_search import search_degrees
from pplan.planner.degrees.division_bound import least_division
from pplan.planner.degrees.interleaved_bound import (
    device_update_seconds,
    interleaved_bound,
    least_interleaved,
)
from pplan.planner.degrees.linear_bound import DivisionProgramme
from pplan.planner.degrees.stage_divisions import (
    fit_division,
    lower_bound,
    round_division,
)

NO_LIMIT = float("inf")


def seeds(quick: int, every: int) -> list[Any]:
    """The first so many are quick together; the others are slow."""
    return [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= quick)) for seed in range(every)]


EXCHANGES: tuple[ContextExchange, ...] = ("all-to-all", "ring", "all-gather")
MODES = ("none", "selective", "partial", "full", "offload")


@pytest.fixture(autouse=True)
def offload_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of these models are small."""
    monkeypatch.setattr("pplan.cost_models.transformer.layer_work.LEAST_OFFLOADED", 1)


def random_shape(random: Random) -> TransformerShape:
    blocks = random.randint(2, 7)
    hidden = 64 * random.choice((1, 4, 16))
    experts = (
        ExpertShape(8, 2, random.choice((32, 512)), random.choice((0, 64))) if random.random() < 0.6 else None
    )
    routed = tuple(experts is not None and random.random() < 0.6 for _ in range(blocks))
    return TransformerShape(
        "random",
        hidden,
        random.choice((256, 32000)),
        4 * hidden,
        AttentionShape(8, random.choice((4, 8)), 16, 16),
        routed,
        experts,
        tied=random.random() < 0.3,
    )


def random_costs(random: Random) -> RankCosts:
    link = Link(10 ** random.uniform(8, 11), 10 ** random.uniform(-6, -4))
    topology = two_level_topology(Device("GPU", None), 8, 4, link, Link(10 ** random.uniform(8, 10), 1e-5))
    limits = DeviceLimits(10 ** random.uniform(11, 14), 10 ** random.uniform(10, 12))
    return RankCosts(
        limits,
        TopologyLinks(topology),
        overheads=Overheads(10 ** random.uniform(-7, -4)),
        host_bandwidth=10 ** random.uniform(8, 12),
    )


def divisions(layers: LayerTable) -> Iterator[list[int]]:
    """All, with no block or any number on the first (virtual) stage, the last, and that of predictors, and at
    least one on each between if there are enough."""
    blocks, stages = layers.shape.blocks, layers.slots
    place = layers.setting.predictor_slot(stages)
    for ends in combinations_with_replacement(range(blocks + 1), stages - 1):
        counts = [b - a for a, b in pairwise((0, *ends, blocks))]
        behind = stages - 1 if place is None else place
        inner = [own for slot, own in enumerate(counts[:behind]) if slot]
        if (all(inner) or len(inner) > blocks) and not any(counts[behind + 1 :]):
            yield counts


def random_table(random: Random) -> LayerTable:
    shape = random_shape(random)
    stages = random.randint(1, 4)
    data = random.choice((1, 2))
    expert = random.choice((1, data)) if any(shape.routed) else 1
    zero = random.choice((0, 1, 2, 3) if stages == 1 else (0, 1))
    context = 2 if expert == data and random.random() < 0.3 else 1
    degrees = ParallelDegrees(
        random.choice((1, 2)), context, expert, stages, data, zero, exchange=random.choice(EXCHANGES)
    )
    many = random.randint(1, 8)
    recompute, again = random.choice(MODES), None
    if recompute == "partial":
        recompute, again = "full", random.randint(1, 3)
    predictors = random.choice((0, 0, 1, 2))
    offset = random.choice((0, 1)) if predictors and stages > 1 else 0
    setting = TrainingSetting(many, Tokens(64), recompute, 1, again, predictors, offset)  # type: ignore[arg-type]
    return LayerTable(shape, degrees, setting, random_costs(random))


@pytest.mark.parametrize("seed", seeds(30, 45))
def test_no_division_is_below_the_bound(seed: int) -> None:
    """In any memory; that of the least bound, where there is one, fits."""
    random = Random(seed)
    layers = random_table(random)
    every = list(divisions(layers))
    peaks = sorted(layers.peak_bytes(own) for own in every)
    limit = random.choice((NO_LIMIT, peaks[0], peaks[0] * 0.999, peaks[len(peaks) // 2]))
    steps = [estimate_stages(layers, own).step_seconds for own in every if layers.peak_bytes(own) <= limit]
    bound, division = least_division(layers, limit)
    assert lower_bound(layers) <= min(steps, default=NO_LIMIT) * (1 + 1e-9)
    assert layers.least_bytes() <= peaks[0] * (1 + 1e-9)
    assert (division is None) == (not steps)
    if division is None:
        assert bound == NO_LIMIT
        return
    assert bound <= min(steps) * (1 + 1e-9)
    assert list(division) in every
    assert layers.peak_bytes(division) <= limit * (1 + 1e-12)
    # Of equal stages without transfers the bound is the step: that of one stage is always.
    assert len(division) > 1 or bound == pytest.approx(steps[0])


@pytest.mark.parametrize("recompute", ["none", "full", "offload"])
def test_the_division_of_the_least_bound_is_the_fastest(recompute: Any) -> None:
    """Where links are fast and blocks equal, of all divisions; the bound is its step but for the update,
    which is longest on another stage."""
    random = Random(3)
    shape = replace(random_shape(random), routed=(False,) * 9, experts=None, vocabulary=32000)
    link = Link(1e15, 1e-9)
    topology = two_level_topology(Device("GPU", None), 8, 8, link, link)
    costs = RankCosts(DeviceLimits(1e13, 1e12), TopologyLinks(topology), host_bandwidth=1e11)
    layers = LayerTable(shape, ParallelDegrees(pipeline=4), TrainingSetting(16, Tokens(64), recompute), costs)
    fastest = min(estimate_stages(layers, own).step_seconds for own in divisions(layers))
    bound, division = least_division(layers, NO_LIMIT)
    assert division is not None
    assert bound == pytest.approx(fastest, rel=0.015)
    assert estimate_stages(layers, division).step_seconds == pytest.approx(fastest, rel=1e-9)


@pytest.mark.parametrize("seed", range(24))
def test_no_division_is_below_the_bounds_where_its_size_chooses_the_algorithm(seed: int) -> None:
    """Gradients of small stages are reduced by another algorithm, or at the pace of another link, than those
    of large ones."""
    random = Random(seed)
    blocks, experts = random.randint(4, 6), ExpertShape(4, 2, 64)
    routed = tuple(random.random() < 0.5 for _ in range(blocks))
    shape = TransformerShape("small", 64, 128, 256, AttentionShape(8, 8, 8, 8), routed, experts)
    inside, between = (Link(10 ** random.uniform(8, 11), 10 ** random.uniform(-6, -4)) for _ in range(2))
    topology = two_level_topology(Device("GPU", None), 12, random.choice((2, 4)), inside, between)
    overheads = Overheads(1e-7)
    costs = RankCosts(DeviceLimits(1e15, 1e13), TopologyLinks(topology), overheads=overheads)
    stages, virtual = random.choice((2, 3)), random.choice((1, 2))
    if stages * virtual > blocks:
        virtual = 1
    degrees = ParallelDegrees(
        expert=random.choice((1, 2)), pipeline=stages, data=4, zero=random.choice((0, 1))
    )
    layers = LayerTable(shape, degrees, TrainingSetting(stages, Tokens(8), "none", virtual), costs)
    every = [(counts, estimate_stages(layers, counts)) for counts in divisions(layers)]
    fastest = min(estimate.step_seconds for _, estimate in every)
    assert layers.least_update_seconds <= min(own.update_seconds for _, own in every) * (1 + 1e-9)
    for counts, estimate in every:
        for device, stage in enumerate(estimate.stages):
            numbers = {
                kind: np.array([sum(shape.routed[block] == kind for own in stage.blocks for block in own)])
                for kind in layers.blocks
            }
            least = device_update_seconds(layers, numbers, range(device, layers.slots, stages))
            assert least[0] <= stage.update_seconds * (1 + 1e-9), counts
    assert lower_bound(layers) <= fastest * (1 + 1e-9)
    if virtual == 1:
        assert least_division(layers, NO_LIMIT)[0] <= fastest * (1 + 1e-9)
        return
    assert least_interleaved(layers, NO_LIMIT) <= fastest * (1 + 1e-9)
    programme = DivisionProgramme(layers, NO_LIMIT)
    for counts, _ in every[::5]:
        programme.add_path(programme.stage_seconds(programme.whole_amounts(counts)))
    assert programme.solve(programme.whole_box()).seconds <= fastest * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(12, 20))
def test_no_interleaved_division_is_below_its_bound(seed: int) -> None:
    """Of every division over the virtual stages, and of the bounds of all and of those that fit."""
    random = Random(seed)
    layers = random_table(random)
    stages, virtual = layers.degrees.pipeline, random.choice((2, 3))
    if stages == 1 or stages * virtual > layers.shape.blocks + 3:
        degrees = replace(layers.degrees, pipeline=3, zero=min(1, layers.degrees.zero))
        layers = LayerTable(layers.shape.with_blocks(7), degrees, layers.setting, layers.costs)
        stages, virtual = 3, 2
    many = stages * random.randint(1, 4)
    setting = replace(layers.setting, micro_batches=many, virtual_stages=virtual)
    layers = LayerTable(layers.shape, layers.degrees, setting, layers.costs)
    every = list(divisions(layers))
    peaks = sorted(layers.peak_bytes(counts) for counts in every)
    limit = random.choice((NO_LIMIT, peaks[0], peaks[0] * 0.999, peaks[len(peaks) // 2]))
    quick = lower_bound(layers)
    least = least_interleaved(layers, limit)
    for counts in every:
        estimate = estimate_stages(layers, counts)
        assert estimate.peak_bytes > limit or least <= estimate.step_seconds * (1 + 1e-9)
        bound = interleaved_bound(layers, counts)
        assert quick <= bound * (1 + 1e-9)
        assert bound <= estimate.step_seconds * (1 + 1e-9)
        assert layers.least_bytes() <= estimate.peak_bytes * (1 + 1e-9)
        assert layers.peak_bytes(counts) == estimate.peak_bytes


def test_amounts_become_whole_blocks() -> None:
    """All blocks are there, each stage has what it must, and none is further off than by what others must
    have."""
    random = Random(7)
    for _ in range(100):
        layers = random_table(random)
        slots, blocks = layers.slots, layers.shape.blocks
        amounts = [random.random() for _ in range(slots)]
        amounts = [own * blocks / sum(amounts) for own in amounts]
        counts = round_division(layers, amounts)
        assert list(counts) in list(divisions(layers))
        if all(own >= 1 for own in amounts) and not layers.setting.predictors:
            assert all(abs(own - count) < 1 for own, count in zip(amounts, counts, strict=True))


@pytest.mark.parametrize(("stages", "virtual"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("again", [1, 2, 3, None])
def test_least_seconds_of_all_stages(stages: int, virtual: int, again: int | None) -> None:
    """Where the first blocks of each stage run again, how the blocks are divided decides how many do."""
    table = random_table(Random(again))
    shape = replace(table.shape, routed=(False,) * 7, experts=None)
    setting = TrainingSetting(stages, Tokens(64), "full", virtual, again)
    layers = LayerTable(shape, ParallelDegrees(pipeline=stages), setting, table.costs)
    every = [
        sum(layers.seconds(own, slot).both for slot, own in enumerate(block_ranges(counts)))
        for counts in divisions(layers)
    ]
    assert layers.whole_seconds == pytest.approx(min(every))


@pytest.mark.parametrize("seed", seeds(12, 18))
def test_no_division_that_fits_is_below_the_bound_of_equal_blocks(seed: int) -> None:
    """Interleaved, with partial recomputation, in the memory that some divisions need."""
    random = Random(seed)
    table = random_table(random)
    shape = replace(table.shape, routed=(False,) * random.randint(6, 7), experts=None)
    stages, virtual = random.choice(((2, 2), (2, 3), (3, 2)))
    again, predictors = random.choice((1, 1, 2, 3, None)), random.choice((0, 0, 1, 2))
    many, offset = stages * random.randint(1, 4), random.choice((0, 1))
    setting = TrainingSetting(many, Tokens(64), "full", virtual, again, predictors, offset)
    layers = LayerTable(shape, ParallelDegrees(pipeline=stages), setting, table.costs)
    every = list(divisions(layers))
    peaks = sorted(layers.peak_bytes(counts) for counts in every)
    limit = peaks[len(peaks) // random.choice((2, 4, 100))]
    bound = least_interleaved(layers, limit)
    for counts in every:
        if layers.peak_bytes(counts) <= limit:
            assert bound <= estimate_stages(layers, counts).step_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.slow] * (seed in (3, 7, 9))) for seed in (0, 1, 3, 4, 6, 7, 8, 9)],
)
def test_an_answer_against_all_there_is(seed: int) -> None:
    random = Random(1000 + seed)
    shape, costs, devices = random_shape(random), random_costs(random), random.choice((2, 4, 6, 8))
    shape = shape.with_blocks(random.randint(2, 5))
    options = DegreeOptions(
        mini_batch=random.choice((8, 24)),
        sequence=64,
        cp=random.choice((None, (1, 2))),
        zero=random.choice((None, (0, 3), (1, 2, 3))),
        predictors=seed % 4 // 3,
        offload=seed % 2 == 1,
    )
    every = []
    for one in list_combinations(shape, devices, options):
        partial = one.recompute_blocks is not None
        for number in range(1, shape.blocks) if partial else (None,):
            setting = replace(one.setting, recompute_blocks=number)
            layers = LayerTable(shape, one.degrees, setting, costs)
            every += [(layers, estimate_stages(layers, counts)) for counts in divisions(layers)]
    peaks = sorted(estimate.peak_bytes for _, estimate in every)
    limit = random.choice((NO_LIMIT, peaks[len(peaks) // 4], peaks[0] * 0.999))
    fitting = [estimate.step_seconds for _, estimate in every if estimate.peak_bytes <= limit]
    if not fitting:
        with pytest.raises(InfeasibleError, match="needs least") as caught:
            search_degrees(shape, devices, costs, options, limit)
        needed = caught.value.details["needed_bytes"]
        assert any(needed == pytest.approx(peak) for peak in peaks)
        assert search_degrees(shape, devices, costs, options, needed * (1 + 1e-9)).plans
        return
    answer = search_degrees(shape, devices, costs, options, limit)
    best = answer.plans[0].estimate
    assert answer.bound_seconds <= min(fitting) * (1 + 1e-9)
    assert min(fitting) <= best.step_seconds * (1 + 1e-9)
    assert best.peak_bytes <= limit
    steps = [plan.estimate.step_seconds for plan in answer.plans]
    assert steps == sorted(steps)
    for plan in answer.plans:
        assert plan.degrees.devices == devices
        assert plan.micro_batches * plan.micro_batch_size * plan.degrees.data == options.mini_batch


def test_only_what_is_allowed() -> None:
    random = Random(5)
    shape, costs = random_shape(random), random_costs(random)
    options = DegreeOptions(
        mini_batch=16,
        sequence=64,
        tp=(2,),
        pp=(2,),
        micro_batch_size=(1, 4),
        recompute="none",
        virtual_stages=(2,),
    )
    answer = search_degrees(shape.with_blocks(6), 8, costs, options, NO_LIMIT)
    for plan in answer.plans:
        assert plan.virtual_stages == 2
        assert (plan.degrees.tensor, plan.degrees.pipeline, plan.recompute) == (2, 2, "none")
        assert plan.micro_batch_size in (1, 4)


@pytest.mark.parametrize(
    ("options", "devices", "says", "change"),
    [
        ({"tp": 3}, 8, "tp=3: not possible: tp 3 x cp 1 x pp 1 = 3 does not divide 8 devices", "`tp`"),
        ({"tp": 8}, 8, "8 heads with 2 of keys and values cannot be shared by 8 devices", "`tp`"),
        ({"ep": 5}, 8, "ep 5 does not divide 6 experts and the 8 devices of a stage", "`ep`"),
        ({"pp": 3}, 8, "pp=3: not possible: tp 1 x cp 1 x pp 3 = 3 does not divide 8 devices", "`pp`"),
        ({"tp": 2, "sequence": 27}, 8, "a sequence of 27 tokens is no multiple of", "`tp`"),
        ({"zero": 3, "pp": 2}, 8, "pp=2, zero=3: not possible: zero=3: is of one", "`pp`, or `zero`"),
        ({"micro_batch_size": 3}, 4, "4 sequences of a replica are no whole number", "`micro_batch_size`"),
        ({"virtual_stages": 9}, 1, "they are of a pipeline of at least 2 stages", "`virtual_stages`"),
        ({"mini_batch": 7}, 9, "no degrees divide 9 devices, 6 layers and a batch of 7", "another batch"),
    ],
)
def test_nothing_possible(options: dict[str, Any], devices: int, says: str, change: str) -> None:
    """What does not divide, and the options of which another value alone is enough, are named."""
    attention = AttentionShape(8, 2, 8, 8)
    shape = TransformerShape("model", 64, 128, 100, attention, (True,) * 6, ExpertShape(6, 2, 48))
    given = DegreeOptions(**{"sequence": 64, "mini_batch": 16, **options})
    with pytest.raises(UsageError, match=re.escape(says)) as refused:
        search_degrees(shape, devices, random_costs(Random(3)), given, NO_LIMIT)
    assert refused.value.hint.endswith(f"{change}.")


def test_only_context_parallelism_divides() -> None:
    """Which is tried without being asked for only where a device keeps 4,096 tokens."""
    random = Random(3)
    shape = replace(random_shape(random).with_blocks(1), attention=AttentionShape(1, 1, 16, 16), experts=None)
    shape, costs = replace(shape, routed=(False,)), random_costs(random)
    options = DegreeOptions(sequence=4096, mini_batch=1)
    with pytest.raises(UsageError, match="that leave a device 4096 tokens") as caught:
        search_degrees(shape, 8, costs, options, NO_LIMIT)
    assert "`cp=4`" in caught.value.hint  # with the embedding on another stage than the block
    assert search_degrees(shape, 8, costs, replace(options, cp=(4,)), NO_LIMIT).plans[0].blocks in (
        (0, 1),
        (1, 0),
    )


@pytest.mark.parametrize("seed", range(12))
def test_how_many_equal_blocks_run_again_at_least(seed: int) -> None:
    """Of a stage with all of them: the fewest with which the ledger's parts that depend on them have room."""
    random = Random(seed)
    costs = random_costs(random)
    shape = TransformerShape("equal", 256, 1024, 1024, AttentionShape(8, 8, 16, 16), (False,) * 6)
    setting = TrainingSetting(4, Tokens(64), "full", 1, 3)
    layers = LayerTable(shape, ParallelDegrees(pipeline=2), setting, costs)
    block = layers.blocks[False]
    boundary = layers._boundary
    for device in (0, 1):
        copies = 2 - device  # micro-batches in flight under 1F1B
        for share in (0.2, 0.5, 0.9, 1.1):
            numbers = np.arange(1, 7)
            beside = layers._beside_bytes((False,), device)
            fixed = [layers._states(device, number) + beside for number in range(7)]
            memory = fixed[3] + share * copies * 3 * block.saved
            again = layers.least_blocks_again({False: numbers}, device, memory)
            for number in numbers.tolist():
                most = min(number, setting.recomputed(6))
                fitting = [
                    count
                    for count in range(most + 1)
                    if fixed[number] + copies * (count * boundary + (number - count) * block.saved)
                    <= memory * (1 + 1e-9)
                ]
                assert again[number - 1] == min(fitting, default=NO_LIMIT)


@pytest.mark.parametrize("seed", range(12))
def test_a_division_that_does_not_fit_is_moved_until_it_does(seed: int) -> None:
    """Into the memory of a division halfway between the best and the worst: all blocks are still there."""
    random = Random(seed)
    table = random_table(random)
    shape = replace(table.shape, routed=table.shape.routed[:1] * 2 + table.shape.routed[-1:] * 5)
    setting = TrainingSetting(8, Tokens(64), "none", 2)
    layers = LayerTable(shape, ParallelDegrees(pipeline=2), setting, table.costs)
    every = [tuple(own) for own in divisions(layers)]
    worst = max(every, key=layers.peak_bytes)
    peaks = sorted(map(layers.peak_bytes, every))
    moved = fit_division(layers, worst, peaks[len(peaks) // 2])
    assert moved in every
    assert layers.peak_bytes(moved) <= peaks[len(peaks) // 2]
    assert fit_division(layers, worst, peaks[0] * 0.999) is None
    assert fit_division(layers, worst, peaks[-1]) == worst

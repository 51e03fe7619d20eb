"""Degrees by block as Galvatron chooses them: the programme against every choice, its costs against those of
equal degrees."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest

from pplan.api.degrees import search_configuration
from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.layer_table import LIBRARIES, LayerTable
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_setting import TrainingSetting, block_ranges, even_blocks
from pplan.cost_models.transformer.training_step import estimate_stages
from pplan.cost_models.transformer.transformer_shape import AttentionShape, ExpertShape, TransformerShape
from pplan.cost_models.transformer.weight_update import update_seconds
from pplan.planner.degrees.degree_options import DegreeOptions
from pplan.planner.degrees.layer_degrees import PARTS, _Pipeline, plan_layer_degrees

NO_LIMIT = float("inf")


def random_case(random: Random) -> tuple[TransformerShape, Any, RankCosts, DegreeOptions]:
    routed = tuple(random.random() < 0.5 for _ in range(random.randint(2, 4)))
    hidden = 64 * random.choice((1, 4, 16))
    shape = TransformerShape(
        *("random", hidden, random.choice((256, 32000)), 4 * hidden, AttentionShape(8, 8, 16, 16), routed),
        ExpertShape(8, 2, 64, 64) if any(routed) else None,
    )
    inside, between = (Link(10 ** random.uniform(8, 11), 1e-6) for _ in range(2))
    topology = two_level_topology(Device("GPU", None), 4, random.choice((2, 4)), inside, between)
    limits = DeviceLimits(10 ** random.uniform(11, 14), 10 ** random.uniform(10, 12))
    options = DegreeOptions(mini_batch=8, sequence=64, predictors=random.choice((0, 0, 1)))
    return shape, topology, RankCosts(limits, TopologyLinks(topology)), options


@pytest.mark.parametrize("seed", range(8))
def test_the_programme_against_every_choice(seed: int) -> None:
    """Of one stage, in several memories: never below the fastest choice that fits, and this where memory is
    not short by what is rounded up."""
    random = Random(seed)
    shape, topology, costs, options = random_case(random)
    shape = shape.with_blocks(min(shape.blocks, 3))
    stages = random.choice((1, 2))
    whole = _Pipeline(shape, topology, costs, options, NO_LIMIT, stages, random.choice((4, 8)))
    whole.choices = random.sample(whole.choices, min(4, len(whole.choices)))
    stage = random.randrange(stages)
    begin = sum(even_blocks(shape.blocks, stages)[:stage])
    blocks = range(begin, begin + even_blocks(shape.blocks, stages)[stage])
    every = []
    for chosen in product(whole.choices, repeat=len(blocks)):
        seconds = whole._stage_seconds(stage, chosen, blocks).both * whole.micro_batches
        updates = [
            update_seconds(a.parameters[shape.routed[b]], a.own.degrees, costs)
            for a, b in zip(chosen, blocks, strict=True)
        ]
        every.append((seconds + sum(updates), whole._stage_bytes(stage, chosen, blocks), chosen))
    peaks = sorted(bytes for _, bytes, _ in every)
    for limit in (NO_LIMIT, peaks[-1] * 2, peaks[len(peaks) // 2], peaks[0], peaks[0] * 0.99):
        whole.memory_bytes = limit
        fastest = min((seconds for seconds, bytes, _ in every if bytes <= limit), default=NO_LIMIT)
        own = whole._choose(stage, blocks)
        if own is None:
            assert limit < peaks[-1] * 2
            continue
        seconds, bytes = next((a, b) for a, b, chosen in every if list(chosen) == own)
        assert bytes <= limit
        assert seconds >= fastest * (1 - 1e-12)
        if limit >= peaks[-1] * 2:
            assert seconds == pytest.approx(fastest, rel=1e-12)
        # In so much less memory, all that is rounded up has room.
        close = [a for a, b, _ in every if LIBRARIES + (b - LIBRARIES) * (1 + 2 / PARTS) <= limit]
        assert not close or limit < NO_LIMIT or seconds <= min(close) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_blocks_together_need_what_their_stage_does(seed: int) -> None:
    """Bytes and seconds of each block with what is beside it, against those of the whole stage: less the
    libraries, one workspace and the empty tensors, which blocks share; and as many updates as blocks."""
    random = Random(100 + seed)
    shape, topology, costs, options = random_case(random)
    stages = random.choice((1, 2))
    whole = _Pipeline(shape, topology, costs, options, NO_LIMIT, stages, random.choice((4, 8)))
    for stage, blocks in enumerate(block_ranges(even_blocks(shape.blocks, stages))):
        own = random.choice(whole.choices)
        picks, last = [own] * len(blocks), stage == stages - 1
        rows = [
            whole._block_costs(own, shape.routed[block], roles, stage)
            for block in blocks
            for roles in [[0] * (block == 0) + [2] * (block == shape.blocks - 1)]
        ]
        shared = LIBRARIES + max(own.workspace, own.end_workspace * last) + own.end_placeholders * last
        shared += own.placeholders[frozenset(shape.routed[block] for block in blocks)]
        bytes = whole._stage_bytes(stage, picks, blocks)
        assert sum(each for _, each in rows) + shared == pytest.approx(bytes, rel=1e-9)
        seconds = whole.micro_batches * whole._stage_seconds(stage, picks, blocks).both
        seconds += sum(
            update_seconds(own.parameters[shape.routed[b]], own.own.degrees, costs) for b in blocks
        )
        assert sum(each for each, _ in rows) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_equal_degrees_cost_what_they_cost_elsewhere(seed: int) -> None:
    """Of a plan whose blocks all have the same degrees: the step and the bytes of the estimate."""
    random = Random(seed)
    shape, topology, costs, options = random_case(random)
    stages = random.choice((1, 2))
    whole = _Pipeline(shape, topology, costs, options, NO_LIMIT, stages, 8)
    only = random.choice(whole.choices)
    whole.choices = [only]
    plan = whole.plan()
    assert plan is not None
    own = only.own.degrees
    degrees = ParallelDegrees(own.tensor, 1, own.expert, stages, own.data)
    tokens = Tokens(64, 8 // own.data)
    kind: Any = "full" if only.own.again else "none"
    setting = TrainingSetting(1, tokens, kind, predictors=options.predictors)
    estimate = estimate_stages(LayerTable(shape, degrees, setting, costs), even_blocks(shape.blocks, stages))
    if stages == 1 and options.predictors:  # counted with a copy of the embedding, as on other stages
        assert plan.step_seconds >= estimate.step_seconds * (1 - 1e-9)
    else:
        assert plan.step_seconds == pytest.approx(estimate.step_seconds, rel=1e-9)
    assert plan.peak_bytes >= estimate.peak_bytes * (1 - 1e-9)
    assert options.predictors or plan.peak_bytes == pytest.approx(estimate.peak_bytes, rel=1e-9)
    assert plan.describe() == degrees.describe()
    assert plan.recompute == {"none": "never", "full": "always"}[kind]


def test_blocks_have_degrees_of_their_own_where_memory_is_short() -> None:
    """Between what the fastest degrees and what the smallest need, a mixture is faster than the latter."""
    limits = DeviceLimits(1e14, 1e12)
    link = Link(1e12, 1e-7)
    topology = two_level_topology(Device("GPU", None), 4, 4, link, link)
    costs = RankCosts(limits, TopologyLinks(topology))
    shape = TransformerShape("equal", 1024, 1024, 4096, AttentionShape(16, 16, 64, 64), (False,) * 8)
    options = DegreeOptions(mini_batch=16, sequence=1024)
    free = plan_layer_degrees(shape, topology, costs, options, NO_LIMIT)
    assert free is not None
    limit = LIBRARIES + (free.peak_bytes - LIBRARIES) * 0.6
    short = plan_layer_degrees(shape, topology, costs, options, limit)
    assert short is not None
    assert short.peak_bytes <= limit
    assert short.step_seconds > free.step_seconds
    assert plan_layer_degrees(shape, topology, costs, options, LIBRARIES * 1.001) is None


def test_in_the_table_of_baselines() -> None:
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    answer = search_configuration(config, gpus=4, gpu="h100", mini_batch=16, sequence=1024)
    own = next(own for own in answer.baselines if own.name == "galvatron")
    assert own.plan is None
    assert own.by_layer is not None
    assert answer.plans[0].estimate.step_seconds <= own.by_layer.step_seconds * (1 + 1e-9)
    assert own.by_layer.peak_bytes <= answer.limit_bytes
    assert len(own.by_layer.blocks) == 12

"""A given division at its best degrees, against every combination of them."""

from __future__ import annotations

from random import Random

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.rank_costs import DeviceLimits, Overheads, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_step import estimate_stages
from pplan.cost_models.transformer.transformer_shape import AttentionShape, ExpertShape, TransformerShape
from pplan.planner.degrees.degree_combinations import list_combinations
from pplan.planner.degrees.degree_options import DegreeOptions
from pplan.planner.degrees.layout_estimate import estimate_layout

NO_LIMIT = float("inf")


def shape(experts: bool) -> TransformerShape:
    routed = (False, experts, False, experts)
    own = ExpertShape(8, 2, 32, 64) if experts else None
    return TransformerShape("toy", 256, 1024, 1024, AttentionShape(8, 4, 16, 16), routed, own)


def costs(random: Random) -> RankCosts:
    link = Link(10 ** random.uniform(8, 11), 10 ** random.uniform(-6, -4))
    topology = two_level_topology(Device("GPU", None), 8, 4, link, Link(10 ** random.uniform(8, 10), 1e-5))
    limits = DeviceLimits(10 ** random.uniform(11, 14), 10 ** random.uniform(10, 12))
    return RankCosts(limits, TopologyLinks(topology), overheads=Overheads(1e-5))


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_the_shortest_step_of_those_that_fit(seed: int) -> None:
    """With as much memory as one wants, with what half of them need, and with less than any needs."""
    random = Random(seed)
    model, own = shape(seed % 2 == 1), costs(random)
    pipeline, counts = ((2, (1, 3)), (2, (3, 1)), (4, (1, 1, 1, 1)), (1, (4,)))[seed % 4]
    recompute = ("auto", "none", "full")[seed % 3]
    options = DegreeOptions(mini_batch=8, sequence=64, recompute=recompute, zero=(0, 1))
    estimates = {}
    # Which virtual stages and stages they have is given.
    listed = list_combinations(
        model, 8, DegreeOptions(**{**vars(options), "pp": (pipeline,), "virtual_stages": (1,)})
    )
    for one in listed:
        if one.recompute_blocks is None:
            layers = LayerTable(model, one.degrees, one.setting, own)
            estimates[one.degrees, one.setting] = estimate_stages(layers, counts)
    assert len(estimates) > 5
    peaks = sorted(estimate.peak_bytes for estimate in estimates.values())
    for memory in (NO_LIMIT, peaks[len(peaks) // 2], peaks[0], 0.99 * peaks[0]):
        fitting = [own.step_seconds for own in estimates.values() if own.peak_bytes <= memory]
        plan = estimate_layout(model, counts, pipeline, 8, own, options, memory)
        assert plan.blocks == counts
        assert plan.estimate == estimates[plan.degrees, plan.setting]
        if fitting:
            assert plan.estimate.peak_bytes <= memory
            assert plan.estimate.step_seconds == min(fitting)
        else:
            assert plan.estimate.peak_bytes == peaks[0]


def test_interleaved_stages_have_whole_rounds_of_micro_batches() -> None:
    """Two virtual stages on each of two devices: 2, 4 or 8 micro-batches of 8 samples, not one."""
    options = DegreeOptions(mini_batch=8, sequence=64, recompute="none", zero=(1,))
    plan = estimate_layout(shape(False), (1, 1, 1, 1), 2, 8, costs(Random(0)), options, NO_LIMIT)
    assert plan.setting.virtual_stages == 2
    assert plan.degrees.pipeline == 2
    assert plan.setting.micro_batches % 2 == 0
    with pytest.raises(UsageError, match="mini_batch=1: makes no multiple of 2 micro-batches"):
        estimate_layout(
            shape(False),
            (1, 1, 1, 1),
            2,
            2,
            costs(Random(0)),
            DegreeOptions(mini_batch=1, sequence=64),
            NO_LIMIT,
        )


def test_partial_recomputation_of_one_block_where_it_is_asked_for() -> None:
    partial = DegreeOptions(mini_batch=8, sequence=64, recompute="partial", zero=(1,))
    plan = estimate_layout(shape(False), (2, 2), 2, 8, costs(Random(1)), partial, NO_LIMIT)
    assert plan.setting.recompute_blocks == 1


def test_a_refusal_names_what_was_given() -> None:
    """Not one virtual stage, which the layout alone says."""
    options = DegreeOptions(mini_batch=8, sequence=64)
    with pytest.raises(UsageError, match="does not divide 4 devices") as refused:
        estimate_layout(shape(False), (1, 1, 2), 3, 4, costs(Random(0)), options, NO_LIMIT)
    assert "virtual_stages" not in refused.value.what + refused.value.hint

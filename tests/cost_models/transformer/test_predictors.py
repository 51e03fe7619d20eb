"""Multi-token predictors against DeepSeek's published count, and products and bytes counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.kernel_table import Matmul
from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.layer_work import LayerWork, Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_setting import TrainingSetting
from pplan.cost_models.transformer.training_step import estimate_stages
from pplan.cost_models.transformer.transformer_shape import AttentionShape, TransformerShape

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "num_attention_heads": 128, "num_key_value_heads": 128, "first_k_dense_replace": 3, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280,
}  # fmt: skip
SHAPE = TransformerShape("small", 256, 1024, 512, AttentionShape(8, 8, 32, 32), (False,) * 4)
TOKENS = Tokens(64)
TOPOLOGY = two_level_topology(Device("GPU", None), 8, 4, Link(1e11, 1e-6), Link(1e10, 5e-6))
COSTS = RankCosts(DeviceLimits(1e12, 1e11), TopologyLinks(TOPOLOGY))


def table(shape: TransformerShape = SHAPE, pipeline: int = 2, **setting: Any) -> LayerTable:
    own = TrainingSetting(4, TOKENS, **setting)
    return LayerTable(shape, ParallelDegrees(pipeline=pipeline), own, COSTS)


def flops(work: LayerWork) -> float:
    """Of the products with matrices of parameters."""
    kernels = (*work.forward, *work.backward)
    return sum(own.flops for own in kernels if isinstance(own, Matmul))


def test_parameters_of_deepseek_v3() -> None:
    """README_WEIGHTS.md of DeepSeek-V3: its predictor has 11.5 billion of its own, besides embedding and
    head, 0.9 billion each."""
    shape = transformer_shape(DEEPSEEK_V3)
    without, alone, beside = (
        table(shape, 3, predictors=number, predictor_offset=offset)
        for number, offset in ((0, 0), (1, 1), (1, 0))
    )
    own = sum(alone.parameters(range(0), 1))
    assert own == pytest.approx(11.5e9 + 0.9e9, rel=0.02)
    assert sum(without.parameters(range(0), 1)) == 0
    assert sum(beside.parameters(range(0), 2)) - sum(without.parameters(range(0), 2)) == own


def test_the_embedding_is_copied_where_the_stage_has_none() -> None:
    rows = 1024 * 256
    counts = {}
    for tied in (False, True):
        shape = replace(SHAPE, tied=tied)
        for pipeline in (1, 2):
            one, none = table(shape, pipeline, predictors=1), table(shape, pipeline)
            last = pipeline - 1
            more = one.parameters(range(0), last).dense - none.parameters(range(0), last).dense
            counts[tied, pipeline] = more - one.parameters(range(1), 9).dense - 2 * 256**2 - 3 * 256
    assert counts == {(False, 1): 0, (True, 1): 0, (False, 2): rows, (True, 2): 0}


def test_products() -> None:
    """Each parameter of a matrix is multiplied once for each token, forward, and twice backward."""
    layers = table(predictors=2)
    matrices = 2 * 256**2 + 4 * 256**2 + 3 * 256 * 512
    assert flops(layers.predictor) == 3 * 2 * 64 * matrices
    head = layers.costs.seconds(layers.head, layers.degrees)
    lookup = layers.costs.seconds(layers.embedding, layers.degrees)
    predictor = layers.costs.seconds(layers.predictor, layers.degrees)
    both = 3 * head.both + 2 * (lookup.both + predictor.both)
    assert layers.fixed_seconds(1) == pytest.approx(both)
    apart = table(predictors=2, predictor_offset=1)
    assert apart.fixed_seconds(0) == pytest.approx(lookup.both + 2 * (lookup.both + predictor.both))
    assert apart.whole_seconds == pytest.approx(layers.whole_seconds)


def test_their_results_cross_the_cuts_behind_them() -> None:
    layers = table(pipeline=4, predictors=2, predictor_offset=2)
    bytes = [1, 3, 3]
    expected = [COSTS.links.transfer(count * 2 * 64 * 256, 1) for count in bytes]
    assert [layers.transfer_seconds(slot) for slot in range(3)] == pytest.approx(expected)


@pytest.mark.parametrize(("recompute", "blocks"), [("none", None), ("full", 1), ("full", None)])
def test_memory(recompute: Any, blocks: int | None) -> None:
    """What a predictor keeps is that of a block and the inputs and outputs of two norms; the scores of all
    heads are alive at once. Megatron-LM's block method does not run predictors again."""
    one, none = (
        table(recompute=recompute, recompute_blocks=blocks, predictors=number, predictor_offset=0)
        for number in (1, 0)
    )
    with_one, without = (estimate_stages(own, (2, 2)).stages[1].ledger for own in (one, none))
    boundary = 2 * 64 * 256
    kept = 2 * boundary if blocks is None and recompute == "full" else one.blocks[False].saved + 4 * boundary
    assert with_one["activations"] - without["activations"] == kept
    assert with_one["workspace"] >= 2 * one.head.saved
    firsts = [estimate_stages(own, (2, 2)).stages[0] for own in (one, none)]
    assert firsts[0] == firsts[1]

"""What a device runs for each layer of a transformer, what it keeps, and what a step then takes, against
golden files. `make golden` rewrites them: read the diff.

That torch counts as many FLOPs, that published runs took as long and needed as much, and what the ranks
share, is tested beside this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.hardware import Device, Link
from pplan.cost_models.topology import two_level_topology
from pplan.cost_models.transformer.block_kernels import block_work, embedding_work, head_work, predictor_work
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_setting import TrainingSetting
from pplan.cost_models.transformer.training_step import estimate_step

Golden = Callable[[str, str], None]
AsText = Callable[[object], str]
DENSE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 5,
    "vocab_size": 1000,
}
EXPERTS = DENSE | {
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 8,
}
PLAIN = {"n_embd": 256, "n_head": 8, "n_layer": 4, "n_positions": 64, "vocab_size": 1000}
SHAPES = {
    "llama": transformer_shape(DENSE | {"model_type": "llama"}),
    "deepseek": transformer_shape(EXPERTS | {"model_type": "deepseek_v3", "n_group": 2, "topk_group": 2}),
    "gpt2": transformer_shape(PLAIN | {"model_type": "gpt2"}),
}
DEGREES = (
    ParallelDegrees(),
    ParallelDegrees(tensor=2, data=2, expert=2),
    ParallelDegrees(context=2, data=2, expert=4, zero=0),
    ParallelDegrees(context=2, exchange="ring"),
    ParallelDegrees(tensor=2, context=2, exchange="all-gather"),
    ParallelDegrees(tensor=2, pipeline=2, data=2, expert=2),
    ParallelDegrees(data=4, zero=2),
    ParallelDegrees(data=4, zero=3, expert=2),
)
SETTING = TrainingSetting(4, Tokens(64))
SETTINGS = (
    SETTING,
    replace(SETTING, recompute="selective"),
    replace(SETTING, recompute="full"),
    replace(SETTING, recompute="full", recompute_blocks=1),
    replace(SETTING, recompute="offload"),
    replace(SETTING, virtual_stages=2),
    replace(SETTING, predictors=1),
)
TOPOLOGY = two_level_topology(Device("toy", None), 8, 4, Link(1e9, 5e-6), Link(1e8, 2e-5))


@pytest.mark.parametrize("name", SHAPES)
def test_kernels(name: str, golden: Golden, as_text: AsText) -> None:
    shape = SHAPES[name]
    rows = {}
    for degrees in DEGREES[:5]:
        own = degrees if shape.experts else replace(degrees, expert=1)
        parts = {"embedding": embedding_work, "head": head_work, "predictor": predictor_work}
        works = {part: work(shape, own, SETTING.tokens) for part, work in parts.items()}
        for routed in {False, any(shape.routed)}:
            works[f"block {'with experts' * routed}"] = block_work(shape, routed, own, SETTING.tokens)
        rows[f"{own.describe()}, ZeRO {own.zero}"] = works
    golden(f"cost_models/kernels/{name}.txt", as_text(rows))


@pytest.mark.parametrize("name", SHAPES)
def test_steps(name: str, golden: Golden, as_text: AsText) -> None:
    shape, costs = (
        SHAPES[name],
        RankCosts(DeviceLimits(1e12, 1e11), TopologyLinks(TOPOLOGY), host_bandwidth=1e10),
    )
    rows: dict[str, object] = {}
    for degrees in DEGREES:
        own = degrees if shape.experts else replace(degrees, expert=1)
        for setting in SETTINGS if own.pipeline > 1 else SETTINGS[::2]:
            try:
                row: object = estimate_step(shape, own, setting, costs)
            except UsageError as error:
                row = str(error)
            words = f"{setting.recompute} {setting.recompute_blocks or ''}{'+' * setting.predictors}"
            rows[f"{own.describe()}, ZeRO {own.zero}, {words} x {setting.virtual_stages}"] = row
    golden(f"cost_models/steps/{name}.txt", as_text(rows))

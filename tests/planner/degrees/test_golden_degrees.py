"""Plans by degrees of small transformers, and what all that is said of them is, against golden files.

`test_degree_search.py` holds bounds and divisions against all there are; here is what a search answers: of
which degrees, micro-batches and recomputation, with which seconds and bytes, and after how much. `make
golden` rewrites the files: read the diff.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pplan.cost_models.errors import PplanError
from pplan.cost_models.hardware import Device, Link
from pplan.cost_models.topology import two_level_topology
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.rank_costs import DeviceLimits, Overheads, RankCosts, TopologyLinks
from pplan.planner.degrees.degree_baselines import degree_baselines
from pplan.planner.degrees.degree_options import DegreeOptions
from pplan.planner.degrees.degree_search import DegreePlan, search_degrees
from pplan.planner.degrees.layout_estimate import estimate_layout

Golden = Callable[[str, str], None]
AsText = Callable[[object], str]
DENSE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 4099,
}
ROUTED: dict[str, Any] = {
    **DENSE,
    "model_type": "qwen2_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 352,
    "shared_expert_intermediate_size": 704,
    "mlp_only_layers": [0],
}
LATENT: dict[str, Any] = {
    **DENSE,
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
COSTS = RankCosts(
    DeviceLimits(20e12, 1e12),
    TopologyLinks(two_level_topology(Device("GPU", None), 8, 4, Link(1e11, 5e-6), Link(1e10, 2e-5))),
    overheads=Overheads(1.1, 1e-5, 1e-4),
)
SEARCHES: dict[str, tuple[dict[str, Any], int, float, dict[str, Any]]] = {
    "dense": (DENSE, 4, 4e9, {}),
    "dense in little memory": (DENSE, 4, 0.75e9, {"recompute": "auto"}),
    "dense and sharded": (DENSE, 4, 2e9, {"zero": (0, 2, 3)}),
    "dense and interleaved": (DENSE, 4, 4e9, {"pp": (2, 4), "virtual_stages": (1, 2, 3), "tp": (1,)}),
    "partly again": (DENSE, 2, 1.1e9, {"recompute": "partial", "pp": (2,)}),
    "long sequences": (DENSE, 4, 4e9, {"cp": (1, 2, 4), "sequence": 8192, "mini_batch": 4, "tp": (1, 2)}),
    "experts": (ROUTED, 4, 4e9, {"ep": (1, 2, 4), "tp": (1, 2)}),
    "latent attention and predictors": (LATENT, 4, 8e9, {"predictors": 1, "tp": (1, 2), "ep": (1, 2)}),
    "nothing fits": (DENSE, 2, 0.3e9, {}),
    "nothing is possible": (DENSE, 4, 4e9, {"tp": (3,)}),
}


def plan_text(plan: DegreePlan | None) -> object:
    if plan is None:
        return None
    own = plan.estimate
    return {
        "degrees": plan.degrees,
        "setting": plan.setting,
        "blocks": plan.blocks,
        "seconds": [own.step_seconds, own.pipeline_seconds, own.update_seconds],
        "stages": own.stages,
    }


@pytest.mark.parametrize("name", SEARCHES)
def test_answers(name: str, golden: Golden, as_text: AsText) -> None:
    keys, devices, memory, more = SEARCHES[name]
    shape = transformer_shape(keys)
    options = DegreeOptions(**{"mini_batch": 16, "sequence": 512, **more})
    try:
        answer = search_degrees(shape, devices, COSTS, options, memory)
    except PplanError as error:
        content: dict[str, Any] = {"what": error.what, "hint": error.hint}
    else:
        content = {
            "best": plan_text(answer.plans[0]),
            "others": [
                [own.degrees, own.setting.tokens, own.estimate.step_seconds] for own in answer.plans[1:]
            ],
            "bound": [answer.bound_seconds, answer.gap, answer.combinations],
            "kernels": [len(answer.kernels), len(answer.assumed_kernels)],
            "baselines": {
                own.name: own.reason or plan_text(own.plan)
                for own in degree_baselines(shape, devices, COSTS, options, memory, 4)
            },
        }
    golden(f"planner/degrees/{name.replace(' ', '_')}.txt", as_text(content))


@pytest.mark.parametrize(
    ("counts", "pipeline", "more"),
    [
        ((2, 4), 2, {}),
        ((1, 2, 1, 2), 2, {}),
        ((3, 3), 2, {"recompute": "partial"}),
        ((3, 3, 0), 3, {"predictors": 1}),
        ((1, 2, 1, 2), 2, {"mini_batch": 1}),
    ],
)
def test_layouts(
    counts: tuple[int, ...], pipeline: int, more: dict[str, Any], golden: Golden, as_text: AsText
) -> None:
    """Where all fits, and where nothing does."""
    shape = transformer_shape(LATENT if "predictors" in more else DENSE)
    offset = 1 if counts[-1] == 0 else 0
    options = DegreeOptions(**{"mini_batch": 8, "sequence": 512, **more})
    devices, lines = 2 * pipeline, []
    for memory in (8e9, 0.2e9):
        try:
            plan = estimate_layout(shape, counts, pipeline, devices, COSTS, options, memory, offset)
            lines.append(as_text(plan_text(plan)))
        except PplanError as error:
            lines.append(str(error))
    words = "_".join(map(str, (*counts, *more)))
    golden(f"planner/degrees/layout_{words}.txt", "\n".join(lines))

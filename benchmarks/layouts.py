"""Pipelines that experts published, costed and checked: python benchmarks/layouts.py [--costs]

Without `--costs`: the layouts of Megatron-Bridge's recipes that were mended in August 2026 because they did
not match their model or their pipeline, as they were before, each given to `pplan.lint`. Exit status 1 where
it finds nothing wrong with one of them, or something with one that is right.

With `--costs`: recipes for H100 in bfloat16 (github.com/NVIDIA-NeMo/Megatron-Bridge, figures only; `source`
is the file), with the recipe's degrees, micro-batches, recomputation and layout; the best layout with the
same degrees and micro-batches; and with `--any-degrees`, which takes long, the best of all degrees, as
`pplan solve` finds it: all on servers of 8 (`--topology dgx-h100`). Seconds are estimates of one cost
model, from the GPU's limits; what overlaps in a recipe (expert exchange, gradients), and moments in bfloat16,
are not in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pplan
from pplan import InfeasibleError, UsageError
from pplan.api.degrees import search_configuration

Config = Mapping[str, Any]

LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, **LATENT}
DEEPSEEK |= {
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
}
MODELS: dict[str, Config] = {
    "Llama 3 70B": {
        **LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
    "Llama 3.1 405B": {
        **LLAMA,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_hidden_layers": 126,
    },
    "Qwen3 235B-A22B": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": 94,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "vocab_size": 151936,
    },
    "DeepSeek-V3": {
        **DEEPSEEK,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "vocab_size": 129280,
    },
    "Kimi K2": {
        **DEEPSEEK,
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
    },
    "Moonlight 16B": {
        "model_type": "deepseek_v3",
        **LATENT,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "q_lora_rank": None,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
    },
    "GLM-4.5V": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 46,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "vocab_size": 151552,
    },
}
"""Sizes as of their config.json; of GLM-4.5V those of its language model."""
MODELS["Qwen3.5-VL 397B"] = {**MODELS["Qwen3 235B-A22B"], "num_hidden_layers": 60}
"""Only the number of its blocks counts here."""


@dataclass(frozen=True)
class Mended:
    """A layout before a pull request mended it, and after; `before` and `after`: layout, pipeline, virtual
    stages."""

    request: int
    model: str
    what: str
    before: tuple[str, int, int]
    after: tuple[str, int, int]


SIXTEEN = "Et*4|(tttt|)*14t"
MENDED = (
    Mended(
        *(5443, "DeepSeek-V3", "16 stages for pipelines of 8"),
        (f"{SIXTEEN}mL", 8, 1),
        ("Et*8|(t*8|)*6t*5mL", 8, 1),
    ),
    Mended(
        *(5578, "GLM-4.5V", "8 stages for pipelines of 4"),
        ("Et|(t*7|)*6tttL", 4, 1),
        ("Et*11|t*12|t*12|t*11L", 4, 1),
    ),
    Mended(
        *(5578, "GLM-4.5V", "45 of 46 blocks on 16 stages"),
        ("E|(ttt|)*14tttL", 16, 1),
        ("Et|(ttt|)*14tttL", 16, 1),
    ),
    Mended(
        *(5640, "Kimi K2", "16 stages for pipelines of 4"),
        (f"{SIXTEEN}L", 4, 1),
        ("Et*16|t*16|t*16|t*13L", 4, 1),
    ),
    Mended(
        *(5708, "Moonlight 16B", "no layout: 27 blocks on 2 stages"), ("even", 2, 1), ("Et*14|t*13L", 2, 1)
    ),
    Mended(
        *(5884, "Qwen3.5-VL 397B", "no layout: 60 blocks on 8 stages"),
        ("even", 8, 1),
        ("Et*4|(t*8|)*6t*8L", 8, 1),
    ),
)
"""Pull requests of August 2026, by number."""


@dataclass(frozen=True)
class Recipe:
    """A recipe's degrees, batch and layout. `source`: below src/megatron/bridge."""

    model: str
    source: str
    gpus: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    virtual: int
    mini_batch: int
    sequence: int
    layout: str
    recompute: str = "none"

    @property
    def options(self) -> dict[str, Any]:
        """Of the training and the machine."""
        return {
            "gpus": self.gpus,
            "topology": "dgx-h100",
            "mini_batch": self.mini_batch,
            "sequence": self.sequence,
        }


_LLAMA_70B = "Etttt|(tttt|)*18ttttL"
_LLAMA_405B = "Et|(tt|)*62tL"
RECIPES = (
    Recipe("Llama 3 70B", "perf_recipes/llama/h100/llama3.py", 64, 4, 4, 2, 1, 5, 256, 8192, _LLAMA_70B),
    Recipe("Llama 3 70B", "perf_recipes/llama/h100/llama3.py", 32, 4, 4, 1, 1, 5, 32, 4096, _LLAMA_70B),
    Recipe(
        "Llama 3.1 405B", "perf_recipes/llama/h100/llama31.py", 512, 8, 8, 2, 1, 8, 768, 8192, _LLAMA_405B
    ),
    Recipe(
        "Llama 3.1 405B", "perf_recipes/llama/h100/llama31.py", 1024, 8, 8, 2, 1, 8, 1536, 8192, _LLAMA_405B
    ),
    Recipe(
        *("Qwen3 235B-A22B", "perf_recipes/qwen/h100/qwen3_moe.py", 256, 2, 8, 1, 32, 4, 8192, 4096),
        "Ett|(ttt|)*30ttL",
    ),
    Recipe(
        *("DeepSeek-V3", "perf_recipes/deepseek/h100/deepseek_v3.py", 1024, 2, 8, 1, 64, 4, 16384, 4096),
        *("Et|(tt|)*30mL", "selective"),
    ),
    Recipe(
        *("DeepSeek-V3", "recipes/deepseek/h100/deepseek_v3.py", 1024, 2, 16, 1, 64, 1, 4096, 4096),
        f"{SIXTEEN}mL",
    ),
    Recipe(
        *("DeepSeek-V3", "recipes/deepseek/h100/deepseek_v3.py", 256, 2, 8, 1, 32, 1, 4096, 4096),
        *("Et*8|(t*8|)*6t*5mL", "full"),
    ),
    Recipe(
        *("Kimi K2", "perf_recipes/kimi/h100/kimi_k2.py", 1024, 8, 16, 1, 64, 2, 8192, 4096),
        *("Et|(tt|)*30L", "selective"),
    ),
    Recipe(
        *("Kimi K2", "recipes/kimi/h100/kimi_k2.py", 512, 2, 16, 1, 32, 1, 4096, 4096),
        *(f"{SIXTEEN}L", "selective"),
    ),
)
"""What splits with the embedding and the loss counted as blocks is written as the layout that it makes."""


def check_mended() -> Iterator[tuple[Mended, tuple[str, ...], tuple[str, ...]]]:
    """Of each what lint finds before and after."""
    for own in MENDED:
        found = [
            pplan.lint(layout, MODELS[own.model], pp=(pipeline,), virtual_stages=(virtual,)).problems
            for layout, pipeline, virtual in (own.before, own.after)
        ]
        yield own, found[0], found[1]


def cost(recipe: Recipe, *, any_degrees: bool) -> dict[str, Any]:
    """Seconds of a step and bytes: of the recipe, with its recomputation and with any; of the best layout at
    its degrees and micro-batches, and, with `any_degrees`, of the best of all; `refused`: why none."""
    degrees: dict[str, Any] = {
        "tp": (recipe.tensor,),
        "cp": (recipe.context,),
        "ep": (recipe.expert,),
        "pp": (recipe.pipeline,),
    }
    return {
        "model": recipe.model,
        "source": recipe.source,
        "gpus": recipe.gpus,
        "layout": recipe.layout,
        "recipe": _cost_layout(recipe, degrees, recipe.recompute),
        "any recomputation": _cost_layout(recipe, degrees, "auto"),
        "same degrees": _best(recipe, {**degrees, "micro_batch_size": (1,)}),
        **({"any degrees": _best(recipe, {})} if any_degrees else {}),
    }


def _cost_layout(recipe: Recipe, degrees: dict[str, Any], recompute: str) -> dict[str, Any]:
    try:
        report = pplan.lint(
            recipe.layout,
            MODELS[recipe.model],
            **recipe.options,
            **degrees,
            virtual_stages=(recipe.virtual,),
            micro_batch_size=(1,),
            recompute=recompute,
        )
    except UsageError as error:
        return {"refused": error.what}
    if report.plan is None:
        return {"refused": "; ".join(report.problems)}
    return {"fits": report.fits, **_figures(report.plan)}


def _best(recipe: Recipe, degrees: dict[str, Any]) -> dict[str, Any]:
    predictors = recipe.layout.count("m")
    try:
        best = search_configuration(MODELS[recipe.model], **recipe.options, **degrees, predictors=predictors)
    except (InfeasibleError, UsageError) as error:
        return {"refused": error.what}
    plan = best.plans[0]
    return {"gap": best.gap, "degrees": plan.degrees.describe(), **_figures(plan)}


def _figures(plan: Any) -> dict[str, Any]:
    return {
        "step": plan.estimate.step_seconds,
        "bytes": plan.estimate.peak_bytes,
        "recompute": plan.setting.recompute,
        "virtual": plan.setting.virtual_stages,
        "size": plan.micro_batch_size,
    }


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--costs", action="store_true", help="cost the recipes, which takes some minutes")
    parser.add_argument("--any-degrees", action="store_true", help="and search all degrees, which takes long")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="only the recipes of these")
    parser.add_argument("--results", type=Path, help="keep the costs, a JSON object a line")
    chosen = parser.parse_args()
    if chosen.costs:
        for recipe in RECIPES:
            if chosen.models and recipe.model not in chosen.models:
                continue
            row = cost(recipe, any_degrees=chosen.any_degrees)
            print(json.dumps(row, default=str), flush=True)
            if chosen.results:
                with chosen.results.open("a") as file:
                    file.write(json.dumps(row, default=str) + "\n")
        return 0
    wrong = 0
    for own, before, after in check_mended():
        wrong += not before or bool(after)
        print(f"#{own.request} {own.model}, {own.what}: {'; '.join(before) or 'NOTHING FOUND'}")
        print(f"    after: {'; '.join(after) or 'right'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

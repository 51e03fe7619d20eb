"""What degrees that differ from stage to stage gain: python benchmarks/stage_degrees.py [--only WORDS]

Models as their config.json has them, on servers of 8 H100 (`--topology dgx-h100`) and on A100s of 40 GiB in
one server, with batches of 8 sequences of 4,096 tokens a GPU. Of each the fastest plan with equal degrees in
1F1B, the fastest of any schedule that `pplan solve` knows (interleaved 1F1B, one stage), and the fastest
1F1B pipeline with degrees by stage, faster than the first by `gain`, with its gap to the bound of all such
pipelines, its stages as devices x blocks, and the processor's seconds of that search. Seconds are estimates
of one cost model, from the GPU's limits.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from pplan.api.degrees import search_configuration

LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
GEMMA = {**LLAMA, "vocab_size": 256000, "num_attention_heads": 16}
CONFIGS: dict[str, Any] = {
    "Llama 3 8B": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "Llama 3 70B": LLAMA,
    "like Gemma 2 9B": {
        **GEMMA,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
    },
    "like Gemma 2 27B": {
        **GEMMA,
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_hidden_layers": 46,
    },
    "Mixtral 8x7B": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Moonlight 16B": {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
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
}
H100, A100 = {"topology": "dgx-h100"}, {"gpu": "a100-40gb"}
CASES: tuple[tuple[str, int, dict[str, str]], ...] = (
    ("Llama 3 8B", 8, H100),
    ("Llama 3 8B", 16, H100),
    ("Llama 3 8B", 8, A100),
    ("like Gemma 2 9B", 8, A100),
    ("like Gemma 2 27B", 16, H100),
    ("Llama 3 70B", 24, H100),
    ("Llama 3 70B", 32, H100),
    ("Llama 3 70B", 64, H100),
    ("Mixtral 8x7B", 16, H100),
    ("Moonlight 16B", 16, H100),
)


def compare(model: str, gpus: int, machine: dict[str, str]) -> str:
    """One row of the table."""
    options: dict[str, Any] = {"gpus": gpus, "mini_batch": 8 * gpus, **machine}
    every = search_configuration(CONFIGS[model], **options).plans[0].estimate.step_seconds
    same = search_configuration(CONFIGS[model], **options, virtual_stages=(1,)).plans[0].estimate.step_seconds
    begin = time.process_time()
    answer = search_configuration(CONFIGS[model], **options, virtual_stages=(1,), by_stage=True).by_stage
    seconds = time.process_time() - begin
    assert answer is not None
    name = f"{model}, {gpus} {'H100' if machine == H100 else 'A100'}"
    if answer.plan is None:
        gap, text = same / answer.bound_seconds - 1, "none is faster"
        return f"| {name} | {same:.3f} | {every:.3f} | - | - | {gap:.1%} | {text} | {seconds:.1f} |"
    step = answer.plan.estimate.step_seconds
    gap, gain = step / answer.bound_seconds - 1, same / step - 1
    text = ", ".join(
        f"{own.devices.size} x {len(own.blocks)} ({own.devices.degrees.describe()})"
        for own in answer.plan.stages
    )
    figures = f"{same:.3f} | {every:.3f} | {step:.3f} | {gain:.1%} | {gap:.1%}"
    return f"| {name} | {figures} | {text} | {seconds:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name has these words")
    chosen = parser.parse_args()
    print("| case | equal, 1F1B | equal, any | by stage | gain | gap | stages | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for model, gpus, machine in CASES:
        if chosen.only in model:
            print(compare(model, gpus, machine), flush=True)


if __name__ == "__main__":
    main()

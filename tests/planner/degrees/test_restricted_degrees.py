"""What a search of few degrees finds is no plan that the search of all misses: its answer is never below the
bound of all, nor, where that is optimal, below the step of all; and what fits in it fits in all."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pplan import InfeasibleError, UsageError
from pplan.api.degrees import search_configuration
from pplan.planner.degrees.degree_search import DegreeAnswer
from pplan.planner.plan_degrees import SAME


def random_config(random: Random) -> dict[str, Any]:
    """Of odd numbers of heads and blocks, with dense layers, experts, or experts behind dense layers."""
    heads = random.choice((4, 6, 8, 12))
    width = random.choice((32, 64, 128))
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": heads * width,
        "intermediate_size": random.choice((2, 3, 4)) * heads * width,
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([own for own in (1, 2, 3, 4, 6) if heads % own == 0]),
        "num_hidden_layers": random.randint(2, 9),
        "vocab_size": random.choice((1000, 32003, 128256)),
    }
    number = random.choice((4, 6, 8))
    if random.random() < 0.4:
        config |= {"model_type": "mixtral", "num_local_experts": number, "num_experts_per_tok": 2}
    elif random.random() < 0.4:
        config |= {
            "model_type": "qwen3_moe",
            "num_experts": number,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 96,
            "mlp_only_layers": [0],
        }
    return config


def random_options(random: Random) -> dict[str, Any]:
    gpus = random.choice((2, 3, 4, 6, 8))
    options: dict[str, Any] = {
        "gpus": gpus,
        "gpu": random.choice(("h100", "a100-40gb", "b200")),
        "mini_batch": gpus * random.choice((1, 2, 3, 4)),
        "sequence": random.choice((512, 1024, 8192)),
        "memory_bytes": int(2 ** random.uniform(30.3, 33.5)),
    }
    if random.random() < 0.5:
        options["bandwidth"] = (10 ** random.uniform(9, 12), 10 ** random.uniform(8.5, 11))
        options["gpus_per_node"] = random.choice([own for own in (1, 2, 3, 4) if gpus % own == 0])
    if random.random() < 0.3:
        options["zero"] = random.choice(((0, 1), (1, 3), (0, 1, 2, 3)))
    return options


def random_restriction(random: Random, gpus: int) -> dict[str, Any]:
    divisors = [number for number in range(1, gpus + 1) if gpus % number == 0]
    values = {"tp": divisors, "pp": divisors, "ep": divisors, "micro_batch_size": (1, 2, 4)}
    fixed = {name: random.choice(own) for name, own in values.items() if random.random() < 0.5}
    if random.random() < 0.5:
        fixed["virtual_stages"] = random.choice((1, 1, 2, 3))
    recompute = random.choice(("auto", "none", "selective", "partial", "full"))
    return {"fix": fixed, "recompute": recompute}


def answer_of(config: dict[str, Any], options: dict[str, Any]) -> DegreeAnswer | None:
    """None where nothing fits, or divides."""
    try:
        return search_configuration(config, **options)
    except (InfeasibleError, UsageError):
        return None


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 1)) for seed in range(24)]
)
def test_no_restriction_finds_what_all_degrees_miss(seed: int) -> None:
    random = Random(seed)
    config, options = random_config(random), random_options(random)
    every = answer_of(config, options)
    for _ in range(4):
        own = answer_of(config, options | random_restriction(random, options["gpus"]))
        if own is None:
            continue
        assert every is not None
        step = own.plans[0].estimate.step_seconds
        assert step >= every.bound_seconds * (1 - 1e-9)
        if every.gap <= SAME:
            assert step >= every.plans[0].estimate.step_seconds * (1 - 2 * SAME)

"""The degrees of rules of thumb, against all that they choose from."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest

import pplan
from pplan.api.degrees import search_configuration
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.training_setting import TrainingSetting
from pplan.cost_models.transformer.training_step import estimate_step
from pplan.planner.degrees.degree_combinations import list_combinations, options_to_allow
from pplan.planner.degrees.degree_options import DegreeOptions

MODEL = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 24,
    "vocab_size": 128256,
}


def test_the_grid_is_the_fastest_of_its_trials() -> None:
    """Of every tensor degree, number of stages, size of micro-batches and recomputation."""
    answer = search_configuration(MODEL, gpus=8, gpu="a100-40gb", mini_batch=32, zero=(1, 3))
    grid = next(own.plan for own in answer.baselines if own.name == "grid")
    assert grid is not None
    steps = []
    for tensor, stages, size, recompute in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), ("none", "full")):
        data = 8 // (tensor * stages)
        if not data or 32 % (data * size):
            continue
        setting = TrainingSetting(32 // data // size, Tokens(4096, size), recompute)  # type: ignore[arg-type]
        own = estimate_step(answer.shape, ParallelDegrees(tensor, 1, 1, stages, data), setting, answer.costs)
        if own.peak_bytes <= answer.limit_bytes:
            steps.append(own.step_seconds)
    assert grid.estimate.step_seconds == pytest.approx(min(steps), rel=1e-12)
    by_name = {baseline.name: baseline.plan for baseline in answer.baselines}
    assert by_name["data-parallel"] is None  # all states on every device have no room
    sharded = by_name["fsdp"]
    assert sharded is not None
    assert (sharded.degrees.data, sharded.degrees.zero) == (8, 3)
    for baseline in answer.baselines:
        if baseline.plan is not None:
            assert answer.plans[0].estimate.step_seconds <= baseline.plan.estimate.step_seconds * (1 + 1e-12)
            assert baseline.plan.estimate.peak_bytes <= answer.limit_bytes


@pytest.mark.slow
def test_megatrons_rule_adds_stages_where_a_node_is_too_small() -> None:
    """36 billion parameters need more than eight devices of 40 GiB; 6 billion do not."""
    large = {**MODEL, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    large["num_hidden_layers"] = 40
    few: dict[str, Any] = {"gpus": 32, "mini_batch": 32, "tp": (8,), "virtual_stages": (1,)}
    answer = search_configuration(large, gpu="a100-40gb", **few)
    rule = next(own.plan for own in answer.baselines if own.name == "megatron")
    assert rule is not None
    assert rule.degrees.tensor == 8
    assert rule.degrees.pipeline > 1
    assert (rule.micro_batch_size, rule.recompute) == (1, "none")
    by_name = {own.name: own for own in answer.baselines}
    assert by_name["data-parallel"].plan is None
    assert "fit" in by_name["data-parallel"].reason
    small = search_configuration(MODEL, gpu="h100", **few)
    rule = next(own.plan for own in small.baselines if own.name == "megatron")
    assert rule is not None
    assert rule.degrees.pipeline == 1


EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4}
RESTRICTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": (2,), "recompute": "full"},
    {"pp": (1, 2), "zero": (0, 3), "micro_batch_size": (2,)},
    {"cp": (1,), "ep": (1, 4), "virtual_stages": (2, 4), "recompute": "partial"},
)


@pytest.mark.parametrize("restricted", RESTRICTIONS)
def test_the_options_that_would_allow_a_plan(restricted: dict[str, Any]) -> None:
    """Of every combination: none where it is among those that are tried; with them it is."""
    shape = transformer_shape({**MODEL, **EXPERTS}, "small").with_blocks(14)
    options = DegreeOptions(mini_batch=8, sequence=8192, **restricted)
    free = DegreeOptions(mini_batch=8, sequence=8192, zero=(0, 1, 2, 3))
    tried = set(list_combinations(shape, 4, options))
    every = list(list_combinations(shape, 4, free))
    assert tried < set(every)
    for one in every:
        changes: Any = options_to_allow(shape, one, options)
        assert (one in tried) == (not changes)
    for one in Random(0).sample(every, 5):
        changes = options_to_allow(shape, one, options)
        assert one in set(list_combinations(shape, 4, replace(options, **changes)))


def test_a_note_says_what_allows_a_faster_baseline() -> None:
    """With it none is faster any more."""
    options: dict[str, Any] = {"gpus": 8, "gpu": "h100", "mini_batch": 32, "layers": 2}
    notes = pplan.solve(MODEL, **options, zero=1).notes
    (note,) = (text for text in notes if "baseline" in text)
    assert note.endswith("not among what is allowed: DP 8, ZeRO 3; allow it with zero=(1, 3)")
    for allowed in (options, {**options, "zero": (1, 3)}):
        notes = pplan.solve(MODEL, **allowed).notes
        assert not any("baseline" in text for text in notes)

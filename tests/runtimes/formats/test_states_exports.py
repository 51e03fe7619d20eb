"""Precision, gradients and ZeRO of a plan in the words of each runtime, and what a runtime does not train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pplan.cost_models.errors import ExportError
from pplan.planner.plan_file import Plan
from pplan.runtimes.exports import export

MakePlan = Callable[..., Plan]
SPREAD: dict[str, Any] = {"precision": "mixed", "gradient_dtype": "fp32", "zero": 1}


def exported(runtime: str, plan: Plan, **keys: Any) -> Any:
    document, _ = export(runtime, plan.model_copy(update=keys))
    return document


@pytest.fixture
def plan(make_decoder_plan: MakePlan) -> Plan:
    """Two stages of two replicas, profiled in bfloat16."""
    return make_decoder_plan([5, 7], replicas=2, dtype="bfloat16", schedule="1f1b")


def test_deepspeed_has_zero_1_and_its_gradients(plan: Plan) -> None:
    config = exported("deepspeed", plan, **SPREAD).config
    assert config["zero_optimization"] == {"stage": 1}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    without = exported("deepspeed", plan, **SPREAD | {"zero": 0, "gradient_dtype": "bf16"}).config
    assert "zero_optimization" not in without
    assert without["data_types"] == {"grad_accum_dtype": "bf16"}


def test_megatrons_distributed_optimizer(plan: Plan) -> None:
    assert "--use-distributed-optimizer" in exported("megatron", plan, **SPREAD).arguments
    assert "--grad-reduce-in-bf16" not in exported("megatron", plan, **SPREAD).arguments
    without = exported("megatron", plan, precision="mixed", gradient_dtype="bf16").arguments
    assert "--use-distributed-optimizer" not in without
    assert "--grad-reduce-in-bf16" in without
    overrides = exported("megatron-bridge", plan, **SPREAD).arguments
    assert "ddp.use_distributed_optimizer=true" in overrides
    assert "ddp.grad_reduce_in_fp32=true" in overrides


def test_pytorchs_trainers_shard_over_the_replicas(plan: Plan) -> None:
    assert exported("torch", plan, **SPREAD).zero == 1
    assert exported("torch", plan).zero == 0
    arguments = exported("torchtitan", plan, **SPREAD).arguments
    degree = {name: arguments[arguments.index(name) + 1] for name in arguments if name.endswith("_degree")}
    assert degree["--parallelism.data_parallel_shard_degree"] == "2"
    assert degree["--parallelism.data_parallel_replicate_degree"] == "1"
    assert exported("nemo-automodel", plan, **SPREAD).sections["distributed"]["dp_replicate_size"] == 1


@pytest.mark.parametrize(
    ("runtime", "keys", "says"),
    [
        ("deepspeed", SPREAD | {"zero": 2}, "ZeRO-2: its pipeline engine runs ZeRO stage 1 only"),
        ("torch", SPREAD | {"zero": 3}, "gathers weights again and again"),
        ("megatron", SPREAD | {"zero": 3}, "its distributed optimizer"),
        (
            "megatron",
            {"precision": "bf16"},
            "it trains in pure bf16, megatron keeps float32 master weights",
        ),
    ],
)
def test_what_a_runtime_does_not_train(plan: Plan, runtime: Any, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ExportError, match=says):
        exported(runtime, plan, **keys)

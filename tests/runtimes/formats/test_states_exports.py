"""Precision, gradients and ZeRO of a plan in the words of each runtime, and what a runtime does not train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pplan.cost_models.document import MadeBy
from pplan.cost_models.errors import ExportError
from pplan.planner.plan_file import Plan
from pplan.runtimes import deepspeed, torch_pipelining
from pplan.runtimes.formats import megatron_export, nemo_export, torchtitan_export

MakePlan = Callable[..., Plan]
SPREAD: dict[str, Any] = {"precision": "mixed", "gradient_dtype": "fp32", "zero": 1}


def exported(runtime: Any, plan: Plan, **keys: Any) -> Any:
    document, _ = runtime.export(plan.model_copy(update=keys), device="cuda", made_by=MadeBy())
    return document


@pytest.fixture
def plan(make_decoder_plan: MakePlan) -> Plan:
    """Two stages of two replicas, profiled in bfloat16."""
    return make_decoder_plan([5, 7], replicas=2, dtype="bfloat16", schedule="1f1b")


def test_deepspeed_has_zero_1_and_its_gradients(plan: Plan) -> None:
    config = exported(deepspeed, plan, **SPREAD).config
    assert config["zero_optimization"] == {"stage": 1}
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    without = exported(deepspeed, plan, **SPREAD | {"zero": 0, "gradient_dtype": "bf16"}).config
    assert "zero_optimization" not in without
    assert without["data_types"] == {"grad_accum_dtype": "bf16"}


def test_megatrons_distributed_optimizer(plan: Plan) -> None:
    assert "--use-distributed-optimizer" in exported(megatron_export, plan, **SPREAD).arguments
    assert "--grad-reduce-in-bf16" not in exported(megatron_export, plan, **SPREAD).arguments
    without = exported(megatron_export, plan, precision="mixed", gradient_dtype="bf16").arguments
    assert "--use-distributed-optimizer" not in without
    assert "--grad-reduce-in-bf16" in without
    document, _ = megatron_export.export_bridge(
        plan.model_copy(update=SPREAD), device="cuda", made_by=MadeBy()
    )
    assert "ddp.use_distributed_optimizer=true" in document.arguments
    assert "ddp.grad_reduce_in_fp32=true" in document.arguments


def test_pytorchs_trainers_shard_over_the_replicas(plan: Plan) -> None:
    assert exported(torch_pipelining, plan, **SPREAD).zero == 1
    assert exported(torch_pipelining, plan).zero == 0
    arguments = exported(torchtitan_export, plan, **SPREAD).arguments
    degree = {name: arguments[arguments.index(name) + 1] for name in arguments if name.endswith("_degree")}
    assert degree["--parallelism.data_parallel_shard_degree"] == "2"
    assert degree["--parallelism.data_parallel_replicate_degree"] == "1"
    assert exported(nemo_export, plan, **SPREAD).sections["distributed"]["dp_replicate_size"] == 1


@pytest.mark.parametrize(
    ("runtime", "keys", "says"),
    [
        (deepspeed, SPREAD | {"zero": 2}, "ZeRO-2: its pipeline engine runs ZeRO stage 1 only"),
        (torch_pipelining, SPREAD | {"zero": 3}, "gathers weights again and again"),
        (megatron_export, SPREAD | {"zero": 3}, "its distributed optimizer"),
        (
            megatron_export,
            {"precision": "bf16"},
            "it trains in pure bf16, megatron keeps float32 master weights",
        ),
    ],
)
def test_what_a_runtime_does_not_train(plan: Plan, runtime: Any, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ExportError, match=says):
        exported(runtime, plan, **keys)

"""Degrees of parallelism as Megatron-LM's arguments."""

from __future__ import annotations

from math import gcd

from ..planner.degrees.degree_search import DegreeAnswer, DegreePlan
from ..runtimes.formats.megatron_export import write_layout


def megatron_arguments(answer: DegreeAnswer, plan: DegreePlan) -> list[str]:
    """What `pretrain_gpt.py` takes besides the model and the data."""
    degrees = plan.degrees
    flags: dict[str, object] = {
        "--num-layers": sum(plan.blocks),
        "--seq-length": answer.options.sequence,
        "--micro-batch-size": plan.micro_batch_size,
        "--global-batch-size": answer.options.batch_size,
        "--tensor-model-parallel-size": degrees.tensor,
        "--pipeline-model-parallel-size": degrees.pipeline,
    }
    if len(set(plan.blocks)) > 1:
        flags["--pipeline-model-parallel-layout"] = write_layout(plan.blocks)
    if degrees.context > 1:
        flags["--context-parallel-size"] = degrees.context
        flags["--cp-comm-type"] = "a2a"
    if degrees.expert > 1:
        flags["--expert-model-parallel-size"] = degrees.expert
        flags["--expert-tensor-parallel-size"] = 1
    if plan.recompute == "full":
        flags["--recompute-granularity"] = "full"
        flags["--recompute-method"] = "uniform"
        flags["--recompute-num-layers"] = gcd(*plan.blocks)
    words = ["--bf16"]
    if degrees.tensor > 1:
        words.append("--sequence-parallel")
    if degrees.zero:
        words.append("--use-distributed-optimizer")
    return [str(part) for flag in flags.items() for part in flag] + words

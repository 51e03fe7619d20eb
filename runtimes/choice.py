"""What a runtime is given: the plan itself where it runs it, or the best alternative in the plan's file."""

from __future__ import annotations

from dataclasses import dataclass

from ..cost_models.errors import ExportError
from ..cost_models.runtime import Runtime, runtime_named
from ..planner.plan_file import Alternative, Plan, Recompute

STRAIGHT = frozenset({"naive", "gpipe", "1f1b", "dapple"})
"""Schedules of one stage a device that run a mini-batch whole before the next: they differ in order only."""


@dataclass(frozen=True)
class Choice:
    """A partition that the runtime runs, every stage on the same number of `replicas`.

    `devices` are the stages' in turn, each stage's replicas together.
    """

    balance: tuple[int, ...]
    replicas: int
    devices: tuple[int, ...]
    micro_batches: int
    micro_batch_size: int
    recompute: Recompute
    step_seconds: float


def choose(plan: Plan, runtime: Runtime) -> tuple[Choice, str | None]:
    """The plan, or the least step_seconds of its alternatives that `runtime` runs, and then a remark on it.

    Where one process drives all stages, a plan that was not made for such a runtime gives way to the
    alternative that was: only that one counts all launches.

    The remark is a sentence for standard error: what was taken, its step time, and why not the plan.
    Raises ExportError where there is nothing to take.
    """
    reasons = refusals(plan, runtime)
    usable = [alternative for alternative in plan.alternatives if _runs_alternative(runtime, alternative)]
    if not reasons and not (usable and _leaves_out_launches(plan, runtime)):
        return _of_plan(plan), None
    if not usable:
        raise ExportError(
            f"{runtime.name} cannot run this plan of {plan.model}: {'; '.join(reasons)}; "
            f"and none of the plan's {len(plan.alternatives)} alternatives is for {runtime.name}",
            f"Make a plan for it: pplan solve --runtime {runtime.name}",
        )
    best = min(usable, key=lambda alternative: alternative.step_seconds)
    if reasons:
        why = f"{runtime.name} cannot run the plan itself: {'; '.join(reasons)}"
    elif _same_cuts(plan, best):
        return _of_alternative(best), None
    else:
        why = f"The plan's step leaves out that {runtime.name} launches all stages from one process"
    return _of_alternative(best), _remark(plan, runtime, why, best)


def _leaves_out_launches(plan: Plan, runtime: Runtime) -> bool:
    """Whether `runtime` drives all stages from one process and the plan was made for none that does."""
    return runtime.one_process and (plan.runtime is None or not runtime_named(plan.runtime).one_process)


def _same_cuts(plan: Plan, other: Alternative) -> bool:
    return (plan.balance, plan.micro_batches, plan.recompute, plan.schedule) == (
        other.balance,
        other.micro_batches,
        other.recompute,
        other.schedule,
    )


def refusals(plan: Plan, runtime: Runtime) -> list[str]:
    """Why `runtime` cannot run the plan itself, one clause each; empty where it can."""
    replicas = plan.replicas
    reasons = []
    if plan.virtual_stages > 1:
        reasons.append(f"it has {plan.virtual_stages} virtual stages a device, {runtime.name} runs 1")
    if not _runs_schedule(plan, runtime):
        reasons.append(f"its schedule is {plan.schedule}, {runtime.name} runs {_listed(runtime.schedules)}")
    if not runtime.runs_replicas(replicas):
        allowed = "no replicas" if runtime.replicas == "none" else "the same number of them on every stage"
        reasons.append(
            f"its stages have {'-'.join(map(str, replicas))} replicas, {runtime.name} runs {allowed}"
        )
    elif plan.micro_batch_size % replicas[0]:
        reasons.append(f"its {replicas[0]} replicas cannot share {plan.micro_batch_size} samples evenly")
    per_node = plan.gpus_per_node
    nodes = {device // per_node for stage in plan.stages for device in stage.devices} if per_node else {0}
    if runtime.one_process and len(nodes) > 1:
        reasons.append(f"it takes {len(nodes)} nodes, {runtime.name} is one process on one node")
    untrained = [i for i, stage in enumerate(plan.stages) if stage.memory.get("gradients") == 0]
    if untrained and runtime.trains_every_stage:
        reasons.append(f"stage {untrained[0]} has no parameters, {runtime.name} trains every stage")
    if plan.recompute not in runtime.recompute:
        reasons.append(f"it recomputes {plan.recompute}, {runtime.name} knows {_listed(runtime.recompute)}")
    return reasons


def _runs_schedule(plan: Plan, runtime: Runtime) -> bool:
    if plan.schedule in runtime.schedules:
        return True
    if plan.schedule not in STRAIGHT:
        return False
    if plan.micro_batches == 1:
        return True  # one forward, then one backward, on every stage: all these orders are the same
    # One stage takes as long in any of them. 1F1B keeps one micro-batch in flight, GPipe all of them: that
    # is right only where the memory is not limited.
    return len(plan.stages) == 1 and (
        "1f1b" in runtime.schedules or plan.stages[0].memory_limit_bytes is None
    )


def _runs_alternative(runtime: Runtime, alternative: Alternative) -> bool:
    return (
        runtime.name in alternative.runtimes
        and alternative.schedule in runtime.schedules
        and alternative.recompute in runtime.recompute
    )


def _of_plan(plan: Plan) -> Choice:
    return Choice(
        balance=tuple(plan.balance),
        replicas=plan.replicas[0],
        devices=tuple(device for stage in plan.stages for device in stage.devices),
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        recompute=plan.recompute,
        step_seconds=plan.prediction.step_seconds,
    )


def _of_alternative(alternative: Alternative) -> Choice:
    return Choice(
        balance=tuple(alternative.balance),
        replicas=1,
        devices=tuple(range(len(alternative.balance))),
        micro_batches=alternative.micro_batches,
        micro_batch_size=alternative.micro_batch_size,
        recompute=alternative.recompute,
        step_seconds=alternative.step_seconds,
    )


def _remark(plan: Plan, runtime: Runtime, why: str, taken: Alternative) -> str:
    balance = ",".join(map(str, taken.balance))
    return (
        f"{why}. Exported instead its best "
        f"alternative for {runtime.name}: balance {balance}, schedule {taken.schedule}, "
        f"{taken.micro_batches} micro-batches of {taken.micro_batch_size}, recompute {taken.recompute}, "
        f"{taken.step_seconds:.4g} s a step (the plan: {plan.prediction.step_seconds:.4g} s)."
    )


def _listed(words: frozenset[str]) -> str:
    return ", ".join(sorted(words))

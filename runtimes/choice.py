"""The choice of what a runtime is given: the plan itself, or the best alternative in its file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from ..cost_models.errors import ExportError
from ..cost_models.memory import recompute_kinds
from ..cost_models.quantities import format_count
from ..cost_models.runtime import Runtime, find_runtime
from ..planner.plan_file import BUFFER_WARNING, Plan, PlanRow
from .trainer_words import INSTEAD
from .transformer_blocks import FirstBlocksError, NotBlocksError, count_first_blocks, find_blocks

LINEAR = frozenset({"naive", "gpipe", "1f1b", "dapple"})
"""Schedules of one stage a device that run one global batch before the next: they differ in order only."""


def choose(plan: Plan, runtime: Runtime) -> tuple[PlanRow, str | None]:
    """The plan, or the least step_seconds of its alternatives that `runtime` runs, and then a remark on it.

    Where one process drives all stages, or a stage has buffers for all micro-batches, a plan that was not
    made for such a runtime gives way to the alternative that was: only that one counts them.

    The remark is a sentence for standard error: what was taken, its step time, and why not the plan; or what
    of the runtime the plan, which was taken, does not count.
    Raises ExportError where there is nothing to take.
    """
    if refusal := runtime.refuse_outputs(plan.profile.undivided_outputs):
        raise ExportError(*refusal)
    reasons = refusals(plan, runtime)
    usable = [alternative for alternative in plan.alternatives if _runs_alternative(runtime, alternative)]
    uncounted = _uncounted(plan, runtime)
    if not reasons and not (usable and uncounted):
        return plan.row, _misfit_remark(plan, runtime) if uncounted else None
    if not usable:
        count = format_count(len(plan.alternatives), "alternative")
        lacks = (
            f"none of its {count} is for {runtime.name}" if plan.alternatives else "it has no alternatives"
        )
        raise ExportError(
            f"{runtime.name} cannot run this plan of {plan.model}: {'; '.join(reasons)}; and {lacks}",
            f"Make a plan for it: pplan.solve(runtime={runtime.name!r})",
        )
    best = min(usable, key=lambda alternative: alternative.step_seconds)
    if reasons:
        why = f"{runtime.name} cannot run the plan itself: {'; '.join(reasons)}"
    elif _same_cuts(plan, best):
        return best, None
    else:
        why = f"{runtime.name} {uncounted}"
    return best, _remark(plan, runtime, why, best)


def _uncounted(plan: Plan, runtime: Runtime) -> str:
    """What `runtime` does and the plan, made for another or for any, does not count; empty for nothing."""
    made_for = None if plan.runtime is None else find_runtime(plan.runtime)
    if runtime.one_process and not (made_for and made_for.one_process):
        return "launches all stages from one process, which the plan's step does not count"
    # The alternative is of these schedules: it is the plan itself where that fits with the buffers. A stage
    # without neighbours has none.
    ahead = made_for is not None and made_for.receives_ahead
    counts = plan.schedule not in LINEAR or ahead or len(plan.stages) == 1
    if runtime.receives_ahead and not counts:
        return "has buffers for all micro-batches of a step, which the plan's memory does not count"
    return ""


def _misfit_remark(plan: Plan, runtime: Runtime) -> str | None:
    """The plan's own warning that it does not fit with the runtime's buffers, where no alternative does."""
    if not runtime.receives_ahead:
        return None
    text = next((own for own in plan.warnings if own.startswith(BUFFER_WARNING)), None)
    return None if text is None else f"{text[:1].upper()}{text[1:]}."


def _same_cuts(plan: Plan, other: PlanRow) -> bool:
    return (plan.balance, plan.micro_batches, plan.recompute, plan.schedule) == (
        other.balance,
        other.micro_batches,
        other.recompute,
        other.schedule,
    )


def refusals(plan: Plan, runtime: Runtime) -> list[str]:
    """Why `runtime` cannot run the plan itself, one clause each; empty where it can."""
    modes, first_blocks = stage_recompute(plan), list[str]()
    kinds = recompute_kinds(modes)
    if runtime.first_blocks and "first_layers" in kinds:
        first_blocks = _other_first_blocks(plan, runtime, modes)
        modes, kinds = ("always",), {"always"}
    reasons = list(
        runtime.find_problems(
            min(runtime.schedules) if _runs_schedule(plan, runtime) else plan.schedule,
            modes,
            kinds,
            plan.replicas,
            virtual_stages=plan.virtual_stages,
            micro_batch_size=plan.micro_batch_size,
        )
    )
    nodes = _nodes(plan)
    if runtime.one_process and len(set(nodes)) > 1:
        reasons.append(f"it takes {len(set(nodes))} nodes, {runtime.name} is one process on one node")
    if not runtime.one_process and nodes != sorted(nodes):
        reasons.append(f"its stages go back and forth between nodes, {runtime.name} fills node after node")
    untrained = [i for i, stage in enumerate(plan.stages) if stage.memory.get("gradients") == 0]
    if untrained and runtime.trains_every_stage:
        reasons.append(f"nothing in stage {untrained[0]} is trained, {runtime.name} trains every stage")
    return [*reasons, *first_blocks, *_other_states(plan, runtime), *_shared_weights(plan, runtime)]


def _other_first_blocks(plan: Plan, runtime: Runtime, modes: Sequence[str]) -> list[str]:
    """The reason, where the stages do not all run the same number of first blocks again."""
    ends = list(accumulate(stage.layers for stage in plan.stages))
    try:
        count_first_blocks(find_blocks(plan.layer_names), ends, modes)
    except (NotBlocksError, FirstBlocksError) as error:
        return [f"{error}, in {runtime.name} all stages run the same number of whole blocks again"]
    return []


def _other_states(plan: Plan, runtime: Runtime) -> Iterator[str]:
    """Reasons, where the runtime keeps other weights and optimizer states than the plan counts."""
    if max(plan.replicas) > 1 and plan.zero not in runtime.zero:
        yield f"it spreads states by ZeRO-{plan.zero}: {runtime.no_zero}"
    if plan.training_precision.name == "bf16" and runtime.own_optimizer:
        yield f"it trains in pure bf16, {runtime.name} keeps float32 master weights"


def _shared_weights(plan: Plan, runtime: Runtime) -> Iterator[str]:
    """Reasons, where stages share weights that the runtime keeps on one."""
    for weight in plan.tied:
        if not runtime.shares_weight(weight.stages, len(plan.stages) - 1):
            stages = " and ".join(map(str, weight.stages))
            yield f"its stages {stages} share {weight.tensor}, {runtime.name}: {runtime.no_tied}"
            return


def _nodes(plan: Plan) -> list[int]:
    """The node of each device of the pipeline, in the order of its stages."""
    per_node, places = plan.gpus_per_node, len(plan.stages) // plan.virtual_stages
    devices = [device for stage in plan.stages[:places] for device in stage.devices]
    return [device // per_node for device in devices] if per_node else [0]


def stage_recompute(plan: Plan) -> tuple[str, ...]:
    """The recomputation of each stage: its own, or the plan's."""
    return tuple(stage.recompute or plan.recompute for stage in plan.stages)


def _runs_schedule(plan: Plan, runtime: Runtime) -> bool:
    if runtime.runs(plan.schedule):
        return True
    if plan.schedule not in LINEAR:
        return False
    if plan.micro_batches == 1:
        return True  # one forward, then one backward, on every stage: all these orders are the same
    # One stage takes as long in any of them. 1F1B keeps one micro-batch in flight, GPipe all of them: that
    # is right only where the memory is not limited.
    return len(plan.stages) == 1 and (
        "1f1b" in runtime.schedules or plan.stages[0].memory_limit_bytes is None
    )


def _runs_alternative(runtime: Runtime, alternative: PlanRow) -> bool:
    modes = alternative.part_recompute
    problems = runtime.find_problems(
        alternative.schedule,
        modes,
        recompute_kinds(modes),
        alternative.replicas,
        virtual_stages=alternative.virtual_stages,
        micro_batch_size=alternative.micro_batch_size,
    )
    return runtime.name in alternative.runtimes and not any(problems)


def _remark(plan: Plan, runtime: Runtime, why: str, other: PlanRow) -> str:
    balance = ",".join(map(str, other.balance))
    replicas = f" of {other.replicas[0]} replicas" if other.replicas[0] > 1 else ""
    return (
        f"{why}{INSTEAD} its best "
        f"alternative for {runtime.name}: balance {balance}{replicas}, schedule {other.schedule}, "
        f"{other.batch}, "
        f"recompute {other.recompute}, {other.step_seconds:.4g} s a step "
        f"(the plan: {plan.prediction.step_seconds:.4g} s)."
    )

"""What a runtime is given: the plan itself where it runs it, or the best alternative in the plan's file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ...cost_models.errors import ExportError
from ...cost_models.first_layers import recompute_kind, recompute_kinds
from ...cost_models.quantities import format_count
from ...cost_models.runtime import OFFLOAD, Runtime, find_runtime
from ...planner.plan_file import Plan
from ...planner.plan_records import BUFFER_WARNING, Alternative
from .export_document import hash_layers
from .first_blocks import FirstBlocksError, count_first_blocks
from .transformer_blocks import NotBlocksError, find_blocks

INSTEAD = ". Exported instead"
"""What of a remark follows the reason."""
LINEAR = frozenset({"naive", "gpipe", "1f1b", "dapple"})
"""Schedules of one stage a device that run one global batch before the next: they differ in order only."""


@dataclass(frozen=True)
class Choice:
    """A partition that the runtime runs, every stage on the same number of `replicas`.

    `balance` is by part: the stages, of which a device holds `virtual_stages`. `devices` are those of the
    pipeline in turn, each one's replicas together. `stage_recompute` is by part.
    """

    balance: tuple[int, ...]
    replicas: int
    devices: tuple[int, ...]
    schedule: str
    virtual_stages: int
    micro_batches: int
    micro_batch_size: int
    stage_recompute: tuple[str, ...]
    step_seconds: float

    @property
    def recompute(self) -> str:
        """The recomputation of all stages, for a runtime whose stages recompute alike."""
        return self.stage_recompute[0]


def document_fields(plan: Plan, choice: Choice, runtime: str) -> dict[str, Any]:
    """The fields that the document of every runtime has, but `made_by`."""
    return {
        "runtime": runtime,
        "model": plan.model,
        "layers_sha256": hash_layers(plan),
        "mini_batch": choice.micro_batches * choice.micro_batch_size,
        "micro_batch_size": choice.micro_batch_size,
        "step_seconds": choice.step_seconds,
    }


def choose(plan: Plan, runtime: Runtime) -> tuple[Choice, str | None]:
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
        return _plan_choice(plan), _misfit_remark(plan, runtime) if uncounted else None
    if not usable:
        raise ExportError(
            f"{runtime.name} cannot run this plan of {plan.model}: {'; '.join(reasons)}; "
            f"and {_no_alternative(plan, runtime)}",
            f"Make a plan for it: pplan.solve(runtime={runtime.name!r})",
        )
    best = min(usable, key=lambda alternative: alternative.step_seconds)
    if reasons:
        why = f"{runtime.name} cannot run the plan itself: {'; '.join(reasons)}"
    elif _same_cuts(plan, best):
        return _alternative_choice(best), None
    else:
        why = f"{runtime.name} {uncounted}"
    return _alternative_choice(best), _remark(plan, runtime, why, best)


def _no_alternative(plan: Plan, runtime: Runtime) -> str:
    if not plan.alternatives:
        return "it has no alternatives"
    if len(plan.alternatives) == 1:
        return f"its only alternative is not for {runtime.name}"
    return f"none of the plan's {len(plan.alternatives)} alternatives is for {runtime.name}"


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
    if plan.virtual_stages > 1 and not runtime.virtual_stages:
        reasons.append(f"it has {plan.virtual_stages} virtual stages a device, {runtime.name} runs 1")
    if not _runs_schedule(plan, runtime):
        reasons.append(
            f"its schedule is {plan.schedule}, {runtime.name} runs {_join_words(runtime.schedules)}"
        )
    if not runtime.runs_replicas(replicas):
        allowed = "no replicas" if runtime.replicas == "none" else "the same number of them on every stage"
        reasons.append(
            f"its stages have {'-'.join(map(str, replicas))} replicas, {runtime.name} runs {allowed}"
        )
    elif plan.micro_batch_size % replicas[0]:
        reasons.append(f"its {replicas[0]} replicas cannot share {plan.micro_batch_size} samples evenly")
    nodes = _nodes(plan)
    if runtime.one_process and len(set(nodes)) > 1:
        reasons.append(f"it takes {len(set(nodes))} nodes, {runtime.name} is one process on one node")
    if not runtime.one_process and nodes != sorted(nodes):
        reasons.append(f"its stages go back and forth between nodes, {runtime.name} fills node after node")
    untrained = [i for i, stage in enumerate(plan.stages) if stage.memory.get("gradients") == 0]
    if untrained and runtime.trains_every_stage:
        reasons.append(f"stage {untrained[0]} has no parameters, {runtime.name} trains every stage")
    reasons += _other_states(plan, runtime)
    reasons += _shared_weights(plan, runtime)
    reasons += _other_recomputation(plan, runtime)
    return reasons


def _other_recomputation(plan: Plan, runtime: Runtime) -> list[str]:
    """Reasons, where the runtime does not recompute what the plan's stages do."""
    own, reasons = stage_recompute(plan), list[str]()
    words = dict.fromkeys(own)
    if runtime.first_blocks and "first_layers" in recompute_kinds(own):
        ends = list(accumulate(stage.layers for stage in plan.stages))
        try:
            count_first_blocks(find_blocks(plan.layer_names), ends, own)
        except (NotBlocksError, FirstBlocksError) as error:
            return [f"{error}, in {runtime.name} all stages run the same number of whole blocks again"]
        return []
    if len(words) > 1 and not runtime.recompute_by_stage:
        reasons.append(f"its stages recompute {' and '.join(words)}, in {runtime.name} all do the same")
    unknown = [word for word in map(recompute_kind, words) if word not in runtime.recompute]
    if unknown:
        does = "offloads to the host's memory" if unknown[0] == OFFLOAD else f"recomputes {unknown[0]}"
        reasons.append(f"it {does}, {runtime.name} knows {_join_words(runtime.recompute)}")
    return reasons


def _other_states(plan: Plan, runtime: Runtime) -> Iterator[str]:
    """Reasons, where the runtime keeps other weights and optimizer states than the plan counts."""
    if max(plan.replicas) > 1 and plan.zero not in runtime.zero:
        yield f"it spreads states by ZeRO-{plan.zero}: {runtime.no_zero}"
    if plan.training_precision.name == "bf16" and not runtime.pure_16_bits:
        yield f"it trains in pure bf16, {runtime.name} keeps float32 master weights"


def _shared_weights(plan: Plan, runtime: Runtime) -> Iterator[str]:
    """Reasons, where stages share weights that the runtime keeps on one."""
    for weight in plan.tied:
        is_at_ends = weight.stages == [0, len(plan.stages) - 1]
        if not (runtime.tied == "any" or (runtime.tied == "ends" and is_at_ends)):
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


def _runs_alternative(runtime: Runtime, alternative: Alternative) -> bool:
    words = _recompute_modes(alternative)
    return (
        runtime.name in alternative.runtimes
        and alternative.schedule in runtime.schedules
        and runtime.runs_replicas([alternative.replicas])
        and alternative.micro_batch_size % alternative.replicas == 0
        and (runtime.virtual_stages or alternative.virtual_stages == 1)
        and runtime.recompute.issuperset(recompute_kinds(words))
        and (runtime.recompute_by_stage or len(set(words)) == 1)
    )


def _recompute_modes(alternative: Alternative) -> tuple[str, ...]:
    """The recomputation of each stage of an alternative."""
    return tuple(alternative.stage_recompute or [alternative.recompute] * len(alternative.balance))


def _plan_choice(plan: Plan) -> Choice:
    places = len(plan.stages) // plan.virtual_stages
    return Choice(
        balance=tuple(stage.layers for stage in plan.stages),
        replicas=plan.replicas[0],
        devices=tuple(device for stage in plan.stages[:places] for device in stage.devices),
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        micro_batches=plan.micro_batches,
        micro_batch_size=plan.micro_batch_size,
        stage_recompute=stage_recompute(plan),
        step_seconds=plan.prediction.step_seconds,
    )


def _alternative_choice(alternative: Alternative) -> Choice:
    devices = len(alternative.balance) // alternative.virtual_stages * alternative.replicas
    return Choice(
        balance=tuple(alternative.balance),
        replicas=alternative.replicas,
        devices=tuple(range(devices)),
        schedule=alternative.schedule,
        virtual_stages=alternative.virtual_stages,
        micro_batches=alternative.micro_batches,
        micro_batch_size=alternative.micro_batch_size,
        stage_recompute=_recompute_modes(alternative),
        step_seconds=alternative.step_seconds,
    )


def _remark(plan: Plan, runtime: Runtime, why: str, other: Alternative) -> str:
    balance = ",".join(map(str, other.balance))
    replicas = f" of {other.replicas} replicas" if other.replicas > 1 else ""
    return (
        f"{why}{INSTEAD} its best "
        f"alternative for {runtime.name}: balance {balance}{replicas}, schedule {other.schedule}, "
        f"{format_count(other.micro_batches, 'micro-batch')} of {other.micro_batch_size}, "
        f"recompute {other.recompute}, {other.step_seconds:.4g} s a step "
        f"(the plan: {plan.prediction.step_seconds:.4g} s)."
    )


def _join_words(words: frozenset[str]) -> str:
    return ", ".join(sorted(words))

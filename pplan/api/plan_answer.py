"""The answer of a plan in sentences: what it is the best of, the global batch, what stays free."""

from __future__ import annotations

from ..cost_models.number_format import compare_steps, three_digits
from ..cost_models.quantities import format_count, format_seconds
from ..cost_models.runtime import find_runtime
from ..planner.pipeline_config import ANY_SCHEDULE, INTERLEAVED
from ..planner.plan_file import Plan
from ..planner.plan_records import TIE, Aim, Alternative, Baseline, DefaultMiniBatch, OtherMiniBatch
from .plan_summary import objective_value

OBJECTIVES = {
    "memory": "needs the least memory",
    "cost": "is the cheapest",
    "robust": "is the fastest at the 90th percentile",
    "slow-devices": "has the shortest mean step with slow devices",
}


def answer_lines(plan: Plan) -> list[str]:
    """The answer in one line, and the lines that qualify it; a faster baseline stands in the first two."""
    answer, *further_lines = _answer(plan)
    unsearched = _unsearched_lines(plan)
    return [answer, *unsearched, *_batch_lines(plan), *further_lines]


def _answer(plan: Plan) -> list[str]:
    what = _describe_shape(plan)
    if plan.objective is not None:
        return [_objective_answer(plan, plan.objective, what)]
    rival = _faster_baseline(plan)
    figures = _figures(plan.prediction.step_seconds, plan.prediction.samples_per_second)
    if plan.is_fixed_partition:
        return [f"{what} as given: {figures}."]
    if plan.is_replanned:
        return [f"{what} moves the fewest weights of the {plan.searched}: {figures}."]
    if rival is None or rival.name not in _UNPIPELINED:
        lines = [f"{what} is the fastest{_scope_text(plan)}: {figures}."]
    else:
        lines = [_rival_answer(plan, rival), f"This plan is {_lower_first(what).rstrip(',')}: {figures}."]
    if plan.gpus is not None and plan.device_count < plan.gpus:
        lines.append(_unused_devices_line(plan, plan.device_count, plan.gpus))
    return lines


def _objective_answer(plan: Plan, aim: Aim, what: str) -> str:
    scope = "" if aim.exact else " of those scored"
    step = format_seconds(plan.prediction.step_seconds)
    best = OBJECTIVES.get(aim.name, f"is the best for {aim.name}")
    return f"{what} {best}{scope}: {objective_value(aim)}; {step} a step."


def _lower_first(what: str) -> str:
    return what.replace("A pipeline", "a pipeline").replace("Data", "data").replace("One ", "one ")


def _devices(plan: Plan, number: int) -> str:
    """`4 GPUs`; where several share every layer `4 groups of 2 GPUs`."""
    sharers = plan.profile.tensor_parallel
    if sharers > 1:
        return f"{format_count(number, 'group')} of {sharers} {plan.device_kind}s"
    return format_count(number, plan.device_kind)


def _describe_shape(plan: Plan) -> str:
    used = plan.device_count
    stages, chunks = len(plan.stages) // plan.virtual_stages, plan.virtual_stages
    if len(plan.stages) > 1:
        chunks_text = f", {chunks} virtual stages on each," if chunks > 1 else ""
        return f"A pipeline of {format_count(stages, 'stage')} over {_devices(plan, used)}{chunks_text}"
    if used > 1:
        return f"Data parallelism over {_devices(plan, used)}"
    return f"One {plan.device_kind}" if plan.profile.tensor_parallel == 1 else f"One {_devices(plan, 1)[2:]}"


def _scope_text(plan: Plan) -> str:
    """The set of plans of which this one is the fastest: other schedules, or ways to recompute, may be faster
    that were not in the running."""
    within = f" that {plan.runtime} can run" if plan.runtime else ""
    return f"{within} of the plans {_looked_at(plan)}"


def _planner(plan: Plan) -> str | None:
    """The named planner whose proposals alone were in the running."""
    return None if plan.options.planner == "best" else plan.options.planner


def _looked_at(plan: Plan) -> str:
    """Whether the plan is the best of all that were in the running."""
    if (planner := _planner(plan)) is not None:
        return f"that the planner {planner} proposes"
    return "searched" if plan.prediction.exact else "scored"


def _figures(step: float, samples_per_second: float) -> str:
    return f"{format_seconds(step)} a step, {three_digits(samples_per_second)} samples/s"


def _rival_answer(plan: Plan, rival: Baseline) -> str:
    on = f" over {_devices(plan, plan.gpus)}" if rival.name == "data-parallel" and plan.gpus else ""
    step = rival.step_seconds or 0.0
    unable = rival.name == "data-parallel" and plan.runtime and plan.gpus and not _replicates(plan)
    reason = f"{plan.runtime} does not run it" if unable else "the options given leave it out"
    otherwise = ", run otherwise," if _describe_shape(plan) == f"{_rival(plan, rival)}{on}" else ""
    figures = _figures(step, plan.mini_batch / step)
    return f"{_rival(plan, rival)}{on}{otherwise} is faster: {figures}; {reason}."


def _unsearched_lines(plan: Plan) -> list[str]:
    """A line on the fastest alternative under a schedule that was not searched, if it beats the plan."""
    step = plan.prediction.step_seconds
    others = [row for row in plan.alternatives if row.schedule == INTERLEAVED and row.step_seconds < step]
    if not others or plan.objective is not None or plan.device_count != plan.gpus:
        return []  # a line on unused devices names it
    best = min(others, key=lambda row: row.step_seconds)
    return [
        f"An {INTERLEAVED} pipeline would take {format_seconds(best.step_seconds)} "
        f"({compare_steps(best.step_seconds, step)}). This schedule was not searched: "
        f"use schedule={ANY_SCHEDULE!r}."
    ]


def _rival(plan: Plan, rival: Baseline) -> str:
    return "Data parallelism" if rival.name == "data-parallel" else f"One {plan.device_kind}"


def _replicates(plan: Plan) -> bool:
    return find_runtime(plan.runtime or "").runs_replicas([plan.gpus or 1])


def _unused_devices_line(plan: Plan, used: int, available: int) -> str:
    """A line on devices that stay unused, with the step of a plan on all of them that is easily made."""
    on_all = [
        (other.step_seconds, f"a straight {other.schedule} pipeline")
        for other in plan.alternatives
        if other.replicas == other.virtual_stages == 1
        and len(other.balance) == available
        and _may_run(plan, other)
    ]
    on_all += [
        (base.step_seconds, "data parallelism")
        for base in plan.baselines
        if base.name == "data-parallel" and base.step_seconds is not None and plan.runtime is None
    ]
    # A faster one is not for this plan's options: it may not stand here as the price of using all.
    slower = [row for row in on_all if row[0] >= plan.prediction.step_seconds]
    uses = f"It uses {used} of the {_devices(plan, available)}"
    runtime = None if plan.runtime is None else find_runtime(plan.runtime)
    if runtime is not None and runtime.one_process and used == plan.gpus_per_node:
        return f"{uses}: {runtime.name} reaches those of one node."
    if (other := _faster_alternative(plan, used)) is not None:
        return f"{uses}; one of its alternatives, {other.schedule}, takes {_step(other)} on {_used(other)}."
    none = f"{uses}: of the plans {_looked_at(plan)} none is faster on more"
    if not slower:
        return f"{none} of them."
    step, what = min(slower)
    return f"{none}; {what} on all {available} takes {format_seconds(step)} a step."


def _faster_alternative(plan: Plan, used: int) -> Alternative | None:
    """The fastest of the alternatives of a plan for any runtime that take more devices than it, where that is
    faster."""
    if plan.runtime is not None:
        return None
    limit = plan.prediction.step_seconds * (1 - TIE)
    faster = [other for other in plan.alternatives if other.step_seconds < limit and _used(other) > used]
    return min(faster, key=lambda other: other.step_seconds, default=None)


def _used(other: Alternative) -> int:
    """Devices that an alternative takes."""
    return len(other.balance) // other.virtual_stages * other.replicas


def _step(other: Alternative) -> str:
    return f"{format_seconds(other.step_seconds)} a step"


def _may_run(plan: Plan, other: Alternative) -> bool:
    return plan.runtime is None or not other.runtimes or plan.runtime in other.runtimes


def _faster_baseline(plan: Plan) -> Baseline | None:
    """The fastest baseline that beats the plan: the options held the search away from it. None under an
    objective other than the step, and for a plan that was not searched."""
    if plan.objective is not None or plan.is_fixed_partition or plan.is_replanned:
        return None
    limit = plan.prediction.step_seconds * (1 - TIE)
    faster = [base for base in plan.baselines if base.step_seconds is not None and base.step_seconds < limit]
    return min(faster, key=lambda base: base.step_seconds or 0.0, default=None)


_UNPIPELINED = ("data-parallel", "one-gpu")


def _batch_lines(plan: Plan) -> list[str]:
    """Lines on how the global batch was chosen where none was given, with the steps of half and twice of
    it."""
    default = plan.default_mini_batch
    if default is None:
        return []
    samples, samples_per_gpu = default.samples_per_device, plan.mini_batch / (plan.gpus or 1)
    about = "" if samples_per_gpu == samples else "about "
    sharers, kind = plan.profile.tensor_parallel, plan.device_kind
    device = kind if sharers == 1 else f"group of {sharers} {kind}s"
    each = f"{about}{format_count(samples, 'sample')} a {device}"
    rule = f"Global batch {plan.mini_batch}, {each}, as none was given"
    return [f"{rule}; {_other_batches(default)}."]


def _other_batches(default: DefaultMiniBatch) -> str:
    if not default.others:
        return "half and twice of it were not tried (`mini_batch` sets another)"
    return "; ".join(_other_batch(other) for other in default.others) + " (`mini_batch`)"


def _other_batch(other: OtherMiniBatch) -> str:
    if other.step_seconds is None or other.samples_per_second is None:
        return f"with {other.mini_batch}: no plan was found"
    step, rate = format_seconds(other.step_seconds), three_digits(other.samples_per_second)
    return f"with {other.mini_batch}: {step}, {rate} samples/s"

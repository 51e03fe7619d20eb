"""The figures of a plan in sentences: step, batch, training, search space, and what was proven of them."""

from __future__ import annotations

from ..cost_models.optimizers import find_optimizer
from ..cost_models.quantities import (
    compare_steps,
    describe_gap,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    percent,
    three_digits,
    whole_percent,
)
from ..cost_models.runtime import OFFLOAD, find_runtime
from ..planner.candidate import ANY_SCHEDULE, INTERLEAVED
from ..planner.plan_file import (
    TIE,
    Aim,
    Alternative,
    Baseline,
    DefaultMiniBatch,
    OtherMiniBatch,
    Plan,
    Prediction,
)


def short_summary(plan: Plan) -> list[str]:
    """The step, what it is made of, and its proof with the plans that it is about."""
    return [*_figures(plan), _proof(plan)]


def summary_lines(plan: Plan) -> list[str]:
    """The same with the searched space where the proof is about other plans, and the devices."""
    lines = short_summary(plan)
    if plan.searched not in ("", plan.prediction.bound_covers) and not plan.is_fixed_partition:
        lines.append(f"Searched: {plan.searched}")
    if plan.topology:
        lines.append(f"Devices: {plan.topology}")
    return lines


def _figures(plan: Plan) -> list[str]:
    prediction = plan.prediction
    interval = step_interval(prediction)
    return [
        f"Step {format_seconds(prediction.step_seconds)}{f' ({interval})' if interval else ''}, "
        f"{three_digits(prediction.samples_per_second)} samples/s, bubble {percent(prediction.bubble)}.",
        f"{batch_equation(plan)}; schedule {plan.schedule}; recompute {_recompute(plan)}; "
        f"optimizer {plan.optimizer}{_update(prediction)}{_states(plan)}.",
    ]


def _update(prediction: Prediction) -> str:
    """What is known of the optimizer's own step."""
    least = prediction.optimizer_seconds
    return f" (its own step{'' if least is None else f', {format_seconds(least)} or more,'} not counted)"


def _recompute(plan: Plan) -> str:
    """The plan's word; where stages offload, of the others, and how many do."""
    words = [stage.recompute for stage in plan.stages]
    offload = words.count(OFFLOAD)
    if not offload:
        return plan.recompute.replace("_", "-")
    others = {word or plan.recompute for word in words} - {OFFLOAD}
    word = "never" if others <= {"never"} else "selective"
    many = f"{offload} of {len(words)} stages offload" + ("s" if offload == 1 else "")
    rate = plan.options.host_bandwidth
    return f"{word}, {many} to the host" + (f" at {format_rate(rate)}" if rate else "")


def batch_equation(plan: Plan) -> str:
    """`Global batch 256 = 32 micro-batches x 8 replicas x 1`."""
    replicas = max(plan.replicas) if len(set(plan.replicas)) == 1 else 1
    return f"Global batch {describe_batch(plan.mini_batch, plan.micro_batch_size, replicas)}"


def describe_batch(mini_batch: int, micro_batch_size: int, replicas: int) -> str:
    """`256 = 32 micro-batches x 8 replicas x 1`; of replicas that do not share evenly `256 = 32
    micro-batches x 8`."""
    batch = f"{mini_batch} = {format_count(mini_batch // micro_batch_size, 'micro-batch')}"
    if replicas > 1 and micro_batch_size % replicas == 0:
        return f"{batch} x {replicas} replicas x {micro_batch_size // replicas}"
    return f"{batch} x {micro_batch_size}"


def _states(plan: Plan) -> str:
    """The training precision, where the plan names it: `; mixed precision, bf16 gradients, ...`."""
    if plan.precision is None or (plan.precision in ("fp32", "fp64") and not plan.zero):
        return ""
    precision = plan.training_precision
    size = precision.bytes_per_parameter(find_optimizer(plan.optimizer))
    name = {"mixed": "mixed precision", "bf16": "pure bf16"}.get(precision.name, precision.name)
    gradients = f", {precision.gradient_dtype} gradients" if precision.name == "mixed" else ""
    spread = f"; ZeRO-{plan.zero} over the replicas of a stage" if plan.zero else ""
    return f"; {name}{gradients}: {size:.3g} bytes a parameter{spread}"


def step_interval(prediction: Prediction) -> str:
    """Return the widest interval of the step that is known, as `80 % interval 12.1 to 12.9 ms`.

    There are two: that of draws of the layers' times, and the error of their sum against the whole model.
    Empty where neither is known, or where it would print as the step itself.
    """
    step, error = prediction.step_seconds, prediction.uncertainty or 0.0
    low, high = prediction.low_seconds, prediction.high_seconds
    if low is None or high is None or high - low < 2 * error * step:
        return f"± {whole_percent(error)}" if error >= _LEAST_ERROR else ""
    first, last = format_seconds(low), format_seconds(high)
    if first == last == format_seconds(step):
        return ""
    number, unit = first.split()
    # The step is that of median layers. With many stages, one of them is late in most steps.
    late = ": some stage is late in most steps" if low > step and first != format_seconds(step) else ""
    return f"80 % interval {number if last.endswith(f' {unit}') else first} to {last}{late}"


_LEAST_ERROR = 0.01
"""Error of the layers' sum from which on it is printed."""


def _proof(plan: Plan) -> str:
    if plan.is_fixed_partition:
        return "No other partition was looked at: pplan solve finds the best."
    if plan.objective is not None:
        return _objective_proof(plan, plan.objective)
    prediction = plan.prediction
    covers = f" ({prediction.bound_covers})" if prediction.bound_covers else ""
    if prediction.exact:
        return f"Optimal in the search space{covers}: none of these plans is faster."
    bound = format_seconds(prediction.lower_bound_seconds)
    return f"Best found; {describe_gap(prediction.gap, bound)}{covers}."


def _objective_proof(plan: Plan, aim: Aim) -> str:
    """The bound on what is aimed at, and on the step: each with the plans that it is about."""
    bound = f"is faster than {format_seconds(plan.prediction.lower_bound_seconds)} a step"
    step = f"none of these plans {bound}"
    if not aim.lower_bound:
        covers = f" ({plan.prediction.bound_covers})" if plan.prediction.bound_covers else ""
        return f"Best found; not proven: {aim.detail}. Proven: no plan of the search space{covers} {bound}."
    about = "; ".join(part for part in (aim.covers, aim.detail) if part)
    among = f" ({about})" if about else ""
    if aim.exact:
        return f"Optimal in the search space{among}: none of these plans has less. Proven: {step}."
    gap = describe_gap(aim.value / aim.lower_bound - 1, _amount(aim, aim.lower_bound))
    return f"Best found; {gap}{among}. Proven: {step}."


def objective_value(aim: Aim) -> str:
    """The plan's value of its objective."""
    where = " on the fullest device" if aim.unit == "bytes" else ""
    return f"{_amount(aim, aim.value)}{where}"


def _amount(aim: Aim, value: float) -> str:
    if aim.unit == "seconds":
        return format_seconds(value)
    return f"${1e6 * value:.4g} a million samples" if aim.unit == "$/sample" else format_bytes(value)


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
    figures = _step_figures(plan.prediction.step_seconds, plan.prediction.samples_per_second)
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


def _step_figures(step: float, samples_per_second: float) -> str:
    return f"{format_seconds(step)} a step, {three_digits(samples_per_second)} samples/s"


def _rival_answer(plan: Plan, rival: Baseline) -> str:
    on = f" over {_devices(plan, plan.gpus)}" if rival.name == "data-parallel" and plan.gpus else ""
    step = rival.step_seconds or 0.0
    unable = rival.name == "data-parallel" and plan.runtime and plan.gpus and not _replicates(plan)
    reason = f"{plan.runtime} does not run it" if unable else "the options given leave it out"
    otherwise = ", run otherwise," if _describe_shape(plan) == f"{_rival(plan, rival)}{on}" else ""
    figures = _step_figures(step, plan.mini_batch / step)
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
    """Return whether the runtime runs data parallelism on all devices, which share a batch evenly there."""
    gpus = plan.gpus or 1
    return plan.mini_batch % gpus == 0 and find_runtime(plan.runtime or "").runs_replicas([gpus])


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

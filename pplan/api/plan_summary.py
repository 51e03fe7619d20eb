"""The figures of a plan in sentences: step, batch, training, search space, and what was proven of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ..cost_models.optimizers import find_optimizer
from ..cost_models.quantities import (
    compare_steps,
    describe_gap,
    format_amount,
    format_batch,
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
from ..planner.plan_degrees import StageDegrees, TransformerTraining
from ..planner.plan_file import (
    TIE,
    Aim,
    DefaultMiniBatch,
    OtherMiniBatch,
    Plan,
    Prediction,
)


def short_summary(plan: Plan) -> list[str]:
    """Summarize how the plan trains, and what was proven of it, in two sentences."""
    return [f"{_batch_line(plan)}{_chosen_batch(plan)}; {_setting(plan)}.", _proof(plan, with_space=False)]


def summary_lines(plan: Plan) -> list[str]:
    """Add the plans that the proof covers, where the step's time goes, and the devices."""
    lines = [f"{_batch_line(plan)}; {_setting(plan)}.", *_update_lines(plan), _proof(plan, with_space=True)]
    if plan.searched not in ("", plan.prediction.bound_covers) and not plan.is_fixed_partition:
        lines.append(f"Searched: {plan.searched}")
    return [*lines, f"Devices: {plan.topology}"] if plan.topology else lines


def _batch_line(plan: Plan) -> str:
    replicas = [plan.degrees.data] if plan.degrees else plan.replicas
    tokens = f" of {plan.training.sequence} tokens" if plan.training else ""
    return f"Global batch {describe_batch(plan.mini_batch, plan.micro_batch_size, replicas)}{tokens}"


def _setting(plan: Plan) -> str:
    """Describe schedule, recomputation and number formats."""
    schedule = f"{plan.schedule}, bubble {percent(plan.prediction.bubble)}"
    if (training := plan.training) is None:
        least = plan.prediction.optimizer_seconds
        update = "" if least is None else f", {format_seconds(least)} or more,"
        return (
            f"{schedule}; recompute {_recompute(plan)}; {plan.optimizer} (its own step{update} not counted)"
            f"{_states(plan)}"
        )
    from ..cost_models.transformer.weight_update import NUMERIC_FORMATS  # most plans are of a profile

    virtual = f", {plan.virtual_stages} virtual stages a device" if plan.virtual_stages > 1 else ""
    most = max(stage.host_bytes or 0 for stage in plan.stages)
    host = f", up to {format_bytes(most)} a GPU in the host's memory, pinned" if most else ""
    last, predictors = len(plan.stages) - 1, ""
    if training.predictors and plan.degrees:
        count = format_count(training.predictors, "multi-token predictor")
        predictors = f"; {count} on stage {last - plan.degrees.predictor_offset} of 0 to {last}"
    words = f"recompute {_recompute_words(plan)}{host}"
    return f"{schedule}{virtual}; {words}; {NUMERIC_FORMATS}{predictors}"


def _update_lines(plan: Plan) -> list[str]:
    """Split the step of a plan from a configuration into its pipeline and what follows it."""
    if plan.training is None:
        return []
    step, update = plan.prediction.step_seconds, max(stage.update_seconds or 0.0 for stage in plan.stages)
    return [
        f"The pipeline takes {format_seconds(step - update)}, gradients and update {format_seconds(update)}; "
        f"{three_digits(plan.prediction.samples_per_second)} samples/s, "
        f"{format_amount(plan.mini_batch * plan.training.sequence / step)} tokens/s on all GPUs."
    ]


def plan_degrees(plan: Plan) -> list[StageDegrees]:
    """List the degrees of the plan: those of all stages, or of each stage."""
    return [plan.degrees] if plan.degrees else [stage.degrees for stage in plan.stages if stage.degrees]


def describe_degrees(plan: Plan) -> str:
    """Describe the degrees of the plan: `TP 4 x PP 2 x DP 4`, or those of each stage."""
    if plan.degrees is not None:
        return plan.degrees.describe()
    return f"PP {len(plan.stages)} of {', '.join(own.describe() for own in plan_degrees(plan))}"


def plan_setting(plan: Plan) -> str:
    """Describe degrees, micro-batches and recomputation of a plan from a configuration."""
    return f"{describe_degrees(plan)}, {plan.batch}, recompute {_recompute_words(plan)}"


def _recompute_words(plan: Plan) -> str:
    words = dict.fromkeys(own.recompute.replace("_", " ") for own in plan_degrees(plan))
    return " or ".join(words)


def _recompute(plan: Plan) -> str:
    """The plan's word; where stages offload, of the others, and how many do."""
    words = [stage.recompute or plan.recompute for stage in plan.stages]
    if not (offload := words.count(OFFLOAD)):
        return plan.recompute.replace("_", "-")
    word = "never" if set(words) <= {"never", OFFLOAD} else "by stage"
    rate = f" at {format_rate(plan.options.host_bandwidth)}" if plan.options.host_bandwidth else ""
    return f"{word}, {offload} of {len(words)} stages offload{'s' if offload == 1 else ''} to the host{rate}"


def describe_batch(mini_batch: int, micro_batch_size: int, replicas: Sequence[int]) -> str:
    """Describe a global batch; replicas that share micro-batches evenly with their part of one.

    >>> describe_batch(256, 8, [1])
    '256 = 32 micro-batches x 8 per micro-batch'
    >>> describe_batch(256, 8, [4])
    '256 = 32 micro-batches x 8 per micro-batch (4 replicas x 2)'
    >>> describe_batch(256, 8, [3, 1])
    '256 = 32 micro-batches x 8 per micro-batch (3-1 replicas)'
    """
    batch = f"{mini_batch} = {format_batch(mini_batch // micro_batch_size, micro_batch_size)} per micro-batch"
    counts = set(replicas)
    if counts == {1} or (len(counts) > 1 and len(replicas) > _MOST_REPLICAS):
        return batch
    if len(counts) == 1 and micro_batch_size % replicas[0] == 0:
        return f"{batch} ({replicas[0]} replicas x {micro_batch_size // replicas[0]})"
    each = replicas[:1] if len(counts) == 1 else replicas
    return f"{batch} ({'-'.join(map(str, each))} replicas)"


_MOST_REPLICAS = 8
"""Stages whose unequal replicas are listed."""


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

    It includes draws of the layers' times, and the error of their sum against the whole model.
    Empty where neither is known, or where it would print as the step itself.
    """
    step, error = prediction.step_seconds, prediction.uncertainty or 0.0
    low, high = prediction.interval or (step, step)
    if max(step - low, high - step) <= error * step * (1 + 1e-9):
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


def _proof(plan: Plan, *, with_space: bool) -> str:
    """State what was proven of the step and of an objective, `with_space`: each with its plans."""
    if plan.is_fixed_partition:
        return "No other partition was looked at: pplan solve finds the best."
    prediction, aim = plan.prediction, plan.objective
    bound = format_seconds(prediction.lower_bound_seconds)
    covers = f" ({prediction.bound_covers})" if prediction.bound_covers and with_space else ""
    if aim is None and prediction.exact:
        return f"Optimal in the search space{covers}: none of these plans is faster."
    if aim is None:
        return f"Best found; {describe_gap(prediction.gap, bound)}{covers}."
    faster = f"is faster than {bound} a step"
    if not aim.lower_bound:
        return f"Best found; not proven: {aim.detail}. Proven: no plan of the search space{covers} {faster}."
    about = "; ".join(part for part in (aim.covers, aim.detail) if part)
    among, step = f" ({about})" if about and with_space else "", f"Proven: none of these plans {faster}"
    if aim.exact:
        return f"Optimal in the search space{among}: none of these plans has less. {step}."
    gap = describe_gap(aim.value / aim.lower_bound - 1, _amount(aim, aim.lower_bound))
    return f"Best found; {gap}{among}. {step}."


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


def answer_lines(plan: Plan, *, short: bool = False, plan_first: bool = False) -> list[str]:
    """Answer in one line, and qualify it in others; a faster baseline stands in the first two.

    Args:
        plan: The plan.
        short: Leave out how the global batch was chosen.
        plan_first: Begin with the plan, not with a faster baseline.
    """
    answer, *further_lines = _answer(plan)
    if plan_first and further_lines[:1] and further_lines[0].startswith(_THIS_PLAN):
        answer, further_lines = further_lines[0], [answer, *further_lines[1:]]
    batch = [] if short else _batch_lines(plan)
    return [answer, *_unsearched_lines(plan), *batch, *further_lines]


def _degree_answer(plan: Plan, training: TransformerTraining) -> list[str]:
    """Lines with the answer of a plan from a configuration, and its model."""
    step, name = plan.prediction.step_seconds, describe_degrees(plan)
    faster = [
        (base.step_seconds, base.name)
        for base in plan.baselines
        if (base.step_seconds or inf) < step * (1 - TIE)
    ]
    among = f" of those allowed ({min(faster)[1]} is faster)" if faster else ""
    name = f"{name[:1].upper()}{name[1:]}"
    sizes = f"{format_amount(training.parameters)} parameters"
    if training.has_experts:
        sizes += f", of which a token uses {format_amount(training.active_parameters)}"
    source = "seconds and bytes are estimated"
    if (share := training.measured_share) is not None:
        source = (
            f"{whole_percent(share)} of the seconds are measured on {plan.profile.device_name}, the others "
            "and the bytes estimated,"
        )
    return [
        f"{name} is the fastest found{among} on {format_count(plan.device_count, 'GPU')}: "
        f"{_plan_figures(plan)}.",
        f"{plan.model}, {format_count(training.blocks, 'block')}, {sizes}; {source} for "
        f"{training.implementation}'s code.",
    ]


def describe_utilization(prediction: Prediction) -> str:
    """Describe what a GPU computes: `MFU 41.2 %, 129 TFLOP/s and 2650 tokens/s a GPU`; empty if not known."""
    if prediction.mfu is None or prediction.tflops_per_gpu is None:
        return ""
    tokens = format_amount(prediction.tokens_per_second_per_gpu or 0.0)
    flops = three_digits(prediction.tflops_per_gpu)
    return f"MFU {percent(prediction.mfu)}, {flops} TFLOP/s and {tokens} tokens/s a GPU"


def _plan_figures(plan: Plan) -> str:
    """Return the step of the plan with its interval, and what it computes."""
    prediction = plan.prediction
    interval, step = step_interval(prediction), f"{format_seconds(prediction.step_seconds)} a step"
    rate = describe_utilization(prediction) or f"{three_digits(prediction.samples_per_second)} samples/s"
    return f"{step}{f' ({interval})' if interval else ''}, {rate}"


def _answer(plan: Plan) -> list[str]:
    if plan.training is not None:
        return _degree_answer(plan, plan.training)
    what, prediction, aim = _describe_shape(plan), plan.prediction, plan.objective
    if aim is not None:
        best = OBJECTIVES.get(aim.name, f"is the best for {aim.name}")
        scope = "" if aim.exact else " of those scored"
        value = _amount(aim, aim.value) + (" on the fullest device" if aim.unit == "bytes" else "")
        return [f"{what} {best}{scope}: {value}; {_plan_figures(plan)}."]
    figures = _plan_figures(plan)
    if plan.is_fixed_partition:
        return [f"{what} as given: {figures}."]
    if plan.is_replanned:
        return [f"{what} moves the fewest weights of the {plan.searched}: {figures}."]
    limit = prediction.step_seconds * (1 - TIE)
    # The options held the search away from a baseline that is faster.
    faster = [(base.step_seconds, base.name) for base in plan.baselines if (base.step_seconds or inf) < limit]
    within = f" that {plan.runtime} can run" if plan.runtime else ""
    lines = [f"{what} is the fastest{within} of the plans {_looked_at(plan)}: {figures}."]
    if faster and (name := min(faster)[1]) in ("data-parallel", "one-gpu"):
        what = what.replace("A pipeline", "a pipeline").replace("Data", "data").replace("One ", "one ")
        answer = _rival_answer(plan, min(faster)[0] or inf, data_parallel=name == "data-parallel")
        lines = [answer, f"{_THIS_PLAN} {what.rstrip(',')}: {figures}."]
    if plan.gpus is not None and plan.device_count < plan.gpus:
        lines.append(_unused_devices_line(plan, plan.device_count, plan.gpus))
    return lines


_THIS_PLAN = "This plan is"


def _devices(plan: Plan, number: int) -> str:
    """`4 GPUs`; where several share every layer `4 groups of 2 GPUs`."""
    sharers = plan.profile.tensor_parallel
    if sharers > 1:
        return f"{format_count(number, 'group')} of {sharers} {plan.device_kind}s"
    return format_count(number, plan.device_kind)


def _describe_shape(plan: Plan) -> str:
    used, chunks = plan.device_count, plan.virtual_stages
    if len(plan.stages) > 1:
        chunks_text = f", {chunks} virtual stages on each," if chunks > 1 else ""
        stages = format_count(plan.pipeline_stages, "stage")
        return f"A pipeline of {stages} over {_devices(plan, used)}{chunks_text}"
    if used > 1:
        return f"Data parallelism over {_devices(plan, used)}"
    return f"One {_devices(plan, 1)[2:]}"


def _looked_at(plan: Plan) -> str:
    """The plans that were in the running: other schedules, or ways to recompute, may be faster."""
    if plan.options.planner != "best":
        return f"that the planner {plan.options.planner} proposes"
    return "searched" if plan.prediction.exact else "scored"


def _step_figures(step: float, samples_per_second: float) -> str:
    return f"{format_seconds(step)} a step, {three_digits(samples_per_second)} samples/s"


def _rival_answer(plan: Plan, step: float, *, data_parallel: bool) -> str:
    """Data parallelism, or one device, which is faster than the plan, and why it is not the answer."""
    name, reason, gpus = f"One {plan.device_kind}", "the options given leave it out", plan.gpus
    if data_parallel:
        name = f"Data parallelism over {_devices(plan, gpus)}" if gpus else "Data parallelism"
        # Replicas share a batch evenly there.
        uneven = gpus and plan.mini_batch % gpus
        if plan.runtime and gpus and (uneven or not find_runtime(plan.runtime).runs_replicas([gpus])):
            reason = f"{plan.runtime} does not run it"
    otherwise = ", run otherwise," if _describe_shape(plan) == name else ""
    return f"{name}{otherwise} is faster: {_step_figures(step, plan.mini_batch / step)}; {reason}."


def _unsearched_lines(plan: Plan) -> list[str]:
    """A line on the fastest alternative under a schedule that was not searched, if it beats the plan."""
    step = plan.prediction.step_seconds
    steps = [row.step_seconds for row in plan.alternatives if row.schedule == INTERLEAVED]
    if min(steps, default=inf) >= step or plan.objective is not None or plan.device_count != plan.gpus:
        return []  # a line on unused devices names it
    return [
        f"An {INTERLEAVED} pipeline would take {format_seconds(min(steps))} "
        f"({compare_steps(min(steps), step)}). This schedule was not searched: use schedule={ANY_SCHEDULE!r}."
    ]


def _unused_devices_line(plan: Plan, used: int, available: int) -> str:
    """A line on devices that stay unused, with the step of a plan on all of them that is easily made."""
    uses, step = f"It uses {used} of the {_devices(plan, available)}", plan.prediction.step_seconds
    if plan.runtime and find_runtime(plan.runtime).one_process and used == plan.gpus_per_node:
        return f"{uses}: {plan.runtime} reaches those of one node."
    larger = [row for row in plan.alternatives if row.device_count > used and plan.runtime is None]
    other = min(larger, key=lambda row: row.step_seconds, default=None)
    if other is not None and other.step_seconds < step * (1 - TIE):
        figures = f"{format_seconds(other.step_seconds)} a step on {other.device_count}"
        return f"{uses}; one of its alternatives, {other.schedule}, takes {figures}."
    rows = [row for row in plan.alternatives if not row.runtimes or plan.runtime in (None, *row.runtimes)]
    on_all = [
        (row.step_seconds, f"a straight {row.schedule} pipeline")
        for row in rows
        if max(row.replicas) == row.virtual_stages == 1 and len(row.balance) == available
    ]
    on_all += [
        (base.step_seconds or 0.0, "data parallelism")
        for base in plan.baselines
        if base.name == "data-parallel" and plan.runtime is None
    ]
    none = f"{uses}: of the plans {_looked_at(plan)} none is faster on more"
    # A faster one is not for this plan's options: it may not stand here as the price of using all.
    seconds, what = min((row for row in on_all if row[0] >= step), default=(0.0, ""))
    on_all_text = f"; {what} on all {available} takes {format_seconds(seconds)} a step"
    return f"{none}{on_all_text if what else ' of them'}."


def _batch_lines(plan: Plan) -> list[str]:
    """Say how the global batch was chosen where none was given, with the steps of half and twice of it."""
    default = plan.default_mini_batch
    if default is None:
        return []
    others = "half and twice of it were not tried (`mini_batch` sets another)"
    if default.others:
        others = f"{'; '.join(map(_other_batch, default.others))} (`mini_batch`)"
    return [f"Global batch {plan.mini_batch}, {_samples_each(plan, default)}, as none was given; {others}."]


def _samples_each(plan: Plan, default: DefaultMiniBatch) -> str:
    samples, sharers = default.samples_per_device, plan.profile.tensor_parallel
    about = "" if plan.mini_batch / (plan.gpus or 1) == samples else "about "
    device = plan.device_kind if sharers == 1 else f"group of {sharers} {plan.device_kind}s"
    return f"{about}{format_count(samples, 'sample')} a {device}"


def _chosen_batch(plan: Plan) -> str:
    default = plan.default_mini_batch
    return f", {_samples_each(plan, default)} (or set `mini_batch`)" if default else ""


def _other_batch(other: OtherMiniBatch) -> str:
    if other.step_seconds is None or other.samples_per_second is None:
        return f"with {other.mini_batch}: no plan was found"
    step, rate = format_seconds(other.step_seconds), three_digits(other.samples_per_second)
    return f"with {other.mini_batch}: {step}, {rate} samples/s"

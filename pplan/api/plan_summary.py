"""The figures of a plan in sentences: step, batch, training, search space, and what was proven of them."""

from __future__ import annotations

from ..cost_models.number_format import percent, three_digits, whole_percent
from ..cost_models.optimizers import find_optimizer
from ..cost_models.quantities import format_bytes, format_count, format_rate, format_seconds
from ..cost_models.runtime import OFFLOAD
from ..planner.plan_file import Plan
from ..planner.plan_records import Aim, Prediction


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
    return f"Best found; at most {percent(prediction.gap)} from the proven bound of {bound}{covers}."


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
    gap, least = percent(aim.value / aim.lower_bound - 1), _amount(aim, aim.lower_bound)
    return f"Best found; at most {gap} from the proven bound of {least}{among}. Proven: {step}."


def objective_value(aim: Aim) -> str:
    """The plan's value of its objective."""
    where = " on the fullest device" if aim.unit == "bytes" else ""
    return f"{_amount(aim, aim.value)}{where}"


def _amount(aim: Aim, value: float) -> str:
    if aim.unit == "seconds":
        return format_seconds(value)
    return f"${1e6 * value:.4g} a million samples" if aim.unit == "$/sample" else format_bytes(value)

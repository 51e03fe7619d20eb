"""How the mini-batch was chosen where none was given, and what half and twice of it would give."""

from __future__ import annotations

from ..cost_models.quantities import format_seconds
from ..planner.plan_file import DefaultMiniBatch, OtherMiniBatch, Plan
from .figures import three_digits


def default_lines(plan: Plan) -> list[str]:
    """The second line of an answer, where the mini-batch was not given."""
    default = plan.default_mini_batch
    if default is None:
        return []
    samples, each = default.samples_per_device, plan.mini_batch / (plan.gpus or 1)
    about = "" if each == samples else "about "
    rule = f"Mini-batch {plan.mini_batch}, {about}{samples} samples a {plan.device_kind}, as none was given"
    return [f"{rule}; {_others(default)}."]


def _others(default: DefaultMiniBatch) -> str:
    if not default.others:
        return "half and twice of it were not tried (--mini-batch sets another)"
    return "; ".join(_other(other) for other in default.others) + " (--mini-batch)"


def _other(other: OtherMiniBatch) -> str:
    if other.step_seconds is None or other.samples_per_second is None:
        return f"with {other.mini_batch}: no plan"
    step, rate = format_seconds(other.step_seconds), three_digits(other.samples_per_second)
    return f"with {other.mini_batch}: {step}, {rate} samples/s"

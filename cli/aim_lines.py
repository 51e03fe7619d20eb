"""What a plan is the best of, where that is not its step, and what was proven of it, in words."""

from __future__ import annotations

from ..cost_models.quantities import format_bytes, format_seconds
from ..planner.plan_file import Aim, Plan
from .figures import percent

WORDS = {
    "memory": "needs the least memory",
    "cost": "is the cheapest",
    "robust": "is the fastest at the 90th percentile",
}


def aim_line(plan: Plan, aim: Aim, what: str) -> str:
    """The answer: `what` says what the plan is."""
    sure = "" if aim.exact else " of those scored"
    step = format_seconds(plan.prediction.step_seconds)
    return f"{what} {WORDS.get(aim.name, f'is the best for {aim.name}')}{sure}: {_value(aim)}; {step} a step."


def aim_proof(plan: Plan, aim: Aim) -> str:
    """The bound on what is aimed at, and on the step."""
    step = f"faster than {format_seconds(plan.prediction.lower_bound_seconds)} a step"
    if not aim.lower_bound:
        return f"Proven: no plan is {step}. Not proven: {aim.detail}."
    bound = _amount(aim, aim.lower_bound)
    how = "exact" if aim.exact else "not exact"
    gap = f"gap {percent(aim.value / aim.lower_bound - 1)}, {how}"
    of = aim.detail and f" ({aim.detail})"
    among = f" Search space: {aim.covers}." if aim.covers else ""
    return f"Proven: no plan has less than {bound}{of}; {gap}. None is {step}.{among}"


def _value(aim: Aim) -> str:
    where = " on the fullest device" if aim.unit == "bytes" else ""
    return f"{_amount(aim, aim.value)}{where}"


def _amount(aim: Aim, value: float) -> str:
    if aim.unit == "seconds":
        return format_seconds(value)
    return f"${1e6 * value:.4g} a million samples" if aim.unit == "$/sample" else format_bytes(value)

"""Why a plan is as it is, and plans side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from ..cost_models.errors import UsageError
from ..planner.explanation.compare import PlanComparison, compare_plans
from ..planner.explanation.explain_context import make_context
from ..planner.explanation.explanation import Explanation, explain_plan
from ..planner.plan_file import Plan
from ..profiler.profile_file import Profile
from .load import as_plan, check_layers, profile_and_reference
from .machine import planned_machine
from .options import ExplainKeywords, ExplainOptions, options_from


def explain(
    plan: Plan | str | Path,
    profile: Profile | str | Path,
    *,
    progress: Callable[[float], None] | None = None,
    **options: Unpack[ExplainKeywords],
) -> Explanation:
    """Why `plan`, made from `profile`, is as it is, on the machine that it was made for.

    Of the result: `limits` (the critical path, the busiest stage, whether memory forbids a faster plan),
    `second_best` and `other_stages`, `holds` (the bandwidth and the layers' seconds at which another plan
    becomes better) and `what_if` (one more GPU, double the bandwidth or memory, recomputation forced or
    forbidden). `current`: the layers of each stage of a split in use, each on `replicas` devices, with so
    many `micro_batches` and that `schedule` (else the best for it): `current` of the result says why it is
    slower. `progress` is told, as it grows, about which share of the work is done.

    >>> import pplan
    >>> why = pplan.explain("gpt.plan.json", "gpt.profile.json", current=[3, 3, 3])
    >>> f"{why.current.slower:.0%} slower"
    '45% slower'

    Raises UsageError (a profile of other layers, a split that cannot be), FileError.
    """
    (split,) = options_from(options, ExplainOptions, of="explain")
    folder = Path(plan).parent if isinstance(plan, str | Path) else Path()
    plan = as_plan(plan)
    measured_profile, reference = profile_and_reference(profile, "", "")
    check_layers(plan, reference)
    machine, profiles = planned_machine(plan, measured_profile, folder)
    return explain_plan(plan, measured_profile.chain(), machine, profiles, split, progress)


def compare(*plans: Plan | str | Path, profile: Profile | str | Path | None = None) -> PlanComparison:
    """The plans side by side: step, samples/s, bubble, memory, devices and gap of each.

    With the `profile` that the first was made from, what every named planner makes of its problem, too. Of
    the result: `rows`, and `first_slower`, the first plan's seconds a sample over those of the best of the
    others, less 1.

    >>> import pplan
    >>> table = pplan.compare("gpt.plan.json", profile="gpt.profile.json")
    >>> [row.name for row in table.rows[:2]]
    ['gpt.plan.json', 'best']

    Raises UsageError (no plan, a profile of other layers), FileError.
    """
    if not plans:
        raise UsageError("compare: no plan is given", "Give plans, or the paths of their files.")
    plans_by_name = [
        (str(plan) if isinstance(plan, str | Path) else f"plan {number}", as_plan(plan))
        for number, plan in enumerate(plans)
    ]
    if profile is None:
        return compare_plans(plans_by_name)
    first = plans_by_name[0][1]
    measured_profile, reference = profile_and_reference(profile, "", "")
    check_layers(first, reference)
    folder = Path(plans[0]).parent if isinstance(plans[0], str | Path) else Path()
    machine, profiles = planned_machine(first, measured_profile, folder)
    return compare_plans(plans_by_name, make_context(first, measured_profile.chain(), machine, profiles))

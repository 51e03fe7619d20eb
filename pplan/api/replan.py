"""A plan for the devices that are left of another plan's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from ..cost_models.option_fields import describe_options, options_from
from ..cost_models.quantities import format_bytes, format_count, format_seconds
from ..planner.device_loss import ReplannedPlan, replan_problem
from ..planner.explanation.explain_context import make_context
from ..planner.plan_document import plan_without_comparison
from ..planner.plan_file import REPLANNED, Plan
from ..planner.search.branch_and_bound import SearchResult
from ..planner.universal_bound import universal_bound
from ..planner.weight_moves import WeightMove
from ..profiler.profile_file import Profile
from .load import as_plan, check_layers, profile_and_reference
from .machine import planned_machine
from .options import ReplanKeywords, ReplanOptions
from .provenance import made_by


@dataclass(frozen=True)
class Replan:
    """The new `plan`, on the ranks of the old one; the `moves` of weights that it takes, their bytes, those
    of them that come from a checkpoint as no device has them, and the seconds that the rest takes."""

    plan: Plan
    moves: tuple[WeightMove, ...]
    moved_bytes: int
    checkpoint_bytes: int
    move_seconds: float
    fastest_seconds: float


@describe_options(ReplanKeywords, ReplanOptions)
def replan(
    plan: Plan | str | Path, profile: Profile | str | Path, **options: Unpack[ReplanKeywords]
) -> Replan:
    """The plan for the devices of `plan` that are left without those of the ranks `lost`.

    Of the plans with its schedule and global batch whose step is at most the share `within` longer than the
    fastest one's, the one whose devices get the fewest bytes of weights and buffers. Where there are more
    than some 800 plans, those near the old one are looked at. Of the result: `plan`, `moves`,
    `moved_bytes`, `checkpoint_bytes` and `move_seconds`. Optimizer states go the same way, not counted.

    >>> import pplan
    >>> again = pplan.replan("gpt.plan.json", "gpt.profile.json", lost=[3])
    >>> sorted(rank for stage in again.plan.stages for rank in stage.devices)
    [0, 1, 2]

    Raises UsageError (ranks that there are not, none left, a profile of other layers, a schedule of several
    stages a device), InfeasibleError (nothing fits), FileError.
    """
    (own,) = options_from(options, ReplanOptions, of="replan")
    folder = Path(plan).parent if isinstance(plan, str | Path) else Path()
    plan = as_plan(plan)
    measured_profile, reference = profile_and_reference(profile, plan.profile.file, "", plan)
    check_layers(plan, reference)
    machine, profiles = planned_machine(plan, measured_profile, folder)
    context = make_context(plan, measured_profile.chain(), machine, profiles)
    problem = context.problem
    answer = replan_problem(problem, context.present, own.lost, own.within)
    best = answer.plan
    schedules = (*problem.allowed_schedules, best.config.schedule)
    reach = [rank for rank in answer.ranks if rank < problem.usable_gpus]
    bound = universal_bound(problem, schedules, best.step_seconds, reach)
    result = SearchResult(best, bound, bound, exact=False, universal=True)
    if reference.sha256 == plan.profile.sha256:
        reference = plan.profile
    new = plan_without_comparison(problem, best, result, model=plan.model, profile=reference)
    origin = made_by(new.made_by, measured=measured_profile.made_by)
    which, of_these = "", ""
    if not (answer.complete and answer.any_devices):
        which, of_these = " were looked at and", " of these"
    searched = (
        f"{REPLANNED} that{which} are at most {100 * own.within:g} % slower than the fastest{of_these}, "
        f"{format_seconds(answer.fastest_seconds)}"
    )
    notes = _notes(plan, answer, own)
    prediction = new.prediction.model_copy(update={"bound_covers": _on_those_left(new)})
    return Replan(
        plan=new.model_copy(
            update={"searched": searched, "notes": notes, "made_by": origin, "prediction": prediction}
        ),
        moves=answer.moves,
        moved_bytes=answer.moved_bytes,
        checkpoint_bytes=answer.checkpoint_bytes,
        move_seconds=answer.move_seconds,
        fastest_seconds=answer.fastest_seconds,
    )


def _on_those_left(plan: Plan) -> str:
    """Which plans the bound of a plan on fewer devices is of."""
    parts = plan.prediction.bound_covers.split(", ")
    if (every := "on all devices") in parts:
        return ", ".join(f"{every} that are left" if part == every else part for part in parts)
    return ", ".join([*parts, "on the devices that are left"])


def _notes(plan: Plan, answer: ReplannedPlan, options: ReplanOptions) -> list[str]:
    lost = ", ".join(map(str, sorted(set(options.lost))))
    receivers = {move.receiver for move in answer.moves}
    moved = "no weights move"
    if answer.moves:
        moved = f"{format_bytes(answer.moved_bytes)} of weights to {format_count(len(receivers), 'device')}"
    if answer.moved_bytes > answer.checkpoint_bytes:
        moved += f" in {format_seconds(answer.move_seconds)}"
    now, before = map(format_seconds, (answer.plan.step_seconds, plan.prediction.step_seconds))
    name = "device" if len(set(options.lost)) == 1 else "devices"
    notes = [f"without {name} {lost}: {moved}; a step takes {now}, {before} before"]
    if answer.checkpoint_bytes:
        notes.append(
            f"{format_bytes(answer.checkpoint_bytes)} of the weights are on no device that is left: they "
            "come from a checkpoint, whose reading is not timed"
        )
    if not answer.complete:
        notes.append("not all plans were looked at, only those near the old one")
    elif not answer.any_devices:
        notes.append(
            "not all plans were looked at: the devices, or the links between them, are not alike, and stages "
            "take those that are left in rank order, the faster ones first, or those that have most of their "
            "layers"
        )
    return notes

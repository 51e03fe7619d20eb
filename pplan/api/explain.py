"""Why a plan is as it is, plans side by side, and the plan for the devices that are left of another's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from ..cost_models import arguments
from ..cost_models.arguments import Converted, arguments_class, options_from, takes
from ..cost_models.errors import UsageError
from ..cost_models.machines import MachineOptions
from ..cost_models.quantities import format_bytes, format_count, format_seconds
from ..planner.build_plan import plan_without_comparison
from ..planner.candidate import ScoredPlan
from ..planner.device_loss import Replan, replan_problem
from ..planner.explanation.compare import (
    OtherMethod,
    OtherMethodOptions,
    PlanComparison,
    compare_plans,
    list_other_methods,
)
from ..planner.explanation.explain_context import make_context
from ..planner.explanation.explain_options import ExplainOptions
from ..planner.explanation.explanation import Explanation, explain_plan
from ..planner.plan_file import REPLANNED, Plan
from ..planner.plan_options import PlanOptions
from ..planner.search.branch_and_bound import SearchResult
from ..planner.universal_bound import universal_bound
from ..profiler.profile_file import Profile
from .degree_profiles import one_degree
from .load import as_plan, check_layers, profile_and_reference
from .machine import planned_machine
from .provenance import made_by
from .replan_options import ReplanOptions
from .solve import make_problem

PlanOrFile = Plan | str | Path
ProfileOrFile = Profile | str | Path


@arguments_class
class ExplainArguments(ExplainOptions):
    """The arguments of `explain`."""

    plan: PlanOrFile = field(kw_only=False)
    profile: ProfileOrFile = field(kw_only=False)
    progress: Callable[[float], None] | None = None


@arguments_class
class OtherMethodArguments(OtherMethodOptions, PlanOptions, MachineOptions):
    """The arguments of `data_parallel`."""

    profile: ProfileOrFile = field(kw_only=False)


@arguments_class
class ReplanArguments(ReplanOptions):
    """The arguments of `replan`."""

    plan: PlanOrFile = field(kw_only=False)
    profile: ProfileOrFile = field(kw_only=False)
    lost: Converted[Sequence[int], tuple[int, ...]] = field()


@takes(ExplainArguments)
def explain(
    plan: Plan | str | Path,
    profile: Profile | str | Path,
    *,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> Explanation:
    """Why `plan`, made from `profile`, is as it is, on the machine that it was made for.

    Of the result: `limits` (the critical path, the busiest stage, whether memory forbids a faster plan),
    `second_best` and `other_stages`, `holds` (the bandwidth and the layers' seconds at which another plan
    becomes better) and `what_if` (more GPUs, double the bandwidth or memory, recomputation forced or
    forbidden; where the step waits for launches, launches in no time). `current`: the layers of each stage of
    a split in use, each on `replicas` devices, with so many `micro_batches` and that `schedule` (else the
    best for it): `current` of the result says why it is slower. `progress` is told, as it grows, about which
    share of the work is done.

    >>> import pplan
    >>> why = pplan.explain("gpt.plan.json", "gpt.profile.json", current=[3, 3, 3])
    >>> f"{why.current.slower:.0%} slower"
    '45% slower'

    Raises UsageError (a profile of other layers, a split that cannot be), FileError.
    """
    arguments.function("progress", progress)
    (split,) = options_from(options, ExplainOptions, of="explain")
    folder = Path(plan).parent if isinstance(plan, str | Path) else Path()
    plan = as_plan(plan)
    measured_profile, reference = profile_and_reference(profile, "", "", plan)
    check_layers(plan, reference)
    machine, profiles = planned_machine(plan, measured_profile, folder)
    return explain_plan(plan, measured_profile.chain(), machine, profiles, split, progress)


def compare(
    *plans: Plan | str | Path,
    profile: Profile | str | Path | None = None,
    watts: Mapping[str, tuple[float, float]] | str | None = None,
) -> PlanComparison:
    """The plans side by side: step, samples/s, bubble, memory, devices and gap of each.

    With the `profile` that the first was made from, what every named planner makes of its problem, too. Of
    the result: `rows`, and `first_slower`, the first plan's seconds a sample over those of the best of the
    others, less 1. With the `watts` of each kind of device, computing and waiting, also the energy of steps.

    >>> import pplan
    >>> table = pplan.compare("gpt.plan.json", profile="gpt.profile.json")
    >>> [row.name for row in table.rows[:2]]
    ['gpt.plan.json', 'best']

    Raises UsageError (no plan, a profile of other layers), FileError.
    """
    powers = arguments.watts("watts", watts)
    if not plans:
        raise UsageError("compare: no plan is given", "Give plans, or the paths of their files.")
    plans_by_name = [
        (str(plan) if isinstance(plan, str | Path) else f"plan {number}", as_plan(plan))
        for number, plan in enumerate(plans)
    ]
    if profile is None:
        if powers is not None:
            raise UsageError("watts: without a profile", "Give the profile that the first plan is of, too.")
        return compare_plans(plans_by_name)
    first = plans_by_name[0][1]
    measured_profile, reference = profile_and_reference(profile, "", "", first)
    check_layers(first, reference)
    folder = Path(plans[0]).parent if isinstance(plans[0], str | Path) else Path()
    machine, profiles = planned_machine(first, measured_profile, folder)
    context = make_context(first, measured_profile.chain(), machine, profiles)
    return compare_plans(plans_by_name, context, powers)


@takes(OtherMethodArguments)
def data_parallel(profile: Profile | str | Path, **options: Any) -> list[OtherMethod]:
    """Data parallelism by other means, HetPipe and Asteroid on `gpus` devices, each by its own time model.

    All-reduces (ring, tree), `servers` parameter servers (synchronous, asynchronous, at most `staleness`
    updates apart, Downpour with `push_every` and `fetch_every`), Hogwild on a memory of `memory_bandwidth`
    bytes per second; HetPipe's virtual workers by policy; Asteroid's shares, where they are unequal. Each row
    has `step_seconds` of a global batch, `memory_bytes` and `staleness`, or a `reason` why there is none. The
    other options are those of `solve`.

    >>> import pplan
    >>> rows = pplan.data_parallel("gpt.profile.json", gpus=4, mini_batch=64)
    >>> [row.name for row in rows[:3]]
    ['dp-all-reduce', 'dp-synchronous', 'dp-asynchronous']

    Raises UsageError, FileError (the profile, the topology).
    """
    machine, plan_options, own = options_from(
        options, MachineOptions, PlanOptions, OtherMethodOptions, of="data_parallel"
    )
    measured_profile, reference = one_degree(profile, "", "", plan_options, "data_parallel")
    return list_other_methods(make_problem(measured_profile, reference, machine, plan_options), own)


@takes(ReplanArguments)
def replan(plan: Plan | str | Path, profile: Profile | str | Path, **options: Any) -> Replan[Plan]:
    """The plan for the devices of `plan` that are left without those of the ranks `lost`.

    Of the plans with its schedule and global batch whose step is at most the share `within` longer than the
    fastest one's, the one whose devices get the fewest bytes of weights and buffers; with `within=0` the
    fastest one. Where there are more than some 800 plans, the search finds the fastest, and those near it
    and near the old one are looked at. Of the result: `plan`, `moves`,
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
    notes = _list_replan_notes(plan, answer, own)
    prediction = new.prediction.model_copy(update={"bound_covers": _on_those_left(new)})
    return Replan(
        plan=new.model_copy(
            update={"searched": searched, "notes": notes, "made_by": origin, "prediction": prediction}
        ),
        moves=answer.moves,
        move_seconds=answer.move_seconds,
        fastest_seconds=answer.fastest_seconds,
        complete=answer.complete,
        any_devices=answer.any_devices,
        ranks=answer.ranks,
    )


def _on_those_left(plan: Plan) -> str:
    """Which plans the bound of a plan on fewer devices is of."""
    parts = plan.prediction.bound_covers.split(", ")
    if (every := "on all devices") in parts:
        return ", ".join(f"{every} that are left" if part == every else part for part in parts)
    return ", ".join([*parts, "on the devices that are left"])


def _list_replan_notes(plan: Plan, answer: Replan[ScoredPlan], options: ReplanOptions) -> list[str]:
    lost = ", ".join(map(str, sorted(set(options.lost))))
    receivers = {move.receiver for move in answer.moves}
    moved = "no weights move"
    if answer.moves:
        moved = f"{format_bytes(answer.moved_bytes)} of weights to {format_count(len(receivers), 'device')}"
    if answer.moved_bytes > answer.checkpoint_bytes:
        moved += f" in {format_seconds(answer.move_seconds)}"
    now, before = map(format_seconds, (answer.plan.step_seconds, plan.prediction.step_seconds))
    name = "device" if len(set(options.lost)) == 1 else "devices"
    notes = [
        f"without {name} {lost}: {moved}; a step takes {now}, {before} before",
        "to resume, export this plan with `script`, name the checkpoint of the old run as CHECKPOINT in the "
        "script, and start it: any number of stages reads it",
    ]
    if answer.checkpoint_bytes:
        notes.append(
            f"{format_bytes(answer.checkpoint_bytes)} of the weights are on no device that is left: they "
            "come from a checkpoint, whose reading is not timed"
        )
    if not answer.complete:
        notes.append("not all plans were looked at, only those near the old one and the fastest one")
    elif not answer.any_devices:
        notes.append(
            "not all plans were looked at: the devices, or the links between them, are not alike, and stages "
            "take those that are left in rank order, the faster ones first, or those that have most of their "
            "layers"
        )
    return notes

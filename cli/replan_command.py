"""`pplan replan`: the plan for the devices that are left of another plan's, which moves few weights."""

from __future__ import annotations

from ..api.replan_options import ReplanOptions
from .output import AsJson, Force, Output, PlanFile, ProfileFile, choose_input, choose_target, file_stem


def replan_command(
    plan_file: PlanFile = None,
    profile_file: ProfileFile = None,
    *,
    loss: ReplanOptions,
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Plan again without the devices that are gone.

    Of the fast plans it takes the one that moves the fewest bytes of weights.
    """
    from ..api.explain import replan
    from ..api.load import read_plan
    from .plan_tables import print_plan
    from .streams import console

    files = read_plan(choose_input(plan_file, ("plan",)), profile_file)
    plan = files.plan
    about = {
        "model": plan.model,
        "profile.file": files.profile_file.name,
        "profile.layers_sha256": files.profile.layers_sha256,
    }
    target = choose_target(
        output, f"{file_stem(plan.model)}.replan.plan.json", force=force, about=about, kind="plan"
    )
    target.check(files.plan_file, files.profile_file)
    new = replan(files.plan_file, files.profile_file, **vars(loss)).plan
    target.write(new, as_json=as_json, show=lambda: print_plan(new, console()))

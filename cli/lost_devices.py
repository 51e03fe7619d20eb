"""The part of `pplan solve` that plans again without the devices that are gone."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ..api.explain import replan
from ..api.load import read_plan
from ..api.replan_options import ReplanOptions
from ..cost_models.errors import UsageError
from .field_names import FIELDS
from .output import choose_input, choose_target, file_stem
from .plan_tables import print_plan
from .streams import console


def solve_without(
    loss: ReplanOptions,
    files: list[Path],
    profile_file: Path | None,
    typed: Collection[str],
    output: Path | None,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Write and print the plan for the devices that are left.

    Args:
        loss: The devices that are gone.
        files: The plan to start from, if it is named.
        profile_file: Its profile, where that is not beside it.
        typed: Fields of all options that are typed.
        output: Where the plan goes; None: NAME.replan.plan.json.
        force: Replace an existing file.
        as_json: Print JSON.

    Raises:
        UsageError: Options that the old plan settles, or several plans.
        FileError: A file cannot be read or written.
        InfeasibleError: No plan fits.
    """
    for name in sorted(set(typed) - {"lost", "within"}):
        raise UsageError(
            f"{FIELDS[name]} with --lost: the machine and the training are those of the plan", "Omit it."
        )
    if len(files) > 1:
        raise UsageError(
            f"--lost with {len(files)} files: it takes one plan", "Name its profile by --profile."
        )
    source = read_plan(choose_input(files[0] if files else None, ("plan",)), profile_file)
    about = {
        "model": source.plan.model,
        "profile.file": source.profile_file.name,
        "profile.layers_sha256": source.profile.layers_sha256,
    }
    name = f"{file_stem(source.plan.model)}.replan.plan.json"
    target = choose_target(output, name, force=force, about=about, kind="plan")
    target.check(source.plan_file, source.profile_file)
    plan = replan(source.plan_file, source.profile_file, **vars(loss)).plan
    target.write(plan, as_json=as_json, show=lambda: print_plan(plan, console()))

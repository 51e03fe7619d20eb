"""A second opinion on a plan."""

from __future__ import annotations

from pathlib import Path

from ..cost_models import arguments
from ..planner.plan_file import Plan
from ..profiler.profile_file import Profile
from ..verification.documents import LARGEST_PROFILE, read_content
from ..verification.report import Report
from ..verification.verify_files import Sources, read_sources, verify_sources
from .load import check_is_plan


def verify(plan: Plan | str | Path, profile: Profile | str | Path | None = None) -> Report:
    """A second opinion on `plan`: all of it worked out again, by code that shares nothing with `solve`.

    `plan` and `profile` may be the paths of their files; without `profile` the file that the plan names is
    taken, beside the plan's. Of the result: `agrees`; `lines`, each with its `name`, its `state` ("ok",
    "differs" or "not checked"), what the plan `said` and what was `found`; `differing`; `to_json()`.

    >>> import pplan
    >>> report = pplan.verify("gpt.plan.json")
    >>> report.agrees, report.differing
    (True, [])

    Raises UsageError, FileError (a file that cannot be read, or is broken).
    """
    if isinstance(plan, str | Path):
        path = profile if isinstance(profile, str | Path) else None
        sources = read_sources(Path(plan), None if path is None else Path(path))
    else:
        check_is_plan(plan)
        sources = Sources(plan.to_json().encode(), "plan")
        if isinstance(profile, str | Path):
            sources.profile = read_content(Path(profile), "profile", LARGEST_PROFILE)
            sources.profile_name, sources.folder = str(profile), Path(profile).parent
    if profile is not None and not isinstance(profile, str | Path):
        arguments.instance(
            "profile", profile, Profile, "Give what pplan.profile returns, or the path of its file."
        )
        sources.profile, sources.profile_name, sources.is_file = profile.to_json().encode(), "profile", False
    return verify_sources(sources)

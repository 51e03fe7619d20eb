"""Plans and profiles as a caller gives them: themselves, or the paths of their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from ..cost_models import arguments
from ..cost_models.errors import FileError, UsageError
from ..cost_models.quantities import format_count
from ..cost_models.text_files import decode_text, escape_surrogates, read_bytes, sha256
from ..planner.plan_file import Plan, ProfileReference
from ..profiler.profile_file import Profile


def load_profile(path: str | Path) -> Profile:
    """The profile in a file. Raises FileError."""
    return Profile.load(arguments.path("path", path))


def load_plan(path: str | Path) -> Plan:
    """The plan in a file. Raises FileError."""
    return Plan.load(arguments.path("path", path))


def read_profile(path: Path) -> tuple[Profile, str]:
    """Read a profile and the SHA-256 of its file, at once: it may be a pipe. Raises FileError."""
    content = read_bytes(path, "profile")
    return Profile.parse(decode_text(content, path, "profile"), str(path)), sha256(content)


def as_plan(plan: Plan | str | Path) -> Plan:
    """The plan, read where it is named by its path."""
    if isinstance(plan, str | Path):
        return load_plan(plan)
    check_is_plan(plan)
    return plan


def check_is_plan(plan: Plan) -> None:
    """Raises UsageError where it is none."""
    arguments.instance(
        "plan", plan, Plan, 'Give what pplan.solve returns, or pplan.load_plan("a.plan.json").'
    )


def check_is_measured(plan: Plan) -> None:
    """Raises UsageError for a plan from a configuration, whose layers have no profile."""
    if plan.training is not None:
        raise UsageError(
            f"the plan of {plan.model} is from a configuration: there is no profile of its layers",
            "Use show, export, compare, report or lint. Or profile the model, as in "
            "pplan.profile('hf:llama'), and plan again.",
        )


def check_layers(plan: Plan, profile: ProfileReference) -> None:
    """Raises UsageError where the profile has other layers than the plan's."""
    if plan.profile.layers_sha256 not in ("", profile.layers_sha256):
        raise UsageError(
            f"profile {profile.file or 'given'}: has other layers than the one that the plan for "
            f"{plan.model} was made from ({plan.profile.file or 'without a name'})",
            "Give that profile, or plan again with pplan.solve.",
        )


def profile_and_reference(
    profile: Profile | str | Path, file: str, sha: str, plan: Plan | None = None
) -> tuple[Profile, ProfileReference]:
    """The profile, read where it is named by its path, and what a plan says of it; of a `plan` that there is,
    for as many devices to a layer as it has. Raises UsageError for a profile without these."""
    file, sha = arguments.word("profile_file", file), arguments.word("profile_sha256", sha)
    if plan is not None:
        check_is_measured(plan)
    if isinstance(profile, str | Path):
        file = file or Path(profile).name
        profile, content_sha = read_profile(Path(profile))
        sha = sha or content_sha
    arguments.instance(
        "profile", profile, Profile, "Give what pplan.profile returns, or the path of its file."
    )
    sha = sha or sha256(profile.to_json())
    if plan is not None:
        profile = profile.at_degree(plan.profile.tensor_parallel)
    return profile, _reference(profile, file, sha)


def _reference(profile: Profile, file: str, sha: str) -> ProfileReference:
    return ProfileReference(
        file=file,
        sha256=sha,
        layers_sha256=profile.layers_sha256,
        dtype=profile.dtype,
        amp=profile.amp,
        device_name=profile.device_name or profile.device,
        granularity=profile.granularity,
        estimated=profile.estimated,
        device=profile.device,
        tensor_parallel=profile.tensor_parallel,
        undivided_outputs=[str(output) for output in profile.outputs if not output.has_samples],
        has_batch_norms=bool(profile.batch_norms),
    )


@dataclass(frozen=True)
class PlanAndProfile:
    """A plan and the profile that it was made from, as read from their files."""

    plan: Plan
    profile: Profile
    plan_file: Path
    profile_file: Path


def profile_next_to(path: Path, plan: Plan) -> Path:
    """Path of the plan's profile in the folder of its file `path`.

    The plan holds the name with escapes for bytes that are not UTF-8.
    """
    name = Path(plan.profile.file).name
    if "\\udc" not in name or not path.parent.is_dir():
        return path.parent / name
    files = sorted(path.parent.iterdir())
    return next((file for file in files if escape_surrogates(file.name) == name), path.parent / name)


def plan_of_profile(plan: Plan, profile: Profile, file: str) -> Plan:
    """Return a plan from a configuration as one of the layers of a profile of the same model.

    Raises:
        ExportError: Several devices share a layer, or layers run again in part.
        UsageError: The profile has other layers.
    """
    from ..runtimes.degree_exports import without_degrees

    own = without_degrees(plan)
    check_layers(own, _reference(profile, file, ""))
    return own


def read_plan(path: Path, profile_file: Path | None, *, takes_others: bool = False) -> PlanAndProfile:
    """The plan in a file, with the profile of its name beside it, or the one that is named; where it
    `takes_others`, also of a plan from a configuration with a profile of the same layers.

    Raises FileError for either, and for a profile that the plan was not made from.
    """
    plan = Plan.load(path)
    if takes_others and plan.training is not None and profile_file is not None:
        content = read_bytes(profile_file, "profile")
        profile = Profile.parse(decode_text(content, profile_file, "profile"), str(profile_file))
        return PlanAndProfile(plan_of_profile(plan, profile, profile_file.name), profile, path, profile_file)
    check_is_measured(plan)
    profile_path = profile_next_to(path, plan)
    if profile_file is None and not profile_path.is_file():
        raise FileError(
            f"{path}: was made from {plan.profile.file or 'a nameless profile'}, which is not beside it",
            "Put it there, or name it as `profile`.",
        )
    where = profile_path if profile_file is None else profile_file
    content = read_bytes(where, "profile")
    if (sha := sha256(content)) != plan.profile.sha256:
        raise FileError(
            f"{where}: is not the profile that {path} was made from (SHA-256 {sha[:12]}…, "
            f"the plan says {plan.profile.sha256[:12]}…)",
            f"Name the right one as `profile`, or plan again: pplan solve {quote(str(where))}",
        )
    profile = Profile.parse(decode_text(content, where, "profile"), str(where))
    profile = profile.at_degree(plan.profile.tensor_parallel)
    if sum(plan.balance) != len(profile.layers):
        raise FileError(
            f"{path}: has {format_count(sum(plan.balance), 'layer')}, its profile {where} "
            f"{len(profile.layers)}",
            f"Name the right one as `profile`, or plan again: pplan solve {quote(str(where))}",
        )
    return PlanAndProfile(plan, profile, path, where)

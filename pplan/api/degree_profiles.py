"""Profiles of layers that 1, 2, 4 devices share, in one file or in several: those that are allowed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast

from ..cost_models import arguments
from ..cost_models.errors import UsageError
from ..cost_models.quantities import either
from ..planner.plan_file import ProfileReference
from ..planner.plan_options import PlanOptions
from ..profiler.profile_file import Profile
from .load import profile_and_reference

Profiles = Profile | str | Path | Sequence[Profile | str | Path]
"""A profile, or one for each number of devices that share every layer; or the paths of their files."""


def measured_degrees(profiles: Profiles, file: str, sha: str) -> list[tuple[Profile, ProfileReference]]:
    """By how many devices share every layer, the fewest first: the profile of such layers, and what a plan
    says of it. Raises UsageError for profiles of different layers, or twice of as many devices; FileError."""
    several = list(profiles) if isinstance(profiles, list | tuple) else [cast(Profile, profiles)]
    if not several:
        raise UsageError("profile: none is given", "Give one, or one for each number of devices that share.")
    own = []
    for profile in several:
        whole, reference = profile_and_reference(profile, file, sha)
        own += [
            (whole.at_degree(degree), reference.model_copy(update={"tensor_parallel": degree}))
            for degree in whole.degrees
        ]
    own.sort(key=lambda each: each[0].tensor_parallel)
    for one, other in pairwise(own):
        _check_alike(*one, *other)
    return own


_SAME_OF_ALL = ("layers_sha256", "dtype", "amp", "device_name", "device", "estimated", "scales_with_samples")
"""Of the profiles of layers that more or fewer devices share."""


def _check_alike(
    one: Profile, reference: ProfileReference, other: Profile, other_reference: ProfileReference
) -> None:
    """Raises UsageError where two profiles are not of the same layers for different numbers of devices."""
    names = f"{reference.file or one.model} and {other_reference.file or other.model}"
    if one.tensor_parallel == other.tensor_parallel:
        raise UsageError(
            f"{names}: two profiles for tp={one.tensor_parallel}",
            "Give one profile for each number of devices.",
        )
    if (one.loss is None) != (other.loss is None):
        raise UsageError(
            f"{names}: the loss was measured in one of them alone, which would seem the slower",
            "Profile all with --tp, that of one device with --tp 1: then none has it.",
        )
    for what in _SAME_OF_ALL:
        values = getattr(one, what), getattr(other, what)
        if values[0] != values[1]:
            what_differs = (
                "other layers" if what == "layers_sha256" else f"{what} {values[0]} and {values[1]}"
            )
            raise UsageError(
                f"{names} have {what_differs}", "Profile the same model in the same way, but for --tp."
            )


def allowed_degrees(
    degrees: Sequence[tuple[Profile, ProfileReference]], options: PlanOptions
) -> list[tuple[Profile, ProfileReference]]:
    """Those that the options allow. Raises UsageError where there are no costs for one of them."""
    if options.tp is None:
        return list(degrees)
    numbers = [profile.tensor_parallel for profile, _ in degrees]
    for number in options.tp:
        if number not in numbers:
            raise UsageError(
                f"tp={number}: the profile has no costs of layers that {number} devices share",
                f"It has those of {either(numbers)}. A table may have columns such as tp{number}_forward_ms.",
            )
    return [each for each in degrees if each[0].tensor_parallel in options.tp]


def one_degree(
    profile: Profile | str | Path, file: str, sha: str, options: PlanOptions, of: str
) -> tuple[Profile, ProfileReference]:
    """The profile, of the one number of devices to a layer that the options name where it has several. Raises
    UsageError."""
    if not isinstance(profile, str | Path):
        arguments.instance("profile", profile, Profile, "Give one profile, or the path of its file.")
    degrees = allowed_degrees(measured_degrees(profile, file, sha), options)
    if len(degrees) > 1:
        numbers = [each.tensor_parallel for each, _ in degrees]
        raise UsageError(
            f"{of}: the profile has costs of layers that {either(numbers)} devices share",
            f"Give one of these: tp={numbers[0]}, say.",
        )
    return degrees[0]

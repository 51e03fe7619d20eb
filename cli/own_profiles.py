"""The profiles that kinds of devices in a topology have of their own."""

from __future__ import annotations

from pathlib import Path

from ..cost_models.errors import FileError
from ..cost_models.layer import Chain
from ..cost_models.machines.measured_on import PROCESSOR, check_processor_seconds_of
from ..cost_models.topology import Topology
from ..profiler.profile_file import Profile
from ..profiler.profile_warnings import profiled_device


def own_profiles(topology: Topology, folder: Path, seconds_of: str | None = PROCESSOR) -> dict[str, Chain]:
    """The layers as measured on them, by the name that the topology gives the file; names are relative to
    `folder`.

    Raises FileError, and UsageError where one of a GPU was measured on a processor and `seconds_of` does not
    say that it is meant.
    """
    made = {}
    for kind in topology.kinds:
        if kind.profile is not None:
            profile = _profile(folder / kind.profile, kind.name)
            if seconds_of is None:
                check_processor_seconds_of(profiled_device(profile), kind)
            made[kind.profile] = profile.chain()
    return made


def _profile(path: Path, kind: str) -> Profile:
    if not path.is_file():  # a device, say, of which there is no end
        raise FileError(
            f"{path}: no such file; the topology says that it is the profile of {kind}",
            "Put it beside the topology or plan that names it, or give --topology with the one beside it.",
        )
    return Profile.load(path)

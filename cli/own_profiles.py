"""The profiles that kinds of devices in a topology have of their own."""

from __future__ import annotations

from pathlib import Path

from ..cost_models.errors import FileError
from ..cost_models.layer import Chain
from ..cost_models.topology import Topology
from ..profiler.profile_file import Profile


def own_profiles(topology: Topology, folder: Path) -> dict[str, Chain]:
    """The layers as measured on them, by the name that the topology gives the file; names are relative to
    `folder`. Raises FileError."""
    made = {}
    for kind in topology.kinds:
        if kind.profile is not None:
            made[kind.profile] = _profile(folder / kind.profile, kind.name).chain()
    return made


def _profile(path: Path, kind: str) -> Profile:
    if not path.is_file():  # a device, say, of which there is no end
        raise FileError(
            f"{path}: no such file; the topology says that it is the profile of {kind}",
            "Put it beside the topology or plan that names it, or give --topology with the one beside it.",
        )
    return Profile.load(path)

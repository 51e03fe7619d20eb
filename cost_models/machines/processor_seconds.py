"""Whether seconds that were measured on one device may be planned with on others."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import UsageError
from ..hardware import Device
from ..topology import Topology
from .preset_lookup import device_preset, is_gpu
from .topology_options import ProfiledDevice

PROCESSOR = "cpu"
SECONDS_OF = (PROCESSOR,)
"""What `seconds_of` may say: a processor's seconds are meant to stand for those of a GPU."""


def check_seconds_source(word: str | None, profiled: ProfiledDevice) -> None:
    """Raises UsageError for a word that is not known, or says another device than the profile."""
    if word is None:
        return
    if word not in SECONDS_OF:
        raise UsageError(
            f"seconds_of={word!r}: not known",
            f"Use seconds_of={PROCESSOR!r}, where a processor's seconds are to stand for a GPU's.",
        )
    if not profiled.is_cpu:
        where = profiled.name or profiled.device
        raise UsageError(
            f"seconds_of={word!r}: the profile's seconds are not those of a processor but of {where}",
            "Omit it: it is for planning GPUs with a processor's seconds.",
        )


def check_processor_seconds(profiled: ProfiledDevice, topology: Topology, word: str | None) -> None:
    """Raises UsageError where GPUs are to be planned with a processor's seconds and `seconds_of` does not
    say that this is meant; a kind with a stated speed, or a profile of its own, says what its seconds are."""
    check_seconds_source(word, profiled)
    if word is None:
        for kind in gpus_with_the_seconds(topology):
            check_seconds_on_kind(profiled, kind)


def check_seconds_on_kind(profiled: ProfiledDevice, kind: Device) -> None:
    """Raises UsageError where the kind is a GPU and its seconds were measured on a processor."""
    if not profiled.is_cpu or not is_gpu(kind.name):
        return
    preset = device_preset(kind.name)
    figures = f"analytic:{preset.name if preset else 'FILE.toml'}"
    raise UsageError(
        f"the layers' seconds were measured on a processor, {profiled.name or 'cpu'}: they do not tell how "
        f"long the layers take on {kind.name}",
        f"Profile the model on {kind.name}, import seconds measured there (pplan import), or estimate them "
        f"(pplan profile MODEL device={figures!r}); "
        f"pplan solve seconds_of={PROCESSOR!r} plans with the processor's all the same.",
    )


def gpus_with_the_seconds(topology: Topology) -> Iterator[Device]:
    """The kinds of GPUs that are taken to be just as fast as the profiled device."""
    return (kind for kind in topology.kinds if is_gpu(kind.name) and kind.speed == 1 and not kind.profile)

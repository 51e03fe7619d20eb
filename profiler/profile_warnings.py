"""What of a profile may make a plan wrong that is made with it: said before anything else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..cost_models.machines import is_gpu, same_device
from ..cost_models.runtime import other_layers_warning
from ..cost_models.topology import Topology
from ..cost_models.topology_file import UNNAMED, ProfiledDevice, gpus_as_profiled
from .profile_file import Profile, WholeMeasurement

CLOSES = 0.05
"""Share by which the layers' seconds may miss the whole model's, and its passes vary, without a word."""

MISSES = 0.1
"""Share from which on such a profile is not kept for later: measuring again may do better."""
WAITED = "the device waited for the host"
"""How a note begins, behind its micro-batch size, of a device that had nothing to do."""
STAMPS_SECONDS = 1e-3
"""What reading the clock between layers may add to a pass of a model, however small that is."""


def profiled_device(profile: Profile) -> ProfiledDevice:
    """What the profile was measured on."""
    return ProfiledDevice(profile.device, profile.device_name, profile.device_memory_bytes)


def list_warnings(profile: Profile, topology: Topology, runtime: str | None) -> list[str]:
    """Warnings about planning this machine, or a runtime, with these seconds, the gravest first."""
    own = _closing_warnings(profile)
    other_layers = other_layers_warning(runtime, profile.device)
    return [
        *([other_layers] if other_layers else []),
        *_of_the_device(profile, topology),
        *(note for note in profile.notes if note in own),
        *_of_the_spread(profile),
        *_of_an_interruption(profile),
        *_of_groups(profile),
    ]


def list_notes(profile: Profile) -> list[str]:
    """What else the profile says."""
    own = _closing_warnings(profile)
    return [*profile.remarks(), *(note for note in profile.notes if note not in own)]


def misses_whole(profile: Profile) -> bool:
    """Whether the layers are far from adding up to the whole model at some micro-batch size."""
    return any(
        abs(whole.closing_ratio - 1)
        > max(MISSES, STAMPS_SECONDS / (whole.forward_seconds + whole.backward_seconds))
        for whole in profile.whole
    )


def _closing_warnings(profile: Profile) -> set[str]:
    """All that may be among its notes."""
    measured: tuple[list[str], ...] = ([], profile.notes)
    return {text for own in measured for whole in profile.whole for text in closing_warning(whole, own)}


def closing_warning(whole: WholeMeasurement, notes: Sequence[str]) -> list[str]:
    """The warning that the layers do not add up to the whole model; `notes`: of the measurement, which say
    where a device waited for its host."""
    if abs(whole.closing_ratio - 1) <= CLOSES:
        return []
    size = f"micro-batch size {whole.micro_batch_size}"
    if any(note.startswith(f"{size}: {WAITED}") for note in notes):
        advice = "a larger micro-batch keeps the device busy, a quiet machine changes little"
    elif whole.spread is None:
        advice = "one pass was measured, and a larger budget tells more"
    elif whole.spread > CLOSES:
        advice = "measure again on a quiet machine"
    else:
        advice = f"repeated passes agree within {CLOSES:.0%}, so that a quiet machine changes little"
    return [
        f"{size}: the layers add up to {whole.closing_ratio:.3f} of the whole model's time, more than "
        f"{CLOSES:.0%} off; {advice}"
    ]


def _of_the_device(profile: Profile, topology: Topology) -> Iterator[str]:
    measured = profiled_device(profile)
    name = measured.name or measured.device
    kinds = [kind.name for kind in topology.kinds if kind.speed == 1 and not kind.profile]
    if measured.is_cpu:
        yield _of_a_processor(name, topology)
    elif not measured.is_known:
        if kinds:
            yield (
                "the profile does not say which device its seconds are of: they are taken to be those of "
                + ("the devices of the plan" if kinds == [UNNAMED] else " and ".join(kinds))
            )
    elif others := [kind for kind in kinds if measured.name and not same_device(kind, measured.name)]:
        yield f"the layers' seconds are those of {name}: for {' and '.join(others)}, profile the model on one"
    if profile.estimated:
        yield "the profile is an estimate, not a measurement"


def _of_a_processor(name: str, topology: Topology) -> str:
    gpus = [kind.name for kind in gpus_as_profiled(topology)]
    if gpus:
        return (
            f"the seconds are those of a processor, {name}, and not of {' and '.join(gpus)}: "
            "seconds_of='cpu' says that this is meant"
        )
    if any(is_gpu(kind.name) for kind in topology.kinds):
        return f"the seconds of the GPUs are made of those of a processor, {name}, by the stated speeds"
    return (
        f"the layers' seconds are those of this processor, {name}, and the devices are taken to be such "
        "processors: for GPUs profile on one, or estimate with device='analytic:h100'"
    )


def _of_the_spread(profile: Profile) -> Iterator[str]:
    wide = [(whole, whole.spread) for whole in profile.whole if whole.spread and whole.spread > CLOSES]
    if wide:
        sizes = ", ".join(str(whole.micro_batch_size) for whole, _ in wide)
        most = max(spread for _, spread in wide)
        yield f"micro-batch size {sizes}: the measured passes vary by up to {most:.0%}; the machine was busy"


def _of_groups(profile: Profile) -> Iterator[str]:
    if profile.tensor_parallel > 1:
        yield (
            f"each device of this plan is a group of {profile.tensor_parallel} neighbours that share every "
            "layer, as they were measured"
        )


def _of_an_interruption(profile: Profile) -> Iterator[str]:
    missing = [left.micro_batch_size for left in profile.unmeasured if left.reason == "interrupted"]
    if missing:
        sizes = ", ".join(map(str, missing))
        yield f"the profile was interrupted: micro-batch size {sizes} was not measured"

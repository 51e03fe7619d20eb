"""The preset of a GPU by its name: as a user writes it, or as its driver calls it."""

from __future__ import annotations

import difflib
import re

from ..errors import UsageError
from .presets import PRESETS, Figure, Preset


def find_preset(name: str, called: str = "") -> Preset:
    """The preset of that name; case, spaces, dashes and underscores do not matter. Raises UsageError, which
    calls it as a file does; else by the field `gpu`."""
    preset = _BY_KEY.get(name_key(name))
    if preset is not None:
        return preset
    begun = [key for key in _BY_KEY if name_key(name) and key.startswith(name_key(name))]
    near = begun or difflib.get_close_matches(name_key(name), _BY_KEY, n=1, cutoff=0.5)
    guess = f"Did you mean {' or '.join(_BY_KEY[key].name for key in near)}? " if near else ""
    raise UsageError(
        f"{called} {name}: no preset of that name" if called else f"gpu={name!r}: no preset of that name",
        f"{guess}Presets: {', '.join(PRESETS)}. For another GPU give `memory`, `bandwidth` and `latency`.",
    )


def match_device(device_name: str) -> Preset | None:
    """The preset of the GPU that the driver calls `device_name`, if there is one for exactly that model."""
    for preset in PRESETS.values():
        if re.fullmatch(preset.device_names, device_name.strip(), re.IGNORECASE):
            return preset
    return None


def device_preset(device_name: str) -> Preset | None:
    """The preset with that title, or of the GPU that the driver calls so; None for one without, as a CPU."""
    titled = (preset for preset in PRESETS.values() if preset.title == device_name)
    return next(titled, None) or match_device(device_name)


def same_device(a: str, b: str) -> bool:
    """Whether both names are of one kind of device, be it a preset's title or a name of its driver."""
    one, other = device_preset(a), device_preset(b)
    return a == b or (one is not None and one == other)


_GPU_WORDS = re.compile(r"\b(GPU|NVIDIA|GeForce|Tesla|Quadro|RTX|Radeon|Instinct)\b", re.IGNORECASE)


def is_gpu(device_name: str) -> bool:
    """Whether the name is a preset's, or holds a word that names of GPUs hold."""
    return device_preset(device_name) is not None or _GPU_WORDS.search(device_name) is not None


def device_context(device_name: str) -> Figure | None:
    """What a process's context takes of a device with a preset's title or a name of its driver; None for one
    without preset, as a CPU."""
    preset = device_preset(device_name)
    return None if preset is None else preset.context_bytes


def name_key(name: str) -> str:
    """What is compared of a name: case, spaces, dashes and underscores do not matter."""
    return re.sub(r"[\s_-]+", "", name.lower())


_BY_KEY = {name_key(name): preset for name, preset in PRESETS.items()}

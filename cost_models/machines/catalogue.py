"""GPUs and machines by their names: as a user writes them, and as drivers call GPUs.

The catalogue has machines that people own or rent, as `topology` names them, every figure with its source. A
machine is a number of GPUs of a preset, the link inside, and the network between machines of its kind. As in
`presets`, bandwidth is one direction, and latencies are assumptions of ours. Where a machine has fewer
network adapters than GPUs, those that share one are neighbours.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache

from ..errors import UsageError
from .presets import (
    DGX_A100,
    DGX_H100,
    ETHERNET,
    HDR,
    NDR,
    NETWORK_LATENCY,
    NVLINK_2,
    NVLINK_3,
    NVLINK_4,
    PCIE_4,
    PCIE_A10G,
    PRESETS,
    Figure,
    Preset,
    PresetLink,
    gigabits,
)


def find_preset(name: str, called: str = "") -> Preset:
    """The preset of that name; case, spaces, dashes and underscores do not matter. Raises UsageError, which
    calls it as a file does; else by the field `gpu`."""
    preset = _PRESETS_BY_KEY.get(name_key(name))
    if preset is not None:
        return preset
    begun = [key for key in _PRESETS_BY_KEY if name_key(name) and key.startswith(name_key(name))]
    near = begun or difflib.get_close_matches(name_key(name), _PRESETS_BY_KEY, n=1, cutoff=0.5)
    guess = f"Did you mean {' or '.join(_PRESETS_BY_KEY[key].name for key in near)}? " if near else ""
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


@lru_cache(maxsize=256)  # every ledger asks for its device's
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


_PRESETS_BY_KEY = {name_key(name): preset for name, preset in PRESETS.items()}


@dataclass(frozen=True)
class Machine:
    """A kind of machine: `gpus` devices of the preset `gpu`, and the links `inside` it and `between` two.

    `gpus_per_adapter` GPUs share the bandwidth of `between`. `aliases` are other names for it.
    """

    name: str
    title: str
    gpu: str
    gpus: Figure
    inside: PresetLink
    between: PresetLink
    gpus_per_adapter: Figure
    aliases: tuple[str, ...] = ()


def find_machine(name: str) -> Machine | None:
    """The machine of that name, if there is one; case, spaces, dashes and underscores do not matter."""
    return _BY_KEY.get(name_key(name))


def unknown_machine(name: str, called: str = "") -> UsageError:
    """The refusal of a name that is none, with the nearest that are. It is `called` as a file or an argument
    does; else by the field `topology`."""
    what = f"{called} {name}" if called else f"topology={name!r}"
    gpu = next((preset for preset in PRESETS.values() if name_key(preset.name) == name_key(name)), None)
    if gpu is not None:
        return UsageError(
            f"{what}: is a GPU, not a machine",
            f"Give gpu={gpu.name!r}, or a machine: {', '.join(MACHINES)}.",
        )
    key = name_key(name)
    begun = [other for other in _BY_KEY if key and other.startswith(key)]
    near = begun or difflib.get_close_matches(key, _BY_KEY, n=1, cutoff=0.5)
    names = dict.fromkeys(_BY_KEY[other].name for other in near)
    guess = f"Did you mean {' or '.join(names)}? " if names else ""
    return UsageError(
        f"{what}: no such file, and no machine of that name",
        f"{guess}Machines: {', '.join(MACHINES)}; or name a TOML file.",
    )


_GOOGLE = (
    "Google Cloud, Networking and GPU machines "
    "(https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth)"
)
_AZURE_A100 = (
    "Microsoft Azure, ND A100 v4 series "
    "(https://learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/nda100v4-series)"
)
_AZURE_H100 = (
    "Microsoft Azure, ND H100 v5 series "
    "(https://learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/ndh100v5-series)"
)
_P3 = "Amazon EC2 P3 instances (https://aws.amazon.com/ec2/instance-types/p3/)"
_P4 = "Amazon EC2 P4 instances (https://aws.amazon.com/ec2/instance-types/p4/)"
_P5 = "Amazon EC2 P5 instances (https://aws.amazon.com/ec2/instance-types/p5/)"
_G5 = "Amazon EC2 G5 instances (https://aws.amazon.com/ec2/instance-types/g5/)"
_EFA_CARDS = (
    "Amazon EC2 User Guide, network cards "
    "(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html)"
)

_PCIE_4090 = PresetLink(
    "PCIe 4.0 x16",
    Figure(
        PCIE_4.bandwidth.value,
        f"{PCIE_4.bandwidth.source}; assumption: a transfer reaches it, though GeForce cards have no "
        "peer-to-peer access and send through the host's memory",
    ),
    PCIE_4.latency,
)


def _network(name: str, gigabits_per_second: int, source: str) -> PresetLink:
    return PresetLink(name, gigabits(gigabits_per_second, source), NETWORK_LATENCY)


def _own(source: str) -> Figure:
    return Figure(1, f"{source}: an adapter for each GPU")


def _whole_node(source: str) -> Figure:
    return Figure(8, f"{source}: a figure for the whole machine, shared by its eight GPUs")


def _p4(name: str, title: str, gpu: str) -> Machine:
    cards = f"{_P4}: 400 Gb/s, in four network cards of 100 Gb/s ({_EFA_CARDS})"
    return Machine(
        name=name,
        title=title,
        gpu=gpu,
        gpus=Figure(8, f"{_P4}: eight GPUs"),
        inside=NVLINK_3,
        between=_network("EFA", 100, cards),
        gpus_per_adapter=Figure(2, f"assumption: two GPUs to each of the four network cards; {_P4}"),
    )


_ALL = (
    Machine(
        name="dgx-a100",
        title="NVIDIA DGX A100 640GB",
        gpu="a100-80gb",
        gpus=Figure(8, f"{DGX_A100}: eight GPUs"),
        inside=NVLINK_3,
        between=HDR,
        gpus_per_adapter=_own(DGX_A100),
        aliases=("dgx-a100-640gb", "dgx-a100-80gb"),
    ),
    Machine(
        name="dgx-h100",
        title="NVIDIA DGX H100",
        gpu="h100",
        gpus=Figure(8, f"{DGX_H100}: eight GPUs"),
        inside=NVLINK_4,
        between=NDR,
        gpus_per_adapter=_own(DGX_H100),
    ),
    Machine(
        name="8x4090",
        title="Eight GeForce RTX 4090 on PCIe",
        gpu="rtx-4090",
        gpus=Figure(8, "assumption: a server with eight PCIe slots for GPUs; makers build many sizes"),
        inside=_PCIE_4090,
        between=ETHERNET,
        gpus_per_adapter=Figure(8, "assumption: one port for the whole server"),
        aliases=("8x-rtx-4090", "rtx-4090-x8"),
    ),
    Machine(
        name="p3.16xlarge",
        title="Amazon EC2 p3.16xlarge",
        gpu="v100-16gb",
        gpus=Figure(8, f"{_P3}: eight GPUs"),
        inside=NVLINK_2,
        between=_network("25 Gb Ethernet", 25, f"{_P3}: 25 Gb/s"),
        gpus_per_adapter=_whole_node(_P3),
    ),
    _p4("p4d.24xlarge", "Amazon EC2 p4d.24xlarge", "a100-40gb"),
    _p4("p4de.24xlarge", "Amazon EC2 p4de.24xlarge", "a100-80gb"),
    Machine(
        name="p5.48xlarge",
        title="Amazon EC2 p5.48xlarge",
        gpu="h100",
        gpus=Figure(8, f"{_P5}: eight GPUs"),
        inside=NVLINK_4,
        between=_network("EFA", 400, f"{_P5}: 3,200 Gb/s in 32 network cards, four to a GPU ({_EFA_CARDS})"),
        gpus_per_adapter=Figure(1, f"assumption: each GPU sends through the four cards near it; {_P5}"),
    ),
    Machine(
        name="g5.48xlarge",
        title="Amazon EC2 g5.48xlarge",
        gpu="a10g",
        gpus=Figure(8, f"{_G5}: eight GPUs"),
        inside=PCIE_A10G,
        between=_network("100 Gb Ethernet", 100, f"{_G5}: 100 Gb/s"),
        gpus_per_adapter=_whole_node(_G5),
    ),
    Machine(
        name="a2-highgpu-8g",
        title="Google Cloud a2-highgpu-8g",
        gpu="a100-40gb",
        gpus=Figure(8, f"{_GOOGLE}: eight GPUs"),
        inside=NVLINK_3,
        between=_network("100 Gb Ethernet", 100, f"{_GOOGLE}: A2, up to 100 Gb/s"),
        gpus_per_adapter=_whole_node(_GOOGLE),
    ),
    Machine(
        name="a3-highgpu-8g",
        title="Google Cloud a3-highgpu-8g",
        gpu="h100",
        gpus=Figure(8, f"{_GOOGLE}: eight GPUs"),
        inside=NVLINK_4,
        between=_network(
            "200 Gb Ethernet",
            200,
            f"{_GOOGLE}: up to 1,000 Gb/s in five adapters of 200 Gb/s, four of them for the GPUs",
        ),
        gpus_per_adapter=Figure(2, f"{_GOOGLE}: one adapter for two GPUs"),
    ),
    Machine(
        name="nd-a100-v4",
        title="Microsoft Azure ND A100 v4 (Standard_ND96asr_v4)",
        gpu="a100-40gb",
        gpus=Figure(8, f"{_AZURE_A100}: eight GPUs"),
        inside=NVLINK_3,
        between=_network("InfiniBand HDR", 200, f"{_AZURE_A100}: 8 x 200 Gb/s HDR"),
        gpus_per_adapter=_own(_AZURE_A100),
        aliases=("nd96asr-v4", "standard-nd96asr-v4"),
    ),
    Machine(
        name="nd-h100-v5",
        title="Microsoft Azure ND H100 v5 (Standard_ND96isr_H100_v5)",
        gpu="h100",
        gpus=Figure(8, f"{_AZURE_H100}: eight GPUs"),
        inside=NVLINK_4,
        between=_network("InfiniBand NDR", 400, f"{_AZURE_H100}: 400 Gb/s Quantum-2 CX7 for each GPU"),
        gpus_per_adapter=_own(_AZURE_H100),
        aliases=("nd96isr-h100-v5", "standard-nd96isr-h100-v5"),
    ),
)

MACHINES: dict[str, Machine] = {machine.name: machine for machine in _ALL}
_BY_KEY = {name_key(name): machine for machine in _ALL for name in (machine.name, *machine.aliases)}

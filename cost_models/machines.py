"""GPUs, machines and rooflines by name, every figure with its source; and the options of a machine.

Memory is what the driver reports as usable, which is less than the name says and differs a little between
drivers: of the reports found, the smallest for the whole, unpartitioned device without optional ECC.

Bandwidth is one direction between two GPUs. Data sheets add both directions, and often all the links of a
GPU: each source says how the figure follows. Latencies are assumptions of ours, since no vendor states them;
give `latency` where they were measured.

A context is what a process takes of a device before its first tensor: the driver's own and the kernels that
are loaded at once. It differs with the driver, and grows as further kernels are loaded.

A machine is one that people own or rent: a number of GPUs of a preset, the link inside, and the network
between machines of its kind. Where a machine has fewer network adapters than GPUs, neighbours share one.

What a GPU can do at most, for estimates without one: FLOP/s, memory bandwidth, launches.

Those of the presets' GPUs stand here. Peaks are those of dense matrix products; data sheets of NVIDIA often
give those of sparse ones, twice as many. Of half precision they are those that add up in float32, as torch
does. Of another GPU a TOML file says them, for `device="analytic:my.toml"`:

    name = "My GPU"           # as its driver names it: plans take links of its preset, where there is one
    memory = "48GiB"
    bandwidth = "864GB/s"     # of its memory
    launch = "1.5us"          # for each kernel on the device; may be left out
    host_launch = "40us"      # for each operation on the host; may be left out
    float32 = 91.6e12         # FLOP/s of dense products
    bfloat16 = 181e12

Of FLOP/s those of the dtypes that the model computes in are needed, of float32, tf32, float16, bfloat16 and
float64. Keys that are not known are refused.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from . import arguments
from .arguments import Options, option, read_by_level
from .errors import FileError, UsageError
from .quantities import parse_bytes, parse_rate, parse_seconds
from .text_files import parse_toml, read_text

GB_PER_SECOND = 1e9
MIB = 2**20


@dataclass(frozen=True)
class Figure:
    """A number and where it is from; a source that begins with `assumption` is a choice of ours."""

    value: float
    source: str


@dataclass(frozen=True)
class PresetLink:
    """A kind of link, one direction: bytes per second and seconds."""

    name: str
    bandwidth: Figure
    latency: Figure


_SEEN_ADA = "426 MiB on an RTX 6000 Ada with PyTorch 2.10 for CUDA 13.0 (https://github.com/unslothai/unsloth-zoo/pull/1053)"
_ADA_CONTEXT = Figure(426 * MIB, f"assumption: as on the largest GPU of this architecture; seen: {_SEEN_ADA}")
_CONTEXT = Figure(
    512 * MIB,
    f"assumption: between what was seen: {_SEEN_ADA}, 612 MiB on a B200 "
    "(https://github.com/unslothai/unsloth/pull/8669)",
)


_HOPPER_CONTEXT = Figure(
    _CONTEXT.value + 2 * 32 * MIB,
    f"{_CONTEXT.source}; and workspaces of cuBLAS for forward and for backward, 32 MiB each on Hopper "
    "(aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize)",
)
"""On other GPUs PyTorch's workspaces of cuBLAS are 8 MiB each, within what is not known of a context."""


@dataclass(frozen=True)
class Preset:
    """A GPU as `gpu` names it, with the links `inside` a usual server of it and `between` such servers.

    `device_names` is a pattern for the whole name that the driver gives the device. `context_bytes` are those
    of one process on it.
    """

    name: str
    title: str
    device_names: str
    memory_bytes: Figure
    gpus_per_node: Figure
    inside: PresetLink
    between: PresetLink
    context_bytes: Figure = _CONTEXT


def _device_query(driver: str, device: str) -> str:
    return (
        f"deviceQuery of NVIDIA's cuda-samples (https://github.com/NVIDIA/cuda-samples), "
        f"total amount of global memory of a {device} under a driver for CUDA {driver}"
    )


_V100 = (
    "NVIDIA DGX-1 With Tesla V100 System Architecture, white paper "
    "(https://images.nvidia.com/content/pdf/dgx1-v100-system-architecture-whitepaper.pdf)"
)
_A100 = (
    "NVIDIA A100 Tensor Core GPU data sheet (https://www.nvidia.com/content/dam/en-zz/Solutions/"
    "Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf)"
)
DGX_A100 = "NVIDIA DGX A100 System User Guide, DU-09821-001 (https://docs.nvidia.com/dgx/dgxa100-user-guide/)"
_HGX_H100 = (
    "Introducing NVIDIA HGX H100, NVIDIA Technical Blog (https://developer.nvidia.com/blog/"
    "introducing-nvidia-hgx-h100-an-accelerated-server-platform-for-ai-and-high-performance-computing/)"
)
DGX_H100 = "NVIDIA DGX H100/H200 User Guide (https://docs.nvidia.com/dgx/dgxh100-user-guide/)"
_DGX_B200 = "NVIDIA DGX B200 User Guide (https://docs.nvidia.com/dgx/dgxb200-user-guide/)"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet (https://www.nvidia.com/en-us/data-center/h200/)"
_MI300X = (
    "AMD Instinct MI300X Platform data sheet (https://www.amd.com/content/dam/amd/en/documents/"
    "instinct-tech-docs/data-sheets/amd-instinct-mi300x-platform-data-sheet.pdf)"
)
_AZURE_MI300X = (
    "Microsoft Azure, ND MI300X v5 sizes series "
    "(https://learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/nd-mi300x-v5-series)"
)
_EC2 = "Amazon EC2 accelerated computing instances (https://aws.amazon.com/ec2/instance-types/)"
_PCI_SIG = "PCI Express Base Specification (https://pcisig.com/specifications)"

_NVLINK_LATENCY = Figure(5e-6, "assumption: 5 µs to start a transfer over NVLink or Infinity Fabric")
_PCIE_LATENCY = Figure(10e-6, "assumption: 10 µs to start a transfer over PCIe, part of it through the host")
NETWORK_LATENCY = Figure(20e-6, "assumption: 20 µs to start a transfer through the network between servers")
_EIGHT_SLOTS = Figure(8, "assumption: a server with eight PCIe slots for GPUs; makers build many sizes")


def gigabits(per_second: int, source: str) -> Figure:
    """Bytes per second of a network that its source states in gigabits."""
    text = f"{source}; {per_second} Gb/s are {per_second / 8:g} GB/s in each direction"
    return Figure(per_second / 8 * GB_PER_SECOND, text)


def _infiniband(rate: str, gigabits_per_second: int, adapters: str) -> PresetLink:
    return PresetLink(f"InfiniBand {rate}", gigabits(gigabits_per_second, adapters), NETWORK_LATENCY)


_EDR = _infiniband("EDR", 100, f"{_V100}: four adapters of 100 Gb/s a server; a transfer uses one")
HDR = _infiniband("HDR", 200, f"{DGX_A100}: eight ConnectX-6 adapters of 200 Gb/s, one a GPU")
NDR = _infiniband("NDR", 400, f"{DGX_H100}: eight ConnectX-7 ports of 400 Gb/s, one a GPU")
_NDR_AZURE = _infiniband("NDR", 400, f"{_AZURE_MI300X}: 8 x 400 Gb/s NDR, one a GPU")
ETHERNET = PresetLink(
    "100 Gb Ethernet",
    Figure(12.5 * GB_PER_SECOND, "assumption: one port of 100 Gb/s a server, which is 12.5 GB/s"),
    NETWORK_LATENCY,
)
PCIE_3 = PresetLink(
    "PCIe 3.0 x16",
    Figure(15.75 * GB_PER_SECOND, f"{_PCI_SIG}: 8 GT/s x 16 lanes, 128b/130b, is 15.75 GB/s a direction"),
    _PCIE_LATENCY,
)
PCIE_4 = PresetLink(
    "PCIe 4.0 x16",
    Figure(31.5 * GB_PER_SECOND, f"{_PCI_SIG}: 16 GT/s x 16 lanes, 128b/130b, is 31.5 GB/s a direction"),
    _PCIE_LATENCY,
)
PCIE_5 = PresetLink(
    "PCIe 5.0 x16",
    Figure(63 * GB_PER_SECOND, f"{_PCI_SIG}: 32 GT/s x 16 lanes, 128b/130b, is 63 GB/s a direction"),
    _PCIE_LATENCY,
)
PCIE_A10G = PresetLink(
    "PCIe 4.0 x16",
    Figure(
        PCIE_4.bandwidth.value,
        "assumption: 16 lanes of PCIe 4.0, as NVIDIA's A10 has; Amazon does not state it for the A10G",
    ),
    _PCIE_LATENCY,
)
NVLINK_2 = PresetLink(
    "NVLink 2",
    Figure(
        50 * GB_PER_SECOND,
        f"{_V100}: six links of 25 GB/s a direction (300 GB/s with both directions), of which neighbours in "
        "the hybrid cube mesh share two; pairs without a link are slower, a server with NVSwitch is faster",
    ),
    _NVLINK_LATENCY,
)
NVLINK_3 = PresetLink(
    "NVLink 3",
    Figure(300 * GB_PER_SECOND, f"{_A100}: 600 GB/s with both directions, to any GPU through NVSwitch"),
    _NVLINK_LATENCY,
)


def _nvlink_4(source: str) -> PresetLink:
    figure = Figure(450 * GB_PER_SECOND, f"{source}: 900 GB/s with both directions, to any GPU by NVSwitch")
    return PresetLink("NVLink 4", figure, _NVLINK_LATENCY)


NVLINK_4 = _nvlink_4(_HGX_H100)
_NVLINK_5 = PresetLink(
    "NVLink 5",
    Figure(900 * GB_PER_SECOND, f"{_DGX_B200}: 1.8 TB/s with both directions, to any GPU by NVSwitch"),
    _NVLINK_LATENCY,
)
_INFINITY_FABRIC = PresetLink(
    "Infinity Fabric",
    Figure(
        64 * GB_PER_SECOND,
        f"{_MI300X}: 128 GB/s with both directions to each of seven peers; AMD puts 48 GB/s as what the "
        "protocol leaves (https://github.com/ROCm/rccl/issues/1210)",
    ),
    _NVLINK_LATENCY,
)


def _v100(gigabytes: int, device_names: str, memory: Figure) -> Preset:
    return Preset(
        name=f"v100-{gigabytes}gb",
        title=f"V100-{gigabytes}GB",
        device_names=device_names,
        memory_bytes=memory,
        gpus_per_node=Figure(8, f"{_V100}: eight GPUs"),
        inside=NVLINK_2,
        between=_EDR,
    )


def _a100(gigabytes: int, memory: Figure) -> Preset:
    return Preset(
        name=f"a100-{gigabytes}gb",
        title=f"A100-{gigabytes}GB",
        device_names=rf"(NVIDIA )?A100-SXM4-{gigabytes}GB",
        memory_bytes=memory,
        gpus_per_node=Figure(8, f"{DGX_A100}: eight GPUs"),
        inside=NVLINK_3,
        between=HDR,
    )


def _card(
    name: str,
    title: str,
    device_names: str,
    memory: Figure,
    inside: PresetLink,
    node: Figure,
    context: Figure = _CONTEXT,
) -> Preset:
    return Preset(name, title, device_names, memory, node, inside, ETHERNET, context)


_PRESETS = (
    _v100(
        16,
        "(NVIDIA )?(Tesla )?V100-SXM2-16GB",
        Figure(16_945_512_448, _device_query("10.2", "Tesla V100-SXM2-16GB")),
    ),
    _v100(
        32,
        "(NVIDIA )?(Tesla )?V100-SXM[23]-32GB",
        Figure(34_089_730_048, _device_query("11.4", "Tesla V100-SXM2-32GB")),
    ),
    _a100(
        40,
        Figure(
            42_298_834_944,
            _device_query("12.2", "NVIDIA A100-SXM4-40GB")
            + ", as in https://github.com/bottlerocket-os/bottlerocket/pull/3873",
        ),
    ),
    _a100(80, Figure(84_987_740_160, _device_query("12.2", "NVIDIA A100-SXM4-80GB"))),
    Preset(
        name="h100",
        title="H100",
        device_names="NVIDIA H100 80GB HBM3",
        memory_bytes=Figure(85_017_755_648, _device_query("13.0", "NVIDIA H100 80GB HBM3")),
        gpus_per_node=Figure(8, f"{_HGX_H100}: eight GPUs"),
        inside=NVLINK_4,
        between=NDR,
        context_bytes=_HOPPER_CONTEXT,
    ),
    Preset(
        name="h200",
        title="H200",
        device_names="NVIDIA H200",
        memory_bytes=Figure(
            143_156 * MIB,
            "torch.cuda.get_device_properties of an NVIDIA H200: total_memory=143156MB, in MiB (https://docs.pytorch.org/docs/stable/cuda.html)",
        ),
        gpus_per_node=Figure(8, f"{DGX_H100}: eight GPUs"),
        inside=_nvlink_4(_H200),
        between=NDR,
        context_bytes=_HOPPER_CONTEXT,
    ),
    Preset(
        name="b200",
        title="B200",
        device_names="NVIDIA B200",
        memory_bytes=Figure(
            int(178.35 * 2**30),
            "total capacity of an NVIDIA B200 in messages of PyTorch, 178.35 GiB; nvidia-smi says 179 "
            "(https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview)",
        ),
        gpus_per_node=Figure(8, f"{_DGX_B200}: eight GPUs"),
        inside=_NVLINK_5,
        between=NDR,
    ),
    _card(
        "l4",
        "L4",
        "NVIDIA L4",
        Figure(23_612_293_120, _device_query("12.0", "NVIDIA L4")),
        PCIE_4,
        Figure(8, f"{_EC2}: g6.48xlarge, eight L4"),
        _ADA_CONTEXT,
    ),
    _card(
        "a10g",
        "A10G",
        "NVIDIA A10G",
        Figure(
            22_731 * MIB,
            "nvidia-smi of an NVIDIA A10G under driver 470.256, 22731 MiB, as in "
            "https://github.com/bottlerocket-os/bottlerocket-core-kit/pull/122",
        ),
        PCIE_A10G,
        Figure(8, f"{_EC2}: g5.48xlarge, eight A10G"),
    ),
    _card(
        "t4",
        "T4",
        "(NVIDIA )?(Tesla )?T4",
        Figure(15_843_721_216, _device_query("11.0", "Tesla T4")),
        PCIE_3,
        Figure(8, f"{_EC2}: g4dn.metal, eight T4"),
    ),
    _card(
        "rtx-4090",
        "RTX 4090",
        "(NVIDIA )?GeForce RTX 4090",
        Figure(25_250_627_584, _device_query("13.0", "NVIDIA GeForce RTX 4090")),
        PCIE_4,
        _EIGHT_SLOTS,
        _ADA_CONTEXT,
    ),
    _card(
        "rtx-3090",
        "RTX 3090",
        "(NVIDIA )?GeForce RTX 3090",
        Figure(25_414_860_800, _device_query("12.1", "NVIDIA GeForce RTX 3090")),
        PCIE_4,
        _EIGHT_SLOTS,
    ),
    Preset(
        name="mi300x",
        title="MI300X",
        device_names="AMD Instinct MI300X( VF| OAM)?",
        memory_bytes=Figure(
            206_141_652_992,
            "rocm-smi --showmeminfo vram of an AMD Instinct MI300X "
            "(https://rocm.docs.amd.com/projects/rocm_smi_lib/)",
        ),
        gpus_per_node=Figure(8, f"{_MI300X}: eight GPUs"),
        inside=_INFINITY_FABRIC,
        between=_NDR_AZURE,
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}


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


_MACHINES = (
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

MACHINES: dict[str, Machine] = {machine.name: machine for machine in _MACHINES}
_BY_KEY = {name_key(name): machine for machine in _MACHINES for name in (machine.name, *machine.aliases)}


TERA = 1e12
LAUNCH = Figure(1.5e-6, "assumption: 1.5 µs on the device from one kernel of a stream to the next")
HOST_LAUNCH = Figure(
    40e-6,
    "of one operation of eager PyTorch, between the 32 and 60 µs of ResNet-50's 172 at batch size 1: 5.5 ms "
    "with a T4, 10.4 ms in a DGX-1 (NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5, inference latency)",
)


PRODUCT_SHARE, ATTENTION_SHARE, MEMORY_SHARE = 0.6, 0.5, 0.7
"""Of the FLOP/s and of the bandwidth: what large products, attention and passes over memory are assumed to
reach where no kernels were measured. With these, published steps of A100 (benchmarks/published_tables.py) are
met to 3.4 % in the median."""


@dataclass(frozen=True)
class Roofline:
    """A GPU's limits.

    `device_name`: as its driver names it, so that a plan finds its memory and links. `peaks`: FLOP/s by
    dtype, and `tf32`. `bandwidth`: bytes per second of its memory. `launch`: seconds from one kernel to
    the next on the device. `host_launch`: of the host, which runs ahead, for each operation of forward.
    """

    name: str
    device_name: str
    memory_bytes: int
    peaks: Mapping[str, Figure]
    bandwidth: Figure
    launch: Figure = LAUNCH
    host_launch: Figure = HOST_LAUNCH

    @property
    def has_flash_attention(self) -> bool:
        """Of compute capability 8.0, from which on there are flash attention and bfloat16."""
        return "bfloat16" in self.peaks

    def peak(self, dtype: str) -> float:
        """FLOP/s. Raises UsageError where there is no figure."""
        if dtype not in self.peaks:
            raise UsageError(
                f"analytic:{self.name}: there is no figure of its FLOP/s in {dtype}",
                f"There are those of {', '.join(self.peaks)}: name one with `dtype`, or give your "
                "own figures: device='analytic:my.toml'",
            )
        return self.peaks[dtype].value


def find_roofline(name: str) -> Roofline:
    """Of the preset of that name, spelled as `find_preset` allows. Raises UsageError."""
    hint = (
        f"There are those of {', '.join(ROOFLINES)}. For another GPU write its figures into a file: "
        "device='analytic:my.toml'"
    )
    try:
        preset = find_preset(name).name
    except UsageError as error:
        near = [other for other in ROOFLINES if name_key(name) and name_key(other).startswith(name_key(name))]
        guess = f"Did you mean {' or '.join(f'analytic:{other}' for other in near)}? " if near else ""
        raise UsageError(f"device='analytic:{name}': no preset of that name", guess + hint) from error
    if preset not in ROOFLINES:
        raise UsageError(f"device='analytic:{name}': there are no figures of its FLOP/s", hint)
    return ROOFLINES[preset]


_V100_SHEET = (
    "NVIDIA V100 Tensor Core GPU data sheet, SXM2 (https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf)"
)
_A100_SHEET = (
    "NVIDIA A100 Tensor Core GPU data sheet, SXM (https://www.nvidia.com/content/dam/en-zz/Solutions/"
    "Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf)"
)
_A100_40GB = (
    "NVIDIA A100 Tensor Core GPU Architecture, white paper (https://images.nvidia.com/aem-dam/en-zz/"
    "Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf)"
)
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, SXM (https://www.nvidia.com/en-us/data-center/h100/)"
_H200_SHEET = "NVIDIA H200 Tensor Core GPU data sheet, SXM (https://www.nvidia.com/en-us/data-center/h200/)"
_B200 = (
    "NVIDIA DGX B200 data sheet, an eighth of its eight GPUs "
    "(https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet)"
)
_L4 = "NVIDIA L4 Tensor Core GPU data sheet (https://www.nvidia.com/en-us/data-center/l4/)"
_T4 = (
    "NVIDIA T4 Tensor Core GPU data sheet (https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/"
    "tesla-t4/t4-tensor-core-datasheet-951643.pdf)"
)
_ADA = (
    "NVIDIA Ada GPU Architecture, white paper (https://images.nvidia.com/aem-dam/Solutions/geforce/ada/"
    "nvidia-ada-gpu-architecture.pdf)"
)
_GA102 = (
    "NVIDIA Ampere GA102 GPU Architecture, white paper (https://www.nvidia.com/content/PDF/"
    "nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf)"
)
_MI300X_SHEET = (
    "AMD Instinct MI300X data sheet (https://www.amd.com/content/dam/amd/en/documents/"
    "instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf)"
)


def _roofline(
    name: str,
    device_name: str,
    source: str,
    teraflops: Mapping[str, float],
    bandwidth: float,
    bandwidth_source: str = "",
) -> Roofline:
    """From TFLOP/s and GB/s."""
    return Roofline(
        name=name,
        device_name=device_name,
        memory_bytes=int(find_preset(name).memory_bytes.value),
        peaks={dtype: Figure(peak * TERA, source) for dtype, peak in teraflops.items()},
        bandwidth=Figure(bandwidth * 1e9, bandwidth_source or source),
    )


def _peaks(
    half: float, float32: float, tf32: float | None = None, float64: float | None = None, *, bf16: bool = True
) -> dict[str, float]:
    """TFLOP/s; None and False where the tensor cores know no such dtype, or no figure is published."""
    kinds = {
        "float32": float32,
        "tf32": tf32,
        "float16": half,
        "bfloat16": half if bf16 else None,
        "float64": float64,
    }
    return {kind: peak for kind, peak in kinds.items() if peak is not None}


_VOLTA = _peaks(125, 15.7, None, 7.8, bf16=False)
_AMPERE = _peaks(312, 19.5, 156, 19.5)
_HOPPER = _peaks(1979 / 2, 67, 989 / 2, 67)
_SPARSE = "; of tensor cores half of what it gives with sparsity"

_ROOFLINES = (
    _roofline("v100-16gb", "Tesla V100-SXM2-16GB", _V100_SHEET, _VOLTA, 900),
    _roofline("v100-32gb", "Tesla V100-SXM2-32GB", _V100_SHEET, _VOLTA, 900),
    _roofline("a100-40gb", "NVIDIA A100-SXM4-40GB", _A100_SHEET, _AMPERE, 1555, _A100_40GB),
    _roofline("a100-80gb", "NVIDIA A100-SXM4-80GB", _A100_SHEET, _AMPERE, 2039),
    _roofline("h100", "NVIDIA H100 80GB HBM3", _H100 + _SPARSE, _HOPPER, 3350, _H100),
    _roofline("h200", "NVIDIA H200", _H200_SHEET + _SPARSE, _HOPPER, 4800, _H200_SHEET),
    _roofline("b200", "NVIDIA B200", _B200, _peaks(2250, 80, 1100, 40), 8000),
    _roofline("l4", "NVIDIA L4", _L4 + _SPARSE, _peaks(242 / 2, 30.3, 120 / 2), 300, _L4),
    _roofline("t4", "Tesla T4", _T4, _peaks(65, 8.1, bf16=False), 300),
    _roofline("rtx-4090", "NVIDIA GeForce RTX 4090", _ADA, _peaks(165.2, 82.6, 82.6), 1008),
    _roofline("rtx-3090", "NVIDIA GeForce RTX 3090", _GA102, _peaks(71, 35.6, 35.6), 936),
    _roofline("mi300x", "AMD Instinct MI300X", _MI300X_SHEET, _peaks(1307.4, 163.4, 653.7, 163.4), 5300),
)

ROOFLINES: dict[str, Roofline] = {roofline.name: roofline for roofline in _ROOFLINES}


HOST_SHARE = Figure(
    0.85,
    "assumption: of a link to the host what copies of pinned memory reach; nvbandwidth is seen to print 55.6 "
    "of an H100's 63 GB/s, and nothing is taken off for GPUs that share a switch",
)
_HOST_LINKS = {
    **dict.fromkeys(("v100-16gb", "v100-32gb", "t4"), PCIE_3),
    **dict.fromkeys(("a100-40gb", "a100-80gb", "l4", "rtx-4090", "rtx-3090"), PCIE_4),
    **dict.fromkeys(("h100", "h200", "b200", "mi300x"), PCIE_5),
    "a10g": PCIE_A10G,
}


def host_bandwidth(device_name: str) -> float | None:
    """Bytes per second of copies between the memory of that GPU and its host's, in either direction; None
    where it is not known. An assumption: the GPU's PCIe generation, and `HOST_SHARE` of it."""
    preset = device_preset(device_name)
    link = None if preset is None else _HOST_LINKS.get(preset.name)
    return None if link is None else HOST_SHARE.value * link.bandwidth.value


def memory_bandwidth(device_name: str) -> float | None:
    """Peak bytes per second of the memory of the GPU with a preset's title or a name of its driver; None
    where it is not known."""
    preset = device_preset(device_name)
    roofline = None if preset is None else ROOFLINES.get(preset.name)
    return None if roofline is None else roofline.bandwidth.value


_DTYPES = ("float32", "tf32", "float16", "bfloat16", "float64")
_EXAMPLE = 'Write lines such as: name = "My GPU", memory = "48GiB", bandwidth = "864GB/s", float32 = 91.6e12'

Peak = Annotated[float, Field(ge=1e6, le=1e20)]


class _RooflineKeys(BaseModel):
    """What may stand in the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    name: Annotated[str, Field(min_length=1)]
    memory: str
    bandwidth: str
    launch: str | None = None
    host_launch: str | None = None
    float32: Peak | None = None
    tf32: Peak | None = None
    float16: Peak | None = None
    bfloat16: Peak | None = None
    float64: Peak | None = None


def load_roofline(path: Path) -> Roofline:
    """Reads and validates the file.

    Raises FileError: missing, not TOML, a key that is missing or not known, a value that is not allowed.
    """
    keys, source = _read_keys(path), str(path)
    peaks = {dtype: Figure(peak, source) for dtype in _DTYPES if (peak := getattr(keys, dtype)) is not None}
    if not peaks:
        raise FileError(f"{path}: no FLOP/s are given", f"Give at least one of {', '.join(_DTYPES)}.")
    try:
        return Roofline(
            name=keys.name,
            device_name=keys.name,
            memory_bytes=parse_bytes(keys.memory, "memory"),
            peaks=peaks,
            bandwidth=_finite(parse_rate(keys.bandwidth, "bandwidth"), keys.bandwidth, source),
            launch=_launch(keys.launch, "launch", source) or LAUNCH,
            host_launch=_launch(keys.host_launch, "host_launch", source) or HOST_LAUNCH,
        )
    except UsageError as error:
        raise FileError(f"{path}: {error.what}", error.hint) from error


def _launch(text: str | None, key: str, source: str) -> Figure | None:
    return None if text is None else Figure(parse_seconds(text, key), source)


def _finite(rate: float, text: str, source: str) -> Figure:
    if not math.isfinite(rate):
        raise UsageError(f"bandwidth {text}: no memory is endlessly fast", _EXAMPLE)
    return Figure(rate, source)


def _read_keys(path: Path) -> _RooflineKeys:
    try:
        content = parse_toml(read_text(path, "roofline"))
    except ValueError as error:
        raise FileError(f"{path}: not a TOML file: {error}", _EXAMPLE) from error
    try:
        return _RooflineKeys.model_validate(content)
    except ValidationError as error:
        raise _refusal(path, content, error) from error


def _refusal(path: Path, content: dict[str, Any], error: ValidationError) -> FileError:
    first = error.errors()[0]
    key = str(first["loc"][0])
    if first["type"] == "missing":
        return FileError(f"{path}: the key {key!r} is missing", _EXAMPLE)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, _RooflineKeys.model_fields, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        keys = ", ".join(_RooflineKeys.model_fields)
        return FileError(f"{path}: unknown key {key!r}", f"{guess}Keys: {keys}.")
    return FileError(f"{path}: {key}: {first['msg']}, the value is {content[key]!r}", _EXAMPLE)


class MachineKeywords(TypedDict, total=False):
    """The fields of `MachineOptions` but `gpus`, as a caller may give them."""

    gpus_per_node: int | None
    gpu: str | None
    memory_bytes: int | None
    bandwidth: float | Sequence[float] | None
    latency: float | Sequence[float] | None
    topology: str | Path | None


def _machine(default: Any, check: Any, form: str, help: str, **more: Any) -> Any:
    return option(default, check, help, form, panel="The machine", **more)


def _memory(name: str, value: Any) -> int | None:
    return arguments.optional_whole(name, value, example="16 * 2**30")


def _bandwidth(name: str, value: Any) -> Sequence[float] | None:
    return arguments.by_level(name, value, "(300e9, 25e9)")


def _latency(name: str, value: Any) -> Sequence[float] | None:
    return arguments.by_level(name, value, "(5e-6, 20e-6)")


@dataclass(frozen=True)
class MachineOptions(Options):
    """The devices and their links; None: as in `topology`, else as profiled. Raises UsageError.

    `bandwidth` (bytes per second) and `latency` (seconds) hold one value inside a node and, where given, a
    second between nodes; `topology` is a machine's name or a TOML file.
    """

    gpus: int | None = _machine(
        None,
        arguments.optional_whole,
        "N",
        "How many GPUs there are; default: the topology's.",
        least=1,
    )
    gpus_per_node: int | None = _machine(None, arguments.optional_whole, "N", "GPUs in one server.", least=1)
    gpu: str | None = _machine(
        None,
        arguments.optional_word,
        "NAME",
        f"Its memory and the links of its usual server: {', '.join(PRESETS)}.",
    )
    memory_bytes: int | None = _machine(
        None, _memory, "16GiB", "Memory of each GPU.", flag="memory", read=parse_bytes
    )
    bandwidth: Sequence[float] | None = _machine(
        None,
        _bandwidth,
        "300GB/s[,25GB/s]",
        "Link bandwidth, inside a server and between servers.",
        read=read_by_level(parse_rate),
    )
    latency: Sequence[float] | None = _machine(
        None,
        _latency,
        "5us[,20us]",
        "Link latency, inside a server and between servers.",
        read=read_by_level(parse_seconds),
    )
    topology: Path | None = _machine(
        None,
        arguments.optional_path,
        "NAME|FILE.toml",
        f"A machine, or devices and links in a file. Machines: {', '.join(MACHINES)}.",
    )

    @property
    def parts(self) -> dict[str, Any]:
        """What they say beside the number of devices and the topology, as `make_topology` takes it."""
        return {
            "gpus_per_node": self.gpus_per_node,
            "gpu": self.gpu,
            "memory_bytes": self.memory_bytes,
            "bandwidth": self.bandwidth,
            "latency": self.latency,
        }

    @property
    def folder(self) -> Path:
        """Where the files that the topology names are."""
        return Path() if self.topology is None else self.topology.parent

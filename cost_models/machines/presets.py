"""The GPUs people have, and the links of a usual server of each: every figure with where it is from.

Memory is what the driver reports as usable, which is less than the name says and differs a little between
drivers: of the reports found, the smallest for the whole, unpartitioned device without optional ECC.

Bandwidth is one direction between two GPUs. Data sheets add both directions, and often all the links of a
GPU: each source says how the figure follows. Latencies are assumptions of ours, since no vendor states them;
give `latency` where they were measured.

A context is what a process takes of a device before its first tensor: the driver's own and the kernels that
are loaded at once. It differs with the driver, and grows as further kernels are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

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


_ALL = (
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

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}

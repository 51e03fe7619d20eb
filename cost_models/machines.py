"""GPUs, machines and rooflines by name, and the options that describe a machine.

The figures are in `machines.toml`, each with its source.

- Memory is what the driver reports as usable. It is less than the nominal size and differs a little between
  drivers. The figure is the smallest report found for the whole, unpartitioned device without optional ECC.
- Bandwidth is one direction between two GPUs. Data sheets add both directions, and often all links of a GPU.
  Each source says how the figure follows.
- Latencies are assumptions, because no vendor states them. Give `latency` if you have measured it.
- A context is the memory that a process takes on a device before its first tensor: the driver's and that of
  the kernels that are loaded at once. It differs with the driver and grows as further kernels are loaded.
  PyTorch's cuBLAS workspaces are counted on Hopper only. Elsewhere they are 8 MiB each, within the
  uncertainty of a context.
- A machine is one that people own or rent: a number of GPUs of a preset, the link inside, and the network
  between machines of its kind. If a machine has fewer network adapters than GPUs, neighbours share one.
- Rooflines hold the peak FLOP/s, memory bandwidth and launch times of the presets' GPUs, for estimates
  without a GPU. Peaks are those of dense matrix products. NVIDIA's data sheets often give those of sparse
  ones, twice as many. Peaks of half precision accumulate in float32, as torch does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import arguments
from .arguments import Converted, Options, option, options_class, read_by_level
from .errors import UsageError
from .quantities import parse_bytes, parse_rate, parse_seconds
from .text_files import parse_toml


@dataclass(frozen=True)
class Figure:
    """Number with its source. A source that begins with `assumption` is a choice of pplan."""

    value: float
    source: str


@dataclass(frozen=True)
class PresetLink:
    """Kind of link in one direction, with bandwidth in bytes per second and latency in seconds."""

    name: str
    bandwidth: Figure
    latency: Figure


@dataclass(frozen=True)
class Preset:
    """GPU that `gpu` names.

    Attributes:
        name: Name of the preset.
        title: Name for messages.
        device_names: Regular expression for the driver's full name of the device.
        memory_bytes: Usable memory in bytes.
        gpus_per_node: GPUs of a usual server.
        inside: Links inside a usual server.
        between: Links between usual servers.
        context_bytes: Bytes of the context of one process.
        host_link: Link to the host.
    """

    name: str
    title: str
    device_names: str
    memory_bytes: Figure
    gpus_per_node: Figure
    inside: PresetLink
    between: PresetLink
    context_bytes: Figure
    host_link: PresetLink


_TABLES = parse_toml((Path(__file__).parent / "machines.toml").read_text(encoding="utf-8"))


def _figure(table: Mapping[str, Any], key: str) -> Figure:
    return Figure(table[key], table[f"{key}_source"].format(**_TABLES["sources"]))


_LINKS = {
    key: PresetLink(link["name"], _figure(link, "bandwidth"), _figure(link, "latency"))
    for key, link in _TABLES["links"].items()
}


PRESETS = {
    gpu["name"]: Preset(
        gpu["name"],
        gpu["title"],
        gpu["device_names"],
        _figure(gpu, "memory_bytes"),
        _figure(gpu, "gpus_per_node"),
        _LINKS[gpu["inside"]],
        _LINKS[gpu["between"]],
        _figure(gpu, "context_bytes"),
        _LINKS[gpu["host_link"]],
    )
    for gpu in _TABLES["gpu"]
}


def find_preset(name: str, called: str = "") -> Preset:
    """Return the preset of this name. Case, spaces, dashes and underscores do not matter.

    Args:
        name: Name of the preset.
        called: Name of the value in a file. Without one the message names the field `gpu`.

    Raises:
        UsageError: There is no such preset.
    """
    preset = _PRESETS_BY_KEY.get(name_key(name))
    if preset is not None:
        return preset
    raise UsageError(
        f"{called} {name}: no preset of that name" if called else f"gpu={name!r}: no preset of that name",
        f"{_guess(name, _PRESETS_BY_KEY)}Presets: {', '.join(PRESETS)}. "
        "For another GPU give `memory`, `bandwidth` and `latency`.",
    )


def match_device(device_name: str) -> Preset | None:
    """Return the preset of the GPU that the driver calls `device_name`, or None for other models."""
    for preset in PRESETS.values():
        if re.fullmatch(preset.device_names, device_name.strip(), re.IGNORECASE):
            return preset
    return None


@lru_cache(maxsize=256)  # every ledger asks for its device's
def device_preset(device_name: str) -> Preset | None:
    """Return the preset with this title or of the GPU with this driver name.

    None for others, such as a CPU.
    """
    titled = (preset for preset in PRESETS.values() if preset.title == device_name)
    return next(titled, None) or match_device(device_name)


def same_device(a: str, b: str) -> bool:
    """Return whether both names, preset titles or driver names, belong to one kind of device."""
    one, other = device_preset(a), device_preset(b)
    return a == b or (one is not None and one == other)


_GPU_WORDS = re.compile(r"\b(GPU|NVIDIA|GeForce|Tesla|Quadro|RTX|Radeon|Instinct)\b", re.IGNORECASE)


def is_gpu(device_name: str) -> bool:
    """Return whether the name is that of a preset or holds a word that is typical for GPUs."""
    return device_preset(device_name) is not None or _GPU_WORDS.search(device_name) is not None


def device_context(device_name: str) -> Figure | None:
    """Return the context bytes of a device by preset title or driver name. None without a preset."""
    preset = device_preset(device_name)
    return None if preset is None else preset.context_bytes


def name_key(name: str) -> str:
    """Return the name without case, spaces, dashes and underscores, for comparison."""
    return re.sub(r"[\s_-]+", "", name.lower())


def _guess(name: str, catalogue: Mapping[str, Preset | Machine]) -> str:
    """Ask whether the user meant the names that begin with `name`, or the most similar one."""
    key = name_key(name)
    begun = [other for other in catalogue if key and other.startswith(key)]
    near = begun or difflib.get_close_matches(key, catalogue, n=1, cutoff=0.5)
    names = dict.fromkeys(catalogue[other].name for other in near)
    return f"Did you mean {' or '.join(names)}? " if names else ""


_PRESETS_BY_KEY = {name_key(name): preset for name, preset in PRESETS.items()}


@dataclass(frozen=True)
class Machine:
    """Kind of machine.

    Attributes:
        name: Name of the machine.
        title: Name for messages.
        gpu: Preset of its GPUs.
        gpus: Number of GPUs.
        inside: Link between its GPUs.
        between: Link between two machines.
        gpus_per_adapter: GPUs that share the bandwidth of `between`.
        aliases: Other names.
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
    """Return the machine of this name, or None. Case, spaces, dashes and underscores do not matter."""
    return _BY_KEY.get(name_key(name))


def unknown_machine(name: str, called: str = "") -> UsageError:
    """Return the error for an unknown machine, with similar names.

    Args:
        name: Unknown name.
        called: Name of the value in a file or argument. Without one the message names the field `topology`.
    """
    what = f"{called} {name}" if called else f"topology={name!r}"
    gpu = _PRESETS_BY_KEY.get(name_key(name))
    if gpu is not None:
        return UsageError(
            f"{what}: is a GPU, not a machine",
            f"Give gpu={gpu.name!r}, or a machine: {', '.join(MACHINES)}.",
        )
    return UsageError(
        f"{what}: no such file, and no machine of that name",
        f"{_guess(name, _BY_KEY)}Machines: {', '.join(MACHINES)}; or name a TOML file.",
    )


MACHINES = {
    machine["name"]: Machine(
        machine["name"],
        machine["title"],
        machine["gpu"],
        _figure(machine, "gpus"),
        _LINKS[machine["inside"]],
        _LINKS[machine["between"]],
        _figure(machine, "gpus_per_adapter"),
        tuple(machine.get("aliases", ())),
    )
    for machine in _TABLES["machine"]
}
_BY_KEY = {
    name_key(name): machine for machine in MACHINES.values() for name in (machine.name, *machine.aliases)
}


LAUNCH = Figure(1.5e-6, "assumption: 1.5 µs on the device from one kernel of a stream to the next")
HOST_LAUNCH = Figure(
    40e-6,
    "of one operation of eager PyTorch, between the 32 and 60 µs of ResNet-50's 172 at batch size 1: 5.5 ms "
    "with a T4, 10.4 ms in a DGX-1 (NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5, inference latency)",
)


PRODUCT_SHARE = Figure(0.6, "assumption: 60 % of the FLOP/s, where no table of kernels was published")
ATTENTION_SHARE, MEMORY_SHARE = 0.5, 0.7
"""Share of the FLOP/s for attention, and of the bandwidth for memory passes, if no kernels were measured.

Both are assumptions. benchmarks/published_tables.py compares with published steps.
"""


@dataclass(frozen=True)
class Roofline:
    """Limits of a GPU.

    Attributes:
        name: Name of the preset.
        device_name: Driver's name, with which a plan finds memory and links.
        memory_bytes: Memory in bytes.
        peaks: Peak FLOP/s by dtype, and for `tf32`.
        bandwidth: Bytes per second of its memory.
        product_share: Share of the peak that a transformer's bfloat16 products reach in a training loop.
        launch: Seconds from one kernel to the next on the device.
        host_launch: Host seconds per operation of forward. The host runs ahead.
    """

    name: str
    device_name: str
    memory_bytes: int
    peaks: Mapping[str, Figure]
    bandwidth: Figure
    product_share: Figure = PRODUCT_SHARE
    launch: Figure = LAUNCH
    host_launch: Figure = HOST_LAUNCH

    @property
    def has_flash_attention(self) -> bool:
        """True if compute capability is 8.0 or higher, as flash attention and bfloat16 need."""
        return "bfloat16" in self.peaks

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s of a dtype.

        Raises:
            UsageError: There is no figure for the dtype.
        """
        if dtype not in self.peaks:
            raise UsageError(
                f"analytic:{self.name}: there is no figure of its FLOP/s in {dtype}",
                f"There are those of {', '.join(self.peaks)}: name one with `dtype`, or give your "
                "own figures: device='analytic:my.toml'",
            )
        return self.peaks[dtype].value


def find_roofline(name: str) -> Roofline:
    """Return the roofline of the preset of this name, spelled as `find_preset` allows.

    Raises:
        UsageError: There is no such preset, or it has no peak FLOP/s.
    """
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


ROOFLINES = {
    gpu["name"]: Roofline(
        gpu["name"],
        gpu["driver_name"],
        gpu["memory_bytes"],
        {dtype: _figure(gpu | {"flops": peak}, "flops") for dtype, peak in gpu["flops"].items()},
        _figure(gpu, "memory_bandwidth"),
        _figure(gpu, "product_share") if "product_share" in gpu else PRODUCT_SHARE,
    )
    for gpu in _TABLES["gpu"]
    if "flops" in gpu
}


HOST_SHARE = Figure(
    0.85,
    "assumption: of a link to the host what copies of pinned memory reach; nvbandwidth is seen to print 55.6 "
    "of an H100's 63 GB/s, and nothing is taken off for GPUs that share a switch",
)


def host_bandwidth(device_name: str) -> float | None:
    """Return the bytes per second of copies between a GPU and its host in one direction, or None if unknown.

    This is an assumption: `HOST_SHARE` of the GPU's PCIe generation.
    """
    preset = device_preset(device_name)
    return None if preset is None else HOST_SHARE.value * preset.host_link.bandwidth.value


def memory_bandwidth(device_name: str) -> float | None:
    """Return the peak memory bandwidth in bytes per second of a GPU by preset title or driver name.

    None if unknown.
    """
    preset = device_preset(device_name)
    roofline = None if preset is None else ROOFLINES.get(preset.name)
    return None if roofline is None else roofline.bandwidth.value


def _machine(default: Any, check: Any, form: str, help: str, **more: Any) -> Any:
    return option(default, check, help, form, panel="The machine", **more)


def _memory(name: str, value: Any) -> int | None:
    return arguments.optional_whole(name, value, example="16 * 2**30")


def _bandwidth(name: str, value: Any) -> Sequence[float] | None:
    return arguments.by_level(name, value, "(300e9, 25e9)")


def _latency(name: str, value: Any) -> Sequence[float] | None:
    return arguments.by_level(name, value, "(5e-6, 20e-6)")


@options_class
class DeviceCount(Options):
    """Number of devices. None for that of the topology."""

    gpus: int | None = _machine(
        None,
        arguments.optional_whole,
        "N",
        "How many GPUs there are; default: the topology's.",
        least=1,
    )


@options_class
class DeviceOptions(Options):
    """Devices and their links. None for those of `topology`, else as profiled.

    `bandwidth` (bytes per second) and `latency` (seconds) hold one value inside a node and optionally a
    second between nodes. `topology` is a machine's name or a TOML file.

    Raises:
        UsageError: A value is invalid.
    """

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
    bandwidth: Converted[float | Sequence[float] | None, Sequence[float] | None] = _machine(
        None,
        _bandwidth,
        "300GB/s[,25GB/s]",
        "Link bandwidth, inside a server and between servers.",
        read=read_by_level(parse_rate),
    )
    latency: Converted[float | Sequence[float] | None, Sequence[float] | None] = _machine(
        None,
        _latency,
        "5us[,20us]",
        "Link latency, inside a server and between servers.",
        read=read_by_level(parse_seconds),
    )
    topology: Converted[str | Path | None, Path | None] = _machine(
        None,
        arguments.optional_path,
        "NAME|FILE.toml",
        f"A machine, or devices and links in a file. Machines: {', '.join(MACHINES)}.",
    )

    @property
    def parts(self) -> dict[str, Any]:
        """Arguments of `make_topology` other than the number of devices and the topology."""
        return {
            "gpus_per_node": self.gpus_per_node,
            "gpu": self.gpu,
            "memory_bytes": self.memory_bytes,
            "bandwidth": self.bandwidth,
            "latency": self.latency,
        }

    @property
    def folder(self) -> Path:
        """Folder of the files that the topology names."""
        return Path() if self.topology is None else self.topology.parent


@options_class
class MachineOptions(DeviceOptions, DeviceCount):
    """Machine: devices, their number and their links."""

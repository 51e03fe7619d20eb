"""The machine that measures: its devices, dtypes, memory and versions."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from datetime import UTC, datetime
from pathlib import Path

import torch

from ..cost_models.document import MadeBy
from ..cost_models.errors import MachineError, UsageError

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of this name. Raises UsageError, which lists the names."""
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is not known", f"Use one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def parse_device(name: str | None) -> torch.device:
    """`cpu`, `cuda`, `cuda:N` or `meta`; by default CUDA where there is a device.

    Raises UsageError for another name, MachineError for a device that is not here.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    match = re.fullmatch(r"cpu|meta|cuda(?::(\d{1,9}))?", name)
    if match is None:
        raise UsageError(f"device {name!r} is not known", f"Use one of {_available()}.")
    if name in ("cpu", "meta"):
        return torch.device(name)
    index = int(match[1] or 0)
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise MachineError(
            f"device {name!r} is not here: torch {torch.__version__} finds "
            f"{torch.cuda.device_count() if torch.cuda.is_available() else 0} CUDA devices",
            f"Use one of {_available()}.",
        )
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """The manufacturer's name of the device; empty for meta."""
    if device.type == "meta":
        return ""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    match = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def device_memory_bytes(device: torch.device) -> int | None:
    """None for a CPU, whose memory is not its own."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def free_host_bytes() -> int | None:
    """Memory that the kernel would still give, within the control group's limit; None where it is unknown.

    Linux hands out more than it has and ends the process later, so that a CPU allocation seldom fails.
    """
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    if match is None:
        return None
    limit, used = (_text(f"/sys/fs/cgroup/memory.{key}").strip() for key in ("max", "current"))
    free = int(match[1]) * 1024
    return min(free, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else free


def free_bytes(device: torch.device) -> int | None:
    """Memory of the device that nobody has taken; None where it is unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def versions() -> MadeBy:
    """Versions of pplan, Python, torch, CUDA and the driver, and the time; the caller adds the command."""
    driver = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)", _text("/proc/driver/nvidia/version"))
    return MadeBy(
        pplan=importlib.metadata.version("pplan"),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=driver[1] if driver else None,
    )


def _available() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ", ".join(["cpu", *(f"cuda:{index}" for index in range(count)), "meta"])


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def list_devices() -> list[tuple[str, str, int | None]]:
    """The devices that can be measured: torch's word, the manufacturer's name, bytes of memory (of a CPU,
    what is free)."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(count))]
    return [
        (str(device), device_name(device), device_memory_bytes(device) or free_bytes(device))
        for device in devices
    ]


def list_backends() -> list[str]:
    """What processes may send tensors by, as torch was built."""
    if not torch.distributed.is_available():
        return []
    usable = {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available() and torch.cuda.is_available(),
        "mpi": torch.distributed.is_mpi_available(),
    }
    return [name for name, is_usable in usable.items() if is_usable]


def have_direct_access() -> bool | None:
    """Whether the first two GPUs read each other's memory directly; None where there are not two."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        return None
    return bool(torch.cuda.can_device_access_peer(0, 1))

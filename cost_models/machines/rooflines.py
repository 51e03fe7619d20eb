"""What a GPU can do at most, for estimates without one: FLOP/s, memory bandwidth, launches.

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import FileError, UsageError
from ..quantities import parse_bytes, parse_rate, parse_seconds
from ..text_files import parse_toml, read_text
from .catalogue import device_preset, find_preset, name_key
from .presets import PCIE_3, PCIE_4, PCIE_5, PCIE_A10G, Figure

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


_V100 = (
    "NVIDIA V100 Tensor Core GPU data sheet, SXM2 (https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf)"
)
_A100 = (
    "NVIDIA A100 Tensor Core GPU data sheet, SXM (https://www.nvidia.com/content/dam/en-zz/Solutions/"
    "Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf)"
)
_A100_40GB = (
    "NVIDIA A100 Tensor Core GPU Architecture, white paper (https://images.nvidia.com/aem-dam/en-zz/"
    "Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf)"
)
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, SXM (https://www.nvidia.com/en-us/data-center/h100/)"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, SXM (https://www.nvidia.com/en-us/data-center/h200/)"
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
_MI300X = (
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

_ALL = (
    _roofline("v100-16gb", "Tesla V100-SXM2-16GB", _V100, _VOLTA, 900),
    _roofline("v100-32gb", "Tesla V100-SXM2-32GB", _V100, _VOLTA, 900),
    _roofline("a100-40gb", "NVIDIA A100-SXM4-40GB", _A100, _AMPERE, 1555, _A100_40GB),
    _roofline("a100-80gb", "NVIDIA A100-SXM4-80GB", _A100, _AMPERE, 2039),
    _roofline("h100", "NVIDIA H100 80GB HBM3", _H100 + _SPARSE, _HOPPER, 3350, _H100),
    _roofline("h200", "NVIDIA H200", _H200 + _SPARSE, _HOPPER, 4800, _H200),
    _roofline("b200", "NVIDIA B200", _B200, _peaks(2250, 80, 1100, 40), 8000),
    _roofline("l4", "NVIDIA L4", _L4 + _SPARSE, _peaks(242 / 2, 30.3, 120 / 2), 300, _L4),
    _roofline("t4", "Tesla T4", _T4, _peaks(65, 8.1, bf16=False), 300),
    _roofline("rtx-4090", "NVIDIA GeForce RTX 4090", _ADA, _peaks(165.2, 82.6, 82.6), 1008),
    _roofline("rtx-3090", "NVIDIA GeForce RTX 3090", _GA102, _peaks(71, 35.6, 35.6), 936),
    _roofline("mi300x", "AMD Instinct MI300X", _MI300X, _peaks(1307.4, 163.4, 653.7, 163.4), 5300),
)

ROOFLINES: dict[str, Roofline] = {roofline.name: roofline for roofline in _ALL}


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

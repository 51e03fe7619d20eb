"""The machine in a plan's `machine` field: kinds of devices by rank, and the links and ports between them."""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import inf, prod

from ..cost_models.errors import FileError
from .documents import LARGEST, Table
from .stated_plan import MOST_DEVICES

MIB = 2**20
_DECIMAL = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BINARY = {"KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}
_SIZES = _DECIMAL | _BINARY
_RATES = {f"{unit}/S": factor for unit, factor in _SIZES.items()}
_PER_SECOND = {"NS": 1e9, "US": 1e6, "µS": 1e6, "MS": 1e3, "S": 1.0}

KINDS: tuple[tuple[str, int, float | None], ...] = (
    (r"V100-(16|32)GB|(NVIDIA )?(Tesla )?V100-SXM(2-16|[23]-32)GB", 512, 900e9),
    (r"A100-40GB|(NVIDIA )?A100-SXM4-40GB", 512, 1555e9),
    (r"A100-80GB|(NVIDIA )?A100-SXM4-80GB", 512, 2039e9),
    (r"H100|NVIDIA H100 80GB HBM3", 576, 3.35e12),
    (r"H200|NVIDIA H200", 576, 4.8e12),
    (r"B200|NVIDIA B200", 512, 8e12),
    (r"(NVIDIA )?L4", 426, 300e9),
    (r"A10G|NVIDIA A10G", 512, None),
    (r"T4|(NVIDIA )?(Tesla )?T4", 512, 300e9),
    (r"RTX 3090|(NVIDIA )?GeForce RTX 3090", 512, 936e9),
    (r"RTX 4090|(NVIDIA )?GeForce RTX 4090", 426, 1008e9),
    (r"MI300X|AMD Instinct MI300X( VF| OAM)?", 512, 5.3e12),
)
"""By a pattern for a device's name: the MiB that a process's context takes of it, none of any other device,
and the bytes per second of its memory."""

Port = tuple[int, int, int]
"""A level, 0 for out and 1 for in, and the number of the port there."""


@dataclass(frozen=True)
class StatedDevice:
    """Devices of one kind: their seconds are the profile's over `speed`, or those of a `profile` of their
    own."""

    name: str
    memory_bytes: int | None
    speed: float
    profile: str | None

    @property
    def context_bytes(self) -> int:
        """What a process takes of it before its first tensor."""
        return self._kind[0] * MIB

    @property
    def memory_bandwidth(self) -> float | None:
        """Bytes per second of its memory; None where it is not known."""
        return self._kind[1]

    @property
    def _kind(self) -> tuple[int, float | None]:
        for names, context, bandwidth in KINDS:
            if re.fullmatch(names, self.name.strip(), re.IGNORECASE):
                return context, bandwidth
        return 0, None


@dataclass(frozen=True)
class StatedLevel:
    """`inner`: devices of one member of a group; `full`: of a whole group (None: any number); `outer`: of a
    group, None for the outermost level, which has one. Each port has `devices_per_port` neighbours."""

    name: str
    inner: int
    full: int | None
    outer: int | None
    bandwidth: float
    latency: float
    devices_per_port: int

    def group(self, rank: int) -> int:
        """The group that a device is in."""
        return 0 if self.outer is None else rank // self.outer


@dataclass(frozen=True)
class StatedMachine:
    """Devices with the ranks 0 to `gpus` - 1 in runs of a kind, and the levels from the innermost out."""

    kinds: tuple[StatedDevice, ...]
    ends: tuple[int, ...]
    """By run, the rank after its last."""
    levels: tuple[StatedLevel, ...]

    @property
    def gpus(self) -> int:
        """How many devices."""
        return self.ends[-1]

    @property
    def gpus_per_node(self) -> int:
        """Those of a group of the level named `node`, else of the innermost level."""
        own = next((level for level in self.levels if level.name == "node"), self.levels[0])
        return self.gpus if own.full is None else own.full

    def kind(self, rank: int) -> StatedDevice:
        """The kind of a device."""
        return self.kinds[bisect_right(self.ends, rank)]

    def level(self, a: int, b: int) -> int:
        """The innermost level whose groups hold both."""
        last = len(self.levels) - 1
        return next((i for i, own in enumerate(self.levels) if own.group(a) == own.group(b)), last)

    def ports(self, a: int, b: int) -> tuple[Port, Port]:
        """The port that a transfer leaves `a` by, and the one that it reaches `b` by."""
        index = self.level(a, b)
        each = self.levels[index].devices_per_port
        return (index, 0, a // each), (index, 1, b // each)


def parse_machine(text: str, where: str) -> StatedMachine:
    """The machine of a topology file of [[device]] and [[level]] tables. Raises FileError."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: not TOML, or a number that is too long
        raise FileError(f"{where}: not TOML: {error}", _MEND) from None
    table = Table(content, where)
    kinds, ends, total = [], [], 0
    for own in table.tables("device", least=1):
        kinds.append(_kind(own))
        total += own.count("count", least=1, most=MOST_DEVICES)
        ends.append(total)
    if total > MOST_DEVICES:
        raise table.refusal("device", total, f"{MOST_DEVICES} devices at most")
    return StatedMachine(tuple(kinds), tuple(ends), _levels(table, total))


_MEND = "Make the plan again with pplan solve."


def _kind(table: Table) -> StatedDevice:
    memory = table.optional_text("memory")
    speed = table.number("speed", 1.0)
    if speed == 0:
        raise table.refusal("speed", speed, "above 0")
    size = None if memory is None else _quantity(table, "memory", memory, _SIZES)
    if size is not None and not 1 <= size <= LARGEST:
        raise table.refusal("memory", memory, "a size of at least one byte")
    return StatedDevice(
        table.text("name"), None if size is None else round(size), speed, table.optional_text("profile")
    )


def _levels(table: Table, gpus: int) -> tuple[StatedLevel, ...]:
    own = table.tables("level", least=1)
    sizes = [level.optional_count("size", least=1) for level in own]
    if len(own) > 64 or None in sizes[:-1]:
        raise table.refusal("level", sizes, "levels with a size each but for the outermost")
    inner = list(accumulate((size or 1 for size in sizes), lambda a, b: a * b, initial=1))
    if sizes[-1] is not None and gpus > prod(size or 1 for size in sizes):
        raise table.refusal("level", sizes, f"levels that hold {gpus} devices")
    levels = []
    for index, level in enumerate(own):
        each = level.count("devices_per_port", 1, least=1)
        if inner[index] % each:
            raise level.refusal("devices_per_port", each, f"a divisor of {inner[index]}")
        levels.append(
            StatedLevel(
                name=level.text("name"),
                inner=inner[index],
                full=None if sizes[index] is None else inner[index + 1],
                outer=None if index == len(own) - 1 else inner[index + 1],
                bandwidth=_rate(level),
                latency=_duration(level),
                devices_per_port=each,
            )
        )
    return tuple(levels)


def _rate(table: Table) -> float:
    text = table.text("bandwidth")
    rate = inf if text.strip().lower() == "inf" else _quantity(table, "bandwidth", text, _RATES)
    if not rate > 0:
        raise table.refusal("bandwidth", text, "above 0 bytes per second")
    return rate


def _duration(table: Table) -> float:
    text = table.text("latency", "0")
    number, unit = _split(table, "latency", text)
    if number == 0 and not unit:
        return 0.0
    if unit.upper().replace("\u03bc", "µ") not in _PER_SECOND:
        raise table.refusal("latency", text, "a duration such as 5us")
    return number / _PER_SECOND[unit.upper().replace("\u03bc", "µ")]


def _quantity(table: Table, key: str, text: str, units: dict[str, float]) -> float:
    number, unit = _split(table, key, text)
    if unit.upper() not in units or unit.endswith(("b", "b/s")):
        raise table.refusal(key, text, f"a quantity such as 16{'GiB' if units is _SIZES else 'GB/s'}")
    return number * units[unit.upper()]


def _split(table: Table, key: str, text: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*(\d{1,40}(?:\.\d{0,40})?(?:[eE][+-]?\d{1,3})?)\s*(\S{0,8})\s*", text)
    if not match:
        raise table.refusal(key, text, "a number with its unit")
    return float(match[1]), match[2]

"""Measured links, the lines fitted to them, and the topology file of them. Needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import median
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from ..cost_models.collectives import all_reduce_seconds
from ..cost_models.document import MadeBy, Record
from ..cost_models.errors import UsageError
from ..cost_models.machines import match_device
from ..cost_models.quantities import format_bytes, format_count, format_rate, format_seconds
from ..cost_models.topology import Device, Link, Topology, two_level_topology

# Latency and bandwidth from measured seconds by size. Needs no torch.
#
#       seconds = latency + bytes / bandwidth
#
# Small transfers show the latency and large ones, which take a thousand times as long, the bandwidth: so what
# counts is the ratio of fitted and measured seconds, twice as long as much as half as long. The median
# seconds
# of one size may still be spoilt by something else on the machine, so a first line is the one with the least
# sum of deviations, which one wrong size cannot pull away. The line is then the least squares without the
# sizes
# that are very far from it; large sizes that are slower by less (a cache is full, say) stay.

Values = npt.NDArray[np.float64]

FAR_OFF = 5.0
"""A size is left out where its seconds and those of the first line differ by more than this factor."""
ROUNDS = 50
"""Of least squares, each weighted by the line before: for a measured link it settles in about ten."""


@dataclass(frozen=True)
class LinkFit:
    """`latency_seconds` and `bandwidth_bytes_per_second` of the line, and `deviation`: the largest relative
    difference between the line and a measured size, those that were left out included."""

    latency_seconds: float
    bandwidth_bytes_per_second: float
    deviation: float

    def seconds(self, size: float) -> float:
        """Seconds of a transfer of `size` bytes."""
        return self.latency_seconds + size / self.bandwidth_bytes_per_second


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> LinkFit:
    """The line through the median `seconds` of transfers of `sizes` bytes.

    The latency is at least 0, the bandwidth above 0. Raises UsageError where there are fewer than two
    different sizes, and where a figure is not above 0. Where larger transfers take no longer, a line from 0
    comes out and `deviation` is large.
    """
    bytes, measured = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if len(set(sizes)) < 2:
        raise UsageError(
            f"sizes={tuple(sizes)!r}: {len(set(sizes))} sizes do not tell latency from bandwidth",
            "Give at least two different ones, as in sizes=(1024, 16777216).",
        )
    if not (np.all(bytes > 0) and np.all(measured > 0) and np.all(np.isfinite(measured))):
        raise UsageError("`sizes`: a size or its measured seconds are not above 0", "Give larger sizes.")
    first = _least_deviations(bytes, measured)
    near = np.abs(np.log(_ratios(first, bytes, measured))) <= math.log(FAR_OFF)
    latency, per_byte = first
    if len(set(bytes[near])) > 1:
        latency, per_byte = _least_squares(first, bytes[near], measured[near])
    return LinkFit(
        latency_seconds=latency,
        bandwidth_bytes_per_second=1 / per_byte,
        deviation=float(np.max(np.abs(_ratios((latency, per_byte), bytes, measured) - 1))),
    )


Line = tuple[float, float]
"""Seconds of nothing, and seconds a byte."""


def _ratios(line: Line, bytes: Values, measured: Values) -> Values:
    """Fitted over measured seconds."""
    latency, per_byte = line
    return (latency + per_byte * bytes) / measured


def _least_deviations(bytes: Values, measured: Values) -> Line:
    """The line with the least sum of deviations through two of the points, or from 0 through one."""
    lines = [(0.0, float(seconds / size)) for size, seconds in zip(bytes, measured, strict=True)]
    for i, j in combinations(range(len(bytes)), 2):
        if bytes[i] == bytes[j]:
            continue
        per_byte = float((measured[j] - measured[i]) / (bytes[j] - bytes[i]))
        latency = float(measured[i] - per_byte * bytes[i])
        if per_byte > 0 and latency >= 0:
            lines.append((latency, per_byte))
    return min(lines, key=lambda line: float(np.abs(np.log(_ratios(line, bytes, measured))).sum()))


def _least_squares(line: Line, bytes: Values, measured: Values) -> Line:
    """From the first `line`, that with the least sum of ratio + 1 / ratio - 2, which is the square of the
    difference over fitted and measured seconds."""
    for _ in range(ROUNDS):
        fitted = measured * _ratios(line, bytes, measured)
        fit = _weighted(np.sqrt(1 / (fitted * measured)), bytes, measured)
        if fit is None or np.allclose(fit, line, rtol=1e-12, atol=0):
            break
        line = fit
    return line


def _weighted(weights: Values, bytes: Values, measured: Values) -> Line | None:
    """The least squares with these weights and a latency of at least 0; None where the line would fall."""
    columns = np.stack([weights, bytes * weights], axis=1)
    scale = np.linalg.norm(columns, axis=0)  # bytes are many times seconds
    (latency, per_byte), *_ = np.linalg.lstsq(columns / scale, measured * weights, rcond=None)
    if latency < 0:
        latency, per_byte = 0.0, (columns[:, 1] @ (measured * weights)) / scale[1]
    return (float(latency / scale[0]), float(per_byte / scale[1])) if per_byte > 0 else None


# Measured links, and the topology file of them. Needs no torch.

LevelName = Literal["inside", "between"]
LEVEL_TITLES: dict[LevelName, str] = {"inside": "inside a node", "between": "between nodes"}
FAR_FROM_A_LINE = 0.5
"""Relative difference from which the fitted figures are worth a remark."""
SLOW_ALL_REDUCE = 1.5
"""Times the predicted seconds from which data parallelism is worth a remark."""


class Member(Record):
    """A process: its node, numbered from 0, and its device, with the memory of a GPU."""

    rank: int
    node: int
    device_name: str
    memory_bytes: int | None = None


class PairTimes(Record):
    """Median seconds of one transfer by size: `there` from `first` to `second`, `back` the other way."""

    first: int
    second: int
    there_seconds: list[float]
    back_seconds: list[float]


class MeasuredLinks(Record):
    """Everything measured, by `sizes` in bytes. Each process has one device."""

    backend: str
    members: list[Member]
    sizes: list[int]
    repeats: int
    pairs: list[PairTimes]
    all_reduce_seconds: list[float]
    made_by: MadeBy = MadeBy()

    @model_validator(mode="after")
    def _check(self) -> Self:
        ranks, sizes = range(len(self.members)), len(self.sizes)
        if not self.members or [member.rank for member in self.members] != [*ranks]:
            raise ValueError(f"members: must have the ranks from 0, has {[own.rank for own in self.members]}")
        if sorted(set(self.sizes)) != self.sizes or sizes < 2 or self.sizes[0] < 1:
            raise ValueError(f"sizes is {self.sizes}: must be two or more that rise from 1 byte")
        if not self.pairs:
            raise ValueError("pairs is empty: at least one pair of ranks must be measured")
        seconds = [self.all_reduce_seconds]
        for pair in self.pairs:
            if pair.first not in ranks or pair.second not in ranks or pair.first == pair.second:
                raise ValueError(f"pairs: {pair.first} and {pair.second} are no two ranks of members")
            seconds += [pair.there_seconds, pair.back_seconds]
        for own in seconds:
            if len(own) != sizes or not all(0 < each < math.inf for each in own):
                raise ValueError(f"seconds {own}: must be {sizes} values above 0, one for each size")
        return self

    @cached_property
    def levels(self) -> dict[LevelName, LinkFit]:
        """The fitted link of each level that was measured. Raises UsageError."""
        fits: dict[LevelName, LinkFit] = {}
        for level in LEVEL_TITLES:
            if self.pairs_of(level):
                there, back = self.medians(level)
                fits[level] = fit_link([*self.sizes, *self.sizes], [*there, *back])
        return fits

    def level(self, pair: PairTimes) -> LevelName:
        """Whether the pair is inside a node."""
        return "inside" if self.members[pair.first].node == self.members[pair.second].node else "between"

    def pairs_of(self, level: LevelName) -> list[PairTimes]:
        """The measured pairs of a level."""
        return [pair for pair in self.pairs if self.level(pair) == level]

    def medians(self, level: LevelName) -> tuple[list[float], list[float]]:
        """Over the pairs of a level: median seconds there and back, by size."""
        pairs = self.pairs_of(level)
        there = zip(*(pair.there_seconds for pair in pairs), strict=True)
        back = zip(*(pair.back_seconds for pair in pairs), strict=True)
        return [median(each) for each in there], [median(each) for each in back]

    def slowest_pair(self, level: LevelName) -> tuple[PairTimes, float]:
        """The pair that takes longest for the largest size, and its bytes per second then, both ways."""
        slowest = max(self.pairs_of(level), key=_largest_seconds)
        return slowest, self.sizes[-1] / _largest_seconds(slowest)

    @property
    def gpus_per_node(self) -> int:
        """Of the node with most."""
        return max(self._on_nodes)

    @property
    def remarks(self) -> list[str]:
        """What the topology file cannot say."""
        lines = []
        names = sorted({member.device_name for member in self.members})
        if len(names) > 1:
            lines.append(f"the devices differ ({', '.join(names)}), a topology has one kind")
        counts = self._on_nodes
        if any(count != self.gpus_per_node for count in counts[:-1]):
            lines.append(
                f"the nodes have {', '.join(map(str, counts))} devices, "
                f"the file says {self.gpus_per_node} for each"
            )
        if "between" in self.levels and "inside" not in self.levels:
            lines.append("there is one device a node: the link inside a node is written as the one between")
        for level, fit in self.levels.items():
            if fit.deviation > FAR_FROM_A_LINE:
                lines.append(
                    f"{LEVEL_TITLES[level]} a measured size is {fit.deviation:.0%} from the fitted line: the "
                    "machine was busy, or the link is not of one bandwidth"
                )
        slower = self.all_reduce_seconds[-1] / self.predicted_all_reduce()[-1]
        if slower > SLOW_ALL_REDUCE:
            lines.append(
                f"an all-reduce of {format_bytes(self.sizes[-1])} takes {slower:.1f} times what these links "
                "predict for it"
            )
        return lines

    @property
    def topology(self) -> Topology:
        """With the fitted links; where only one level was measured it stands for both."""
        fits = list(self.levels.values())
        inside, between = (
            Link(fit.bandwidth_bytes_per_second, fit.latency_seconds) for fit in (fits[0], fits[-1])
        )
        device = Device(self.members[0].device_name, self.members[0].memory_bytes)
        return two_level_topology(device, len(self.members), self.gpus_per_node, inside, between)

    def predicted_all_reduce(self) -> list[float]:
        """Seconds by size as the cost models have them for these links."""
        devices, topology = range(len(self.members)), self.topology
        return [all_reduce_seconds(topology, devices, float(size)) for size in self.sizes]

    @property
    def _on_nodes(self) -> list[int]:
        """Devices on each node."""
        counts = Counter(member.node for member in self.members)
        return [counts[node] for node in sorted(counts)]

    def to_json(self) -> str:
        """What was measured and fitted."""
        fitted: dict[str, dict[str, float]] = {name: vars(fit) for name, fit in self.levels.items()}
        return MeasuredAndFitted(**dict(self), fitted=fitted).model_dump_json(indent=1) + "\n"

    def to_toml(self) -> str:
        """The topology file that `topology` names, what was measured in its comments."""
        return "\n".join([*self._head(), "", *self._keys(), "", *self._tables()]) + "\n"

    def _head(self) -> list[str]:
        devices = Counter(member.device_name for member in self.members)
        counts = ", ".join(f"{count} x {name}" for name, count in sorted(devices.items()))
        lines = [
            f"Links measured by pplan {self.made_by.pplan} at {self.made_by.time}.",
            f"World size {len(self.members)} on {format_count(len(self._on_nodes), 'node')}: {counts}.",
            f"Backend {self.backend}, torch {self.made_by.torch}; medians of {self.repeats} transfers.",
            *(f"Note: {remark}." for remark in self.remarks),
        ]
        return [f"# {_plain(line)}" for line in lines]

    def _keys(self) -> list[str]:
        topology, members = self.topology, self.members
        levels = topology.levels if "between" in self.levels else topology.levels[:1]
        links = [level.link for level in levels]
        rates = ", ".join(f'"{format_rate(link.bandwidth_bytes_per_second)}"' for link in links)
        waits = ", ".join(f'"{_ascii(format_seconds(link.latency_seconds))}"' for link in links)
        alike = len({member.device_name for member in members}) == 1
        preset = match_device(members[0].device_name) if alike else None
        memory = [member.memory_bytes for member in members if member.memory_bytes is not None]
        return [
            *([f'gpu = "{preset.name}"'] if preset else []),
            *([f'memory = "{min(memory)}B"'] if len(memory) == len(members) else []),
            f"gpus = {topology.gpus}",
            f"gpus_per_node = {topology.gpus_per_node}",
            f"bandwidth = [{rates}]",
            f"latency = [{waits}]",
        ]

    def _tables(self) -> list[str]:
        lines = []
        for level, fit in self.levels.items():
            there, back = self.medians(level)
            pairs = self.pairs_of(level)
            lines += [f"Transfers {LEVEL_TITLES[level]}, median of {format_count(len(pairs), 'pair')}:"]
            lines += [_row("size", "there", "back", "fitted")]
            for size, one, other in zip(self.sizes, there, back, strict=True):
                lines.append(_row(format_bytes(size), *map(format_seconds, (one, other, fit.seconds(size)))))
            lines += [f"largest difference {fit.deviation:.0%}", ""]
        lines += ["All-reduce over all devices:", _row("size", "measured", "predicted")]
        for size, one, other in zip(
            self.sizes, self.all_reduce_seconds, self.predicted_all_reduce(), strict=True
        ):
            lines.append(_row(format_bytes(size), format_seconds(one), format_seconds(other)))
        return [f"# {_ascii(line)}".rstrip() for line in lines]


class MeasuredAndFitted(MeasuredLinks):
    """The JSON output: the link of each level beside what was measured."""

    fitted: dict[str, dict[str, float]]


def _largest_seconds(pair: PairTimes) -> float:
    return (pair.there_seconds[-1] + pair.back_seconds[-1]) / 2


def _row(*cells: str) -> str:
    return "".join(f"{cell:>12}" for cell in cells)


def _ascii(text: str) -> str:
    return text.replace("µ", "u")


def _plain(text: str) -> str:
    """Without what a TOML comment may not hold: control characters."""
    return "".join(character if character.isprintable() else " " for character in text)

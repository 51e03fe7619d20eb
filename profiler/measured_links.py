"""What `pplan profile-links` measured, and the topology file of it. Needs no torch."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from statistics import median
from typing import Literal

from ..cost_models.collectives import all_reduce_seconds
from ..cost_models.document import MadeBy, Record
from ..cost_models.machines import match_device
from ..cost_models.quantities import format_bytes, format_count, format_rate, format_seconds
from ..cost_models.topology import Device, Link, Topology, two_level_topology
from .link_fit import LinkFit, fit_link

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

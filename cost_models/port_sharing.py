"""The ways of transfers through a topology's ports, and what the stages of a pipeline share of these.

A transfer between two stages of replicas goes through several ports at once, each of which sends at its
bandwidth, whatever it carries. So transfers that leave by one port are served one after another, all-reduces
that go through one port share it, and no step is shorter than the transfers through its most loaded port.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .collectives import all_reduce_loads
from .hardware import Link, Port
from .topology import FEW_RANKS, Topology

Ranks = tuple[int, ...]
Owners = npt.NDArray[np.int64]
Loaded = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Routes:
    """The ways from stages to stages of a topology, remembered."""

    topology: Topology
    _routes: dict[tuple[Ranks, Ranks], tuple[float, float]] = field(default_factory=dict)
    _loads: dict[tuple[Ranks, Ranks], Mapping[Port, float]] = field(default_factory=dict)
    _pairs: dict[tuple[int, int], tuple[Link, tuple[Port, Port]]] = field(default_factory=dict)

    def route(self, senders: Ranks, receivers: Ranks) -> tuple[float, float]:
        """Latency, and seconds of each byte of a whole micro-batch, for which the slowest port is taken.

        Each sender has an equal run of its samples, and so needs each receiver (DAPPLE's split and
        concatenation, Fan et al., PPoPP 2021, section 5). Parts that go through one port, as the network
        adapter of a machine, share its bandwidth; the slowest port counts.
        """
        key = self._shift_ranks(senders), self._shift_ranks(receivers, senders[0])
        if key not in self._routes:
            self._routes[key] = self._route(senders, receivers)
        return self._routes[key]

    def _shift_ranks(self, ranks: Ranks, first: int | None = None) -> Ranks:
        """The ranks as if `first`, else their own first, were of the first node, where nodes are alike."""
        if not self.alike:
            return ranks
        node = (ranks[0] if first is None else first) // self.topology.gpus_per_node
        shift = node * self.topology.gpus_per_node
        return tuple(rank - shift for rank in ranks)

    @property
    def alike(self) -> bool:
        """Whether every node has the same links to the next: a level's ports belong to its members."""
        return len(self.topology.levels) <= 2

    def _route(self, senders: Ranks, receivers: Ranks) -> tuple[float, float]:
        if len(senders) + len(receivers) > FEW_RANKS:
            by_level = list(self._load_arrays(senders, receivers))
            latency = max(self.topology.levels[level].link.latency_seconds for level, *_ in by_level)
            return latency, max(float(loads.max()) for *_, loads in by_level)
        loads, latency = self._add_loads(senders, receivers)
        return latency, max(loads.values())

    def loads(self, senders: Ranks, receivers: Ranks) -> Mapping[Port, float]:
        """By port that the transfer goes through, leaving or entering: for how many seconds of each byte of a
        whole micro-batch it is taken."""
        key = self._shift_ranks(senders), self._shift_ranks(receivers, senders[0])
        first = senders[0] - key[0][0]
        if key not in self._loads:
            self._loads[key] = self._shift_loads(self._of_all_ports(senders, receivers), -first)
        return self._shift_loads(self._loads[key], first) if first else self._loads[key]

    def _shift_loads(self, loads: Mapping[Port, float], devices: int) -> Mapping[Port, float]:
        """The same of ports that belong to devices of so much higher ranks."""
        by_level = [devices // level.devices_per_port for level in self.topology.levels]
        return {
            Port(port.level, port.direction, port.owner + by_level[port.level]): load
            for port, load in loads.items()
        }

    def exit_port(self, senders: Ranks, receivers: Ranks) -> Port:
        """Of the ports that the transfer leaves by, the one that it takes longest (of equal ones the first):
        transfers with the same one are served one after another."""
        leaving = [(-load, port) for port, load in self.loads(senders, receivers).items() if port.leaves]
        return min(leaving)[1]

    def _of_all_ports(self, senders: Ranks, receivers: Ranks) -> Mapping[Port, float]:
        if len(senders) + len(receivers) <= FEW_RANKS:
            return self._add_loads(senders, receivers)[0]
        return {
            Port(level, direction, owner): load
            for level, direction, owners, loads in self._load_arrays(senders, receivers)
            for owner, load in zip(owners.tolist(), loads.tolist(), strict=True)
        }

    def _load_arrays(self, senders: Ranks, receivers: Ranks) -> Iterator[tuple[int, str, Owners, Loaded]]:
        """`_add_loads` of many devices: by level and direction, the owners of the ports and their seconds."""
        many, few = len(receivers), len(senders)
        edges = np.unique(np.append(many * np.arange(few + 1), few * np.arange(many + 1)))
        a, b = np.array(senders)[edges[:-1] // many], np.array(receivers)[edges[:-1] // few]
        shares, shared = np.diff(edges) / (few * many), self.topology.shared_levels(a, b)
        for level in np.unique(shared).tolist():
            own, at = self.topology.levels[level], shared == level
            seconds = shares[at] / own.link.bandwidth_bytes_per_second
            for direction, ranks in (("out", a[at]), ("in", b[at])):
                owners, number = np.unique(ranks // own.devices_per_port, return_inverse=True)
                loads = np.bincount(number.reshape(-1), weights=seconds).astype(np.float64)
                yield level, direction, owners, loads

    def _add_loads(self, senders: Ranks, receivers: Ranks) -> tuple[dict[Port, float], float]:
        """What `loads` returns, and the longest latency."""
        loads: defaultdict[Port, float] = defaultdict(float)
        latency = 0.0
        for a, b, share in _parts(senders, receivers):
            if (a, b) not in self._pairs:
                self._pairs[a, b] = self.topology.link(a, b), self.topology.ports(a, b)
            link, ports = self._pairs[a, b]
            latency = max(latency, link.latency_seconds)
            for port in ports:
                loads[port] += share / link.bandwidth_bytes_per_second
        return dict(loads), latency


def _parts(senders: Ranks, receivers: Ranks) -> Iterator[tuple[int, int, float]]:
    """Sender, receiver and share of the samples of every part. Samples are counted in parts of a sender times
    parts of a receiver, so that they are whole."""
    done, whole = 0, len(senders) * len(receivers)
    while done < whole:
        i, j = done // len(receivers), done // len(senders)
        until = min((i + 1) * len(receivers), (j + 1) * len(senders))
        yield senders[i], receivers[j], (until - done) / whole
        done = until


NONE = -1
Loads = dict[tuple[int, int], float]
"""By port, its level and owner: seconds."""


class Hop(NamedTuple):
    """All that one device of a program sends to another in a step; `seconds`: how long its busiest port is
    taken by them together."""

    sender: int
    receiver: int
    seconds: float


class AllReduceBytes(NamedTuple):
    """The bytes that an all-reduce over `ranks` adds up, so many `times` in a step; `before`: bytes of
    all-reduces that send as much as the ranks exchange earlier in the step. `key` names it to the caller."""

    key: int
    ranks: Ranks
    bytes: float
    times: int = 1
    before: float = 0.0


@dataclass(frozen=True, eq=False)
class PortSharing:
    """`links` (devices, devices): a number for the port that each transfer waits for, -1 where there is none.
    `reduce_loads`: by key of an all-reduce, the seconds for which it takes each port that others take, too.
    `port_seconds`: for how long the most loaded port is taken in a step."""

    links: npt.NDArray[np.int64]
    reduce_loads: dict[int, Loads]
    port_seconds: float

    @property
    def pattern(self) -> bytes:
        """The same for pipelines whose transfers wait for each other in the same way."""
        numbers: dict[int, int] = {NONE: NONE}
        same = [numbers.setdefault(int(link), len(numbers)) for link in self.links.flat]
        return np.array(same, dtype=np.int64).tobytes()


class TopologyPorts:
    """Of the pipelines on a topology; what its ports carry is remembered."""

    def __init__(self, topology: Topology, routes: Routes | None = None) -> None:
        self.topology = topology
        self.routes = Routes(topology) if routes is None else routes
        self._numbers: dict[Port, int] = {}
        self._exits: dict[tuple[Ranks, Ranks], int] = {}
        self._parts: dict[tuple[Ranks, Ranks], list[tuple[Port, float]]] = {}
        self._reduced: dict[Ranks, Loads] = {}

    def sharing(
        self, ranks: Sequence[Ranks], hops: Sequence[Hop], reductions: Sequence[AllReduceBytes]
    ) -> PortSharing:
        """`ranks`: by device of the program, those of its replicas."""
        links = np.full((len(ranks), len(ranks)), NONE, dtype=np.int64)
        seconds_by_port: defaultdict[Port, float] = defaultdict(float)
        for sender, receiver, seconds in hops:
            links[sender, receiver] = self._exit(ranks[sender], ranks[receiver])
            if seconds:
                for port, part in self._shares(ranks[sender], ranks[receiver]):
                    seconds_by_port[port] += part * seconds
        loads: dict[int, Loads] = {}
        reduced: Loads = {}  # as many seconds in either direction
        for own in reductions:
            own_loads = self._loads(own.ranks)
            if own.bytes:
                loads[own.key] = {port: own.bytes * each for port, each in own_loads.items()}
            bytes = own.bytes * own.times + own.before
            for place, each in own_loads.items():
                reduced[place] = reduced.get(place, 0.0) + bytes * each
        together = (own + reduced.get((port.level, port.owner), 0.0) for port, own in seconds_by_port.items())
        return PortSharing(links, _of_several(loads), max([*reduced.values(), *together], default=0.0))

    def _exit(self, senders: Ranks, receivers: Ranks) -> int:
        key = senders, receivers
        if key not in self._exits:
            port = self.routes.exit_port(senders, receivers)
            self._exits[key] = self._numbers.setdefault(port, len(self._numbers))
        return self._exits[key]

    def _shares(self, senders: Ranks, receivers: Ranks) -> list[tuple[Port, float]]:
        """By port, its part of the seconds for which the busiest is taken."""
        key = senders, receivers
        if key not in self._parts:
            loads = self.routes.loads(senders, receivers)
            most = max(loads.values())
            self._parts[key] = [(port, load / most) for port, load in loads.items() if most]
        return self._parts[key]

    def _loads(self, ranks: Ranks) -> Loads:
        key = tuple(sorted(ranks))
        if key not in self._reduced:
            self._reduced[key] = all_reduce_loads(self.topology, key)
        return self._reduced[key]


def _of_several(loads: dict[int, Loads]) -> dict[int, Loads]:
    """Without the ports that a single all-reduce takes: there it waits for no other."""
    uses = Counter(port for own in loads.values() for port in own)
    contended = {
        key: {port: seconds for port, seconds in own.items() if uses[port] > 1} for key, own in loads.items()
    }
    return {key: own for key, own in contended.items() if own}


def end_on_ports(end: float, loads: Loads, free: Loads) -> float:
    """When an all-reduce ends whose ports others take, too; `end`: by itself. `free`: until when each port is
    taken, brought up to date.

    Each port works through what it is given, one after another; by itself, what it sends of this one ends
    with it.
    """
    last = end
    for port, seconds in loads.items():
        free[port] = max(end - seconds, free.get(port, 0.0)) + seconds
        last = max(last, free[port])
    return last


def all_reduce_ends(ready: Sequence[float], seconds: Sequence[float], loads: dict[int, Loads]) -> list[float]:
    """By stage, when its gradients are added up: `ready` when its last backward ends, `seconds` of its
    all-reduce by itself, `loads` of shared ports by stage. Whoever is ready first goes first."""
    ends = [begin + more for begin, more in zip(ready, seconds, strict=True)]
    free: Loads = {}
    for stage in sorted(loads, key=lambda own: (ready[own], own)):
        ends[stage] = end_on_ports(ends[stage], loads[stage], free)
    return ends

"""What a transfer between two stages of replicas takes: every port that its parts go through."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .hardware import Link, Port
from .topology import Topology

Ranks = tuple[int, ...]


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

    @cached_property
    def alike(self) -> bool:
        """Whether every node has the same links to the next."""
        node = self.topology.gpus_per_node
        own_ports = all(node % level.devices_per_port == 0 for level in self.topology.levels)
        return len(self.topology.levels) <= 2 and own_ports

    def _route(self, senders: Ranks, receivers: Ranks) -> tuple[float, float]:
        loads, latency = self._add_loads(senders, receivers)
        return latency, max(loads.values())

    def loads(self, senders: Ranks, receivers: Ranks) -> Mapping[Port, float]:
        """By port that the transfer goes through, leaving or entering: for how many seconds of each byte of a
        whole micro-batch it is taken."""
        key = self._shift_ranks(senders), self._shift_ranks(receivers, senders[0])
        first = senders[0] - key[0][0]
        if key not in self._loads:
            self._loads[key] = self._shift_loads(self._add_loads(senders, receivers)[0], -first)
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

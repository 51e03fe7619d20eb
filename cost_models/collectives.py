"""Seconds of transfers and collectives between devices, and the ports that they share.

A collective takes the fastest algorithm for the topology and the size. Each sends as its authors count it: a
latency for every step, and the bytes that one device (or one port that devices share) sends, at the pace of
the slowest level in use. Adding up takes no time.

- ring: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, Journal of
  Parallel and Distributed Computing 69(2), 2009.
- tree: Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan,
  Parallel Computing 35(12), 2009; in NCCL since 2.4 (Jeaugey, Massively scale your deep learning training
  with NCCL 2.4, https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/).
- hierarchical: reduce-scatter inside, all-reduce across with what that left, all-gather inside (Mikami et
  al., Massively distributed SGD: ImageNet/ResNet-50 training in a flash, arXiv:1811.05233, with two levels;
  here with as many as the topology has).
- all-to-all: pairwise exchange (Thakur, Rabenseifner and Gropp, Optimization of collective communication
  operations in MPICH, International Journal of High Performance Computing Applications 19(1), 2005).

A transfer between two replicated stages uses several ports at once, each at its bandwidth. Transfers that
leave through one port are served one after another. All-reduces through one port share it. A step is at least
as long as the transfers through its most loaded port.

A weight that layers of several stages use (`layer.TiedWeight`) has a copy on each of these stages. After the
last backward of the last of them, and after each stage's own all-reduce, its gradients are added up by one
all-reduce over all devices that hold it, of every replica (Megatron-LM's embedding group, DeepSpeed's tied
layers), one weight after another in the order of their first users. The all-reduce of a stage's replicas
holds the weight where the stage has its first user, and no copies: these are part of the sum over all. Under
ZeRO-1 every replica spreads copies like any weight.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .layer import Floats, TiedWeight, has_user
from .optimizers import Precision
from .topology import Amount, Link, Port, Topology

FEW_RANKS = 64
"""Most devices of a route that is computed part by part. Arrays would double the time of some searches."""
Algorithm: TypeAlias = Literal["ring", "tree", "hierarchical"]


def all_reduce_seconds(topology: Topology, devices: Iterable[int], bytes: Amount) -> Amount:
    """Return the seconds of an all-reduce by the fastest algorithm for each size.

    Args:
        topology: Devices and links.
        devices: Ranks that take part.
        bytes: Bytes that each device holds, a float or an array.

    Returns:
        Seconds until every device has the sum, shaped as `bytes`. 0 for one device or no bytes.
    """
    return reduce(np.minimum, all_reduce_seconds_by_algorithm(topology, devices, bytes).values())


def all_reduce_seconds_by_algorithm(
    topology: Topology, devices: Iterable[int], bytes: Amount
) -> dict[Algorithm, Amount]:
    """Return the seconds of an all-reduce by each algorithm that the devices can use, the simplest first.

    For n devices and B bytes:

    - `ring`: 2 (n - 1) steps of B / n bytes.
    - `tree`: 2 ceil(log2 n) latencies and 2 B bytes.
    - `hierarchical`: a reduce-scatter of the remaining part at every level from the inside, then the
      all-gathers back. The devices must be spread evenly (`is_even`).
    """
    ranks = sorted(set(devices))
    halves = _half_seconds(topology, ranks, bytes)
    tree = _tree(topology, ranks, bytes) if len(ranks) > 1 else bytes * 0.0
    seconds: dict[Algorithm, Amount] = {"ring": 2 * halves["ring"], "tree": tree}
    return seconds | {name: 2 * half for name, half in halves.items() if name != "ring"}


def reduce_scatter_seconds(topology: Topology, devices: Iterable[int], bytes: Amount) -> Amount:
    """Return the seconds of a reduce-scatter by the faster of ring and hierarchy, half of an all-reduce.

    Each of the n devices starts with all `bytes` and ends with the sum of its n-th part.
    """
    return reduce(np.minimum, _half_seconds(topology, sorted(set(devices)), bytes).values())


def all_gather_seconds(topology: Topology, devices: Iterable[int], bytes: Amount) -> Amount:
    """Return the seconds until every device has all `bytes`. Before, each of n devices holds an n-th part.

    The steps are those of a reduce-scatter in reverse.
    """
    return reduce_scatter_seconds(topology, devices, bytes)


def all_to_all_seconds(topology: Topology, devices: Iterable[int], bytes: Amount) -> Amount:
    """Return the seconds until each of n devices has an n-th part of the `bytes` of every other device.

    A device sends its parts one after another, each over the innermost level that joins the two devices.
    Levels work at the same time. Devices that share a port share its bandwidth. Parts cannot be combined, so
    unlike an all-gather nothing is saved between nodes.
    """
    ranks = np.array(sorted(set(devices)), dtype=np.int64)
    levels = [
        _pass(level.link, load / len(ranks), bytes, steps)
        for level, (load, steps) in zip(topology.levels, _peers(topology, ranks), strict=True)
    ]
    return reduce(np.maximum, levels)


def ring_step_seconds(topology: Topology, devices: Iterable[int], bytes: Amount) -> Amount:
    """Return the seconds of one ring step, in which every device sends `bytes` to the next.

    The slowest link sets the pace. 0 for one device or no bytes.
    """
    return _over_links(topology, sorted(set(devices)), 1.0, bytes, 1)


def all_reduce_loads(topology: Topology, devices: Iterable[int]) -> dict[tuple[int, int], float]:
    """Return the fewest seconds per byte for which an all-reduce by any algorithm occupies each port.

    If k members of a group take part, the sum of their parts must leave and enter each of them: 2 (k - 1) / k
    of the bytes (Patarasuk and Yuan 2009, theorem 1), over all ports of its devices.

    Returns:
        Seconds per byte by port, keyed by level and owner. They are equal in both directions.
    """
    ranks = np.array(sorted(set(devices)), dtype=np.int64)
    loads: dict[tuple[int, int], float] = {}
    for index, level in enumerate(topology.levels):
        groups, members = topology.places_in(index, ranks)
        _, first, member, sizes = np.unique(
            members, return_index=True, return_inverse=True, return_counts=True
        )
        _, group, joined = np.unique(groups[first], return_inverse=True, return_counts=True)
        ports, first, sharers = np.unique(
            ranks // level.devices_per_port, return_index=True, return_counts=True
        )
        at = member.reshape(-1)[first]
        k = joined[group.reshape(-1)[at]]
        seconds = 2 * (k - 1) / k * sharers / sizes[at] / level.link.bandwidth_bytes_per_second
        loads |= {
            (index, port): load
            for port, load, count in zip(ports.tolist(), seconds.tolist(), k.tolist(), strict=True)
            if count > 1
        }
    return loads


def is_even(topology: Topology, devices: Iterable[int]) -> bool:
    """Return whether all groups of a level hold equally many of the devices.

    Hierarchical algorithms need that.
    """
    return all(len(members) == 1 for members in topology.members(devices))


def is_concave(topology: Topology) -> bool:
    """Return whether the seconds of reductions and gathers are concave in the bytes, above none.

    True if of any two levels one has both the higher latency and the lower bandwidth. One link is then the
    slowest of a ring or a tree for all sizes. The seconds of each algorithm are a line, and those of the
    fastest the minimum of lines.
    """
    links = [level.link for level in topology.levels_in_use]
    links.sort(key=lambda link: (link.latency_seconds, -link.bandwidth_bytes_per_second))
    return all(a.bandwidth_bytes_per_second >= b.bandwidth_bytes_per_second for a, b in pairwise(links))


def link_signature(topology: Topology, devices: Iterable[int]) -> tuple[object, ...]:
    """Return a key of the seconds of collectives: equal for devices that are joined in the same way."""
    ranks = sorted(set(devices))
    if len(ranks) == 1:
        return (1,)
    at_once = tuple(_at_once(ranks, level.devices_per_port) for level in topology.levels)
    return (len(ranks), tuple(topology.members(ranks)), at_once)


def _half_seconds(topology: Topology, ranks: list[int], bytes: Amount) -> dict[Algorithm, Amount]:
    """Return the seconds of a reduce-scatter or an all-gather, by each algorithm that the devices can use."""
    if len(ranks) < 2:
        return {"ring": bytes * 0.0}
    seconds: dict[Algorithm, Amount] = {"ring": _ring(topology, ranks, bytes)}
    if is_even(topology, ranks):
        seconds["hierarchical"] = _hierarchical(topology, ranks, bytes)
    return seconds


def _peers(topology: Topology, ranks: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the most pairs that one port joins and the most devices that one device reaches, by level."""
    counts, inside = [], np.ones_like(ranks)
    for index, level in enumerate(topology.levels):
        groups, _ = topology.places_in(index, ranks)
        _, group, size = np.unique(groups, return_inverse=True, return_counts=True)
        totals = size[group.reshape(-1)]
        _, port = np.unique(ranks // level.devices_per_port, return_inverse=True)
        beyond = totals - inside
        counts.append((int(np.bincount(port.reshape(-1), weights=beyond).max()), int(beyond.max())))
        inside = totals
    return counts


def _pass(link: Link, share: float, bytes: Amount, steps: int) -> Amount:
    """Return the seconds of `steps` latencies and a `share` of the bytes.

    Without bytes there are no latencies.
    """
    return share * bytes / link.bandwidth_bytes_per_second + steps * link.latency_seconds * (bytes > 0)


def _ring_links(topology: Topology, ranks: list[int]) -> list[Link]:
    """Return the links of a ring over the ranks in order. It crosses each shared port once."""
    joined = zip(topology.levels, topology.members(ranks), strict=True)
    return [level.link for level, members in joined if max(members) > 1]


def _over_links(topology: Topology, ranks: list[int], share: float, bytes: Amount, steps: int) -> Amount:
    """Return the seconds of steps over all links of a ring at once; the slowest link sets the pace."""
    seconds = [_pass(link, share, bytes, steps) for link in _ring_links(topology, ranks)]
    slowest: Amount = reduce(np.maximum, seconds, bytes * 0.0)
    return slowest


def _ring(topology: Topology, ranks: list[int], bytes: Amount) -> Amount:
    """Return the seconds of n - 1 steps in which every device sends bytes / n to the next."""
    return _over_links(topology, ranks, (len(ranks) - 1) / len(ranks), bytes, len(ranks) - 1)


def _tree(topology: Topology, ranks: list[int], bytes: Amount) -> Amount:
    """Return the seconds up and down two binary trees, each with half of the bytes.

    No device is an inner node of both trees. Pipelined, a device receives 2 x bytes / 2 from its children and
    sends as much, then the same downwards. A group with a shared port has one position in each tree.
    """
    return _over_links(topology, ranks, 2.0, bytes, 2 * math.ceil(math.log2(len(ranks))))


def _hierarchical(topology: Topology, ranks: list[int], bytes: Amount) -> Amount:
    """Return the seconds of half an all-reduce: a ring in every group, from the innermost level outwards.

    Each level works on the part that the inner levels left. Devices that share a port run rings through it at
    the same time, each with its part of the bandwidth.
    """
    total, remainder = bytes * 0.0, 1.0
    for level, (n,) in zip(topology.levels, topology.members(ranks), strict=True):
        if n > 1:
            at_once = _at_once(ranks, level.devices_per_port)
            total = total + _pass(level.link, at_once * remainder * (n - 1) / n, bytes, n - 1)
        remainder /= n
    return total


def _at_once(ranks: list[int], devices_per_port: int) -> int:
    """Return the largest number of `ranks` that share one port."""
    return int(np.unique(np.array(ranks) // devices_per_port, return_counts=True)[1].max())


MIB = 2**20
FIRST_BUCKET_BYTES = 1 * MIB
"""torch.distributed's `_DEFAULT_FIRST_BUCKET_BYTES`: a small bucket first, so that reducing starts early."""
BUCKET_BYTES = 25 * MIB
"""DistributedDataParallel's default `bucket_cap_mb`."""

Values = Sequence[float] | npt.NDArray[np.float64]


def gradient_buckets(parameter_bytes: Values) -> list[tuple[int, int]]:
    """Return the gradient buckets of DistributedDataParallel, as ranges [start, stop) of the parameters.

    A bucket takes gradients until it holds at least its size. It may exceed it by any amount, because a
    parameter is never split. The first bucket is small, the last one holds the rest.

    Args:
        parameter_bytes: (parameters,) bytes in the order in which gradients become ready. DDP regroups by it
            after its first step.
    """
    buckets: list[tuple[int, int]] = []
    start, bytes_so_far, size = 0, 0.0, float(FIRST_BUCKET_BYTES)
    for index, parameter in enumerate(parameter_bytes):
        bytes_so_far += parameter
        if bytes_so_far >= size:
            buckets.append((start, index + 1))
            start, bytes_so_far, size = index + 1, 0.0, BUCKET_BYTES
    if bytes_so_far > 0:
        buckets.append((start, len(parameter_bytes)))
    return buckets


def exposed_all_reduce_seconds(
    layer_backward_seconds: Values, layer_parameter_bytes: Values, topology: Topology, devices: Sequence[int]
) -> Any:
    """Return the seconds from the end of the backward pass until the gradients of all replicas are reduced.

    Reducing overlaps the remaining backward, as in DistributedDataParallel, without slowing it. Buckets are
    reduced one after another (Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel
    Training, VLDB 2020, section 3.2.3).

    Args:
        layer_backward_seconds: (layers,) or (passes, layers) backward seconds in forward order.
        layer_parameter_bytes: (layers,) parameter bytes. Gradients are as large and ready when the layer's
            backward ends.
        topology: Devices and links.
        devices: Ranks of the replicas.

    Returns:
        Seconds: a float, or an array of shape (passes,).
    """
    done = np.cumsum(np.asarray(layer_backward_seconds, dtype=np.float64)[..., ::-1], axis=-1)
    gradients = np.asarray(layer_parameter_bytes, dtype=np.float64)[::-1]
    end = np.zeros(done.shape[:-1])
    if len(devices) == 1 or not gradients.any():
        return end if end.ndim else 0.0
    for layer, size in zip(*_bucket_ends(gradients), strict=True):
        end = np.maximum(end, done[..., layer]) + all_reduce_seconds(topology, devices, size)
    exposed = np.maximum(end - done[..., -1], 0.0)
    return exposed if exposed.ndim else float(exposed)


def _bucket_ends(gradients: npt.NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """Return the index of the last gradient of each bucket, in the order of readiness, and its bytes."""
    buckets = gradient_buckets(gradients)
    # A bucket is complete with its last gradient; layers without parameters add nothing to wait for.
    last = [int(start + np.flatnonzero(gradients[start:stop])[-1]) for start, stop in buckets]
    return last, [float(gradients[start:stop].sum()) for start, stop in buckets]


EXAMPLE_BYTES = (10**6, 10**9)
"""Sizes in bytes: one for which latency dominates, and one for which bandwidth does."""


@dataclass(frozen=True)
class TransferTime:
    """Transfer between two devices that only `level` joins.

    Attributes:
        level: Name of the level.
        bytes: Size in bytes.
        seconds: Seconds of the transfer.
    """

    level: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class AllReduceTime:
    """All-reduce over the first `gpus` devices.

    Attributes:
        over: Description of the devices.
        gpus: Number of devices.
        bytes: Size in bytes.
        best: Fastest algorithm.
        seconds: Seconds by algorithm that the devices can use.
    """

    over: str
    gpus: int
    bytes: int
    best: Algorithm
    seconds: dict[str, float]


def list_transfer_times(topology: Topology) -> list[TransferTime]:
    """Return the transfers of both example sizes at every level, the innermost first.

    Levels that the devices do not reach are included.
    """
    return [
        TransferTime(level.name, size, float(level.link.seconds(float(size))))
        for level in topology.levels
        for size in EXAMPLE_BYTES
    ]


def list_all_reduce_times(topology: Topology) -> list[AllReduceTime]:
    """Return the all-reduces of both example sizes over a node, and over all devices if they are more.

    The list is empty for one device.
    """
    node = min(topology.gpus_per_node, topology.gpus)
    groups = {f"a node ({node} GPUs)": node, f"all {topology.gpus} GPUs": topology.gpus}
    if node == topology.gpus:
        groups = {f"all {topology.gpus} GPUs": topology.gpus}
    return [
        _all_reduce(topology, over, gpus, size)
        for over, gpus in groups.items()
        if gpus > 1
        for size in EXAMPLE_BYTES
    ]


def _all_reduce(topology: Topology, over: str, gpus: int, size: int) -> AllReduceTime:
    each = all_reduce_seconds_by_algorithm(topology, range(gpus), float(size))
    seconds: dict[str, float] = {name: float(value) for name, value in each.items()}
    return AllReduceTime(over, gpus, size, min(each, key=each.__getitem__), seconds)


Ranks = tuple[int, ...]
Owners = npt.NDArray[np.int64]
Loaded = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Routes:
    """Cached routes of the transfers between stages of a topology."""

    topology: Topology
    _routes: dict[tuple[Ranks, Ranks], tuple[float, float]] = field(default_factory=dict)
    _loads: dict[tuple[Ranks, Ranks], Mapping[Port, float]] = field(default_factory=dict)
    _pairs: dict[tuple[int, int], tuple[Link, tuple[Port, Port]]] = field(default_factory=dict)

    def route(self, senders: Ranks, receivers: Ranks) -> tuple[float, float]:
        """Return the latency, and the seconds per byte of a whole micro-batch on the slowest port.

        Each sender holds, and each receiver needs, an equal run of the samples (split and concatenation of
        DAPPLE, Fan et al., PPoPP 2021, section 5). Parts through one port, such as the network adapter of a
        machine, share its bandwidth.

        Args:
            senders: Ranks of the sending stage.
            receivers: Ranks of the receiving stage.
        """
        key = self._shift_ranks(senders), self._shift_ranks(receivers, senders[0])
        if key not in self._routes:
            self._routes[key] = self._route(senders, receivers)
        return self._routes[key]

    def _shift_ranks(self, ranks: Ranks, first: int | None = None) -> Ranks:
        """Shift the ranks as if `first` (default: their first rank) were in the first node.

        Ranks are unchanged if nodes are not alike.
        """
        if not self.alike:
            return ranks
        node = (ranks[0] if first is None else first) // self.topology.gpus_per_node
        shift = node * self.topology.gpus_per_node
        return tuple(rank - shift for rank in ranks)

    @property
    def alike(self) -> bool:
        """True if every node has the same links to the next."""
        return len(self.topology.levels) <= 2

    def _route(self, senders: Ranks, receivers: Ranks) -> tuple[float, float]:
        if len(senders) + len(receivers) > FEW_RANKS:
            by_level = list(self._load_arrays(senders, receivers))
            latency = max(self.topology.levels[level].link.latency_seconds for level, *_ in by_level)
            return latency, max(float(loads.max()) for *_, loads in by_level)
        loads, latency = self._add_loads(senders, receivers)
        return latency, max(loads.values())

    def loads(self, senders: Ranks, receivers: Ranks) -> Mapping[Port, float]:
        """Return the seconds per byte of a whole micro-batch for which the transfer occupies each port.

        The ports are those through which it leaves or enters.
        """
        key = self._shift_ranks(senders), self._shift_ranks(receivers, senders[0])
        first = senders[0] - key[0][0]
        if key not in self._loads:
            self._loads[key] = self._shift_loads(self._of_all_ports(senders, receivers), -first)
        return self._shift_loads(self._loads[key], first) if first else self._loads[key]

    def _shift_loads(self, loads: Mapping[Port, float], devices: int) -> Mapping[Port, float]:
        """Return the loads of the ports whose devices have ranks that are larger by `devices`."""
        by_level = [devices // level.devices_per_port for level in self.topology.levels]
        return {
            Port(port.level, port.direction, port.owner + by_level[port.level]): load
            for port, load in loads.items()
        }

    def exit_port(self, senders: Ranks, receivers: Ranks) -> Port:
        """Return the exit port that the transfer occupies longest, the first if equal.

        Transfers with the same exit port are served one after another.
        """
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
        """Yield the owners of ports and their seconds per byte, by level and direction.

        This is `_add_loads` for many devices.
        """
        many, few = len(receivers), len(senders)
        edges = np.unique(np.append(many * np.arange(few + 1), few * np.arange(many + 1)))
        a, b = np.array(senders)[edges[:-1] // many], np.array(receivers)[edges[:-1] // few]
        shares, shared = np.diff(edges) / (few * many), self.topology.shared_levels(a, b)
        for level in np.unique(shared).tolist():
            shared_level, at = self.topology.levels[level], shared == level
            seconds = shares[at] / shared_level.link.bandwidth_bytes_per_second
            for direction, ranks in (("out", a[at]), ("in", b[at])):
                owners, number = np.unique(ranks // shared_level.devices_per_port, return_inverse=True)
                loads = np.bincount(number.reshape(-1), weights=seconds).astype(np.float64)
                yield level, direction, owners, loads

    def _add_loads(self, senders: Ranks, receivers: Ranks) -> tuple[dict[Port, float], float]:
        """Return the seconds per byte of each port, and the longest latency."""
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
    """Yield sender, receiver and share of the samples of every part of a transfer.

    Samples are counted in units of 1 / (senders x receivers), so that counts are integers.
    """
    done, whole = 0, len(senders) * len(receivers)
    while done < whole:
        i, j = done // len(receivers), done // len(senders)
        until = min((i + 1) * len(receivers), (j + 1) * len(senders))
        yield senders[i], receivers[j], (until - done) / whole
        done = until


NONE = -1
Loads = dict[tuple[int, int], float]
"""Seconds by port, keyed by level and owner."""


class Hop(NamedTuple):
    """Sum of all transfers from one device of a program to another in a step.

    Attributes:
        sender: Sending device.
        receiver: Receiving device.
        seconds: Seconds for which they occupy their busiest port.
    """

    sender: int
    receiver: int
    seconds: float


class AllReduceBytes(NamedTuple):
    """All-reduce in a step.

    Attributes:
        key: Identifier of the caller.
        ranks: Ranks that take part.
        bytes: Bytes of the sum.
        times: Number of such all-reduces in a step.
        before: Bytes of all-reduces that send as much as the ranks exchange earlier in the step.
    """

    key: int
    ranks: Ranks
    bytes: float
    times: int = 1
    before: float = 0.0


@dataclass(frozen=True, eq=False)
class PortSharing:
    """Ports that transfers and all-reduces of a pipeline share.

    Attributes:
        links: (devices, devices) number of the port that each transfer waits for, -1 for none.
        reduce_loads: Seconds of each shared port, by key of the all-reduce.
        port_seconds: Seconds of the most loaded port in a step.
    """

    links: npt.NDArray[np.int64]
    reduce_loads: dict[int, Loads]
    port_seconds: float

    @property
    def pattern(self) -> bytes:
        """Key that is equal for pipelines whose transfers wait for each other in the same way."""
        numbers: dict[int, int] = {NONE: NONE}
        same = [numbers.setdefault(int(link), len(numbers)) for link in self.links.flat]
        return np.array(same, dtype=np.int64).tobytes()


class TopologyPorts:
    """Cached port loads of the pipelines on a topology."""

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
        """Return the ports that the transfers and all-reduces of a pipeline share.

        Args:
            ranks: Ranks of the replicas, by device of the program.
            hops: Transfers between devices of the program.
            reductions: All-reduces of a step.
        """
        links = np.full((len(ranks), len(ranks)), NONE, dtype=np.int64)
        seconds_by_port: defaultdict[Port, float] = defaultdict(float)
        for sender, receiver, seconds in hops:
            links[sender, receiver] = self._exit(ranks[sender], ranks[receiver])
            if seconds:
                for port, part in self._shares(ranks[sender], ranks[receiver]):
                    seconds_by_port[port] += part * seconds
        loads: dict[int, Loads] = {}
        reduced: Loads = {}  # as many seconds in either direction
        for reduction in reductions:
            port_loads = self._loads(reduction.ranks)
            if reduction.bytes:
                loads[reduction.key] = {port: reduction.bytes * load for port, load in port_loads.items()}
            bytes = reduction.bytes * reduction.times + reduction.before
            for place, load in port_loads.items():
                reduced[place] = reduced.get(place, 0.0) + bytes * load
        sums = (sent + reduced.get((port.level, port.owner), 0.0) for port, sent in seconds_by_port.items())
        return PortSharing(links, _contended_loads(loads), max([*reduced.values(), *sums], default=0.0))

    def _exit(self, senders: Ranks, receivers: Ranks) -> int:
        key = senders, receivers
        if key not in self._exits:
            port = self.routes.exit_port(senders, receivers)
            self._exits[key] = self._numbers.setdefault(port, len(self._numbers))
        return self._exits[key]

    def _shares(self, senders: Ranks, receivers: Ranks) -> list[tuple[Port, float]]:
        """Return each port's seconds relative to those of the busiest port."""
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


def _contended_loads(loads: dict[int, Loads]) -> dict[int, Loads]:
    """Drop the ports that a single all-reduce uses, because it waits for no other there."""
    uses = Counter(port for all_reduce in loads.values() for port in all_reduce)
    contended = {
        key: {port: seconds for port, seconds in all_reduce.items() if uses[port] > 1}
        for key, all_reduce in loads.items()
    }
    return {key: all_reduce for key, all_reduce in contended.items() if all_reduce}


def end_on_ports(end: float, loads: Loads, free: Loads) -> float:
    """Return the end of an all-reduce on ports that other all-reduces use. `free` is updated.

    A port processes its all-reduces one after another.

    Args:
        end: End in seconds without other all-reduces.
        loads: Seconds for which the all-reduce occupies each port.
        free: Seconds at which each port becomes free.
    """
    last = end
    for port, seconds in loads.items():
        free[port] = max(end - seconds, free.get(port, 0.0)) + seconds
        last = max(last, free[port])
    return last


def all_reduce_ends(ready: Sequence[float], seconds: Sequence[float], loads: dict[int, Loads]) -> list[float]:
    """Return the end of each stage's all-reduce in seconds. The stage that is ready first goes first.

    Args:
        ready: (stages,) ends of the last backwards.
        seconds: (stages,) seconds of each all-reduce without other traffic.
        loads: Seconds of the shared ports, by stage.
    """
    ends = [begin + more for begin, more in zip(ready, seconds, strict=True)]
    free: Loads = {}
    for stage in sorted(loads, key=lambda index: (ready[index], index)):
        ends[stage] = end_on_ports(ends[stage], loads[stage], free)
    return ends


@dataclass(frozen=True)
class TiedSum:
    """Sum of a tied weight's gradients over all devices that hold it.

    Attributes:
        name: Name of the weight.
        parts: Parts of the layers with a user of the weight.
        stages: Devices of the program that compute these parts.
        ranks: Ranks that hold the weight.
        bytes: Bytes of the gradient.
        seconds: Seconds of the all-reduce without other traffic.
    """

    name: str
    parts: tuple[int, ...]
    stages: tuple[int, ...]
    ranks: Ranks
    bytes: float
    seconds: float


Seconds = Callable[[Ranks, float], float]
"""Function from ranks and the bytes that each holds to the seconds of their all-reduce."""


def reduction_seconds(topology: Topology) -> Seconds:
    """Return the function that gives the seconds of an all-reduce on a topology."""
    return lambda ranks, bytes: float(all_reduce_seconds(topology, ranks, bytes))


def tied_sums(
    tied: Sequence[TiedWeight],
    ends: Sequence[int],
    ranks: Sequence[Sequence[int]],
    stages: Sequence[Sequence[int]],
    precision: Precision,
    seconds: Seconds,
) -> Iterator[TiedSum]:
    """Yield the gradient sums of the tied weights that several parts of the layers use.

    Args:
        tied: Tied weights of the chain.
        ends: Numbers of layers up to the end of each part.
        ranks: Ranks that hold each part.
        stages: Devices of the program that compute each part.
        precision: Bytes of a weight and a gradient.
        seconds: Function for the seconds of an all-reduce.
    """
    bounds = list(pairwise((0, *ends)))
    for weight in tied:
        parts = tuple(part for part, (first, end) in enumerate(bounds) if weight.is_used(first, end))
        holders = tuple(sorted({rank for part in parts for rank in ranks[part]}))
        if len(parts) > 1 and len(holders) > 1 and weight.trainable_bytes:
            bytes = weight.trainable_bytes * (precision.gradient / precision.weight)
            places = tuple(sorted({stage for part in parts for stage in stages[part]}))
            yield TiedSum(weight.name, parts, places, holders, bytes, seconds(holders, bytes))


def ends_after_sums(ends: Floats, sums: Sequence[TiedSum]) -> Floats:
    """Return the (stages, ...) seconds when each stage is done, including the sums of tied weights.

    Args:
        ends: (stages, ...) seconds when the gradients of each stage are reduced.
        sums: Sums of tied weights, in order.
    """
    if not sums:
        return ends
    done = ends.copy()
    for tied_sum in sums:
        stages = list(tied_sum.stages)
        done[stages] = done[stages].max(axis=0) + tied_sum.seconds
    return done


def least_seconds_after(
    tied: Sequence[TiedWeight],
    cut_points: Sequence[int],
    topology: Topology,
    precision: Precision,
    replicas: int,
) -> Floats | float:
    """Return the fewest seconds of the tied-weight sums of a stage, by the cut points of the stage.

    A sum counts if the stage has some and not all users of the weight. It runs over the `replicas` and at
    least one device of another stage. Each of r devices sends 2 (r - 1) / r of the bytes, at best over the
    fastest link.

    Returns:
        (n, n) seconds for the layers from cut point i up to cut point j, or 0.
    """
    points, total = np.array(cut_points), np.zeros((len(cut_points),) * 2)
    if not any(weight.trainable_bytes for weight in tied) or topology.gpus < 2:
        return 0.0
    fastest = max(level.link.bandwidth_bytes_per_second for level in topology.levels_in_use)
    share = 2 * replicas / (replicas + 1) * (precision.gradient / precision.weight)
    for weight in tied:
        has_all = (points <= weight.layers[0])[:, None] & (points > weight.layers[-1])[None, :]
        seconds = share * weight.trainable_bytes / fastest
        total += seconds * (has_user(weight.layers, points) & ~has_all)
    return total

"""The plans to search, and what a stage costs on any run of the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cost_models.collectives import (
    Routes,
    TopologyPorts,
    all_reduce_seconds,
    least_seconds_after,
    link_signature,
    reduction_seconds,
)
from ...cost_models.errors import UsageError
from ...cost_models.layer import Chain, LayerCosts
from ...cost_models.optimizers import Precision
from ...cost_models.precision import training_precision
from ...cost_models.runtime import Runtime
from ...cost_models.step_costs import Hosts
from ...cost_models.topology import Device, Topology
from ..cut_limits import CutLimits
from ..replica_exchange import ReplicaExchange, bytes_at_end, gradient_bytes, stage_figure
from ..stage_table import Floats, StageTable, fullest_kind, layer_work, ledger_options
from .budget import SearchBudget
from .replica_group import Buckets, HostMemory, ReplicaGroupCosts, make_buckets

MOST_BLOCKS = 220
"""Between allowed cuts: of so many, tables of all stages are made."""


_CACHES = ("buckets", "usable", "routes", "ports")
"""What is made of a space once, whatever its budget."""


def divide_batch(size: int, replicas: int) -> int:
    """Samples of a micro-batch that a replica computes: the largest share, where they are not equal."""
    return -(-size // replicas)


@dataclass(frozen=True, eq=False)
class Space:
    """The plans to search: a chain on a topology, for a runtime or any.

    `memory_limit`: bytes that no device may exceed, besides its own limit. `profiles`: the layers as measured
    on the kinds of devices that have a profile of their own, by its name in the topology. `past_largest`:
    whether costs past the largest measured size may be extrapolated.
    """

    chain: Chain
    topology: Topology
    optimizer: str
    memory_limit: float | None = None
    past_largest: bool = False
    runtime: Runtime | None = None
    dtype: str = "float32"
    precision: Precision | None = None
    """Bytes of a parameter; None: as usual for the dtype."""
    zero: int = 0
    profiles: Mapping[str, Chain] = field(default_factory=dict)
    limits: CutLimits = field(default_factory=CutLimits)
    budget: SearchBudget = field(default_factory=SearchBudget)
    """What everything that is done with the space may take."""
    mini_batch: int | None = None
    """Samples of a step, where the runtime has buffers for all of them; else None."""
    host: HostMemory | None = None
    """Where stages may offload."""
    furthest_ends: dict[object, dict[int, npt.NDArray[np.int64]]] = field(default_factory=dict, init=False)
    """Of stages that fit on a kind of device, by micro-batches in flight (`reach_bound`)."""
    _tables: dict[tuple[str, float], StageTable] = field(default_factory=dict, init=False)
    _group_costs: dict[object, ReplicaGroupCosts] = field(default_factory=dict, init=False)
    _joined: dict[tuple[object, ...], object] = field(default_factory=dict, init=False)
    _tied: dict[tuple[tuple[int, ...], float], float] = field(default_factory=dict, init=False)

    def within(self, budget: SearchBudget) -> Space:
        """The same, with its tables, under another budget."""
        space = replace(self, budget=budget)
        for name in ("furthest_ends", "_tables", "_group_costs", "_joined"):
            object.__setattr__(space, name, getattr(self, name))
        vars(space).update({name: own for name, own in vars(self).items() if name in _CACHES})
        return space

    def table(self, size: float) -> StageTable:
        """The stages of the chain, as profiled, at a micro-batch size of one device."""
        return self._table("", self.chain, size, self.past_largest)

    def _table(self, name: str, chain: Chain, size: float, past_largest: bool) -> StageTable:
        if (name, size) not in self._tables:
            self._tables[name, size] = StageTable.of(chain, size, past_largest=past_largest)
        return self._tables[name, size]

    @property
    def kind_chains(self) -> list[Chain]:
        """The layers as measured for each kind of device."""
        kinds = self.topology.kinds
        return [self.chain if kind.profile is None else self.profiles[kind.profile] for kind in kinds]

    @property
    def has_spread(self) -> bool:
        """Whether the spread of the layers' seconds is known on every kind of device."""
        return all(chain.spread is not None for chain in self.kind_chains)

    @cached_property
    def buckets(self) -> Buckets:
        """The gradient buckets of all stages."""
        table = self.table(self.chain.sizes[0])
        return make_buckets(self.gradients(self.chain.trainable_bytes), table.cut_points)

    @cached_property
    def number_bytes(self) -> Precision:
        """Bytes of a weight, a gradient and a master weight."""
        return self.precision or training_precision(self.dtype).bytes

    def gradients(self, trainable: Floats) -> Floats:
        """Bytes of the gradients of so many bytes of trainable weights."""
        return gradient_bytes(trainable, self.number_bytes)

    def bytes_at_end(self, trainable: Floats) -> Floats:
        """Bytes of an all-reduce that sends as much as the replicas of stages with so many bytes of trainable
        weights exchange after the last backward."""
        return bytes_at_end(trainable, self.number_bytes, self.zero)

    @cached_property
    def usable(self) -> npt.NDArray[np.bool_]:
        """Which stages may be, whatever the memory."""
        table = self.table(self.chain.sizes[0])
        usable = table.valid
        if self.runtime is not None and self.runtime.trains_every_stage:
            usable = usable & (np.asarray(table.stage_bytes.trainable) > 0)
        cut_points = np.array(table.cut_points)
        for layer in self.limits.must_cut:
            over = (cut_points <= layer)[:, None] & (cut_points > layer + 1)[None, :]
            usable = usable & ~over
        return usable

    def may_be(self, stage: int, start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> Any:
        """(pairs,): whether the stage of that number may lie between these cut points; True where none is
        pinned."""
        if not self.limits.pins:
            return True
        cut_points = np.array(self.table(self.chain.sizes[0]).cut_points)
        first, after = cut_points[start], cut_points[end]
        fits = np.ones(len(first), dtype=np.bool_)
        for layer, own in self.limits.pins:
            fits &= ((first <= layer) & (layer < after)) == (own == stage)
        return fits

    @property
    def is_long(self) -> bool:
        """Whether there are too many cuts for tables of all stages."""
        return self.chain.max_stages > MOST_BLOCKS

    @property
    def one_process(self) -> bool:
        """Whether one process launches the work of all stages."""
        return self.runtime is not None and self.runtime.one_process

    @property
    def hosts(self) -> Hosts:
        """The same as a word of `Costs`."""
        return "one" if self.one_process else "each"

    @cached_property
    def routes(self) -> Routes:
        """The ways from stages to stages."""
        return Routes(self.topology)

    @cached_property
    def ports(self) -> TopologyPorts:
        """The ports that stages share."""
        return TopologyPorts(self.topology, self.routes)

    def tied_seconds(self, ranks: tuple[int, ...], bytes: float) -> float:
        """Of the sum of a tied weight's gradients over all that hold it."""
        key = ranks, bytes
        if key not in self._tied:
            self._tied[key] = reduction_seconds(self.topology)(ranks, bytes)
        return self._tied[key]

    def pace(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[float, float]:
        """Latency from stage to stage, and seconds of each byte that a replica of the smaller one sends or
        receives."""
        latency, seconds = self.routes.route(senders, receivers)
        return latency, seconds * min(len(senders), len(receivers))

    def limit(self, devices: Sequence[int]) -> float:
        """Bytes that each of these devices may hold, inf for any number."""
        return self.kinds_limit(self._kinds(devices))

    def kinds_limit(self, kinds: Iterable[Device]) -> float:
        """Bytes that a device of any of these kinds may hold, inf for any number."""
        limits = [self.memory_limit, *(kind.memory_bytes for kind in kinds)]
        return min((float(limit) for limit in limits if limit is not None), default=inf)

    def fits_someone(self, size: int, replicas: int) -> bool:
        """Whether a replica's share can be costed."""
        return self.chain.reaches(divide_batch(size, replicas), past_largest=self.past_largest)

    def least_work(
        self, size: int, *, recompute: bool = False, first_share: float, splits: bool = False
    ) -> Floats:
        """(layers,): seconds of so many samples, forward (twice with `recompute`) and backward, on the device
        that is fastest for each layer; `first_share` and `splits` as of `least_backward`."""
        return self.least(size, lambda own: layer_work(own, first_share, recompute=recompute, splits=splits))

    def least_forward(self, size: int) -> Floats:
        """(layers,): forward seconds of so many samples on the device that is fastest for each layer."""
        return self.least(size, lambda own: own.forward_seconds)

    def least(self, size: int, seconds: Callable[[LayerCosts], Floats]) -> Floats:
        """(layers,): such seconds of so many samples on the device that is fastest for each layer."""
        least: Floats = np.minimum.reduce([self.on(kind, size, seconds) for kind in self.topology.kinds])
        return least

    def on(self, kind: Device, size: int, seconds: Callable[[LayerCosts], Floats]) -> Floats:
        """(layers,): such seconds of so many samples on a kind of device."""
        return seconds(self.kind_table(kind, size).costs) * kind.seconds_scale

    def cheapest_work(
        self,
        size: int,
        counts: Iterable[int],
        *,
        recompute: bool = False,
        first_share: float,
        splits: bool = False,
    ) -> Floats | None:
        """(layers,): `least_work` of a micro-batch on all replicas together, of these numbers of replicas the
        one with which each layer takes least; None where none can be costed."""
        fitting = [n for n in counts if n <= size and self.fits_someone(size, n)]
        works = [
            n
            * self.least_work(
                divide_batch(size, n), recompute=recompute, first_share=first_share, splits=splits
            )
            for n in fitting
        ]
        return np.minimum.reduce(works) if works else None

    def least_launch_seconds(
        self, size: int, counts: Iterable[int], devices: int, *, recompute: bool
    ) -> tuple[float, float]:
        """Host seconds of a micro-batch, with the number of replicas, of these, that makes each layer least:
        of the host that launches most, at the least, on so many devices; and of the layer that takes longest.
        0 where no number can be costed."""
        fitting = [count for count in counts if count <= size and self.fits_someone(size, count)]
        tables = [self.table(divide_batch(size, count)).costs for count in fitting]
        if not tables:
            return 0.0, 0.0
        forward = np.minimum.reduce([own.forward_host_seconds for own in tables])
        each = np.minimum.reduce(
            [(1 + recompute) * own.forward_host_seconds + own.backward_host_seconds for own in tables]
        )
        hosts = max(devices // min(fitting), 1)
        if not self.one_process:
            return float(each.sum()) / hosts, float(each.max())
        # Forwards one after another, and backwards on the threads of the devices.
        busiest = forward.sum() + max(float((each - forward).sum()) / hosts, recompute * float(forward.sum()))
        return float(busiest), float(each.max())

    def replica_group(self, size: int, devices: Sequence[int]) -> ReplicaGroupCosts:
        """What stages cost on these devices, which share micro-batches of `size` samples."""
        devices = tuple(devices)
        run = self._run(devices)
        if run not in self._joined:
            self._joined[run] = (self._kinds(devices), link_signature(self.topology, devices))
        key = (size, self._joined[run])
        if key not in self._group_costs:
            self._group_costs[key] = self._cost_group(size, devices)
        return self._group_costs[key]

    def _run(self, devices: tuple[int, ...]) -> tuple[object, ...]:
        """What tells devices apart: runs of one length that begin at the same place of a node are the same
        where nodes are."""
        first, count = devices[0], len(devices)
        if self._single_kind and self.routes.alike and devices == tuple(range(first, first + count)):
            return "run", first % self.topology.gpus_per_node, count
        return devices

    @cached_property
    def _single_kind(self) -> bool:
        return len(self.topology.kinds) == 1

    def _kinds(self, devices: Sequence[int]) -> tuple[Device, ...]:
        if self._single_kind:
            return self.topology.kinds
        return tuple(self.topology.count_kinds(devices))

    def _cost_group(self, size: int, devices: tuple[int, ...]) -> ReplicaGroupCosts:
        kinds = self._kinds(devices)
        per_replica_batch = divide_batch(size, len(devices))
        timed = [(self.kind_table(kind, per_replica_batch), kind.seconds_scale) for kind in kinds]
        exchange = ReplicaExchange(self.topology, devices, self.number_bytes, self.zero)
        forward, backward, first = (
            [stage_figure(own, name, scale, exchange) for own, scale in timed]
            for name in ("forward", "backward", "first_backward")
        )
        longest = np.maximum.reduce(backward)
        exposed_allreduce = np.zeros_like(longest)
        if len(devices) > 1 and self.zero:
            exposed_allreduce = exchange.at_end(self.table(per_replica_batch).reduced_bytes(self.zero))
        elif len(devices) > 1:
            exposed = [
                self.buckets.exposed_seconds(
                    table.costs.backward_seconds * scale,
                    lambda bytes: all_reduce_seconds(self.topology, devices, bytes),
                )
                for table, scale in timed
            ]
            slowest = np.argmax(backward, axis=0)
            exposed_allreduce = np.take_along_axis(np.array(exposed), slowest[None], axis=0)[0]
        return ReplicaGroupCosts(
            table=self.table(per_replica_batch),
            replicas=len(devices),
            per_replica_batch=per_replica_batch,
            size=size,
            forward=np.maximum.reduce(forward),
            backward=longest,
            accumulation=longest - np.maximum.reduce(first),
            exposed_allreduce=exposed_allreduce,
            limit=self.limit(devices),
            optimizer=self.optimizer,
            ledger={
                **ledger_options(fullest_kind(kinds), self.dtype, self.number_bytes, self.zero),
                "ahead": 0 if self.mini_batch is None else self.mini_batch / size,
            },
            host=self.host,
            least_tied=self.least_tied(self.table(per_replica_batch), len(devices)),
        )

    def least_tied(self, table: StageTable, replicas: int) -> Floats | float:
        """`least_seconds_after` of the stages of a table."""
        return least_seconds_after(
            self.chain.tied, table.cut_points, self.topology, self.number_bytes, replicas
        )

    def kind_table(self, kind: Device, size: float) -> StageTable:
        if kind.profile is None:
            return self.table(size)
        if kind.profile not in self.profiles:
            raise UsageError(
                f"the topology says that {kind.name} has a profile of its own, {kind.profile}: it is missing",
                "Give that profile, or the device's speed relative to the profiled one.",
            )
        return self._table(kind.profile, self.profiles[kind.profile], size, past_largest=True)


def narrow_space(space: Space, ends: Sequence[int]) -> Space:
    """The space with no other cuts than those of one plan, given as the layers before them."""
    cut_after = np.zeros(len(space.chain), dtype=np.bool_)
    cut_after[np.array(ends[:-1], dtype=np.int64) - 1] = True
    return with_cuts(space, cut_after)


def with_cuts(space: Space, cut_after: npt.NDArray[np.bool_]) -> Space:
    """The same space with other allowed cuts."""
    chain = replace(space.chain, cut_after=cut_after)
    profiles = {name: replace(own, cut_after=cut_after) for name, own in space.profiles.items()}
    return replace(space, chain=chain, profiles=profiles)

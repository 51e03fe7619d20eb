"""The plans to search, and the costs of a stage on any group of devices."""

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
"""Most blocks (runs of layers between allowed cuts) for which tables of all stages are built."""


_CACHES = ("buckets", "usable", "routes", "ports")
"""Cached properties that do not depend on the budget, so that copies of a space share them."""


def divide_batch(size: int, replicas: int) -> int:
    """Return the most samples of a micro-batch that one replica computes: ceil(size / replicas)."""
    return -(-size // replicas)


@dataclass(frozen=True, eq=False)
class Space:
    """A chain of layers on a topology, for one runtime or for any, with the limits of the search.

    Attributes:
        chain: Costs of the layers on the profiled device.
        topology: Devices and links.
        optimizer: Name of the optimizer, which sets the bytes of its state.
        memory_limit: Bytes that no device may exceed, in addition to its own limit. None for no further
            limit.
        past_largest: Whether costs may be extrapolated past the largest measured micro-batch size.
        runtime: Runtime that must be able to run the plans. None for any.
        dtype: Data type of the training.
        zero: ZeRO stage (0 to 3) of the optimizer.
        profiles: Layers as measured on the kinds of devices that have their own profile, by the profile's
            name in the topology.
        limits: Cuts and pins that the options ask for.
    """

    chain: Chain
    topology: Topology
    optimizer: str
    memory_limit: float | None = None
    past_largest: bool = False
    runtime: Runtime | None = None
    dtype: str = "float32"
    precision: Precision | None = None
    """Bytes of one weight, gradient and master weight. None for those that are usual for the dtype."""
    zero: int = 0
    profiles: Mapping[str, Chain] = field(default_factory=dict)
    limits: CutLimits = field(default_factory=CutLimits)
    budget: SearchBudget = field(default_factory=SearchBudget)
    """Work and time that all computations on this space may take."""
    mini_batch: int | None = None
    """Samples of a step if the runtime keeps buffers for all of them, else None."""
    host: HostMemory | None = None
    """Host memory to which stages may offload activations. None if offloading is off."""
    furthest_ends: dict[object, dict[int, npt.NDArray[np.int64]]] = field(default_factory=dict, init=False)
    """Furthest end of a stage that fits on a kind of device, by micro-batches in flight (filled by
    `reach_bound`)."""
    _tables: dict[tuple[str, float], StageTable] = field(default_factory=dict, init=False)
    _group_costs: dict[object, ReplicaGroupCosts] = field(default_factory=dict, init=False)
    _joined: dict[tuple[object, ...], object] = field(default_factory=dict, init=False)
    _tied: dict[tuple[tuple[int, ...], float], float] = field(default_factory=dict, init=False)

    def within(self, budget: SearchBudget) -> Space:
        """Return the same space with another budget. Tables that were built are shared."""
        space = replace(self, budget=budget)
        for name in ("furthest_ends", "_tables", "_group_costs", "_joined"):
            object.__setattr__(space, name, getattr(self, name))
        vars(space).update({name: value for name, value in vars(self).items() if name in _CACHES})
        return space

    def table(self, size: float) -> StageTable:
        """Return the costs of all stages at a micro-batch size of `size` samples per device, as profiled."""
        return self._table("", self.chain, size, self.past_largest)

    def _table(self, name: str, chain: Chain, size: float, past_largest: bool) -> StageTable:
        if (name, size) not in self._tables:
            self._tables[name, size] = StageTable.of(chain, size, past_largest=past_largest)
        return self._tables[name, size]

    @property
    def kind_chains(self) -> list[Chain]:
        """Layers as measured for each kind of device."""
        kinds = self.topology.kinds
        return [self.chain if kind.profile is None else self.profiles[kind.profile] for kind in kinds]

    @property
    def has_spread(self) -> bool:
        """True if the spread of the layers' seconds is known on every kind of device."""
        return all(chain.spread is not None for chain in self.kind_chains)

    @cached_property
    def buckets(self) -> Buckets:
        """Gradient buckets of all stages."""
        table = self.table(self.chain.sizes[0])
        return make_buckets(self.gradients(self.chain.trainable_bytes), table.cut_points)

    @cached_property
    def number_bytes(self) -> Precision:
        """Bytes of a weight, a gradient and a master weight."""
        return self.precision or training_precision(self.dtype).bytes

    def gradients(self, trainable: Floats) -> Floats:
        """Return the gradient bytes for `trainable` bytes of weights."""
        return gradient_bytes(trainable, self.number_bytes)

    def bytes_at_end(self, trainable: Floats) -> Floats:
        """Return the bytes of an all-reduce that moves as much as the exchange after the last backward.

        ZeRO replaces the all-reduce by reduce-scatters and all-gathers. Some of them run before the last
        backward ends and are not counted here.

        Args:
            trainable: Bytes of trainable weights of the stages.
        """
        return bytes_at_end(trainable, self.number_bytes, self.zero)

    @cached_property
    def usable(self) -> npt.NDArray[np.bool_]:
        """(cut points, cut points) mask of the stages that are allowed regardless of memory."""
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
        """Return whether stage number `stage` may lie between two cut points.

        Args:
            stage: 0-based number of the stage.
            start: (pairs,) cut points where the stage begins.
            end: (pairs,) cut points where it ends.

        Returns:
            (pairs,) mask, or True if no layer is pinned to a stage.
        """
        if not self.limits.pins:
            return True
        cut_points = np.array(self.table(self.chain.sizes[0]).cut_points)
        first, layer_after = cut_points[start], cut_points[end]
        fits = np.ones(len(first), dtype=np.bool_)
        for layer, pinned_stage in self.limits.pins:
            fits &= ((first <= layer) & (layer < layer_after)) == (pinned_stage == stage)
        return fits

    @property
    def is_long(self) -> bool:
        """True if the chain has too many cuts for tables of all stages."""
        return self.chain.max_stages > MOST_BLOCKS

    @property
    def one_process(self) -> bool:
        """True if one process launches the work of all stages."""
        return self.runtime is not None and self.runtime.one_process

    @property
    def hosts(self) -> Hosts:
        """Number of launching processes, in the terms of `Costs.hosts`."""
        return "one" if self.one_process else "each"

    @cached_property
    def routes(self) -> Routes:
        """Latency and bandwidth between any two groups of devices."""
        return Routes(self.topology)

    @cached_property
    def ports(self) -> TopologyPorts:
        """Network ports that stages share."""
        return TopologyPorts(self.topology, self.routes)

    def tied_seconds(self, ranks: tuple[int, ...], bytes: float) -> float:
        """Return the seconds to sum the gradients of a tied weight over all `ranks` that hold a copy."""
        key = ranks, bytes
        if key not in self._tied:
            self._tied[key] = reduction_seconds(self.topology)(ranks, bytes)
        return self._tied[key]

    def pace(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[float, float]:
        """Return the cost of a transfer between two stages.

        Args:
            senders: Ranks of the sending stage.
            receivers: Ranks of the receiving stage.

        Returns:
            Latency in seconds, and seconds per byte that a replica of the smaller stage sends or receives.
        """
        latency, seconds = self.routes.route(senders, receivers)
        return latency, seconds * min(len(senders), len(receivers))

    def limit(self, devices: Sequence[int]) -> float:
        """Return the bytes that each of these devices may hold; inf if unlimited."""
        return self.kinds_limit(self._kinds(devices))

    def kinds_limit(self, kinds: Iterable[Device]) -> float:
        """Return the bytes that a device of any of these kinds may hold; inf if unlimited."""
        limits = [self.memory_limit, *(kind.memory_bytes for kind in kinds)]
        return min((float(limit) for limit in limits if limit is not None), default=inf)

    def fits_someone(self, size: int, replicas: int) -> bool:
        """Return whether the chain has costs for a replica's share of a micro-batch of `size` samples."""
        return self.chain.reaches(divide_batch(size, replicas), past_largest=self.past_largest)

    def least_work(
        self, size: int, *, recompute: bool = False, first_share: float, splits: bool = False
    ) -> Floats:
        """Return the forward and backward seconds of each layer on the device that is fastest for it.

        Args:
            size: Samples of the micro-batch on one device.
            recompute: Whether the forward runs twice.
            first_share: Share of the backwards that are the first of a step, see `least_backward`.
            splits: Whether a backward may be two actions, see `least_backward`.

        Returns:
            (layers,) seconds.
        """
        return self.least(
            size, lambda layers: layer_work(layers, first_share, recompute=recompute, splits=splits)
        )

    def least_forward(self, size: int) -> Floats:
        """Return (layers,) forward seconds of `size` samples, each on the fastest device for the layer."""
        return self.least(size, lambda costs: costs.forward_seconds)

    def least(self, size: int, seconds: Callable[[LayerCosts], Floats]) -> Floats:
        """Return (layers,) `seconds` of `size` samples, each on the fastest device for the layer."""
        least: Floats = np.minimum.reduce([self.on(kind, size, seconds) for kind in self.topology.kinds])
        return least

    def on(self, kind: Device, size: int, seconds: Callable[[LayerCosts], Floats]) -> Floats:
        """Return (layers,) `seconds` of `size` samples on one kind of device."""
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
        """Return the least device seconds of a micro-batch by layer, over numbers of replicas.

        The seconds of all replicas are added up, so that the sum over layers divided by the devices is a
        valid share of a device's work.

        Args:
            size: Samples of a micro-batch on all replicas together.
            counts: Allowed numbers of replicas.
            recompute: Whether the forward runs twice.
            first_share: See `least_work`.
            splits: See `least_work`.

        Returns:
            (layers,) seconds; None if no number of replicas has known costs.
        """
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
        """Return the least host seconds for the launches of a micro-batch.

        Each layer is counted with the number of replicas that makes it cheapest.

        Args:
            size: Samples of a micro-batch on all replicas together.
            counts: Allowed numbers of replicas.
            devices: Number of devices, which limits the number of hosts.
            recompute: Whether the forward is launched twice.

        Returns:
            Least seconds of the busiest host, and seconds of the most expensive layer. Both are 0 if no
            number of replicas has known costs.
        """
        fitting = [count for count in counts if count <= size and self.fits_someone(size, count)]
        tables = [self.table(divide_batch(size, count)).costs for count in fitting]
        if not tables:
            return 0.0, 0.0
        forward = np.minimum.reduce([costs.forward_host_seconds for costs in tables])
        both = np.minimum.reduce(
            [(1 + recompute) * costs.forward_host_seconds + costs.backward_host_seconds for costs in tables]
        )
        hosts = max(devices // min(fitting), 1)
        if not self.one_process:
            return float(both.sum()) / hosts, float(both.max())
        # One process launches all forwards in sequence; each device has a thread for its backwards.
        busiest = forward.sum() + max(float((both - forward).sum()) / hosts, recompute * float(forward.sum()))
        return float(busiest), float(both.max())

    def replica_group(self, size: int, devices: Sequence[int]) -> ReplicaGroupCosts:
        """Return the costs of all stages on these devices, which share micro-batches of `size` samples."""
        devices = tuple(devices)
        run = self._run(devices)
        if run not in self._joined:
            self._joined[run] = (self._kinds(devices), link_signature(self.topology, devices))
        key = (size, self._joined[run])
        if key not in self._group_costs:
            self._group_costs[key] = self._cost_group(size, devices)
        return self._group_costs[key]

    def _run(self, devices: tuple[int, ...]) -> tuple[object, ...]:
        """Return a key that is equal for device groups with equal costs.

        If all devices and links are alike, runs of equal length that begin at the same slot of a node cost
        the same.
        """
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
            [stage_figure(costs, name, scale, exchange) for costs, scale in timed]
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
        """Return `least_seconds_after` of all stages of a table on `replicas` devices each."""
        return least_seconds_after(
            self.chain.tied, table.cut_points, self.topology, self.number_bytes, replicas
        )

    def kind_table(self, kind: Device, size: float) -> StageTable:
        """Return the costs of all stages at `size` samples on one kind of device, before its `seconds_scale`.

        Raises:
            UsageError: The topology names a profile for this kind that was not given.
        """
        if kind.profile is None:
            return self.table(size)
        if kind.profile not in self.profiles:
            raise UsageError(
                f"the topology names the profile {kind.profile} for {kind.name}, which was not given",
                "Give that profile, or state the device's speed relative to the profiled one.",
            )
        return self._table(kind.profile, self.profiles[kind.profile], size, past_largest=True)


def narrow_space(space: Space, ends: Sequence[int]) -> Space:
    """Return the space with only the cuts of one plan.

    Args:
        space: The full space.
        ends: By stage, the number of layers up to its end.
    """
    cut_after = np.zeros(len(space.chain), dtype=np.bool_)
    cut_after[np.array(ends[:-1], dtype=np.int64) - 1] = True
    return with_cuts(space, cut_after)


def with_cuts(space: Space, cut_after: npt.NDArray[np.bool_]) -> Space:
    """Return the same space with other allowed cuts.

    Args:
        space: The full space.
        cut_after: (layers,) mask of the layers after which a cut is allowed.
    """
    chain = replace(space.chain, cut_after=cut_after)
    profiles = {name: replace(layers, cut_after=cut_after) for name, layers in space.profiles.items()}
    return replace(space, chain=chain, profiles=profiles)

"""Brute force over every plan of a small space, straight from the layers, and random spaces to search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations, islice, pairwise, permutations, product
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pplan.cost_models.collectives import exposed_all_reduce_seconds
from pplan.cost_models.layer import Chain, LayerCosts
from pplan.cost_models.memory import StageBytes, ledger, total
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import linear_costs
from pplan.cost_models.timeline import step_seconds
from pplan.cost_models.topology import Device, Group, Link, Topology
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.search.family import Family
from pplan.planner.search.placements import ANY, Placement, list_placements
from pplan.planner.search.space import Space

Floats = npt.NDArray[np.float64]
Stage = tuple[int, int, tuple[int, ...]]
"""First layer, the layer after the last, devices."""
Keep = Callable[[tuple[int, ...], tuple[tuple[int, ...], ...]], bool]
"""Whether plans with these ends and devices are wanted."""
MODES = {"by_stage": ("never", "always")}
SECONDS = ("forward", "backward", "first", "tail", "forward_launch", "backward_launch")


@dataclass(frozen=True)
class Fastest:
    """Of all plans that fit: the fastest, and how many there are; and how many there would be without limits
    of memory."""

    proposal: Proposal
    modes: tuple[str, ...]
    step_seconds: float
    plans: int
    unlimited: int


@dataclass
class BruteForce:
    """Every plan of a space, simulated; without the planner's tables, teams and bounds."""

    space: Space
    families: Sequence[Family]
    keep: Keep | None = None
    most_stages: int | None = None
    _seconds: dict[tuple[int, Stage], dict[str, float]] = field(default_factory=dict)
    _needs: dict[tuple[int, Stage, float, str], float] = field(default_factory=dict)
    _costs: dict[tuple[str | None, int], LayerCosts] = field(default_factory=dict)

    def fastest(self) -> Fastest | None:
        """None where no plan fits."""
        best: Fastest | None = None
        fitting = unlimited = 0
        for config, plans, modes in self._groups():
            unlimited += len(plans)
            steps, fits = self._steps(config, plans, modes)
            fitting += int(fits.sum())
            if fits.any():
                first = int(np.where(fits, steps, inf).argmin())
                if best is None or steps[first] < best.step_seconds:
                    best = Fastest(_proposal(config, plans[first]), modes, float(steps[first]), 0, 0)
        return None if best is None else replace(best, plans=fitting, unlimited=unlimited)

    def plans(self) -> Iterator[tuple[Proposal, tuple[str, ...], float]]:
        """Every plan that fits, with its step."""
        for config, plans, modes in self._groups():
            steps, fits = self._steps(config, plans, modes)
            for row in np.flatnonzero(fits):
                yield _proposal(config, plans[row]), modes, float(steps[row])

    def _groups(self) -> Iterator[tuple[PipelineConfig, list[tuple[Stage, ...]], tuple[str, ...]]]:
        """Plans of one setting, number of stages and recomputation."""
        cuts = [int(i) + 1 for i in np.flatnonzero(self.space.chain.cut_after)]
        for family in self.families:
            config = family.config
            allowed = [count for count in family.replicas if self._shares(config, count)]
            most = min(self.most_stages or inf, len(family.placement.ranks), len(cuts) + 1)
            for stages in range(1, int(most) + 1):
                plans = [
                    tuple((a, b, own) for (a, b), own in zip(pairwise((0, *ends)), devices, strict=True))
                    for devices in ranges(family.placement, stages, allowed, on_all=family.on_all)
                    for chosen in combinations(cuts, stages - 1)
                    if self._wanted(ends := (*chosen, len(self.space.chain)), devices)
                ]
                if plans:
                    for modes in product(MODES.get(config.recompute, (config.recompute,)), repeat=stages):
                        yield config, plans, modes

    def _wanted(self, ends: tuple[int, ...], devices: tuple[tuple[int, ...], ...]) -> bool:
        return self.keep is None or self.keep(ends, devices)

    def _shares(self, config: PipelineConfig, count: int) -> bool:
        size = config.micro_batch_size
        share = -(-size // count)
        return count <= size and self.space.chain.reaches(share, past_largest=self.space.past_largest)

    def _steps(
        self, config: PipelineConfig, plans: list[tuple[Stage, ...]], modes: tuple[str, ...]
    ) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Of each plan its step, and whether it fits."""
        count, stages = config.micro_batches, len(modes)
        names: dict[Stage, int] = {}
        ids = np.array([[names.setdefault(stage, len(names)) for stage in plan] for plan in plans]).T
        own = [self.seconds(config, stage) for stage in names]
        known = {name: np.array([costs[name] for costs in own])[ids] for name in SECONDS}
        runs_again = {"never": 0, "always": count, "except_last": count - 1}
        recompute = np.array([[m < runs_again[mode] for m in range(count)] for mode in modes])[:, :, None]

        def row(name: str, more: str = "") -> Floats:
            values: Floats = known[name][:, None, :] + (recompute * known[more][:, None, :] if more else 0.0)
            return np.broadcast_to(values, (stages, count, len(plans)))

        cuts = [self._cuts(config, plan) for plan in plans]
        occupancy, latency = (np.array([[c[i] for c in own] for own in cuts]).T for i in range(2))
        one_process = self.space.runtime is not None and self.space.runtime.one_process
        backward = row("backward", "forward").copy()
        backward[:, -1 if config.schedule == "gpipe" else 0] -= known["backward"] - known["first"]
        costs = linear_costs(
            forward=row("forward"),
            backward=backward,
            occupancy=occupancy.reshape(stages - 1, len(plans)),
            latency=latency.reshape(stages - 1, len(plans)),
            forward_launch=row("forward_launch"),
            backward_launch=row("backward_launch", "forward_launch"),
            recompute_launch=recompute * row("forward_launch"),
            all_reduce=known["tail"],
            hosts="one" if one_process else "each",
        )
        steps = step_seconds(find_schedule(config.schedule).program(stages, count), costs)
        return steps, self._fit(config, list(names), ids, modes)

    def _fit(
        self, config: PipelineConfig, stages: list[Stage], ids: npt.NDArray[np.int64], modes: Sequence[str]
    ) -> npt.NDArray[np.bool_]:
        schedule, count = find_schedule(config.schedule), config.micro_batches
        fits = np.ones(ids.shape[1], dtype=np.bool_)
        for index, mode in enumerate(modes):
            in_flight = schedule.in_flight(index, len(modes), count)
            own = [self.needs(config, stage, in_flight, mode) <= self._limit(stage) for stage in stages]
            fits &= np.array(own)[ids[index]]
        return fits

    def _limit(self, stage: Stage) -> float:
        own = [self.space.topology.device(rank).memory_bytes for rank in stage[2]]
        return min((limit for limit in (*own, self.space.memory_limit) if limit is not None), default=inf)

    def seconds(self, config: PipelineConfig, stage: Stage) -> dict[str, float]:
        """Of a micro-batch on the slowest replica, and of the all-reduce that follows the last backward."""
        size = config.micro_batch_size
        if (size, stage) not in self._seconds:
            self._seconds[size, stage] = self._made_seconds(size, stage)
        return self._seconds[size, stage]

    def _made_seconds(self, size: int, stage: Stage) -> dict[str, float]:
        first_layer, end, devices = stage
        share, topology = -(-size // len(devices)), self.space.topology
        slowest: dict[str, float] = {"forward": 0.0, "backward": -1.0, "first": 0.0}
        for kind in dict.fromkeys(topology.device(rank) for rank in devices):
            layers = self._layers(kind, share)
            backward = layers.backward_seconds[first_layer:end] * kind.seconds_scale
            forward = float(layers.forward_seconds[first_layer:end].sum() * kind.seconds_scale)
            if backward.sum() > slowest["backward"]:
                gradients = layers.trainable_bytes[first_layer:end]
                exposed_allreduce = exposed_all_reduce_seconds(backward, gradients, topology, devices)
                slowest |= {"backward": float(backward.sum()), "tail": exposed_allreduce}
            slowest["forward"] = max(slowest["forward"], forward)
            first = backward
            if layers.accumulation_seconds is not None:
                adding = layers.accumulation_seconds[first_layer:end] * kind.seconds_scale
                first = np.maximum(backward - adding, 0.0)
            slowest["first"] = max(slowest["first"], float(first.sum()))
        layers = self._layers(None, share)
        slowest["forward_launch"] = float(layers.forward_host_seconds[first_layer:end].sum())
        slowest["backward_launch"] = float(layers.backward_host_seconds[first_layer:end].sum())
        return slowest

    def _layers(self, kind: Device | None, share: int) -> LayerCosts:
        profile = None if kind is None else kind.profile
        if (profile, share) not in self._costs:
            chain = self.space.chain if profile is None else self.space.profiles[profile]
            past_largest = profile is not None or self.space.past_largest
            self._costs[profile, share] = chain.at(share, past_largest=past_largest)
        return self._costs[profile, share]

    def needs(self, config: PipelineConfig, stage: Stage, in_flight: float, mode: str) -> float:
        """Bytes of a stage on one replica with so many micro-batches in flight."""
        key = config.micro_batch_size, stage, in_flight, mode
        if key not in self._needs:
            self._needs[key] = self._made_needs(*key)
        return self._needs[key]

    def _made_needs(self, size: int, stage: Stage, in_flight: float, mode: str) -> float:
        a, b, devices = stage
        layers = self._layers(None, -(-size // len(devices)))
        received = layers.output_bytes[a - 1] if a else 0.0
        own = StageBytes(
            parameters=layers.parameter_bytes[a:b].sum(),
            trainable=layers.trainable_bytes[a:b].sum(),
            buffers=layers.buffer_bytes[a:b].sum(),
            saved=layers.saved_bytes[a:b].sum(),
            saved_input=layers.saved_input_bytes[a],
            input=received if a else layers.input_bytes,
            received=received,
            sent=layers.output_bytes[b - 1] if b < len(self.space.chain) else 0.0,
            workspace=beyond_saved(layers, a, b),
            largest=layers.trainable_bytes[a:b].max(),
        )
        terms = ledger(
            own,
            in_flight=in_flight,
            recompute=mode,
            optimizer=self.space.optimizer,
            replicas=len(devices),
            precision=self.space.number_bytes,
        )
        return float(total(terms))

    def _cuts(self, config: PipelineConfig, plan: tuple[Stage, ...]) -> list[tuple[float, float]]:
        """Occupancy and latency of every transfer: the samples of the smaller side's replica."""
        made = []
        for (_, end, here), (_, _, there) in pairwise(plan):
            shares = [-(-config.micro_batch_size // len(devices)) for devices in (here, there)]
            sent = max(float(self._layers(None, share).output_bytes[end - 1]) for share in shares)
            latency, pace = pace_between(self.space.topology, here, there)
            made.append((sent * min(len(here), len(there)) * pace, latency))
        return made


def beyond_saved(layers: LayerCosts, a: int, b: int) -> float:
    """What layers a to b need at their peak, one after another, besides all that they save."""
    peak = max(layers.saved_bytes[a : i + 1].sum() + layers.workspace_bytes[i] for i in range(a, b))
    return float(peak - layers.saved_bytes[a:b].sum())


_PACES: dict[tuple[Topology, tuple[int, ...], tuple[int, ...]], tuple[float, float]] = {}


def pace_between(topology: Topology, here: tuple[int, ...], there: tuple[int, ...]) -> tuple[float, float]:
    """Latency, and seconds of each byte of all samples: every port carries the samples that its devices have
    in common with those they send to, or receive from."""
    key = topology, here, there
    if key not in _PACES:
        _PACES[key] = _pace(*key)
    return _PACES[key]


def _pace(topology: Topology, here: tuple[int, ...], there: tuple[int, ...]) -> tuple[float, float]:
    loads: dict[object, float] = {}
    latency = 0.0
    for i, a in enumerate(here):
        for j, b in enumerate(there):
            start = max(Fraction(i, len(here)), Fraction(j, len(there)))
            common = min(Fraction(i + 1, len(here)), Fraction(j + 1, len(there))) - start
            if common > 0:
                link = topology.link(a, b)
                latency = max(latency, link.latency_seconds)
                for port in topology.ports(a, b):
                    seconds = float(common) / link.bandwidth_bytes_per_second
                    loads[port] = loads.get(port, 0.0) + seconds
    return latency, max(loads.values())


def ranges(
    placement: Placement, stages: int, allowed: Sequence[int], *, on_all: bool = False
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every choice of devices for so many stages, in the placement's order, or in any."""
    ranks = placement.ranks
    if placement.name == ANY:
        return permuted(ranks, stages, allowed, on_all=on_all)

    def further(position: int, left: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if left == 0:
            if not on_all or position == len(ranks):
                yield ()
            return
        for begin in (position,) if on_all else placement.starts[position]:
            for count in allowed:
                if begin + count <= len(ranks):
                    own = ranks[begin : begin + count]
                    for others in further(begin + count, left - 1):
                        yield (own, *others)

    return further(0, stages)


def permuted(
    ranks: tuple[int, ...], stages: int, allowed: Sequence[int], *, on_all: bool
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Any devices for so many stages."""
    for counts in product(allowed, repeat=stages):
        if sum(counts) == len(ranks) or (sum(counts) < len(ranks) and not on_all):
            for chosen in permutations(ranks, sum(counts)):
                left = iter(chosen)
                yield tuple(tuple(islice(left, count)) for count in counts)


def _proposal(config: PipelineConfig, plan: tuple[Stage, ...]) -> Proposal:
    return Proposal(config, tuple(end for _, end, _ in plan), tuple(devices for _, _, devices in plan))


@pytest.fixture
def brute_force() -> type[BruteForce]:
    """Brute force over a space and families; `keep` takes ends and devices."""
    return BruteForce


@pytest.fixture
def families_of() -> Callable[..., list[Family]]:
    """A function of (space, settings, replicas): with every placement; `equal`: as many on every stage."""

    def make(
        space: Space, configs: Sequence[PipelineConfig], replicas: Sequence[int], *, equal: bool = False
    ) -> list[Family]:
        own = [(count,) for count in replicas] if equal else [tuple(replicas)]
        return [
            Family(config, placement, counts)
            for config in configs
            for placement in list_placements(space.topology)
            for counts in own
        ]

    return make


@pytest.fixture
def heavier() -> Callable[[Chain, Topology], tuple[Chain, Topology]]:
    """A function of a chain and a topology: gradients of up to 60 MiB a layer, of which DDP makes several
    buckets, and links as much faster."""

    def make(chain: Chain, topology: Topology) -> tuple[Chain, Topology]:
        scale = 0.6 * 2**20
        levels = [
            replace(level, link=Link(4 * scale * level.link.bandwidth_bytes_per_second, 0.0))
            for level in topology.levels
        ]
        grown: dict[str, Any] = {
            name: getattr(chain, name) * scale
            for name in ("parameter_bytes", "trainable_bytes", "output_bytes")
        }
        return replace(chain, **grown), replace(topology, levels=tuple(levels))

    return make


@pytest.fixture
def mixed() -> Callable[..., tuple[Topology, dict[str, Chain]]]:
    """A function of (rng, chain, topology): the topology with two or three kinds of devices, some as fast as
    their own profile says, and these profiles."""

    def make(rng: np.random.Generator, chain: Chain, topology: Topology) -> tuple[Topology, dict[str, Chain]]:
        noise = rng.uniform(0.3, 3, (len(chain), 1))
        own = replace(
            chain,
            forward_seconds=chain.forward_seconds * noise,
            backward_seconds=chain.backward_seconds * noise[::-1],
        )
        kinds = [
            topology.device(0),
            Device("fast", [None, 1500][int(rng.integers(2))], speed=float(rng.uniform(0.4, 3))),
            Device("own", topology.device(0).memory_bytes, profile="own.profile.json"),
        ]
        kinds = [kinds[index] for index in rng.permutation(3)]
        count = min(int(rng.integers(2, 4)), topology.gpus)
        inner = rng.choice(np.arange(1, topology.gpus), count - 1, replace=False)
        sizes = np.diff([0, *sorted(inner.tolist()), topology.gpus])
        groups = tuple(Group(kind, int(size)) for kind, size in zip(kinds, sizes, strict=False))
        return Topology(groups, topology.levels), {"own.profile.json": own}

    return make

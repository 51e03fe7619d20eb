"""PipeDream: stages and replicas by the hierarchical dynamic programme, for asynchronous throughput.

Narayanan et al., "PipeDream", SOSP 2019. Its objective is the seconds of a global batch in steady state, with
transfers and all-reduces beside the compute: those of the slowest stage or cut (`pipedream_programme`).
Latencies count nothing in it. What enters the pipeline at a time is a global batch of its own there, a
micro-batch here; replicas of a stage take turns there and share every micro-batch here, which the recurrence
does not tell apart.

Where a model has branches PipeDream's states are the down-sets of its graph. Here they are the cut points of
the chain: what a cut sends is every tensor made before it that is needed behind it, each once, and always
counts. Of devices of several kinds all count as the slowest, with the least memory.

`pipedream-published` counts as the code that its authors published, which is not as the paper does. Of a
stage on m components compute and all-reduce add up, and the all-reduce of m copies sends 4 (m-1) / m times
the weights; what a cut sends is divided among the components of the stage behind it. Cuts are charged, which
that code does where it is told to; memory and unused machines are as in `pipedream`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isqrt
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...cost_models.errors import InfeasibleError, UsageError
from ...cost_models.memory import LedgerOptions, Moment, Recompute
from ...cost_models.quantities import counted, format_bytes
from ...cost_models.schedules import schedule_named
from ..candidate import Proposal
from ..pipeline_config import PipelineConfig
from ..search.space import Space, divide_batch
from ..stage_table import StageTable, ledger_options
from .pipedream_instance import PAPER, PUBLISHED, Bools, Floats, Instance, Recurrence, Tier
from .pipedream_search import WORK, Solution, fastest, list_tiers, place_parts
from .replica_groups import thin

if TYPE_CHECKING:
    from ..problem import Problem


ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
SCHEDULES = (*ASYNCHRONOUS, "1f1b", "dapple", "gpipe")
"""Those whose stages hold what the number of stages behind them says; of several the first is taken."""
ENDLESS = 2**62
"""Micro-batches of a run that does not end."""
ENTRIES = 30_000_000
"""Stages times numbers of replicas whose memory is looked at: 240 MB."""


@dataclass(frozen=True)
class AsynchronousPlan:
    """A pipeline that is never flushed; by stage where plural.

    `ends`: the number of layers before each stage's end. `devices`: the ranks of its replicas.
    `seconds_per_mini_batch`: of the slowest stage or cut, by PipeDream's recurrence, for `mini_batch`
    samples, the size at which they enter. `noam`: the global batches in flight that keep every device busy
    where replicas take turns: the devices over those of the first stage, rounded up. `weight_versions` and
    `memory_bytes`: of one replica, as the ledger counts them where replicas share every global batch.
    `notes`: where the topology or the chain was simplified.
    """

    schedule: str
    recompute: Recompute
    mini_batch: int
    ends: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    seconds_per_mini_batch: float
    noam: int
    weight_versions: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @property
    def replicas(self) -> tuple[int, ...]:
        """By stage, how many devices share it."""
        return tuple(len(own) for own in self.devices)

    @property
    def samples_per_second(self) -> float:
        """In steady state."""
        return self.mini_batch / self.seconds_per_mini_batch


def plan_asynchronous(
    space: Space,
    mini_batch: int,
    *,
    recurrence: Recurrence = PAPER,
    schedule: str = "pipedream",
    recompute: Literal["never", "always"] = "never",
    use_all: bool = False,
    most_replicas: int | None = None,
    work: float = WORK,
) -> AsynchronousPlan:
    """The plan with the highest throughput of global batches of that size, every update made from one of
    them.

    Stage i of p keeps the weight versions and holds the activations that the schedule says (PipeDream: p - i
    of both). Exact for the recurrence and the memory limits, up to `work`; fewer devices are used where more
    are not faster, unless `use_all`.

    Raises InfeasibleError where no plan fits, and UsageError for a size that the profile does not reach and
    a schedule that is not asynchronous.
    """
    if schedule not in ASYNCHRONOUS:
        raise UsageError(f"schedule {schedule!r}: is not asynchronous", f"Use {' or '.join(ASYNCHRONOUS)}.")
    gpus = space.topology.gpus
    if not any(space.fits_someone(mini_batch, replicas) for replicas in range(1, gpus + 1)):
        space.table(divide_batch(mini_batch, gpus))  # which says so
    config = PipelineConfig(schedule, recompute, ENDLESS, mini_batch)
    stages = _Stages(space, config, recurrence, use_all, most_replicas)
    solution = stages.fastest(work)
    if solution is None:
        raise stages.nothing_fits()
    flat, cut_points = solution.flat(), stages.table.cut_points
    devices = tuple(place_parts(solution.parts, stages.tiers))
    behind = range(len(flat) - 1, -1, -1)
    needed = [
        stages.bytes(replicas, b, recompute)[i, j] for (i, j, replicas), b in zip(flat, behind, strict=True)
    ]
    return AsynchronousPlan(
        schedule=schedule,
        recompute=recompute,
        mini_batch=mini_batch,
        ends=tuple(cut_points[end] for _, end, _ in flat),
        devices=devices,
        seconds_per_mini_batch=solution.seconds,
        noam=-(-sum(map(len, devices)) // len(devices[0])),
        weight_versions=tuple(stages.versions(b) for b in behind),
        memory_bytes=tuple(round(float(amount)) for amount in needed),
        notes=tuple(stages.notes(solution)),
    )


LONG = 200
"""Blocks between the cuts that are left of a long chain."""


@dataclass(frozen=True)
class PipeDream:
    """The planner, with the paper's recurrence or another: the same partition under the requested
    schedule."""

    name: str
    recurrence: Recurrence

    def propose(self, problem: Problem) -> Iterable[Proposal]:
        """For every configuration its partition with the shortest bottleneck, where one fits. A runtime that
        runs no replicas, or the same number everywhere, is given one device a stage. Of a long chain some of
        the cuts: tables of all its stages would be too large."""
        space, configs = _within_reach(problem.space), _one_schedule(problem.configs)
        if space.is_long:
            space = thin(space, LONG)
        runtime = space.runtime
        for config in configs:
            size = config.micro_batch_size
            if not space.chain.reaches(size, past_largest=True):
                continue
            shared = space.fits_someone(size, 2) and (runtime is None or runtime.runs_replicas([2, 1]))
            stages = _Stages(space, config, self.recurrence, most_replicas=size if shared else 1)
            solution = stages.fastest(WORK / 2 / len(configs))
            if solution is not None:
                ends = tuple(stages.table.cut_points[end] for _, end, _ in solution.flat())
                yield Proposal(config, ends, tuple(place_parts(solution.parts, stages.tiers)))


def _within_reach(space: Space) -> Space:
    """With the devices that the runtime can use: one process has those of one node."""
    gpus, of_node = space.topology.gpus, space.topology.gpus_per_node
    if not space.one_process or gpus <= of_node:
        return space
    return replace(space, topology=space.topology.with_gpus(of_node))


def _one_schedule(configs: Sequence[PipelineConfig]) -> list[PipelineConfig]:
    """Of one schedule; where each stage may recompute or not, only so."""
    names = {config.schedule for config in configs}
    schedule = next((name for name in SCHEDULES if name in names), None)
    own = [config for config in configs if config.schedule == schedule]
    by_stage = [config for config in own if config.recompute == "by_stage"]
    return by_stage or own


@dataclass(frozen=True, eq=False)
class _Stages:
    """What stages cost and need under a configuration, and their programme."""

    full_space: Space
    config: PipelineConfig
    recurrence: Recurrence
    use_all: bool = False
    most_replicas: int | None = None
    _rooms: dict[int, Floats] = field(default_factory=dict)

    @cached_property
    def space(self) -> Space:
        """With costs past the largest measured size: a replica's share may lie within. Where memory is
        limited, with no more cuts than there is room for tables, one for each number of replicas."""
        space = replace(self.full_space, past_largest=True)
        if space.limit(range(space.topology.gpus)) == inf:
            return space
        counts = {1}
        for tier in list_tiers(space.topology)[0]:
            counts = {count * machines for count in counts for machines in range(1, tier.machines + 1)}
        most = self.most_replicas or inf
        return thin(space, isqrt(ENTRIES // sum(count <= most for count in counts)))

    @property
    def size(self) -> int:
        return self.config.micro_batch_size

    @cached_property
    def table(self) -> StageTable:
        return self.space.table(self.size)

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        return list_tiers(self.space.topology)[0]

    @cached_property
    def ledger(self) -> LedgerOptions:
        """Of the kind of device with the least memory."""
        least = min(self.space.topology.kinds, key=lambda kind: kind.memory_bytes or inf)
        return ledger_options(least, self.space.dtype, self.space.number_bytes, self.space.zero)

    @cached_property
    def limit(self) -> float:
        return self.space.limit(range(self.space.topology.gpus))

    @cached_property
    def modes(self) -> tuple[Recompute, ...]:
        """How a stage may recompute, the cheapest first."""
        return ("never", "always") if self.config.recompute == "by_stage" else (self.config.recompute,)

    def fastest(self, work: float) -> Solution | None:
        """The plan with the shortest bottleneck; None where none fits."""
        return fastest(self._instance, work)

    @cached_property
    def _instance(self) -> Instance:
        unlimited = self.limit == inf and self.full_space.fits_someone(self.size, 1)
        return Instance(
            seconds=np.where(self.space.usable, self._seconds, np.inf),
            weights=np.asarray(self.table.stage_bytes.trainable),
            crossing=self.table.crossing,
            tiers=self.tiers,
            recurrence=self.recurrence,
            fits=None if unlimited else self._fits,
            most_replicas=self.most_replicas,
            use_all=self.use_all,
            check=self.full_space.budget.check,
        )

    @cached_property
    def _seconds(self) -> Floats:
        """Of a global batch on the slowest kind of device; what recomputes, computes twice."""
        topology = self.space.topology
        firsts = {topology.device(rank): rank for rank in range(topology.gpus - 1, -1, -1)}
        groups = [self.space.replica_group(self.size, [rank]) for rank in firsts.values()]
        recompute = 0 if self.config.recompute in ("never", "by_stage") else 1
        slowest: Floats = np.maximum.reduce(
            [(1 + recompute) * group.forward + group.backward for group in groups]
        )
        return slowest

    def in_flight(self, behind: int) -> int:
        """Micro-batches in flight on a stage with so many behind it."""
        own = schedule_named(self.config.schedule)
        return int(own.in_flight(0, behind + 1, self.config.micro_batches))

    def versions(self, behind: int) -> int:
        """Weight versions of a stage with so many behind it."""
        own = schedule_named(self.config.schedule)
        return int(own.weight_versions(0, behind + 1, self.config.micro_batches))

    def bytes(self, replicas: int, behind: int, recompute: Recompute, moment: Moment = "any") -> Floats:
        """What every stage needs on one of its replicas, with so many stages behind it."""
        options: LedgerOptions = {
            **self.ledger,
            "weight_versions": self.versions(behind),
            "moment": moment,
        }
        per_replica_batch = divide_batch(self.size, replicas)
        return self.space.table(per_replica_batch).memory(
            self.in_flight(behind), recompute, self.space.optimizer, replicas, **options
        )

    def _fits(self, replicas: int, behind: int) -> Bools:
        fitting: Bools = self.in_flight(behind) <= self._room(replicas)
        return fitting

    def _room(self, replicas: int) -> Floats:
        """How many micro-batches each stage may hold on so many devices, as a fraction; negative: none. The
        ledger is a line of them, also where each has a version of the weights."""
        if replicas not in self._rooms:
            room = np.full(self.table.valid.shape, -1.0)
            if self.full_space.fits_someone(self.size, replicas):
                for mode in self.modes:
                    at = [self._most_in_flight(replicas, mode, moment) for moment in ("passes", "step")]
                    room = np.maximum(room, np.minimum(*at))
            self._rooms[replicas] = room
        return self._rooms[replicas]

    def _most_in_flight(self, replicas: int, mode: Recompute, moment: Moment) -> Floats:
        one, other = (self.bytes(replicas, behind, mode, moment) for behind in (0, 1))
        if self.in_flight(1) == self.in_flight(0):
            return np.where(one <= self.limit, np.inf, -1.0)
        each = other - one
        with np.errstate(divide="ignore", invalid="ignore"):
            more = np.where(each > 0, (self.limit - one) / each, np.where(one <= self.limit, np.inf, -np.inf))
        # A stage that fits to the byte may not be lost to rounding.
        most: Floats = (self.in_flight(0) + more) * (1 + 1e-12)
        return most

    def notes(self, solution: Solution) -> Iterator[str]:
        """What was planned otherwise than it is."""
        if uneven := list_tiers(self.space.topology)[1]:
            yield uneven
        if len(self.space.topology.kinds) > 1:
            yield "all devices are taken for the slowest, with the least memory"
        if solution.places <= self.full_space.chain.max_stages:
            allowed = self.full_space.chain.max_stages - 1
            yield f"cuts at {solution.places - 2} of {allowed} allowed places were looked at"

    def nothing_fits(self) -> InfeasibleError:
        """The error, with what is missing for the simplest plan of all."""
        gpus = counted(self.space.topology.gpus, "device")
        what = f"{self.config.schedule}: no plan for {self.size} samples on {gpus} fits"
        if self.limit == inf:
            return InfeasibleError(f"{what}: a stage has nothing to train", "Allow other cuts.")
        alone = min(float(self.bytes(1, 0, mode)[0, -1]) for mode in self.modes)
        return InfeasibleError(
            f"{what} into {format_bytes(int(self.limit))} each; the whole model needs "
            f"{format_bytes(round(alone))} on one",
            "Use a smaller global batch, recompute always, more devices or memory; or a schedule with a "
            "flush, which keeps one version of the weights.",
        )


PLANNER = PipeDream("pipedream", PAPER)


PUBLISHED_PLANNER = PipeDream("pipedream-published", PUBLISHED)

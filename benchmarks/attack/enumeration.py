"""Every plan that the rules leave, simulated where it may be below a limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Literal

from pplan.cost_models.errors import UsageError
from pplan.cost_models.memory import Recompute
from pplan.cost_models.program import Program
from pplan.cost_models.runtime import OFFLOAD
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.timeline import step_seconds
from pplan.planner.assembly import Assembly
from pplan.planner.asynchronous import ASYNCHRONOUS, assemble_endless, steady_seconds
from pplan.planner.candidate import Mode, PipelineConfig, Proposal
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble

from .least_seconds import STRAIGHT, LeastSeconds
from .orders import Ranks, Shape, in_any, in_orders
from .rules import Rules

Scope = Literal["orders", "any", "searched"]
"""Stages on runs of the searched orders of the devices, on any devices, or on what of the two is searched."""
NEAR = 1e-9
"""Share of a limit of memory within which it is not decided whether a plan fits."""
WIDE = 16
"""Of more devices not every choice is enumerated: of three stages or more those with one wide stage."""
MOST_PLANS, MOST_SIMULATED = 2_000_000, 8_000
"""Of a problem: of one with more nothing is said."""


class TooManyError(Exception):
    """There are too many plans to enumerate."""


@dataclass(frozen=True)
class Scored:
    """A plan that fits, as the simulator sees it."""

    proposal: Proposal
    recompute: tuple[Recompute, ...]
    step_seconds: float
    peak_bytes: float

    def __str__(self) -> str:
        own = self.proposal
        return (
            f"{self.step_seconds:.9g} s, {self.peak_bytes:.6g} bytes: {own.config.schedule}, "
            f"{own.config.micro_batches} x {own.config.micro_batch_size}, ends {list(own.ends)}, devices "
            f"{[list(ranks) for ranks in own.devices]}, recompute {'-'.join(self.recompute)}"
        )


@dataclass
class Enumeration:
    """The plans of a problem under these schedules; of so many stages, with micro-batches of these sizes, or
    that recompute in one way (`by_stage`: never or always), where they are given.

    `plans` counts those that were enumerated, `simulated` those of them that could be below a limit."""

    problem: Problem
    schedules: Sequence[str]
    scope: Scope = "searched"
    stages: Sequence[int] | None = None
    sizes: Sequence[int] | None = None
    mode: Mode | None = None
    plans: int = 0
    simulated: int = 0
    _needs: dict[object, float] = field(default_factory=dict)

    @cached_property
    def rules(self) -> Rules:
        """What the options leave."""
        problem = self.problem
        return Rules(problem.chain, problem.topology, problem.options, problem.mini_batch)

    @cached_property
    def least(self) -> LeastSeconds:
        """What need not be simulated."""
        return LeastSeconds(self.problem.space)

    def best(self, below: float = inf, peak_below: float = inf) -> Scored | None:
        """The fastest plan with a step below `below` that holds less than `peak_below`; None where there is
        none."""
        found = deque[Scored](maxlen=1)
        found.extend(self.below(lambda: found[0].step_seconds if found else below, peak_below))
        return found[0] if found else None

    def below(self, limit: float | Callable[[], float] = inf, peak_below: float = inf) -> Iterator[Scored]:
        """Every plan that fits with a step below a limit (seconds, or a function that says them)."""

        def now() -> float:
            return limit() if callable(limit) else limit

        for name in self.schedules:
            for size in self.rules.sizes if self.sizes is None else self.sizes:
                count = self.rules.mini_batch // size
                for config, program in self._programs(name, count, size):
                    for proposal, modes, least in self._plans(config, program):
                        if least < now():
                            plan = self._scored(proposal, modes, now(), peak_below)
                            if plan is not None:
                                yield plan

    def _programs(self, name: str, count: int, size: int) -> Iterator[tuple[PipelineConfig, Program]]:
        for devices in range(1, self.rules.most_stages + 1):
            if self.stages is not None and devices not in self.stages:
                continue
            for parts in self.rules.virtual_stages(name):
                if devices * parts > len(self.rules.cut_points) + 1 or (devices == 1 and parts > 1):
                    continue
                if name in ASYNCHRONOUS and not self._runs_late(name, devices, count):
                    continue
                try:
                    program = find_schedule(name).program(devices, count, parts)
                except UsageError:
                    continue
                yield PipelineConfig(name, "by_stage", count, size, parts), program

    def _plans(
        self, config: PipelineConfig, program: Program
    ) -> Iterator[tuple[Proposal, tuple[Recompute, ...], float]]:
        """Plans, what their parts recompute, and seconds that they take at the least."""
        rules, size = self.rules, config.micro_batch_size
        places = _even_shapes if config.schedule == "wpipe" else Enumeration._shapes
        shapes = [shape for shape in places(self, program.devices) if rules.may_have(size, shape)]
        ends = list(rules.ends(program.slots)) if shapes else []
        modes = rules.recomputations(config.schedule, program.devices, config.micro_batches)
        if self.mode is not None:
            left = {"never", "always"} if self.mode == "by_stage" else {self.mode}
            modes = [own for own in modes if left.issuperset(own)]
        by_part = [tuple(own[place.device] for place in program.pipes[0]) for own in modes]
        modes_of = {own: [each for each in by_part if rules.may_recompute(own, each)] for own in ends}
        self.plans += len(shapes) * sum(map(len, modes_of.values()))
        if self.plans > MOST_PLANS:
            raise TooManyError(f"{self.plans:,} plans")
        linear_pipeline = config.schedule in STRAIGHT
        for shape in shapes:
            devices = tuple(shape[place.device] for place in program.pipes[0])
            for own in ends:
                proposal = Proposal(config, own, devices)
                if linear_pipeline:
                    least = self.least.linear_pipeline(program, size, proposal.bounds, devices)
                    yield from ((proposal, chosen, least.of(chosen)) for chosen in modes_of[own])
                else:
                    seconds = self.least.by_device(program, size, proposal.bounds, shape)
                    yield from ((proposal, chosen, seconds) for chosen in modes_of[own])

    def _shapes(self, stages: int) -> list[Shape]:
        key = ("shapes", stages)
        if key not in self._memo:
            self._memo[key] = self._made_shapes(stages)
        return self._memo[key]

    @cached_property
    def _memo(self) -> dict[tuple[str, int], list[Shape]]:
        return {}

    def _made_shapes(self, stages: int) -> list[Shape]:
        rules = self.rules
        whole = rules.reached == rules.topology.gpus
        topology = rules.topology if whole else rules.topology.with_gpus(rules.reached)
        if topology.gpus > WIDE and stages > 2:
            return _one_wide(topology.gpus, stages)
        counts = range(1, topology.gpus + 1)
        if rules.runtime is not None and rules.runtime.replicas == "none":
            counts = range(1, 2)
        if self.scope == "any" or (self.scope == "searched" and self.problem.any_devices):
            return in_any(topology, stages, counts)
        return in_orders(topology, stages, counts, numbered=rules.runtime is not None)

    def _scored(
        self, proposal: Proposal, modes: tuple[Recompute, ...], below: float, peak_below: float
    ) -> Scored | None:
        """The plan, where it fits and is below the limits."""
        space, name = self.problem.space, proposal.config.schedule
        late = name in ASYNCHRONOUS
        known = [self._needs.get(key) for key in self._keys(proposal, modes)]
        if any(own is not None and own >= min(peak_below, inf) for own in known):
            return None
        made = assemble_endless(space, proposal, modes) if late else assemble(space, proposal, modes)
        needs = self._needed(made, self._keys(proposal, modes))
        peak = max(needs) if self._fits_host(made, proposal) else inf
        if peak >= peak_below:
            return None
        self.simulated += 1
        if self.simulated > MOST_SIMULATED:
            raise TooManyError(f"{self.simulated:,} plans to simulate")
        if late:
            step = steady_seconds(space, proposal, modes)
        else:
            step = float(step_seconds(made.program, made.costs())[0])
        return Scored(proposal, modes, step, peak) if step < below else None

    def _fits_host(self, made: Assembly, proposal: Proposal) -> bool:
        """Whether the hosts have the memory for what is offloaded: of every micro-batch between its forward
        and its backward, what the layers save, the loss aside."""
        limit, config = self.problem.options.host_memory_bytes, proposal.config
        if limit is None:
            return True
        for device, mode in enumerate(made.recompute):
            if mode == OFFLOAD:
                first, end = proposal.bounds[device]
                size = -(-config.micro_batch_size // len(proposal.devices[device]))
                costs = self.problem.chain.at(size, past_largest=True)
                each = float(costs.saved_bytes[first:end].sum())
                if end == len(self.problem.chain) and costs.loss_saved_bytes is not None:
                    each -= float(costs.loss_saved_bytes[-1])
                stages, count = len(proposal.ends), config.micro_batches
                held = count if config.schedule == "gpipe" else min(count, stages - device)
                if held * each > limit * (1 - NEAR):
                    return False
        return True

    def _needed(self, made: Assembly, keys: Sequence[object]) -> list[float]:
        """Bytes by device; inf where they are more than it may hold."""
        needs = []
        for device in range(made.program.devices):
            key = keys[device] if keys else None
            if key is None or key not in self._needs:
                own = sum(made.ledger(device).values())
                fits = own <= self._limit(made.ranks[device]) * (1 - NEAR)
                needs.append(own if fits else inf)
                if key is not None:
                    self._needs[key] = needs[-1]
            else:
                needs.append(self._needs[key])
        return needs

    def _keys(self, proposal: Proposal, modes: tuple[Recompute, ...]) -> list[object]:
        """By device, all that its bytes depend on, where that is its own stage alone; else nothing."""
        config, device = proposal.config, self.problem.topology.device
        if config.schedule not in STRAIGHT:
            return []
        here = config.schedule, config.micro_batches, len(modes)
        stages = zip(proposal.bounds, proposal.devices, modes, strict=True)
        return [
            (*here, index, bounds, len(ranks), frozenset(map(device, ranks)), mode)
            for index, (bounds, ranks, mode) in enumerate(stages)
        ]

    def _runs_late(self, schedule: str, stages: int, micro_batches: int) -> bool:
        """Whether an asynchronous pipeline is in the running: of two stages or more; micro-batches are whole
        mini-batches (PipeDream), one for every stage (2BW), any (XPipe, with Adam), or rounds of one for
        every stage (WPipe)."""
        fits = {
            "pipedream": micro_batches == 1,
            "pipedream-2bw": micro_batches >= max(2, stages),
            "xpipe": self.problem.options.optimizer.startswith("adam"),
            "wpipe": micro_batches % stages == 0,
        }
        return stages > 1 and fits[schedule]

    def _limit(self, ranks: Sequence[int]) -> float:
        """Bytes that each of these devices may hold."""
        own = [self.problem.options.memory_limit]
        own += [self.problem.topology.device(rank).memory_bytes for rank in ranks]
        return min((limit for limit in own if limit is not None), default=inf)


def _even_shapes(every: Enumeration, stages: int) -> list[Shape]:
    """On the first devices of each order, of every stage as many replicas."""
    shapes = dict.fromkeys(
        tuple(placement.ranks[stage * count : (stage + 1) * count] for stage in range(stages))
        for placement in every.problem.placements
        for count in range(1, every.rules.reached // stages + 1)
    )
    return list(shapes)


def _one_wide(gpus: int, stages: int) -> list[Shape]:
    """Stages of one device each but for one, on the ranks in order."""
    made = []
    for wide in range(stages):
        for count in range(1, gpus - stages + 2):
            counts = [count if stage == wide else 1 for stage in range(stages)]
            shape, first = list[Ranks](), 0
            for own in counts:
                shape.append(tuple(range(first, first + own)))
                first += own
            made.append(tuple(shape))
    return list(dict.fromkeys(made))

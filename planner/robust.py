"""Effect of the spread of the layers' seconds: the interval of a step, and the most robust plan.

A profile holds, for each layer, the median of forward + backward and its interquartile range as a share of
that median, the spread s. The layer's seconds are modelled as lognormal around the median: the median times
exp(sigma z), with z standard normal. The quartiles are exp(+-q sigma) with q = 0.6745, so

    2 sinh(q sigma) = s,    sigma = asinh(s / 2) / q

Layers vary independently of each other. Forward and backward of one layer vary together, because only the
spread of their sum is known.

The difference between the layers' sum and the whole model (the closing error e, see `Chain.uncertainty`) is
common to all layers: one more factor (1 + e)^z, so that e is one standard deviation.

Devices may be slow, too (`PlanOptions.slow_devices`). Each device is slow independently with the same
probability. Every forward and backward on a slow device takes a given factor longer, for the whole step.
Links, host and optimizer do not vary.

The interval of a step, synchronous or asynchronous, lies between two percentiles of the simulated steps.

The most robust plan has the best 90th percentile of the step over the draws of the layers' seconds or, with
slow devices, the shortest mean step. Compared are plans whose nominal step is near the fastest one's (with
slow devices: no longer than the best mean, which is at least a plan's nominal step): the best of each
configuration and number of stages, those of the named planners, and repeated variations of the best of these,
with a cut or a device moved, a device more or less, stages joined or split. All are scored on the same draws.
This does not search all plans, and the draws are a sample, so nothing is proven about percentile and mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..cost_models.collectives import exposed_all_reduce_seconds
from ..cost_models.errors import UsageError
from ..cost_models.layer import LayerCosts
from ..cost_models.program import StageSlot
from ..cost_models.step_costs import Costs
from ..cost_models.timeline import runs_side_by_side, step_seconds
from ..cost_models.topology import Device
from .assembly import Assembly
from .asynchronous import assemble_endless, steady_steps
from .candidate import PipelineConfig, Proposal, ScoredPlan, near_shapes, replicated_pipeline
from .infeasible import no_plan_fits
from .joint_search import JointSearchResult, is_small_problem
from .plan_file import TIE
from .plan_options import ASYNCHRONOUS
from .problem import Problem
from .replica_exchange import gradient_bytes
from .scoring import assemble, fastest
from .search.branch_and_bound import is_large, search
from .search.budget import WORK_A_SECOND
from .search.family import Family
from .search.space import Space
from .stage_table import Floats, StageTable, part_seconds

SAMPLES = 200
"""Number of draws of the layers' seconds."""
DEVICE_SAMPLES = 1_000
"""Draws if devices may be slow. Most draws of few devices have none, and equal draws are simulated once."""
SEED = 0
QUARTILE = 0.6744897501960817
"""Third quartile of the standard normal distribution."""


@dataclass(frozen=True, eq=False)
class Draws:
    """Random factors of a sample of steps.

    Attributes:
        layers: (samples, layers) standard normal numbers.
        common: (samples,) standard normal numbers for the closing error.
        slow: (samples, devices) mask of slow devices. None if no device is ever slow.
        times: Factor on the seconds of a slow device.
    """

    layers: Floats
    common: Floats
    slow: npt.NDArray[np.bool_] | None = None
    times: float = 1.0

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.common)

    def take(self, which: slice | npt.NDArray[np.int64]) -> Draws:
        """Return some of the samples."""
        slow = None if self.slow is None else self.slow[which]
        return Draws(self.layers[which], self.common[which], slow, self.times)

    def factors(self, costs: LayerCosts) -> Floats:
        """Return (samples, layers) factors on the layers' median seconds; 1 if no spread is known."""
        spread = np.zeros(self.layers.shape[1]) if costs.spread is None else costs.spread
        deviation = np.arcsinh(spread / 2) / QUARTILE * self.layers
        factors: Floats = np.exp(deviation + np.log1p(costs.uncertainty or 0.0) * self.common[:, None])
        return factors

    def slowdown(self, ranks: Sequence[int]) -> Floats:
        """Return (samples,) factors of the slowest of these devices."""
        if self.slow is None:
            return np.ones(len(self))
        return np.where(self.slow[:, list(ranks)].any(axis=1), self.times, 1.0)


@lru_cache(maxsize=4)
def make_draws(
    layers: int, samples: int = SAMPLES, devices: int = 0, slow_devices: tuple[float, float] | None = None
) -> Draws:
    """Return draws that are the same on every call.

    Args:
        layers: Number of layers.
        samples: Number of samples.
        devices: Number of devices.
        slow_devices: Probability that a device is slow, and the factor on its seconds.
    """
    random = np.random.default_rng(SEED)
    draws = Draws(common=random.standard_normal(samples), layers=random.standard_normal((samples, layers)))
    if slow_devices is None:
        return draws
    share, times = slow_devices
    return replace(draws, slow=np.random.default_rng(SEED).random((samples, devices)) < share, times=times)


MOST_TABLES = 16
"""Most stage tables whose drawn seconds are cached."""
ENTRIES = 20_000_000
"""Most actions times draws that are simulated together."""


class StepSampler:
    """Simulated steps of the plans of a space under the same draws. Launches and transfers do not vary.

    Args:
        space: Costs and limits.
        draws: The draws.
    """

    def __init__(self, space: Space, draws: Draws) -> None:
        self.space, self.draws = space, draws
        self._seconds: dict[tuple[StageTable, str], Floats] = {}

    def step_seconds(self, plan: ScoredPlan) -> Floats:
        """Return the (samples,) simulated steps of a plan."""
        assembly = assemble(self.space, plan.proposal, plan.recompute)
        if self.draws.slow is None or any(chain.spread is not None for chain in self.space.kind_chains):
            return self.steps(assembly)
        # Only devices vary, so draws in which the same stages are slow are equal.
        slow = [
            factors for device in range(len(assembly.ranks)) for factors in self._slowdowns(assembly, device)
        ]
        _, first, alike = np.unique(np.array(slow), axis=1, return_index=True, return_inverse=True)
        steps: Floats = StepSampler(self.space, self.draws.take(first)).steps(assembly)[alike.reshape(-1)]
        return steps

    def steps(self, assembly: Assembly) -> Floats:
        """Return the (samples,) simulated steps of an assembled plan.

        Long programs are simulated for a part of the draws at a time, because every action has an entry for
        each draw.
        """
        costs, actions = (
            self.costs(assembly),
            sum(len(device_actions) for device_actions in assembly.program.actions),
        )
        count = max(1, min(len(self.draws), ENTRIES // actions))
        parts = [_part(costs, first, first + count) for first in range(0, len(self.draws), count)]
        return np.concatenate([step_seconds(assembly.program, part) for part in parts])

    def costs(self, assembly: Assembly) -> Costs:
        """Return the costs of all draws, one candidate each."""
        nominal = assembly.costs()
        split = assembly.program.splits_backward
        tables: dict[str, Floats | None] = {
            name: np.broadcast_to(values[..., None], (*values.shape, len(self.draws)))
            for name, values in nominal.arrays().items()
        }
        tables["forward"] = self._by_place(assembly, "forward")
        tables["backward"] = self._by_place(assembly, "input" if split else "backward")
        tables["weight"] = self._by_place(assembly, "weight") if split else None
        tables["accumulation"] = self._accumulation(assembly, "weight" if split else "backward")
        tables["all_reduce"] = self._all_reduce(assembly, nominal)
        return replace(nominal, **tables)  # type: ignore[arg-type] # arrays only

    def _accumulation(self, assembly: Assembly, part: str) -> Floats:
        """Return (devices, chunks, 1, samples) seconds that the first backward saves."""
        takes_less = assembly.by_place(part) > assembly.by_place(f"first_{part}")
        sampled = self._by_place(assembly, part) - self._by_place(assembly, f"first_{part}")
        return sampled * takes_less[..., None]

    def _by_place(self, assembly: Assembly, name: str) -> Floats:
        """Return (devices, chunks, 1, samples) seconds of every stage on its slowest replica."""
        program = assembly.program
        values = np.zeros((program.devices, program.chunks, 1, len(self.draws)))
        for place, part in assembly.program.parts_by_slot.items():
            by_kind = self._of_kinds(assembly, place, part, name)
            values[place.device, place.chunk, 0] = np.maximum.reduce(by_kind)
        return values

    def _of_kinds(self, assembly: Assembly, place: StageSlot, part: int, name: str) -> list[Floats]:
        """Return (samples,) seconds for each kind of device among the replicas."""
        i, j = assembly.bounds[part]
        by_kind = []
        slowdowns = self._slowdowns(assembly, place.device)
        for (table, scale), slowdown in zip(assembly.timing_tables[place.device], slowdowns, strict=True):
            layers = slice(table.cut_points[i], table.cut_points[j])
            seconds = self._layer_draws(table, name)[:, layers].sum(axis=1)
            exchanged = [
                assembly.exchanged_seconds(part, table, scale * times, name)
                for times in (1.0, self.draws.times)
            ]
            by_kind.append(seconds * scale * slowdown + np.where(slowdown > 1, exchanged[1], exchanged[0]))
        return by_kind

    def _slowdowns(self, assembly: Assembly, device: int) -> list[Floats]:
        """Return (samples,) slowdowns by kind of device, in the order of `timing_tables`."""
        by_kind: dict[Device, list[int]] = {}
        for rank in assembly.ranks[device]:
            by_kind.setdefault(assembly.topology.device(rank), []).append(rank)
        return [self.draws.slowdown(ranks) for ranks in by_kind.values()]

    def _layer_draws(self, table: StageTable, name: str) -> Floats:
        """Return the (samples, layers) seconds of every layer."""
        if (table, name) not in self._seconds:
            while len(self._seconds) >= MOST_TABLES:
                del self._seconds[next(iter(self._seconds))]
            self._seconds[table, name] = self.draws.factors(table.costs) * layer_seconds(table.costs, name)
        return self._seconds[table, name]

    def _all_reduce(self, assembly: Assembly, nominal: Costs) -> Floats | None:
        """Return (devices, chunks, samples) seconds of the all-reduces after the last backwards."""
        program = assembly.program
        seconds = np.zeros((program.devices, program.chunks, len(self.draws)))
        for place, part in assembly.program.parts_by_slot.items():
            ranks = assembly.part_ranks(part)
            if len(ranks) > 1 and assembly.reduces_meanwhile(place, ranks):
                seconds[place] = self._exposed_seconds(assembly, place, part, ranks)
            elif nominal.all_reduce is not None:
                seconds[place] = nominal.all_reduce[place]
        return seconds if seconds.any() else None

    def _exposed_seconds(
        self, assembly: Assembly, place: StageSlot, part: int, ranks: Sequence[int]
    ) -> Floats:
        """Return (samples,) exposed all-reduce seconds on the kind with the slowest backward."""
        i, j = assembly.bounds[part]
        gradients = gradient_bytes(assembly.table(place.device).costs.trainable_bytes, assembly.number_bytes)
        exposed, slowdowns = [], self._slowdowns(assembly, place.device)
        for (table, scale), slowdown in zip(assembly.timing_tables[place.device], slowdowns, strict=True):
            layers = slice(table.cut_points[i], table.cut_points[j])
            backward = self._layer_draws(table, "backward")[:, layers] * scale * slowdown[:, None]
            exposed.append(exposed_all_reduce_seconds(backward, gradients[layers], assembly.topology, ranks))
        slowest = np.argmax(self._of_kinds(assembly, place, part, "backward"), axis=0)
        of_slowest: Floats = np.take_along_axis(np.array(exposed), slowest[None], axis=0)[0]
        return of_slowest


def layer_seconds(costs: LayerCosts, name: str) -> Floats:
    """Return the (layers,) seconds of `forward`, `backward`, or the `input` or `weight` part of the latter.

    With the prefix `first_`, these are the seconds without accumulation into gradients.
    """
    if name == "forward":
        return costs.forward_seconds
    if name.startswith("first_"):
        first: Floats = np.maximum(
            layer_seconds(costs, name.removeprefix("first_")) - costs.accumulation, 0.0
        )
        return first
    return costs.backward_seconds if name == "backward" else part_seconds(costs, name)


def _part(costs: Costs, first: int, end: int) -> Costs:
    """Return the costs of some candidates."""
    cut = {name: values[..., first:end] for name, values in costs.arrays().items()}
    return replace(costs, **cut)  # type: ignore[arg-type] # arrays only


LOW, HIGH = 10, 90
"""Percentiles of the step."""
TENTH = 1.2815515655446004
"""The 90th percentile of the standard normal distribution."""
SHARED_MEMORY = 0.12
"""Share by which a step on processors may be longer, because its processes share the bandwidth of memory and
caches: of 10 measured steps one was longer than that (docs/lab/benchmarks.md)."""
ONE_BY_ONE = 200_000
"""Most actions that are simulated if draws cannot be simulated together, and the least number of draws."""
FEWEST = 40
"""Least number of draws then."""


@dataclass(frozen=True)
class DrawnSteps:
    """Mean of the step over the draws, and its percentiles `LOW` and `HIGH`.

    All may lie above the step of the medians: a pipeline is as slow as its slowest stage, which differs from
    draw to draw.
    """

    mean_seconds: float
    low_seconds: float
    high_seconds: float

    def widened(self, step_seconds: float, whole_spread: float | None, contention: float) -> DrawnSteps:
        """Include what the draws of single layers do not know.

        Args:
            step_seconds: The step of the layers' medians.
            whole_spread: Spread of the whole model from pass to pass, which all layers share.
            contention: Share by which processes that share a processor may take longer.

        Returns:
            The steps with the widest of these intervals.
        """
        noise = np.exp(np.arcsinh((whole_spread or 0.0) / 2) / QUARTILE * TENTH)
        highest = step_seconds * max(float(noise), 1 + contention)
        return replace(
            self,
            low_seconds=min(self.low_seconds, step_seconds / float(noise)),
            high_seconds=max(self.high_seconds, highest),
        )

    @classmethod
    def of(cls, steps: Floats) -> DrawnSteps:
        """Return the statistics of (samples,) steps."""
        low, high = np.percentile(steps, (LOW, HIGH))
        return cls(float(np.mean(steps)), float(low), float(high))


def estimate_interval(space: Space, plan: ScoredPlan, draws: Draws | None = None) -> DrawnSteps | None:
    """Return the interval of a plan's step; None if the profile has no spread of the layers' seconds.

    Args:
        space: Costs and limits.
        plan: The plan.
        draws: Draws of the layers' seconds. Defaults to `SAMPLES` draws.
    """
    if not space.has_spread:
        return None
    draws = draws or make_draws(len(space.chain))
    if plan.config.schedule in ASYNCHRONOUS:
        assembly = assemble_endless(space, plan.proposal, plan.recompute)
        return DrawnSteps.of(
            steady_steps(StepSampler(space, draws).costs(assembly), plan.config.micro_batches)
        )
    assembly = assemble(space, plan.proposal, plan.recompute)
    affordable = draws.take(slice(_affordable(assembly, len(draws))))
    return DrawnSteps.of(StepSampler(space, affordable).steps(assembly))


def _affordable(assembly: Assembly, draws: int) -> int:
    """Return the number of draws to simulate."""
    if runs_side_by_side(assembly.program, assembly.costs()):
        return draws
    actions = sum(len(device_actions) for device_actions in assembly.program.actions)
    return min(draws, max(FEWEST, ONE_BY_ONE // actions))


NEAR = 0.2
"""Share by which the nominal step of a compared plan may exceed the fastest one's."""
MOST_BESTS = 64
"""Most plans that are the best of their configuration and number of stages."""
CLIMBED = 4
"""Number of best plans that are varied at a time."""
ROUNDS = 12
"""Most rounds of variations."""


@dataclass(frozen=True)
class RobustPlan:
    """The chosen plan, and how it compares.

    Attributes:
        plan: The chosen plan.
        steps: Its steps over the draws.
        fastest_steps: Those of the fastest plan.
        compared: Number of plans that were compared.
        is_fastest: Whether the chosen plan is the fastest one.
    """

    plan: ScoredPlan
    steps: DrawnSteps
    fastest_steps: DrawnSteps
    compared: int
    is_fastest: bool


def check_known(problem: Problem) -> None:
    """Check that something varies: the profile has a spread, or devices may be slow.

    Raises:
        UsageError: Nothing varies.
    """
    if problem.options.slow_devices is None and not problem.space.has_spread:
        raise UsageError(
            "`robust`: the profile has no spread of the layers' seconds (it is an estimate or an import)",
            "Measure it on the machine itself (pplan profile MODEL), give `slow_devices`, or omit `robust`.",
        )


def most_robust(problem: Problem, answer: JointSearchResult) -> RobustPlan:
    """Choose the most robust plan among plans near the fastest.

    It is the fastest plan itself, unless another one is better by more than `TIE`.

    Args:
        problem: What is asked.
        answer: The fastest plan, and those of named planners.

    Raises:
        UsageError: Nothing varies, see `check_known`.
    """
    check_known(problem)
    best, slow_devices = answer.best, problem.options.slow_devices
    if best is None:
        raise no_plan_fits(problem)
    if slow_devices is None:
        draws = make_draws(len(problem.chain))
    else:
        draws = make_draws(len(problem.chain), DEVICE_SAMPLES, problem.gpus, slow_devices)
    contest = _Comparison(problem, best, draws)
    contest.enter([best])
    contest.enter(plan for plan in answer.by_planner.values() if isinstance(plan, ScoredPlan))
    contest.enter(_bests(problem, contest.longest))
    contest.climb()
    of_fastest, ranked = contest.scores[best.proposal], contest.ranked()[0]
    better = contest.seconds(ranked[1]) < contest.seconds(of_fastest[1]) * (1 - TIE)
    plan, steps = ranked if better else of_fastest
    return RobustPlan(plan, steps, of_fastest[1], len(contest.scores), plan == of_fastest[0])


@dataclass
class _Comparison:
    """Compared plans, with the steps of each."""

    problem: Problem
    fastest: ScoredPlan
    draws: Draws
    scores: dict[Proposal, tuple[ScoredPlan, DrawnSteps]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._resampled = StepSampler(self.problem.space, self.draws)

    def enter(self, plans: Iterable[ScoredPlan]) -> None:
        """Score the plans that are new and near the fastest."""
        for plan in plans:
            near = plan.step_seconds <= self.longest and self.problem.allows(plan.proposal)
            if near and plan.proposal not in self.scores:
                self.scores[plan.proposal] = plan, DrawnSteps.of(self._resampled.step_seconds(plan))

    def seconds(self, steps: DrawnSteps) -> float:
        """Return the statistic to minimise: the high percentile, or the mean with slow devices."""
        return steps.high_seconds if self.draws.slow is None else steps.mean_seconds

    @property
    def longest(self) -> float:
        """Most seconds of the nominal step of a plan that may be the best."""
        if self.draws.slow is None or not self.scores:
            return self.fastest.step_seconds * (1 + NEAR)
        return min(steps.mean_seconds for _, steps in self.scores.values())

    def climb(self) -> None:
        """Vary the best plans until no variation is better."""
        space, varied, visited = self.problem.space, set[Proposal](), set[Proposal]()
        for _ in range(ROUNDS):
            best = [plan.proposal for plan, _ in self.ranked()[:CLIMBED]]
            leading = [proposal for proposal in best if proposal not in varied]
            if not leading or self.problem.budget.over:
                return
            varied.update(leading)
            for proposal in leading:
                new = [
                    variation for variation in variations(self.problem, proposal) if variation not in visited
                ]
                visited.update(new)
                scored = (fastest(space, [variation], self.longest) for variation in new)
                self.enter(plan for plan in scored if plan is not None)

    def ranked(self) -> list[tuple[ScoredPlan, DrawnSteps]]:
        """Return the plans, best first, then fastest, then in the order of their entry."""
        return sorted(self.scores.values(), key=lambda row: (self.seconds(row[1]), row[0].step_seconds))


def variations(problem: Problem, proposal: Proposal) -> Iterator[Proposal]:
    """Yield the plans of neighbouring shapes; if the devices are not in order, only those with other cuts."""
    table = problem.space.table(problem.chain.sizes[0])
    counts, config = proposal.replicas, proposal.config
    in_order = proposal == replicated_pipeline(config, proposal.ends, counts)
    for ends, replicas in near_shapes(table.cut_points, proposal.ends, counts, problem.gpus):
        if replicas == counts and len(ends) == len(counts):
            variation = replace(proposal, ends=ends)
        elif in_order:
            variation = replicated_pipeline(config, ends, replicas)
        else:
            continue
        if problem.allows(variation):
            yield variation


def _bests(problem: Problem, longest: float) -> list[ScoredPlan]:
    """Return the fastest plans of each configuration and number of stages with a step below `longest`.

    If the problem is not small, only one stage more or less than the fastest of the configuration is
    searched. Problems that are too large to search once per configuration have none.
    """
    if is_large(problem.space, problem.families):
        return []
    alike: dict[PipelineConfig, list[Family]] = {}
    for family in problem.families:
        alike.setdefault(family.config, []).append(family)
    work = problem.options.time_limit * WORK_A_SECOND / max(1, len(alike) * len(problem.stage_counts))
    plans = list[ScoredPlan | None]()
    for families in alike.values():

        def find(counts: Iterable[int], families: list[Family] = families) -> ScoredPlan | None:
            return search(problem.space, families, counts, work=work, limit=longest).best

        plans.append(first := find(problem.stage_counts))
        if first is not None:
            stages, small = len(first.proposal.ends), is_small_problem(problem)
            other_counts = [
                n for n in problem.stage_counts if n != stages and (small or abs(n - stages) == 1)
            ]
            plans += [find([number]) for number in other_counts]
    complete = [plan for plan in plans if plan is not None]
    return sorted(complete, key=lambda plan: plan.step_seconds)[:MOST_BESTS]

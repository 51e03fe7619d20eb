"""The plan that needs the least memory of its fullest device: what is said of a problem that no plan fits.

Of every configuration that is searched a dynamic programme, from the last stage back: of the layers from a
place on, with so many stages on so many devices, the least that the largest stage can need, each stage with
any number of replicas and the recomputation with which it needs least. Where its tables would be too large,
only as many replicas of every stage are looked at. Cuts and pins that the options ask for, and `use_all`, are
not: without them no plan needs less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil, inf

import numpy as np

from ..cost_models.errors import UsageError
from ..cost_models.memory import Recompute
from ..cost_models.quantities import format_bytes
from ..cost_models.schedules import find_schedule
from .candidate import Proposal, replicated_pipeline
from .other_schedules import propose_other_schedules, propose_parts
from .pipeline_config import SEARCHED, PipelineConfig
from .problem import Problem
from .scoring import assemble, possible
from .search.budget import SearchBudget
from .search.replica_group import ReplicaGroupCosts
from .search.space import Space
from .search.stage_recompute import least_bytes, stage_modes, stage_word
from .stage_table import Floats, Indices

MOST_ENTRIES = 3e7
"""Of the tables of all configurations with any replicas."""
SECONDS = 1.0
"""For the plans of other schedules."""


@dataclass(frozen=True)
class TightestStage:
    """The stage that needs most, of the plan that needs least: cut points `start` to `end`, on `replicas`
    devices. `is_least`: whether stages with unequal replicas were looked at, too."""

    config: PipelineConfig
    recompute: Recompute
    replicas: int
    stages: int
    stage: int
    start: int
    end: int
    memory_bytes: int
    ledger: dict[str, int]
    is_least: bool
    proposal: Proposal
    """The plan."""


def find_smallest_plan(
    problem: Problem, *, equal: bool = False, in_flight: float | None = None
) -> TightestStage | None:
    """The plan whose largest stage is smallest, with `equal` of those with as many replicas of every stage;
    None where no plan is allowed whatever the memory. `in_flight`: micro-batches that each stage holds at a
    time, as an order of its own may, instead of what 1F1B or GPipe does."""
    names = SEARCHED if in_flight is None else ("1f1b",)
    configs = [
        config for config in problem.configs if config.schedule in names and config.virtual_stages == 1
    ]
    sets = problem.replica_sets
    if equal or _entries(problem, sets) * len(configs) > MOST_ENTRIES:
        sets, equal = [(count,) for counts in sets for count in counts], True
    plans = (_smallest(problem, config, counts, in_flight) for config in configs for counts in sets)
    least = min((plan for plan in plans if plan is not None), key=lambda plan: plan.largest, default=None)
    is_least = not equal or problem.replica_sets == sets
    return None if least is None else least.tightest(is_least=is_least)


def find_smallest_of_others(problem: Problem) -> tuple[int, str] | None:
    """Bytes of the fullest device, and the schedule, of the plan that needs least of those that are tried of
    other schedules than 1F1B and GPipe; None where there is none."""
    problem = replace(problem, budget=SearchBudget(seconds=SECONDS))
    names, least = problem.heuristic_schedules, list[tuple[int, str]]()
    for proposal in (*propose_parts(problem, names), *propose_other_schedules(problem, names, None)):
        if least and problem.budget.over:
            break
        if possible(problem.space, proposal):
            with suppress(UsageError):  # the schedule does not run with these numbers
                least.append((_fullest(problem.space, proposal), proposal.config.schedule))
    return min(least, default=None)


def _fullest(space: Space, proposal: Proposal) -> int:
    """Bytes of its fullest device, each with the recomputation with which it needs least."""
    modes = stage_modes(proposal.config)
    ways = [assemble(space, proposal, [mode] * len(proposal.ends)) for mode in modes]
    devices = range(ways[0].program.devices)
    return max(min(sum(map(ceil, own.ledger(device).values())) for own in ways) for device in devices)


def _entries(problem: Problem, sets: Sequence[tuple[int, ...]]) -> float:
    places, devices = problem.space.chain.max_stages + 1, problem.usable_gpus
    return float(sum(len(own) for own in sets) * problem.stage_counts[-1] * devices * places**2)


def _smallest(
    problem: Problem, config: PipelineConfig, counts: Sequence[int], in_flight: float | None
) -> _SmallestPlan | None:
    own = [
        count
        for count in counts
        if count <= config.micro_batch_size
        and problem.may_share(config.micro_batch_size, [count])
        and problem.space.fits_someone(config.micro_batch_size, count)
    ]
    programme = _SmallestProgramme(problem.space, config, own, in_flight)
    return programme.run(problem.stage_counts[-1], problem.usable_gpus)


@dataclass(frozen=True, eq=False)
class _SmallestPlan:
    """By stage its cut points and replicas; the bytes of the largest."""

    programme: _SmallestProgramme
    stages: list[tuple[int, int, int]]
    largest: float

    def tightest(self, *, is_least: bool) -> TightestStage:
        """Its largest stage, the first of several."""
        programme, count = self.programme, len(self.stages)
        needs = [
            float(programme.need(replicas, count - stage)[start, end])
            for stage, (start, end, replicas) in enumerate(self.stages)
        ]
        stage = needs.index(max(needs))
        start, end, replicas = self.stages[stage]
        mode = programme.mode(replicas, count - stage, start, end)
        ledger = programme.ledger(replicas, count - stage, start, end, mode)
        total = sum(ledger.values())
        return TightestStage(
            programme.config,
            mode,
            replicas,
            count,
            stage,
            start,
            end,
            total,
            ledger,
            is_least,
            self._proposal(),
        )

    def _proposal(self) -> Proposal:
        space = self.programme.space
        cut_points = space.table(space.chain.sizes[0]).cut_points
        ends = [int(cut_points[end]) for _, end, _ in self.stages]
        return replicated_pipeline(self.programme.config, ends, [count for _, _, count in self.stages])


Row = dict[int, Floats]
"""By devices, (cut points,): the least that the largest stage behind each can need."""


@dataclass(frozen=True, eq=False)
class _SmallestProgramme:
    """Of a configuration, with these numbers of replicas."""

    space: Space
    config: PipelineConfig
    counts: Sequence[int]
    in_flight: float | None = None
    _needs: dict[tuple[int, float], tuple[Floats, Indices]] = field(default_factory=dict)

    def run(self, most_stages: int, devices: int) -> _SmallestPlan | None:
        """The plan; None where there is none."""
        last = np.full(len(self.space.usable), inf)
        last[-1] = 0.0
        rows: list[Row] = [{0: last}]
        best: tuple[float, int, int] = (inf, 0, 0)
        for stages in range(1, most_stages + 1):
            rows.append(self._row(rows[-1], stages, devices))
            starts = ((float(values[0]), stages, used) for used, values in rows[-1].items())
            best = min([best, *starts])
        least, stages, used = best
        return None if least == inf else _SmallestPlan(self, list(self._trace(rows, stages, used)), least)

    def _row(self, behind: Row, to_last: int, devices: int) -> Row:
        row: Row = {}
        for used, rest in behind.items():
            for count in self.counts:
                if used + count > devices:
                    continue
                least = np.maximum(self.need(count, to_last), rest[None, :]).min(axis=1)
                earlier = row.get(used + count)
                row[used + count] = least if earlier is None else np.minimum(earlier, least)
        return row

    def _trace(self, rows: Sequence[Row], stages: int, used: int) -> Iterator[tuple[int, int, int]]:
        place = 0
        for to_last in range(stages, 0, -1):
            choices = []
            for count in self.counts:
                rest = rows[to_last - 1].get(used - count)
                if rest is not None:
                    totals = np.maximum(self.need(count, to_last)[place], rest)
                    choices.append((float(totals.min()), int(totals.argmin()), count))
            _, end, count = min(choices)
            yield place, end, count
            place, used = end, used - count

    def _group(self, count: int) -> ReplicaGroupCosts:
        return self.space.replica_group(self.config.micro_batch_size, range(count))

    def _in_flight(self, to_last: int) -> float:
        """Of 1F1B and GPipe, by the stages from this one to the last; or what is given."""
        if self.in_flight is not None:
            return self.in_flight
        return find_schedule(self.config.schedule).in_flight(0, to_last, self.config.micro_batches)

    def need(self, count: int, to_last: int) -> Floats:
        """(cut points, cut points): bytes of every stage on a replica, with the recomputation that needs
        least; inf where there is no stage."""
        least, _ = self._least(count, to_last)
        return np.where(self.space.usable, least, inf)

    def _least(self, count: int, to_last: int) -> tuple[Floats, Indices]:
        key = count, self._in_flight(to_last)
        if key not in self._needs:
            self._needs[key] = least_bytes(self._group(count), self.config, key[1])
        return self._needs[key]

    def mode(self, count: int, to_last: int, start: int, end: int) -> Recompute:
        """The recomputation with which a stage needs least."""
        again = int(self._least(count, to_last)[1][start, end])
        return stage_word(self.config, self._group(count).table.cut_points, start, again, end)

    def ledger(self, count: int, to_last: int, start: int, end: int, mode: Recompute) -> dict[str, int]:
        """Bytes by term."""
        group = self._group(count)
        return group.table.stage_ledger(
            start, end, self._in_flight(to_last), mode, group.optimizer, group.replicas, **group.ledger
        )


def list_limits(problem: Problem) -> list[float]:
    """Bytes that devices may hold, each once, ascending; inf of those whose memory is not known."""
    topology, offset, limits = problem.topology, 0, set[float]()
    for group in topology.groups:
        limits.add(problem.space.limit([offset]))
        offset += group.number
    return sorted(limits)


def smallest_limit(problem: Problem) -> int:
    return int(list_limits(problem)[0])


def room(problem: Problem) -> str:
    """What devices have, in words."""
    least, *more = map(format_bytes, (limit for limit in list_limits(problem) if limit < inf))
    return f"{least} to {more[-1]} a device" if more else f"{least} a device"

"""Search for pipelines whose stages have different degrees.

Stages may differ in devices, tensor, context and expert parallelism, replicas and recomputation. All stages
work on the same micro-batches in the order of 1F1B. The replicas of a stage share the samples of each
micro-batch equally. Stages are on consecutive devices. If the degrees differ at a cut, resharding.py says who
sends what to whom.

For every micro-batch size and number of stages, stages are added to the partial pipelines with the least
bounds (stage_degree_bound.py), and the bound of the rest is kept. More partial pipelines are followed until
nothing shorter can remain, or the work is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ...cost_models.errors import UsageError
from ...cost_models.topology import Topology
from ...cost_models.transformer.layer_table import LayerTable
from ...cost_models.transformer.layer_work import NUMBER, Tokens
from ...cost_models.transformer.rank_costs import PassSeconds, RankCosts
from ...cost_models.transformer.resharding import StageDevices, resharding_seconds
from ...cost_models.transformer.training_setting import TrainingSetting
from ...cost_models.transformer.training_step import StepEstimate, pipeline_seconds
from ...cost_models.transformer.transformer_shape import TransformerShape
from .degree_combinations import most_stages, stage_degrees
from .degree_options import DegreeOptions
from .stage_degree_bound import DegreeTables, DeviceSlot, PipelineBounds, stage_bound, stage_slots
from .stage_degree_table import FIRST, LAST, MIDDLE, BlockRuns, Recompute, StageDegreeTable

MOST_STAGES = 16
"""Most stages if the options name no numbers."""
MOST_BLOCKS = 256
"""Most blocks of a model."""
WIDTHS = (16, 128, 1024)
"""Partial pipelines that are followed, for each number of stages and micro-batch size, in successive
rounds."""
MOST_STEPS = 20_000
"""Partial pipelines after which no more are tried."""
_ROUNDING = 1e-9
"""Relative error of a step whose seconds are summed in another order."""


@dataclass(frozen=True)
class OwnStage:
    """One stage: its devices with their degrees, its blocks, and its recomputation."""

    devices: StageDevices
    blocks: range
    recompute: Recompute


@dataclass(frozen=True)
class StagePlan:
    """A pipeline whose stages have different degrees.

    Attributes:
        stages: The stages.
        samples: Samples of a micro-batch, which the replicas of each stage share.
        micro_batches: Number of micro-batches.
        transfers: Seconds over each cut, in either direction.
        estimate: Estimated step and memory.
    """

    stages: tuple[OwnStage, ...]
    samples: int
    micro_batches: int
    transfers: tuple[float, ...]
    estimate: StepEstimate


@dataclass(frozen=True)
class StageAnswer:
    """Fastest plan with degrees by stage.

    Attributes:
        plan: The plan; None if none is faster than the known plan.
        bound_seconds: Lower bound on all searched pipelines that are faster than the known plan.
        pipelines: Number of (micro-batch size, number of stages) pairs.
    """

    plan: StagePlan | None
    bound_seconds: float
    pipelines: int


class _Stage(NamedTuple):
    """A stage of a partial pipeline.

    `before`: seconds of a micro-batch in the earlier stages and over the cuts, forward and backward. `enter`:
    seconds over the cut before it.
    """

    slot: DeviceSlot
    table: StageDegreeTable
    blocks: range
    seconds: PassSeconds
    update: float
    before: float
    enter: float

    @property
    def devices(self) -> StageDevices:
        """Devices with their degrees."""
        return StageDevices(self.table.degrees, self.slot.first)


class _Beginning(NamedTuple):
    """First stages of a pipeline, and a lower bound on its step."""

    bound: float
    stages: tuple[_Stage, ...]


def check_blocks(shape: TransformerShape) -> None:
    """Check that the model has few enough blocks.

    Raises:
        UsageError: It has more blocks than are searched.
    """
    if shape.blocks > MOST_BLOCKS:
        raise UsageError(
            f"by_stage: the model has {shape.blocks} blocks, and at most {MOST_BLOCKS} are searched",
            "Omit `by_stage`, or give fewer `layers`.",
        )


def search_stage_degrees(
    shape: TransformerShape,
    topology: Topology,
    costs: RankCosts,
    options: DegreeOptions,
    memory_bytes: float,
    most_seconds: float,
    widths: Sequence[int] = WIDTHS,
) -> StageAnswer:
    """Search the pipeline with degrees by stage that has the shortest step below `most_seconds`.

    Args:
        shape: The transformer.
        topology: Devices and links.
        costs: Costs of kernels and communication.
        options: Allowed degrees, and the training setting.
        memory_bytes: Bytes that a device may use.
        most_seconds: Seconds that the step must be below.
        widths: Partial pipelines to follow in successive rounds.

    Returns:
        The plan, and a bound on all.
    """
    search = _Search(shape, topology, options, most_seconds)
    counts, runs = _stage_counts(shape, topology.gpus, options), BlockRuns(shape.routed)
    for samples in _sample_counts(topology.gpus, options) if counts else ():
        tables = _stage_tables(
            shape, topology, costs, options, memory_bytes, samples, runs, counts[-1], search.best_seconds
        )
        search.add(PipelineBounds(tables, counts[-1], search.best_seconds), counts)
    for width in widths:
        search.run(width)
    return StageAnswer(search.plan(costs), search.bound_seconds, search.pipelines)


def _stage_counts(shape: TransformerShape, devices: int, options: DegreeOptions) -> list[int]:
    counts = options.pp or range(2, MOST_STAGES + 1)
    return [count for count in counts if 2 <= count <= min(devices, most_stages(shape))]


def _sample_counts(devices: int, options: DegreeOptions) -> list[int]:
    """Return the samples of a micro-batch of all replicas together."""
    sizes = options.micro_batch_size or [2**power for power in range(options.mini_batch.bit_length())]
    counts = {size * replicas for size in sizes for replicas in range(1, devices + 1)}
    return sorted(count for count in counts if options.mini_batch % count == 0)


def _stage_tables(
    shape: TransformerShape,
    topology: Topology,
    costs: RankCosts,
    options: DegreeOptions,
    memory_bytes: float,
    samples: int,
    runs: BlockRuns,
    most_stages: int,
    most_seconds: float,
) -> DegreeTables:
    micro_batches, by_count = options.mini_batch // samples, dict[int, list[StageDegreeTable]]()
    for count in sorted({slot.size for slot in stage_slots(topology)}):
        for degrees in stage_degrees(shape, count, samples, options):
            tokens = Tokens(options.sequence, samples // degrees.data)
            setting = TrainingSetting(micro_batches, tokens, predictors=options.predictors)
            table = StageDegreeTable(
                shape,
                degrees,
                setting,
                costs,
                options.recompute,
                memory_bytes,
                runs,
                most_stages,
                most_seconds,
            )
            if np.isfinite(table.backward).any():
                by_count.setdefault(count, []).append(table)
    token_bytes = float(NUMBER * options.sequence * samples * shape.hidden)
    return DegreeTables(topology, runs, by_count, micro_batches, samples, token_bytes)


class _Search:
    """Best pipeline so far, and `open`: the least bounds of pipelines that were not followed.

    `open` has an entry for each number of stages and micro-batch size.
    """

    def __init__(
        self, shape: TransformerShape, topology: Topology, options: DegreeOptions, most_seconds: float
    ) -> None:
        self.shape, self.topology, self.options = shape, topology, options
        self.best_seconds = most_seconds
        self.best: tuple[DegreeTables, tuple[_Stage, ...]] | None = None
        self.open: list[tuple[float, int, PipelineBounds]] = []
        self.pipelines = self.steps = 0
        self._cuts: dict[tuple[StageDevices, StageDevices, int], float] = {}

    @property
    def bound_seconds(self) -> float:
        """Lower bound on everything that was searched."""
        return min([self.best_seconds, *(left for left, _, _ in self.open)])

    def add(self, bounds: PipelineBounds, counts: Sequence[int]) -> None:
        """Add all pipelines with these numbers of stages."""
        self.pipelines += len(counts)
        self.open += [(bounds.roots[count], count, bounds) for count in counts]

    def run(self, width: int) -> None:
        """Follow `width` partial pipelines of each entry, best first."""
        following = []
        for least, count, bounds in sorted(self.open, key=lambda entry: entry[:2]):
            if least < self.best_seconds and self.steps < MOST_STEPS:
                least = max(least, self._follow(bounds, count, width))
            following.append((least, count, bounds))
        self.open = [entry for entry in following if entry[0] < self.best_seconds]

    def _follow(self, bounds: PipelineBounds, count: int, width: int) -> float:
        """Follow partial pipelines, and return the least bound of those left out."""
        beginnings, left = [_Beginning(0.0, ())], float("inf")
        for later_stages in range(count - 1, -1, -1):
            longer = [
                beginning
                for shorter in beginnings
                for beginning in self._longer(bounds, shorter, later_stages, width + 1)
            ]
            longer.sort(key=attrgetter("bound"))
            left = min([left, *(beginning.bound for beginning in longer[width : width + 1])])
            beginnings = longer[:width]
        for beginning in beginnings:
            if beginning.bound < self.best_seconds:
                self._finish(bounds.tables, beginning)
        return left

    def _finish(self, tables: DegreeTables, beginning: _Beginning) -> None:
        transfers = [stage.enter for stage in beginning.stages[1:]]
        pipeline = pipeline_seconds(
            [stage.seconds for stage in beginning.stages], transfers, tables.micro_batches
        )
        step = max(beginning.bound, pipeline + max(stage.update for stage in beginning.stages))
        if step < self.best_seconds * (1 - _ROUNDING):
            self.best_seconds, self.best = step, (tables, beginning.stages)

    def _longer(
        self, bounds: PipelineBounds, beginning: _Beginning, later_stages: int, most: int
    ) -> Iterator[_Beginning]:
        """Yield a partial pipeline with one more stage, which `later_stages` stages follow.

        At most `most` are yielded, those with the least bounds.
        """
        self.steps += 1
        start, rank = 0, 0
        if beginning.stages:
            start, rank = beginning.stages[-1].blocks.stop, beginning.stages[-1].slot.end
        rows = [
            self._bounds_with(bounds, beginning, slot, table, start, later_stages)
            for slot in bounds.by_first[rank]
            if slot in bounds.least_behind[later_stages]
            for table in bounds.tables.by_count[slot.size]
        ]
        if not rows:
            return
        all_bounds = np.array([row.bounds for row in rows])
        all_bounds[~(all_bounds < self.best_seconds)] = np.inf
        for place in np.argsort(all_bounds, axis=None)[:most]:
            row, stop = divmod(int(place), all_bounds.shape[1])
            if all_bounds[row, stop] == np.inf:
                return
            yield _Beginning(float(all_bounds[row, stop]), (*beginning.stages, rows[row].stage(start, stop)))

    def _bounds_with(
        self,
        bounds: PipelineBounds,
        beginning: _Beginning,
        slot: DeviceSlot,
        table: StageDegreeTable,
        start: int,
        later_stages: int,
    ) -> _NextStage:
        """Return the bounds of a partial pipeline with one more stage, by where it ends."""
        role = FIRST if not beginning.stages else LAST if later_stages == 0 else MIDDLE
        tables = bounds.tables
        before = enter = 0.0
        if beginning.stages:
            last = beginning.stages[-1]
            enter = self._cut(tables, last.devices, StageDevices(table.degrees, slot.first))
            before = last.before + last.seconds.both + 2 * enter
        new = _NextStage(slot, table, role, later_stages, start, before, enter)
        later_seconds, step = bounds.least_behind[later_stages][slot], bounds.least_step[later_stages][slot]
        micro_batches, count = tables.micro_batches, later_stages + len(beginning.stages) + 1
        both = new.forward + new.backward
        with np.errstate(invalid="ignore"):
            alone = stage_bound(
                new.forward,
                new.backward,
                enter,
                tables.leave_seconds(slot),
                later_seconds,
                later_stages,
                micro_batches,
            )
            pipeline = before + alone
            latest = np.maximum(pipeline + new.update, before + both + step)
            leaves = [*(stage.enter for stage in beginning.stages[1:]), enter]
            for place, (stage, leave) in enumerate(zip(beginning.stages, leaves, strict=False)):
                rest = before - stage.before - stage.seconds.both + both + later_seconds
                seconds = stage_bound(
                    *stage.seconds, stage.enter, leave, rest, count - place - 1, micro_batches
                )
                pipeline = np.maximum(pipeline, stage.before + seconds)
            update = max([0.0, *(stage.update for stage in beginning.stages)])
            new.bounds[:] = np.maximum(latest, pipeline + np.maximum(new.update, update))
        return new

    def _cut(self, tables: DegreeTables, before: StageDevices, after: StageDevices) -> float:
        key = before, after, tables.samples
        if key not in self._cuts:
            self._cuts[key] = resharding_seconds(
                self.topology, before, after, self.options.sequence, tables.samples, self.shape.hidden
            )
        return self._cuts[key]

    def plan(self, costs: RankCosts) -> StagePlan | None:
        """Return the best pipeline as a plan with its costs; None if none exists."""
        if self.best is None:
            return None
        tables, stages = self.best
        plan_stages, estimates = [], []
        for place, stage in enumerate(stages):
            role = FIRST if place == 0 else LAST if place == len(stages) - 1 else MIDDLE
            recompute = stage.table.recompute(role, stage.blocks, len(stages) - 1 - place)
            setting = replace(
                stage.table.setting, recompute=recompute.kind, recompute_blocks=recompute.blocks
            )
            degrees = replace(stage.table.degrees, pipeline=len(stages))
            layers = LayerTable(self.shape, degrees, setting, costs)
            plan_stages.append(OwnStage(stage.devices, stage.blocks, recompute))
            estimates.append(layers.stage((stage.blocks,), place))
        update = max(stage.update_seconds for stage in estimates)
        transfers = tuple(stage.enter for stage in stages[1:])
        passes = [PassSeconds(stage.forward_seconds, stage.backward_seconds) for stage in estimates]
        pipeline = pipeline_seconds(passes, transfers, tables.micro_batches)
        estimate = StepEstimate(pipeline + update, pipeline, update, tuple(estimates))
        return StagePlan(tuple(plan_stages), tables.samples, tables.micro_batches, transfers, estimate)


class _NextStage:
    """A possible next stage: its seconds and the `bounds` of a pipeline, by the block after its last."""

    def __init__(
        self,
        slot: DeviceSlot,
        table: StageDegreeTable,
        role: int,
        later_stages: int,
        start: int,
        before: float,
        enter: float,
    ) -> None:
        self.slot, self.table, self.before, self.enter = slot, table, before, enter
        number = table.runs.number[start]
        if role == LAST:
            number = np.where(np.arange(len(number)) == len(number) - 1, number, -1)
        self.forward, self.backward, self.update = (
            np.where(number < 0, np.inf, figures[number])
            for figures in (table.forward[role], table.backward[role, later_stages], table.update[role])
        )
        self.bounds = np.full(len(number), np.inf)

    def stage(self, start: int, stop: int) -> _Stage:
        """Return the stage with the blocks `start` to `stop` - 1."""
        seconds = PassSeconds(float(self.forward[stop]), float(self.backward[stop]))
        update = float(self.update[stop])
        return _Stage(self.slot, self.table, range(start, stop), seconds, update, self.before, self.enter)

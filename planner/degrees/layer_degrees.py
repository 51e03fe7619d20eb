"""Degrees that differ from block to block, as Galvatron chooses them.

Miao et al., "Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism", PVLDB
16(3), 2022, section 4: the devices are divided into pipeline stages of equal size, with as many blocks on
each, and a dynamic programme over the blocks of a stage gives each block degrees of its own, such that the
seconds of all of them, and of passing the tokens on where the degrees change, are least within the memory.
Whether a block's forward runs again is chosen with them, as in the journal version (Wang et al.,
arXiv:2307.02031). All numbers of stages and all sizes of micro-batches are tried. As there, degrees are
powers of two and a stage is shared by tensors and data; here the schedule is 1F1B, optimizer states are
spread over the replicas (ZeRO 1) instead of weights, and experts are on every device or on as many as can
have them. Predictors have a copy of the embedding, also where there is one stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ...cost_models.quantities import format_count
from ...cost_models.schedules import one_f_one_b_in_flight
from ...cost_models.topology import Topology
from ...cost_models.transformer.layer_table import LIBRARIES
from ...cost_models.transformer.layer_work import Tokens
from ...cost_models.transformer.parallel_degrees import ParallelDegrees
from ...cost_models.transformer.rank_costs import PassSeconds, RankCosts
from ...cost_models.transformer.resharding import StageDevices, resharding_seconds
from ...cost_models.transformer.training_setting import TrainingSetting, block_ranges, even_blocks
from ...cost_models.transformer.training_step import pipeline_seconds
from ...cost_models.transformer.transformer_shape import TransformerShape
from ...cost_models.transformer.weight_update import ParameterCounts, update_seconds
from .block_choice import BlockChoice, BlockDegrees
from .degree_combinations import stage_degrees
from .degree_options import DegreeOptions
from .stage_degree_table import FIRST, LAST

PARTS = 8
"""Of the memory, for each block of a stage, in which the programme counts; what a block needs is rounded
up."""


@dataclass(frozen=True)
class LayerPlan:
    """A 1F1B pipeline whose blocks have degrees of their own. `stages`: of each block; `samples`: of a micro-
    batch, which the replicas share."""

    stages: tuple[tuple[BlockDegrees, ...], ...]
    samples: int
    micro_batches: int
    step_seconds: float
    peak_bytes: float

    @property
    def blocks(self) -> list[BlockDegrees]:
        """Of all stages."""
        return [own for stage in self.stages for own in stage]

    def describe(self) -> str:
        """As `TP 2 x PP 4 x DP 8`, or `PP 4: 20 blocks TP 2 x DP 8, 12 blocks TP 4 x DP 4`."""
        counts = Counter(own.degrees for own in self.blocks)
        if len(counts) == 1:
            return replace(next(iter(counts)), pipeline=len(self.stages)).describe()
        parts = (f"{format_count(count, 'block')} {own.describe()}" for own, count in counts.items())
        return f"PP {len(self.stages)}: {', '.join(parts)}"

    @property
    def recompute(self) -> str:
        """Of which blocks the forward runs again, in words."""
        again = sum(own.again for own in self.blocks)
        some = f"{again} of {len(self.blocks)} blocks"
        return {0: "never", len(self.blocks): "always"}.get(again, some)


def plan_layer_degrees(
    shape: TransformerShape,
    topology: Topology,
    costs: RankCosts,
    options: DegreeOptions,
    memory_bytes: float,
) -> LayerPlan | None:
    """The fastest of all numbers of stages and sizes of micro-batches; None where none fits."""
    pipelines = [
        _Pipeline(shape, topology, costs, options, memory_bytes, stages, samples)
        for stages in _powers(min(topology.gpus, shape.blocks))
        if topology.gpus % stages == 0
        for samples in _sample_counts(topology.gpus // stages, options.mini_batch)
    ]
    best: LayerPlan | None = None
    for pipeline in sorted(pipelines, key=_Pipeline.least_seconds):
        if best is not None and pipeline.least_seconds() >= best.step_seconds:
            break
        plan = pipeline.plan()
        if plan and (best is None or plan.step_seconds < best.step_seconds):
            best = plan
    return best


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())]


def _sample_counts(size: int, mini_batch: int) -> list[int]:
    """Samples of a micro-batch that replicas of a stage of so many devices can share."""
    counts = {
        replicas * power
        for replicas in range(1, size + 1)
        if size % replicas == 0
        for power in _powers(mini_batch)
    }
    return sorted(count for count in counts if mini_batch % count == 0)


class _Pipeline:
    """Of so many stages and of micro-batches of so many samples."""

    def __init__(
        self,
        shape: TransformerShape,
        topology: Topology,
        costs: RankCosts,
        options: DegreeOptions,
        memory_bytes: float,
        stages: int,
        samples: int,
    ) -> None:
        self.shape, self.topology, self.costs = shape, topology, costs
        self.memory_bytes, self.stages, self.samples = memory_bytes, stages, samples
        self.sequence, self.micro_batches = options.sequence, options.mini_batch // samples
        self.size = topology.gpus // stages
        self.choices = list(self._list_choices(options))
        self._cuts: dict[tuple[StageDevices, StageDevices], float] = {}

    def _list_choices(self, options: DegreeOptions) -> Iterator[BlockChoice]:
        widest = min(self.size, self.topology.gpus_per_node)
        own = DegreeOptions(
            mini_batch=options.mini_batch,
            sequence=options.sequence,
            tp=_powers(widest),
            cp=(1,),
            ep=_powers(self.size),
        )
        every = list(stage_degrees(self.shape, self.size, self.samples, own))
        most: dict[int, int] = {}
        for degrees in every:
            most[degrees.tensor] = max(degrees.expert, most.get(degrees.tensor, 1))
        for degrees in every:
            if degrees.expert not in (1, most[degrees.tensor]):
                continue
            tokens = Tokens(self.sequence, self.samples // degrees.data)
            setting = TrainingSetting(self.micro_batches, tokens, predictors=options.predictors)
            for recompute in ("none", "full"):
                yield BlockChoice(self.shape, degrees, replace(setting, recompute=recompute), self.costs)

    def least_seconds(self) -> float:
        """That all stages together take at least: of each block the fastest degrees, shared evenly."""
        if not self.choices:
            return float("inf")
        routed = self.shape.routed
        least = {kind: min(own.seconds[kind].both for own in self.choices) for kind in set(routed)}
        return self.micro_batches * sum(least[kind] for kind in routed) / self.stages

    def plan(self) -> LayerPlan | None:
        """With the degrees of the programme of each stage; None where a stage does not fit."""
        ranges = block_ranges(even_blocks(self.shape.blocks, self.stages))
        picks = []
        for stage, blocks in enumerate(ranges):
            own = self._choose(stage, blocks)
            if own is None:
                return None
            picks.append(own)
        transfers = [
            self._cut(
                before[-1].stage_devices(stage * self.size), after[0].stage_devices((stage + 1) * self.size)
            )
            for stage, (before, after) in enumerate(pairwise(picks))
        ]
        numbered = list(enumerate(zip(picks, ranges, strict=True)))
        seconds = [self._stage_seconds(stage, *both) for stage, both in numbered]
        update = max(self._update_seconds(stage, *both) for stage, both in numbered)
        peak = max(self._stage_bytes(stage, *both) for stage, both in numbered)
        step = pipeline_seconds(seconds, transfers, self.micro_batches) + update
        degrees = tuple(tuple(own.own for own in stage) for stage in picks)
        return LayerPlan(degrees, self.samples, self.micro_batches, step, peak)

    def _roles(self, stage: int) -> list[int]:
        """What the stage has beside blocks."""
        return [FIRST] * (stage == 0) + [LAST] * (stage == self.stages - 1)

    def _cut(self, before: StageDevices, after: StageDevices) -> float:
        key = before, after
        if key not in self._cuts:
            self._cuts[key] = resharding_seconds(
                self.topology, before, after, self.sequence, self.samples, self.shape.hidden
            )
        return self._cuts[key]

    def _change(self, before: BlockChoice, after: BlockChoice) -> float:
        """Seconds of passing a micro-batch's tokens on inside a stage, in either direction."""
        return self._cut(before.stage_devices(0), after.stage_devices(0))

    def _choose(self, stage: int, blocks: range) -> list[BlockChoice] | None:
        """The degrees of a stage's blocks; None where they do not fit."""
        last = LAST in self._roles(stage)
        spaces = [max(own.workspace, own.end_workspace * last) for own in self.choices]
        best, least = None, float("inf")
        for space in sorted(set(spaces)):
            own = [choice for choice, need in zip(self.choices, spaces, strict=True) if need <= space]
            seconds, picks = self._programme(own, stage, blocks, space)
            if seconds < least and self._stage_bytes(stage, picks, blocks) <= self.memory_bytes:
                best, least = picks, seconds
        return best

    def _programme(
        self, choices: Sequence[BlockChoice], stage: int, blocks: range, space: float
    ) -> tuple[float, list[BlockChoice]]:
        """The least seconds of a stage's blocks, of all micro-batches and of the update, and their degrees;
        infinite where nothing fits beside a workspace of so many bytes."""
        room = self.memory_bytes - LIBRARIES - space
        if room <= 0:
            return float("inf"), []
        parts = PARTS * len(blocks)
        change = np.array([[2 * self.micro_batches * self._change(a, b) for b in choices] for a in choices])
        seconds, earlier, needs = np.zeros((len(choices), parts + 1)), [], []
        costs: dict[tuple[bool, bool, bool], list[tuple[float, float]]] = {}
        for place, block in enumerate(blocks):
            if place:
                earlier.append(seconds)
                seconds = (seconds[:, None, :] + change[:, :, None]).min(axis=0)
            roles = [
                role for role in self._roles(stage) if place == (0 if role == FIRST else len(blocks) - 1)
            ]
            kind = self.shape.routed[block]
            key = kind, FIRST in roles, LAST in roles
            if key not in costs:
                costs[key] = [self._block_costs(own, kind, roles, stage) for own in choices]
            rows = costs[key]
            needs.append([int(min(np.ceil(bytes / room * parts - 1e-9), parts + 1)) for _, bytes in rows])
            seconds = np.stack(
                [_later(own, need) + row[0] for own, need, row in zip(seconds, needs[-1], rows, strict=True)]
            )
        row, left = int(seconds[:, -1].argmin()), parts
        least, picks = float(seconds[row, -1]), [choices[row]]
        for before, need in zip(reversed(earlier), reversed(needs), strict=False):
            left -= need[row]
            row = int((before[:, left] + change[:, row]).argmin()) if least < float("inf") else row
            picks.insert(0, choices[row])
        return least, picks

    def _block_costs(
        self, own: BlockChoice, kind: bool, roles: Sequence[int], stage: int
    ) -> tuple[float, float]:
        """Seconds and bytes of a block, with embedding and head where they are beside it."""
        alive = one_f_one_b_in_flight(stage, self.stages, self.micro_batches)
        seconds = own.seconds[kind].both + sum(own.ends[role].both for role in roles)
        bytes = own.states[kind] + sum(own.end_states[role] for role in roles)
        saved = own.saved[kind] + own.end_saved * (LAST in roles)
        update = update_seconds(own.parameters[kind], own.own.degrees, self.costs)
        return self.micro_batches * seconds + update, bytes + alive * saved

    def _stage_seconds(self, stage: int, picks: Sequence[BlockChoice], blocks: range) -> PassSeconds:
        """Of a micro-batch."""
        routed = self.shape.routed
        parts = [own.seconds[routed[block]] for own, block in zip(picks, blocks, strict=True)]
        parts += [self._end(picks, role).ends[role] for role in self._roles(stage)]
        changes = sum(self._change(a, b) for a, b in pairwise(picks))
        return PassSeconds(
            changes + sum(own.forward for own in parts), changes + sum(own.backward for own in parts)
        )

    def _end(self, picks: Sequence[BlockChoice], role: int) -> BlockChoice:
        """The embedding has the degrees of the first block, the head those of the last."""
        return picks[0 if role == FIRST else -1]

    def _update_seconds(self, stage: int, picks: Sequence[BlockChoice], blocks: range) -> float:
        """Of the weights of all blocks with the same degrees together."""
        together: dict[ParallelDegrees, ParameterCounts] = {}
        parts = [
            (own, own.parameters[self.shape.routed[block]]) for own, block in zip(picks, blocks, strict=True)
        ]
        for role in self._roles(stage):
            own = self._end(picks, role)
            parts.append((own, own.layers.parameters(range(0), role)))
        for own, count in parts:
            key = own.own.degrees
            together[key] = count.plus(together.get(key, ParameterCounts(0, 0)))
        return sum(update_seconds(count, key, self.costs) for key, count in together.items())

    def _stage_bytes(self, stage: int, picks: Sequence[BlockChoice], blocks: range) -> float:
        """Of one device, at its peak."""
        alive, routed = one_f_one_b_in_flight(stage, self.stages, self.micro_batches), self.shape.routed
        total = LIBRARIES + sum(
            own.states[routed[block]] + alive * own.saved[routed[block]]
            for own, block in zip(picks, blocks, strict=True)
        )
        space = max(own.workspace for own in picks)
        for role in self._roles(stage):
            own = self._end(picks, role)
            total += own.end_states[role]
            if role == LAST:
                total += alive * own.end_saved + own.end_placeholders
                space = max(space, own.end_workspace)
        kinds: dict[ParallelDegrees, set[bool]] = {}
        for own, block in zip(picks, blocks, strict=True):
            kinds.setdefault(own.own.degrees, set()).add(routed[block])
        tables = {own.own.degrees: own.placeholders for own in picks}
        return total + space + sum(tables[key][frozenset(own)] for key, own in kinds.items())


def _later(seconds: npt.NDArray[np.float64], parts: int) -> npt.NDArray[np.float64]:
    """By parts of the memory, where so many more are needed."""
    later = np.full_like(seconds, np.inf)
    if parts < len(seconds):
        later[parts:] = seconds[: len(seconds) - parts]
    return later

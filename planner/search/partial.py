"""Unfinished plans as arrays, and their expansions by one stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..stage_table import Floats, Indices
from .stage_choices import GroupChoices, StageChoices

BoundState = dict[str, Floats]
"""Intermediate sums of a bound by name, one entry per unfinished plan."""


@dataclass(frozen=True, eq=False)
class Expansion:
    """One further stage of unfinished plans, one entry per (plan, stage) pair.

    Entry k extends plan `parent[k]` by pair `pair[k]` of the group, on the devices `key[k]`, up to
    `end_position[k]`. Seconds are those of `Pipelines`.

    Attributes:
        choices: All allowed stages.
        group: Stages of one replica group.
        group_index: Index of the group in `choices.groups`.
        remaining: Position of the stage counted from the end of the pipeline (1 is the last).
        parent: Rows of the unfinished plans.
        key: Keys of the devices that the stage takes.
        end_position: Positions (or states of devices) after the stage.
        pair: Rows of `group.start` and `group.end`.
        occupancy: Seconds for which the transfer from the previous stage takes its link.
        latency: Latency of that transfer in seconds.
    """

    choices: StageChoices
    group: GroupChoices
    group_index: int
    remaining: int
    parent: Indices
    key: Indices
    end_position: Indices
    pair: Indices
    occupancy: Floats
    latency: Floats

    @cached_property
    def end(self) -> Indices:
        """Cut point where the stage ends."""
        return self.group.end[self.pair]

    @cached_property
    def forward(self) -> Floats:
        """Forward seconds of a micro-batch."""
        return self.group.forward[self.pair]

    @cached_property
    def plain(self) -> Floats:
        """Backward seconds without recomputation."""
        return self.group.plain[self.pair]

    @cached_property
    def accumulation(self) -> Floats:
        """Seconds that the first backward of a step saves because it adds to no gradients."""
        return self.group.accumulation[self.pair]

    @cached_property
    def backward(self) -> Floats:
        """Backward seconds, recomputation included."""
        return self.group.backward(self.choices.in_flight(self.remaining))[0][self.pair]

    @cached_property
    def recompute_end(self) -> Indices:
        """Cut point up to which the forward is recomputed; the start of the stage if nothing is."""
        return self.group.backward(self.choices.in_flight(self.remaining))[1][self.pair]

    @cached_property
    def forward_launch(self) -> Floats:
        """Host seconds to launch a forward."""
        return self.group.forward_launch[self.pair]

    @cached_property
    def exposed_allreduce(self) -> Floats:
        """Seconds of the gradient all-reduce after the last backward."""
        return self.group.exposed_allreduce[self.pair]

    @cached_property
    def least_after(self) -> Floats:
        """Least seconds after the last backward: the all-reduce and the sums of tied weights."""
        return self.group.least_after[self.pair]

    @property
    def cut(self) -> Floats:
        """Seconds of the transfer from the previous stage, latency included."""
        return self.occupancy + self.latency

    @cached_property
    def _least_pace(self) -> tuple[Floats, Floats]:
        return self.choices.ranges.least_pace(self.group.replicas, self.key, self.end_position)

    @cached_property
    def least_occupancy(self) -> Floats:
        """Least seconds for which the transfer to the next stage takes its link."""
        return self._least_pace[1] * self.group.sent[self.pair]

    @cached_property
    def least_cut(self) -> Floats:
        """Least seconds of the transfer to the next stage, latency included."""
        seconds: Floats = self.least_occupancy + self._least_pace[0] * self.group.inner[self.pair]
        return seconds


COLUMNS = ("forward", "backward", "plain", "accumulation", "exposed_allreduce", "occupancy", "latency")
"""Seconds of the chosen stages that a plan stores."""


@dataclass(frozen=True, eq=False)
class PartialPlans:
    """Unfinished plans of one configuration: (plans, stages so far) arrays of the chosen stages.

    `columns["occupancy"]` and `columns["latency"]` are indexed by the stage that receives the transfer (0 for
    the first stage).

    Attributes:
        place: (plans,) cut points where the last chosen stage ends.
        position: (plans,) positions in the order of the devices after the last chosen stage.
        state: Intermediate sums of the bound.
        ends: Cut points where the stages end.
        keys: Keys of the stages' devices.
        groups: Indices of the stages' replica groups.
        recompute_end: Cut points up to which the stages recompute.
        columns: Seconds by name, see `COLUMNS`.
    """

    place: Indices
    position: Indices
    state: BoundState
    ends: Indices
    keys: Indices
    groups: Indices
    recompute_end: Indices
    columns: dict[str, Floats] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self.place)


def empty_plans(state: BoundState) -> PartialPlans:
    """Return the one plan without stages."""
    none = np.zeros((1, 0), dtype=np.int64)
    return PartialPlans(
        place=np.zeros(1, dtype=np.int64),
        position=np.zeros(1, dtype=np.int64),
        state=state,
        ends=none,
        keys=none,
        groups=none,
        recompute_end=none,
        columns={name: np.zeros((1, 0)) for name in COLUMNS},
    )


def extend_plans(plans: PartialPlans, stage: Expansion, state: BoundState, rows: Indices) -> PartialPlans:
    """Return the plans extended by the entries `rows` of a further stage.

    Args:
        plans: Unfinished plans.
        stage: All expansions of these plans.
        state: Intermediate sums, by entry of `stage`.
        rows: Entries to keep.
    """
    parent = stage.parent[rows]

    def more(history: Indices, values: Indices) -> Indices:
        longer: Indices = np.concatenate([history[parent], values[rows][:, None]], axis=1)
        return longer

    return PartialPlans(
        place=stage.end[rows],
        position=stage.end_position[rows],
        state={name: values[rows] for name, values in state.items()},
        ends=more(plans.ends, stage.end),
        keys=more(plans.keys, stage.key),
        groups=more(plans.groups, np.full(len(stage.parent), stage.group_index)),
        recompute_end=more(plans.recompute_end, stage.recompute_end),
        columns={
            name: np.concatenate([plans.columns[name][parent], getattr(stage, name)[rows][:, None]], axis=1)
            for name in COLUMNS
        },
    )


def join_plans(parts: list[PartialPlans], rows: Indices | None = None) -> PartialPlans:
    """Concatenate plans with equal numbers of stages.

    Args:
        parts: Plans to concatenate.
        rows: Rows of the result to keep. None for all.
    """
    pick = slice(None) if rows is None else rows

    def concatenate(values: list[npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
        return np.concatenate(values)[pick]

    first = parts[0]
    return PartialPlans(
        place=concatenate([part.place for part in parts]),  # type: ignore[arg-type] # of one dtype each
        position=concatenate([part.position for part in parts]),  # type: ignore[arg-type]
        state={
            name: concatenate([part.state[name] for part in parts])  # type: ignore[misc]
            for name in first.state
        },
        ends=concatenate([part.ends for part in parts]),  # type: ignore[arg-type]
        keys=concatenate([part.keys for part in parts]),  # type: ignore[arg-type]
        groups=concatenate([part.groups for part in parts]),  # type: ignore[arg-type]
        recompute_end=concatenate([part.recompute_end for part in parts]),  # type: ignore[arg-type]
        columns={
            name: concatenate([part.columns[name] for part in parts])  # type: ignore[misc]
            for name in first.columns
        },
    )

"""Unfinished plans, as arrays: what was chosen so far, and what a further stage adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..stage_table import Floats, Indices
from .stage_choices import GroupChoices, StageChoices

BoundState = dict[str, Floats]
"""What a bound knows of unfinished plans, by name: one entry a plan."""


@dataclass(frozen=True, eq=False)
class Expansion:
    """One further stage of unfinished plans: by entry, of plan `parent`, pair `pair` of a group, on the
    devices `key`, up to `end_position`. It is the `remaining`-th stage from the end. Seconds as of
    `Pipelines`; `cut`: of the transfer from the stage before; `least_cut`, `least_occupancy`: the least that
    the one to the next can take."""

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
        """Place that the stage ends at."""
        return self.group.end[self.pair]

    @cached_property
    def forward(self) -> Floats:
        return self.group.forward[self.pair]

    @cached_property
    def plain(self) -> Floats:
        return self.group.plain[self.pair]

    @cached_property
    def accumulation(self) -> Floats:
        return self.group.accumulation[self.pair]

    @cached_property
    def backward(self) -> Floats:
        return self.group.backward(self.choices.in_flight(self.remaining))[0][self.pair]

    @cached_property
    def again(self) -> Indices:
        """The cut point up to which it runs forward again; its start, where it does not."""
        return self.group.backward(self.choices.in_flight(self.remaining))[1][self.pair]

    @cached_property
    def forward_launch(self) -> Floats:
        return self.group.forward_launch[self.pair]

    @cached_property
    def exposed_allreduce(self) -> Floats:
        return self.group.exposed_allreduce[self.pair]

    @cached_property
    def least_after(self) -> Floats:
        return self.group.least_after[self.pair]

    @property
    def cut(self) -> Floats:
        return self.occupancy + self.latency

    @cached_property
    def _least_pace(self) -> tuple[Floats, Floats]:
        return self.choices.ranges.least_pace(self.group.replicas, self.key, self.end_position)

    @cached_property
    def least_occupancy(self) -> Floats:
        return self._least_pace[1] * self.group.sent[self.pair]

    @cached_property
    def least_cut(self) -> Floats:
        seconds: Floats = self.least_occupancy + self._least_pace[0] * self.group.inner[self.pair]
        return seconds


COLUMNS = ("forward", "backward", "plain", "accumulation", "exposed_allreduce", "occupancy", "latency")


@dataclass(frozen=True, eq=False)
class PartialPlans:
    """Unfinished plans of a configuration, side by side: (plans, stages so far) arrays of what was chosen.

    `occupancy` and `latency` stand beside the stage that a transfer goes to (0 for the first).
    """

    place: Indices
    position: Indices
    state: BoundState
    ends: Indices
    keys: Indices
    groups: Indices
    again: Indices
    columns: dict[str, Floats] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.place)


def empty_plans(state: BoundState) -> PartialPlans:
    """The plan of no stages."""
    none = np.zeros((1, 0), dtype=np.int64)
    return PartialPlans(
        place=np.zeros(1, dtype=np.int64),
        position=np.zeros(1, dtype=np.int64),
        state=state,
        ends=none,
        keys=none,
        groups=none,
        again=none,
        columns={name: np.zeros((1, 0)) for name in COLUMNS},
    )


def extend_plans(plans: PartialPlans, stage: Expansion, state: BoundState, rows: Indices) -> PartialPlans:
    """The plans with the kept entries of a further stage."""
    parent = stage.parent[rows]

    def more(history: Indices, own: Indices) -> Indices:
        longer: Indices = np.concatenate([history[parent], own[rows][:, None]], axis=1)
        return longer

    return PartialPlans(
        place=stage.end[rows],
        position=stage.end_position[rows],
        state={name: values[rows] for name, values in state.items()},
        ends=more(plans.ends, stage.end),
        keys=more(plans.keys, stage.key),
        groups=more(plans.groups, np.full(len(stage.parent), stage.group_index)),
        again=more(plans.again, stage.again),
        columns={
            name: np.concatenate([plans.columns[name][parent], getattr(stage, name)[rows][:, None]], axis=1)
            for name in COLUMNS
        },
    )


def join_plans(parts: list[PartialPlans], rows: Indices | None = None) -> PartialPlans:
    """Several in one; of all of them only the chosen."""
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
        again=concatenate([part.again for part in parts]),  # type: ignore[arg-type]
        columns={
            name: concatenate([part.columns[name] for part in parts])  # type: ignore[misc]
            for name in first.columns
        },
    )

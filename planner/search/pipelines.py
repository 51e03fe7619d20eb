"""Whole pipelines with everything their step depends on: many side by side, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ...cost_models.memory import Recompute
from ...cost_models.schedules import schedule_named
from ...cost_models.simulator.costs import PipelineCosts, transfers_named
from ...cost_models.simulator.kept import kept_program
from ...cost_models.timeline import step_seconds
from ..candidate import Proposal
from ..setting import Setting
from ..stage_table import Floats
from .space import Space, Team


@dataclass(frozen=True, eq=False)
class Pipelines:
    """Pipelines of one setting with as many stages: arrays of shape (pipelines, stages), transfers
    (pipelines, stages - 1), in seconds.

    `backward` with what is run again; `plain` without (of the last micro-batch under except_last). `tail`: of
    the all-reduce after the last backward. `forward_launch` and `backward_launch`: on the host, where one
    process drives all stages.
    """

    setting: Setting
    forward: Floats
    backward: Floats
    plain: Floats
    tail: Floats
    occupancy: Floats
    latency: Floats
    forward_launch: Floats | None = None
    backward_launch: Floats | None = None
    transfers: str = "overlapped"

    def __len__(self) -> int:
        return len(self.forward)

    @property
    def stages(self) -> int:
        """Of each."""
        return int(self.forward.shape[1])

    def some(self, chosen: npt.NDArray[np.int64]) -> Pipelines:
        """A part of them."""
        arrays = {
            name: values[chosen] for name, values in vars(self).items() if isinstance(values, np.ndarray)
        }
        return replace(self, **arrays)  # type: ignore[arg-type] # arrays only

    def step_seconds(self) -> Floats:
        """(pipelines,): simulated."""
        name, costs = self.setting.schedule, self.costs()
        if self.transfers == "overlapped":
            return step_seconds(name, costs)
        program = kept_program(name, self.stages, self.setting.micro_batches)
        return step_seconds(program, replace(costs.general(), transfers=transfers_named(self.transfers)))

    def costs(self) -> PipelineCosts:
        """For the simulator."""
        forward_launch, backward_launch = self.forward_launch, self.backward_launch
        relaunch = None
        if forward_launch is not None and backward_launch is not None:
            relaunch = self._over(backward_launch + forward_launch * self._again, backward_launch)
        return PipelineCosts(
            forward=self._over(self.forward, self.forward),
            backward=self._over(self.backward, self.plain),
            occupancy=self.occupancy.T,
            latency=self.latency.T,
            forward_launch=None if forward_launch is None else self._over(forward_launch, forward_launch),
            backward_launch=relaunch,
            all_reduce=self.tail.T if self.tail.any() else None,
        )

    @property
    def _again(self) -> npt.NDArray[np.bool_] | bool:
        """Whether a stage runs forward again."""
        mode = self.setting.recompute
        return self.backward > self.plain if mode == "by_stage" else mode != "never"

    def _over(self, usual: Floats, last: Floats) -> Floats:
        """(stages, micro-batches, pipelines); the last micro-batch differs under except_last."""
        count = self.setting.micro_batches
        values = np.broadcast_to(usual.T[:, None, :], (self.stages, count, len(self)))
        if self.setting.recompute != "except_last":
            return values
        return np.concatenate([values[:, :-1], last.T[:, None, :]], axis=1)


def stage_modes(setting: Setting) -> tuple[Recompute, ...]:
    """The ways in which a stage may recompute, the cheapest first."""
    return ("never", "always") if setting.recompute == "by_stage" else (setting.recompute,)


def cheapest_mode(team: Team, setting: Setting, i: int, j: int, held: float) -> Recompute | None:
    """How a stage between two places recomputes so that it fits; None where it does not."""
    for mode in stage_modes(setting):
        if held <= team.most_held(mode)[i, j]:
            return mode
    return None


def modes_of(space: Space, proposal: Proposal) -> tuple[Recompute, ...] | None:
    """By stage, what recomputes in a straight pipeline; None where it does not fit, or a stage may not be."""
    setting, places = proposal.setting, list(space.table(space.chain.sizes[0]).places)
    schedule, stages, modes = schedule_named(setting.schedule), len(proposal.ends), []
    for stage, ((first, end), devices) in enumerate(zip(proposal.bounds, proposal.devices, strict=True)):
        if not space.fits_someone(setting.micro_batch_size, len(devices)):
            return None
        if len(devices) > setting.micro_batch_size or first not in places or end not in places:
            return None
        team, i, j = space.team(setting.micro_batch_size, devices), places.index(first), places.index(end)
        if not space.usable[i, j]:
            return None
        held = schedule.in_flight(stage, stages, setting.micro_batches)
        mode = cheapest_mode(team, setting, i, j, held)
        if mode is None:
            return None
        modes.append(mode)
    return tuple(modes)


def pipelines_of(
    space: Space, proposals: Sequence[Proposal], modes: Sequence[Sequence[Recompute]]
) -> Pipelines:
    """Straight pipelines of one setting and one number of stages, side by side."""
    setting, places = proposals[0].setting, list(space.table(space.chain.sizes[0]).places)
    shape = (len(proposals), len(proposals[0].ends))
    columns = {name: np.zeros(shape) for name in ("forward", "backward", "plain", "tail")}
    launches = {name: np.zeros(shape) for name in ("forward_launch", "backward_launch")}
    occupancy, latency = (np.zeros((shape[0], shape[1] - 1)) for _ in range(2))
    for row, proposal in enumerate(proposals):
        teams = [space.team(setting.micro_batch_size, devices) for devices in proposal.devices]
        for stage, (team, (first, end)) in enumerate(zip(teams, proposal.bounds, strict=True)):
            at = places.index(first), places.index(end)
            again = team.forward[at] if modes[row][stage] != "never" else 0.0
            columns["forward"][row, stage], columns["plain"][row, stage] = team.forward[at], team.backward[at]
            columns["backward"][row, stage] = team.backward[at] + again
            columns["tail"][row, stage] = team.tail[at]
            for name, values in launches.items():
                values[row, stage] = getattr(team.table, name)[at]
        for cut, (here, there) in enumerate(pairwise(proposal.devices)):
            place = places.index(proposal.ends[cut])
            sent = max(teams[cut].table.crossing[place], teams[cut + 1].table.crossing[place])
            latency[row, cut], pace = space.pace(here, there)
            occupancy[row, cut] = sent * pace
    runtime = space.runtime
    if runtime is not None and runtime.one_process:
        columns |= launches
    return Pipelines(
        setting,
        **columns,
        occupancy=occupancy,
        latency=latency,
        transfers="overlapped" if runtime is None else runtime.transfers,
    )

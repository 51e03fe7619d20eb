"""Costs of pipelines of one chunk a device, and of programs whose stages take the same seconds each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from ..errors import UsageError
from ..schedules.action import Program
from .costs import Array, Costs, Hosts, check_finite


@dataclass(frozen=True, eq=False)
class PipelineCosts:
    """Seconds of one plan, or of many side by side.

    `forward` and `backward` have shape (stages, micro-batches), `occupancy` and `latency` of the transfers
    between neighbours shape (stages - 1,), the same both ways; a further last axis holds candidates.
    `forward_launch`, `backward_launch` and `recompute_launch` (shape as `forward`) are host seconds, of
    `hosts`, as of `Costs`; None: no host is late. `all_reduce` (stages,) follows the last backward of a
    stage; `accumulation` (stages,) is what its first backward does not take.
    """

    forward: Array
    backward: Array
    occupancy: Array
    latency: Array
    forward_launch: Array | None = None
    backward_launch: Array | None = None
    recompute_launch: Array | None = None
    all_reduce: Array | None = None
    accumulation: Array | None = None
    hosts: Hosts = "one"

    def candidate(self, index: int) -> PipelineCosts:
        """The costs of one of many candidates."""
        arrays: dict[str, Any] = {name: values[..., index] for name, values in self._arrays()}
        return replace(self, **arrays)

    def _arrays(self) -> Iterator[tuple[str, Array]]:
        """All seconds that are given, by name."""
        for own in fields(self):
            values = getattr(self, own.name)
            if isinstance(values, np.ndarray):
                yield own.name, values

    def check(self, stages: int, micro_batches: int) -> None:
        """Raises UsageError where a shape or a value cannot be."""
        if self.forward.shape[:2] != (stages, micro_batches) or self.backward.shape[:2] != (
            stages,
            micro_batches,
        ):
            raise UsageError(
                f"costs of shape {self.forward.shape} and {self.backward.shape} for {stages} stages and "
                f"{micro_batches} micro-batches",
                f"Give forward and backward as ({stages}, {micro_batches}).",
            )
        for name, values in self._arrays():
            if len(values) != (stages - 1 if name in ("occupancy", "latency") else stages):
                raise UsageError(
                    f"{name} has {len(values)} entries for {stages} stages",
                    "Give one an entry a stage (transfers: one a boundary, one less than stages).",
                )
            check_finite(name, values)

    def general(self) -> Costs:
        """The same for the engine: stages of one chunk, one pipe."""

        def chunk(values: Array | None) -> Array | None:
            return None if values is None else values[:, None]

        return Costs(
            forward=self.forward[:, None],
            backward=self.backward[:, None],
            forward_launch=chunk(self.forward_launch),
            backward_launch=chunk(self.backward_launch),
            recompute_launch=chunk(self.recompute_launch),
            forward_occupancy=self.occupancy[None],
            forward_latency=self.latency[None],
            backward_occupancy=self.occupancy[None],
            backward_latency=self.latency[None],
            all_reduce=chunk(self.all_reduce),
            accumulation=None if self.accumulation is None else self.accumulation[:, None, None],
            hosts=self.hosts,
        )


def uniform_costs(
    forward: Sequence[float], backward: Sequence[float], micro_batches: int, transfer_latency: float = 0.0
) -> PipelineCosts:
    """Costs of stages whose micro-batches all cost the same, seconds; transfers are latency only."""
    cuts = max(len(forward) - 1, 0)
    return PipelineCosts(
        forward=np.repeat(np.asarray(forward, dtype=np.float64)[:, None], micro_batches, axis=1),
        backward=np.repeat(np.asarray(backward, dtype=np.float64)[:, None], micro_batches, axis=1),
        occupancy=np.zeros(cuts),
        latency=np.full(cuts, transfer_latency),
    )


def stage_costs(
    program: Program,
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    weight: float | Sequence[float] | None = None,
    transfer_latency: float = 0.0,
) -> Costs:
    """Costs of a program from the seconds of its stages: one value, or one a stage. Transfers: latency only.

    Stages are counted along each pipe (Chimera: both directions have the same first stage); where a device
    holds several places of a pipe, each takes an equal part of the stage's seconds. With `weight`, `backward`
    is the gradient of the input.
    """
    stages = len({place.device for place in program.pipes[0]})
    latency = np.full((1, program.slots - 1), float(transfer_latency))
    return Costs(
        forward=_by_chunk(program, "forward", forward, stages),
        backward=_by_chunk(program, "backward", backward, stages),
        weight=None if weight is None else _by_chunk(program, "weight", weight, stages),
        forward_latency=latency,
        backward_latency=latency,
    )


def _by_chunk(program: Program, name: str, seconds: float | Sequence[float], stages: int) -> Array:
    array = np.atleast_1d(np.asarray(seconds, dtype=np.float64))
    if array.shape not in ((1,), (stages,)):
        raise UsageError(
            f"{name}: {array.size} values for {stages} stages", "Give one value, or one for each stage."
        )
    check_finite(name, array)
    values = np.broadcast_to(array, stages)
    table = np.zeros((program.devices, program.chunks, 1))
    for pipe in program.pipes:
        along = list(dict.fromkeys(place.device for place in pipe))
        for device, chunk in pipe:
            table[device, chunk] = values[along.index(device)] / program.parts
    return table

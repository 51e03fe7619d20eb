"""The least that a plan takes, from its stages alone: what is above a limit need not be simulated.

A device runs its actions one at a time, and a first micro-batch has to come to it and a last gradient has to
go on from it to the first stage: true of every order of the actions. `tests/proofs` holds it against the
simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pplan.cost_models.collectives import Routes
from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import Recompute
from pplan.cost_models.program import Program
from pplan.cost_models.topology import Device
from pplan.planner.search.space import Space

Ranks = tuple[int, ...]
Floats = npt.NDArray[np.float64]
STRAIGHT = ("naive", "gpipe", "1f1b", "dapple", "zb-h1", "zb-h2")
"""Schedules whose every micro-batch goes whole through one stage a device."""


MANY = 16
"""Devices beyond which transfers are taken to need no time: too many ways from stage to stage."""


class _Sums(NamedTuple):
    """Seconds of the layers before a place on a kind of device: forward, a whole backward, one in two parts
    with the part that hands the gradient on, and what the first backward of a step does not take."""

    forward: Floats
    backward: Floats
    in_parts: Floats
    onward: Floats
    once: Floats


class Least(NamedTuple):
    """By stage, seconds below which no step is, without what is run again, and the forward's."""

    stages: list[float]
    recompute: list[float]
    micro_batches: int

    def of(self, modes: Sequence[Recompute]) -> float:
        """The largest, where the stages recompute so."""
        times = {"never": 0, "always": self.micro_batches, "except_last": self.micro_batches - 1}
        return max(
            own + times.get(mode, 0) * recompute
            for own, recompute, mode in zip(self.stages, self.recompute, modes, strict=True)
        )


@dataclass(frozen=True)
class LeastSeconds:
    """Of the stages of a space, remembered."""

    space: Space
    _sums: dict[tuple[Device, int], _Sums] = field(default_factory=dict)
    _sent: dict[int, Floats] = field(default_factory=dict)
    _kinds: dict[Ranks, tuple[Device, ...]] = field(default_factory=dict)
    _routes: dict[tuple[Ranks, Ranks], tuple[float, float]] = field(default_factory=dict)

    def linear_pipeline(
        self, program: Program, size: int, bounds: list[tuple[int, int]], devices: tuple[Ranks, ...]
    ) -> Least:
        """Seconds below which no step with these stages is."""
        count = program.micro_batches
        stages, recompute, there, back = [], [], 0.0, 0.0
        for index, ((first, end), ranks) in enumerate(zip(bounds, devices, strict=True)):
            f, whole, parts, onward, once = self._stage(size, first, end, ranks)
            if program.splits_backward:
                # Weight gradients may go on while the last gradient is on its way to the first stage.
                all_work, on_the_way = f + min(parts, whole), f + onward
            else:
                all_work = on_the_way = f + (onward := whole)
            stages.append(there + max(count * all_work - once, count * on_the_way - once + back))
            recompute.append(f)
            if index + 1 < len(devices):
                cut = self._cut(size, end, ranks, devices[index + 1])
                there, back = there + f + cut, back + onward - once + cut
        return Least(stages, recompute, count)

    def by_device(
        self, program: Program, size: int, bounds: list[tuple[int, int]], devices: tuple[Ranks, ...]
    ) -> float:
        """The same of any program: the work of its busiest device; 0 where devices hold copies, or
        micro-batches are sliced."""
        if len(program.pipes) > 1 or program.shares is not None:
            return 0.0
        work = dict.fromkeys(range(program.devices), 0.0)
        for place, (first, end) in zip(program.pipes[0], bounds, strict=True):
            f, whole, parts, _, once = self._stage(size, first, end, devices[place.device])
            work[place.device] += program.micro_batches * (f + min(whole, parts)) - once
        return max(work.values())

    def _stage(
        self, size: int, first: int, end: int, ranks: Ranks
    ) -> tuple[float, float, float, float, float]:
        if ranks not in self._kinds:
            self._kinds[ranks] = tuple(dict.fromkeys(self.space.topology.device(rank) for rank in ranks))
        share = -(-size // len(ranks))
        each = [self._of(kind, share) for kind in self._kinds[ranks]]
        return (
            max(float(own.forward[end] - own.forward[first]) for own in each),
            max(float(own.backward[end] - own.backward[first]) for own in each),
            max(float(own.in_parts[end] - own.in_parts[first]) for own in each),
            max(float(own.onward[end] - own.onward[first]) for own in each),
            max(float(own.once[end] - own.once[first]) for own in each),
        )

    def _of(self, kind: Device, share: int) -> _Sums:
        key = kind, share
        if key not in self._sums:
            chain: Chain = self.space.chain if kind.profile is None else self.space.profiles[kind.profile]
            costs, scale = chain.at(share, past_largest=True), 1 / kind.speed
            onward = in_parts = costs.backward_seconds
            if costs.backward_input_seconds is not None and costs.backward_weight_seconds is not None:
                onward = costs.backward_input_seconds
                in_parts = onward + costs.backward_weight_seconds
            else:
                onward = onward / 2
            adding = costs.accumulation_seconds
            once = np.zeros_like(onward) if adding is None else adding
            rows = (costs.forward_seconds, costs.backward_seconds, in_parts, onward, once)
            self._sums[key] = _Sums(*(np.append(0.0, np.cumsum(row * scale)) for row in rows))
        return self._sums[key]

    def _cut(self, size: int, end: int, here: Ranks, there: Ranks) -> float:
        if self.space.topology.gpus > MANY:
            return 0.0
        key = here, there
        if key not in self._routes:
            self._routes[key] = Routes(self.space.topology).route(here, there)
        latency, pace = self._routes[key]
        sent = max(self._crossing(-(-size // len(own)))[end - 1] for own in key)
        return latency + float(sent) * min(len(here), len(there)) * pace

    def _crossing(self, share: int) -> Floats:
        if share not in self._sent:
            self._sent[share] = self.space.chain.at(share, past_largest=True).output_bytes
        return self._sent[share]

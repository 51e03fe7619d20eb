"""The steps of 1F1B and GPipe pipelines with one stage a device, all stages at once.

Every action has a tick, at which no stage has two, behind the ticks of all that it waits for: of stage s of
p, and micro-batch m of M,

    1F1B    F at s + 2 m              B at 2 p - 1 - s + 2 m
    GPipe   F at s + m                B at 2 (M + p - 1) - s - m - 1, the last micro-batch first

A stage's ticks come in the order of its actions, and so an array of all stages takes one tick after another
where `engine` takes one action after another: the same sums and comparisons, and so the same bits. With 256
stages and 4,096 micro-batches these are 8,700 ticks instead of 2,097,152 actions. The replicas of a stage are
alike, its slowest stands for all: how many devices there are does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .costs import Array
from .dependencies import Indices

NONE = -1


@dataclass(frozen=True, eq=False)
class LinearCosts:
    """Seconds (stages, candidates) of every micro-batch: `forward`, `backward`, and `accumulation`, what the
    first backward does not take; (cuts, candidates), the same both ways: `occupancy` and `latency`.
    `links` (stages, stages): a number for what a transfer occupies; None: each its own. `forward_launch` and
    `backward_launch` (stages, candidates): seconds of each stage's own host; None: it is never late."""

    forward: Array
    backward: Array
    accumulation: Array
    occupancy: Array
    latency: Array
    links: Indices | None = None
    forward_launch: Array | None = None
    backward_launch: Array | None = None


def linear_ends(schedule: str, micro_batches: int, costs: LinearCosts) -> Array | None:
    """(stages, candidates): when each stage of a `1f1b` or `gpipe` pipeline has run its last action, where
    transfers overlap with computing; None where stages share a link, which serves whoever is ready."""
    lines = _lines(costs)
    if lines is None:
        return None
    run = _Run(micro_batches, costs, lines)
    stages = len(costs.forward)
    numbers = np.arange(stages)
    if schedule == "1f1b":
        for tick in range(2 * (stages + micro_batches) - 1):
            # Of two neighbours one runs forward, the other backward.
            even = numbers[tick % 2 :: 2]
            odd = numbers[(tick + 1) % 2 :: 2]
            run.forward(even, (tick - even) // 2)
            run.backward(odd, (tick - 2 * stages + 1 + odd) // 2, first=0)
        return run.free
    for tick in range(stages + micro_batches - 1):
        run.forward(numbers, tick - numbers)
    for tick in range(stages + micro_batches - 1, 2 * (stages + micro_batches - 1)):
        later = 2 * (stages + micro_batches - 1) - 1 - tick - numbers
        run.backward(numbers, later, first=micro_batches - 1)
    return run.free


def _lines(costs: LinearCosts) -> tuple[Indices, Indices] | None:
    """By stage, the link that its results take to the next stage, and its gradients to the one before."""
    stages = len(costs.forward)
    here = np.arange(stages)
    if costs.links is None:
        return here, here + stages
    onward, back = np.full(stages, NONE), np.full(stages, NONE)
    onward[:-1], back[1:] = costs.links[here[:-1], here[1:]], costs.links[here[1:], here[:-1]]
    occupied = costs.occupancy.any(axis=1)
    used = np.append(onward[:-1][occupied], back[1:][occupied])
    onward, back = (np.where(np.isin(own, used), own, NONE) for own in (onward, back))
    pairs = {(int(line), stage) for own in (onward, back) for stage, line in enumerate(own) if line != NONE}
    if len({line for line, _ in pairs}) < len(pairs):
        return None
    numbers = {line: number for number, line in enumerate(sorted({line for line, _ in pairs}))}
    numbers[NONE] = NONE
    return (
        np.array([numbers[int(line)] for line in onward]),
        np.array([numbers[int(line)] for line in back]),
    )


class _Run:
    """What is known after some ticks. `arrived_forward` and `arrived_backward`: by stage, when what its next
    action waits for is there."""

    def __init__(self, micro_batches: int, costs: LinearCosts, lines: tuple[Indices, Indices]) -> None:
        self.micro_batches, self.costs, self.lines = micro_batches, costs, lines
        shape = costs.forward.shape
        self.free, self.host_free = np.zeros(shape), np.zeros(shape)
        self.link_free = np.zeros((int(max(own.max() for own in lines)) + 2, shape[1]))
        self.arrived_forward, self.arrived_backward = np.zeros(shape), np.zeros(shape)

    def forward(self, stages: Indices, micro_batch: Indices) -> None:
        """Of each of these stages that has one."""
        own = stages[(micro_batch >= 0) & (micro_batch < self.micro_batches)]
        if not len(own):
            return
        starts = np.maximum(self.free[own], self.arrived_forward[own])
        ends = self._launch(own, starts, self.costs.forward[own], self.costs.forward_launch)
        self.free[own] = ends
        sends = own < len(self.free) - 1
        self._send(own[sends], ends[sends], 0, self.arrived_forward, own[sends] + 1, own[sends])

    def backward(self, stages: Indices, micro_batch: Indices, first: int) -> None:
        """The same; micro-batch `first` is the one that adds to no gradients."""
        has = (micro_batch >= 0) & (micro_batch < self.micro_batches)
        own, numbers = stages[has], micro_batch[has]
        if not len(own):
            return
        seconds = self.costs.backward[own]
        if (numbers == first).any():
            seconds = np.where((numbers == first)[:, None], seconds - self.costs.accumulation[own], seconds)
        starts = np.maximum(self.free[own], self.arrived_backward[own])
        ends = self._launch(own, starts, seconds, self.costs.backward_launch)
        self.free[own] = ends
        sends = own > 0
        self._send(own[sends], ends[sends], 1, self.arrived_backward, own[sends] - 1, own[sends] - 1)

    def _launch(self, own: Indices, starts: Array, seconds: Array, launch: Array | None) -> Array:
        """When the actions end that may start then, and no earlier than their launches do."""
        if launch is None:
            return starts + seconds
        begun = self.host_free[own]
        self.host_free[own] = launch_end = begun + launch[own]
        ends: Array = np.maximum(np.maximum(starts, begun) + seconds, launch_end)
        return ends

    def _send(
        self, own: Indices, ends: Array, way: int, arrived: Array, receivers: Indices, cuts: Indices
    ) -> None:
        lines = self.lines[way][own]
        sent = np.where((lines == NONE)[:, None], ends, np.maximum(ends, self.link_free[lines]))
        sent = sent + self.costs.occupancy[cuts]
        self.link_free[lines] = sent  # the last row is of what occupies nothing, and not looked at
        arrived[receivers] = sent + self.costs.latency[cuts]

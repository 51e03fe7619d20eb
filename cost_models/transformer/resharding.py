"""What the devices of a stage send to those of the next where the two share tokens in different ways.

Between blocks a stage's devices hold the hidden states of a micro-batch without a copy: the samples are
shared by its replicas, the tokens of a sample by its context devices, and of those, with sequence
parallelism, by its tensor devices. Of the sequence, cut into 2 c pieces, context device k of c holds the
pieces k and 2 c - 1 - k (as Megatron-LM and torch lay them for causal attention), and each of its t tensor
devices a t-th of these in their order. The ranks of a stage follow one another: tensor devices are
neighbours, then context devices, then replicas. Every device sends to every device behind the cut what both
hold, one message after another, and receives so; the gradients go back the same way. With equal degrees each
device has one message, for its counterpart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..topology import Topology
from .layer_work import NUMBER
from .parallel_degrees import ParallelDegrees

Counts = npt.NDArray[np.int64]


class StageDevices(NamedTuple):
    """Those of one stage: as many as its degrees say, from the rank `first` on."""

    degrees: ParallelDegrees
    first: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.degrees.tensor * self.degrees.context * self.degrees.data

    @property
    def token_shares(self) -> tuple[int, int]:
        """How many devices share the tokens of a sequence: context and tensor ones."""
        return self.degrees.context, self.degrees.tensor


@lru_cache(maxsize=1024)
def held_tokens(context: int, tensor: int, sequence: int) -> tuple[tuple[range, ...], ...]:
    """Of each device that shares a sequence, tensor devices next to each other, the tokens that it holds.
    The sequence is a multiple of 2 x context (where that is above 1) and of context x tensor."""
    piece = sequence // (2 * context)
    shares = []
    for device in range(context):
        mirror = 2 * context - 1 - device
        own = [range(device * piece, (device + 1) * piece), range(mirror * piece, (mirror + 1) * piece)]
        own = [range(sequence)] if context == 1 else own
        size = sequence // (context * tensor)
        shares += [_part(own, share * size, (share + 1) * size) for share in range(tensor)]
    return tuple(shares)


def _part(pieces: Sequence[range], begin: int, end: int) -> tuple[range, ...]:
    """Of pieces laid end to end what lies between two places."""
    parts, before = [], 0
    for piece in pieces:
        part = piece[max(begin - before, 0) : max(end - before, 0)]
        before += len(piece)
        if part:
            parts.append(part)
    return tuple(parts)


@lru_cache(maxsize=4096)
def _common_tokens(before: tuple[int, int], after: tuple[int, int], sequence: int) -> Counts:
    """By device before and after the cut the tokens of a sequence that both hold."""
    rows, columns = held_tokens(*before, sequence), held_tokens(*after, sequence)
    return np.array([[_overlap(own, other) for other in columns] for own in rows])


def _overlap(own: Sequence[range], other: Sequence[range]) -> int:
    return sum(len(range(max(a.start, b.start), min(a.stop, b.stop))) for a in own for b in other)


def message_bytes(
    before: StageDevices, after: StageDevices, sequence: int, samples: int, hidden: int
) -> npt.NDArray[np.float64]:
    """By device before and after the cut, of a micro-batch of so many `samples`: the bytes that go between
    them. Both stages' replicas divide the samples."""
    rows, columns = before.degrees.data, after.degrees.data
    common = np.zeros((rows, columns), dtype=np.int64)
    ends = sorted({*range(0, samples + 1, samples // rows), *range(0, samples + 1, samples // columns)})
    for begin, end in pairwise(ends):
        common[begin * rows // samples, begin * columns // samples] += end - begin
    tokens = _common_tokens(before.token_shares, after.token_shares, sequence)
    return np.asarray(np.kron(common, tokens) * (NUMBER * hidden), dtype=np.float64)


def resharding_seconds(
    topology: Topology,
    before: StageDevices,
    after: StageDevices,
    sequence: int,
    samples: int,
    hidden: int,
) -> float:
    """From the end of a micro-batch's forward on a stage until all of it has arrived on the next: of the
    device that sends or receives longest, by the links between the devices. What a device has already is not
    sent, where both are the same devices."""
    bytes = message_bytes(before, after, sequence, samples, hidden)
    rows, columns = np.nonzero(bytes)
    sent = before.first + rows != after.first + columns
    rows, columns = rows[sent], columns[sent]
    levels = topology.shared_levels(before.first + rows, after.first + columns)
    links = [level.link for level in topology.levels]
    latency = np.array([link.latency_seconds for link in links])[levels]
    rate = np.array([link.bandwidth_bytes_per_second for link in links])[levels]
    seconds = np.zeros_like(bytes)
    seconds[rows, columns] = latency + bytes[rows, columns] / rate
    return float(max(seconds.sum(axis=1).max(), seconds.sum(axis=0).max()))

"""Unequal shares of a micro-batch among unlike replicas: Algorithm 1 of Asteroid (see `asteroid`).

By the replicas' speed, within their memory; what is too much goes to those that end first with it; then parts
move from the slowest replica to others as long as that is faster. As every part that is moved makes the
slowest replica faster, and seconds only grow with the samples, no shares are better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...cost_models.hardware import Device
from ...cost_models.memory import Recompute
from ..search.space import Space
from ..stage_table import Floats, ledger_options
from .replica_groups import MicroBatchChoice

MOST_SHARES = 32
"""Into so many parts a micro-batch is divided among replicas, at the most."""
Ints = npt.NDArray[np.int64]


class SharedStages(NamedTuple):
    """Every stage, (cut points, cut points), on a group of devices: E_f and E_b, inf for what does not fit;
    `shares` (devices, cut points, cut points): the parts of a micro-batch that each device takes."""

    forward: Floats
    backward: Floats
    shares: Ints


@dataclass(frozen=True, eq=False)
class ShareTables:
    """What shares of a micro-batch take and need on each kind of device; `parts` of a micro-batch of
    `choice.size` samples, each of `unit`."""

    space: Space
    choice: MicroBatchChoice
    _times: dict[Device, tuple[Floats, Floats]] = field(default_factory=dict)
    _fits: dict[tuple[Device, int], Ints] = field(default_factory=dict)

    @cached_property
    def parts(self) -> int:
        """Into how many a micro-batch is divided."""
        size = self.choice.size
        return max(count for count in range(1, MOST_SHARES + 1) if size % count == 0)

    @property
    def unit(self) -> int:
        """Samples of a part."""
        return self.choice.size // self.parts

    @property
    def mode(self) -> Recompute:
        """Asteroid does not recompute, unless nothing else is allowed."""
        return "never" if {"never", "by_stage"} & set(self.choice.modes) else "always"

    @cached_property
    def most(self) -> int:
        """Parts that a device may take, as far as they can be costed."""
        return max(
            (n for n in range(1, self.parts + 1) if self.space.fits_someone(n * self.unit, 1)), default=0
        )

    def times(self, kind: Device) -> tuple[Floats, Floats]:
        """(parts + 1, cut points, cut points): forward and backward seconds of so many parts."""
        if kind not in self._times:
            tables = [self.space.kind_table(kind, n * self.unit) for n in range(1, self.most + 1)]
            again = 1 if self.mode == "always" else 0
            forward = [np.zeros(self.space.usable.shape), *(own.forward for own in tables)]
            backward = [np.zeros_like(forward[0]), *(own.backward + again * own.forward for own in tables)]
            scale = kind.seconds_scale
            self._times[kind] = (np.stack(forward) * scale, np.stack(backward) * scale)
        return self._times[kind]

    def room(self, kind: Device, in_flight: int) -> Ints:
        """(cut points, cut points): the most parts that fit; -1 where not even the weights do."""
        if (kind, in_flight) not in self._fits:
            space, limit = self.space, min(kind.memory_bytes or inf, self.space.memory_limit or inf)
            room = np.full(space.usable.shape, self.most)
            if limit < inf:
                options = ledger_options(kind, space.dtype, space.number_bytes, space.zero)
                room[:] = 0
                for n in range(1, self.most + 1):
                    table = space.kind_table(kind, n * self.unit)
                    need = table.memory(in_flight, self.mode, space.optimizer, 1, **options)
                    room = np.where((room == n - 1) & (need <= limit), n, room)
            self._fits[kind, in_flight] = np.where(space.usable, room, -1)
        return self._fits[kind, in_flight]

    def share(self, kinds: Sequence[Device], in_flight: int) -> SharedStages:
        """Algorithm 1 for every stage on devices of these kinds."""
        if len(set(kinds)) == 1:
            return self._share_evenly(kinds[0], len(kinds), in_flight)
        forward = np.stack([self.times(kind)[0] for kind in kinds])
        backward = np.stack([self.times(kind)[1] for kind in kinds])
        room = np.stack([self.room(kind, in_flight) for kind in kinds])
        seconds = forward + backward
        shares = _by_speed(seconds, np.maximum(room, 0), self.parts)
        shares = _offload(seconds, np.maximum(room, 0), shares)
        fits = (shares.sum(axis=0) == self.parts) & (room >= 0).all(axis=0)
        slowest = [
            np.where(fits, np.take_along_axis(own, shares[:, None], axis=1)[:, 0].max(axis=0), inf)
            for own in (forward, backward)
        ]
        return SharedStages(slowest[0], slowest[1], shares)

    def _share_evenly(self, kind: Device, count: int, in_flight: int) -> SharedStages:
        """The same for devices of one kind."""
        least, larger = divmod(self.parts, count)
        most = least + (larger > 0)
        own = least + (np.arange(count) < larger)
        shares = np.broadcast_to(own[:, None, None], (count, *self.space.usable.shape))
        if most > self.most:
            nothing = np.full(self.space.usable.shape, inf)
            return SharedStages(nothing, nothing, shares)
        forward, backward = (
            np.where(most <= self.room(kind, in_flight), t[most], inf) for t in self.times(kind)
        )
        return SharedStages(forward, backward, shares)


def _by_speed(seconds: Floats, room: Ints, parts: int) -> Ints:
    """(devices, ...): parts in proportion to the speed of the devices, as many as have room; what is left
    goes, part by part, to the device that ends first with it."""
    speed = 1 / np.maximum(seconds[:, -1], 1e-300)
    shares: Ints = np.minimum((parts * speed / speed.sum(axis=0)).astype(np.int64), room)
    for _ in range(parts):
        receiver, longer = _next_receiver(seconds, room, shares)
        adds = (shares.sum(axis=0) < parts) & np.isfinite(longer)
        if not adds.any():
            break
        _add(shares, receiver, adds.astype(np.int64))
    return shares


def _offload(seconds: Floats, room: Ints, shares: Ints) -> Ints:
    """The shares, with parts moved from the slowest device as long as the one that takes a part is faster."""
    for _ in range(shares.shape[0] * seconds.shape[1]):
        own = np.take_along_axis(seconds, shares[:, None], axis=1)[:, 0]
        slowest, longest = own.argmax(axis=0), own.max(axis=0)
        receiver, longer = _next_receiver(seconds, room, shares)
        moves = longer < longest
        if not moves.any():
            break
        _add(shares, slowest, -moves.astype(np.int64))
        _add(shares, receiver, moves.astype(np.int64))
    return shares


def _next_receiver(seconds: Floats, room: Ints, shares: Ints) -> tuple[Ints, Floats]:
    """The device that ends first with a part more, and when; inf where none has room."""
    more = np.minimum(shares + 1, seconds.shape[1] - 1)
    longer = np.take_along_axis(seconds, more[:, None], axis=1)[:, 0]
    longer = np.where(shares < room, longer, inf)
    return longer.argmin(axis=0), longer.min(axis=0)


def _add(shares: Ints, device: Ints, amount: Ints) -> None:
    """Adds to the share of one device of every stage."""
    own = np.take_along_axis(shares, device[None], axis=0)
    np.put_along_axis(shares, device[None], own + amount[None], axis=0)

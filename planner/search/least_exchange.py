"""What of the exchange of gradients between replicas follows a stage's last backward, at the least, whichever
devices they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..stage_table import Floats, StageTable
from .least_collectives import least_all_reduce_seconds
from .space import Space


def exposed_exchange(
    space: Space,
    replicas: int,
    table: StageTable,
    slowest_backward: Floats,
    per_node: int | None = None,
) -> Floats:
    """Of every stage with at least so many replicas, what follows its last backward; `slowest_backward`
    (layers,): of a replica, at the most. `per_node`: as of `least_all_reduce_seconds`."""
    trainable = table.reduced_bytes(space.zero)
    if replicas == 1:
        return np.zeros_like(trainable)
    seconds = partial(least_all_reduce_seconds, space.topology, replicas, per_node=per_node)
    if space.zero:
        weights = seconds(trainable) / 2 if space.zero < 3 else np.zeros_like(trainable)
        return weights + (seconds(space.gradients(trainable)) / 2 if space.zero == 1 else 0.0)
    return space.buckets.exposed_seconds(slowest_backward, seconds)


@dataclass(frozen=True, eq=False)
class LeastExchanges:
    """`exposed_exchange` between all cut points, each worked out once.

    The seconds are of any devices: bounds on plans are made of them.
    """

    space: Space
    _seconds: dict[tuple[int, float, bool], Floats] = field(default_factory=dict)

    def after(self, replicas: int, batch: float, *, hides: bool = True) -> Floats:
        """(cut points, cut points): seconds, of so many replicas with so many samples each. Where they wait
        for the backwards of other devices, nothing `hides` any of it."""
        key = (replicas, batch, hides)
        if key not in self._seconds:
            space, table = self.space, self.space.table(batch)
            each = [
                space.on(kind, batch, lambda own: own.backward_seconds)  # type: ignore[arg-type]
                for kind in space.topology.kinds
            ]
            longest = np.maximum.reduce(each) if hides else 0.0 * each[0]
            self._seconds[key] = exposed_exchange(space, replicas, table, longest)
        return self._seconds[key]

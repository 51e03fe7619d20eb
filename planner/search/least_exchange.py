"""Lower bounds on the gradient exchange that follows the last backward of a stage, on any devices."""

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
    """Return the least seconds of exchange after the last backward of `replicas` or more replicas.

    Args:
        space: Topology, gradient buckets and ZeRO stage.
        replicas: Number of replicas of a stage.
        table: Costs of all stages.
        slowest_backward: (layers,) most backward seconds of a replica. A longer backward hides more of the
            exchange.
        per_node: See `least_all_reduce_seconds`.

    Returns:
        (cut points, cut points) seconds.
    """
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
    """Cache of `exposed_exchange` between all cut points, on any devices."""

    space: Space
    _seconds: dict[tuple[int, float, bool], Floats] = field(default_factory=dict)

    def exposed_seconds(self, replicas: int, batch: float, *, hides: bool = True) -> Floats:
        """Return the seconds of the exchange after the last backward, from which bounds on plans are built.

        Args:
            replicas: Number of replicas of each stage.
            batch: Samples per replica.
            hides: Whether backwards hide a part of the exchange. They do not if replicas wait for backwards
                of other devices.

        Returns:
            (cut points, cut points) seconds.
        """
        key = (replicas, batch, hides)
        if key not in self._seconds:
            space, table = self.space, self.space.table(batch)
            by_kind = [
                space.on(kind, batch, lambda costs: costs.backward_seconds)  # type: ignore[arg-type]
                for kind in space.topology.kinds
            ]
            longest = np.maximum.reduce(by_kind) if hides else 0.0 * by_kind[0]
            self._seconds[key] = exposed_exchange(space, replicas, table, longest)
        return self._seconds[key]

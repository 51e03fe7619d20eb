"""What all stages cost on a group of replicas: seconds, and the micro-batches that there is memory for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from ...cost_models.memory import LedgerOptions, Moment, Recompute
from ...cost_models.optimizers import FLOAT32, optimizer_named
from ..stage_table import Floats, StageTable


@dataclass(frozen=True, eq=False)
class ReplicaGroupCosts:
    """What all stages cost on so many devices of these kinds, so joined. Tables as of `StageTable`.

    Seconds are those of the slowest replica; `exposed_allreduce`: of the all-reduce that follows the last
    backward.
    """

    table: StageTable
    replicas: int
    per_replica_batch: int
    size: int
    forward: Floats
    backward: Floats
    exposed_allreduce: Floats
    limit: float
    optimizer: str
    ledger: LedgerOptions
    least_tied: Floats | float = 0.0
    """Of sums of tied weights' gradients, at the least: they follow the all-reduce."""
    _room: dict[str, Floats] = field(default_factory=dict)

    def room(self, recompute: Recompute, start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> Floats:
        """(pairs,): `most_in_flight` of some stages alone."""
        if recompute in self._room:
            return self._room[recompute][start, end]
        if self.limit == inf:
            return np.full(len(start), inf)

        def need(in_flight: float, moment: Moment) -> Floats:
            options: LedgerOptions = {**self.ledger, "moment": moment}
            return self.table.memory_of(
                start, end, in_flight, recompute, self.optimizer, self.replicas, **options
            )

        return self._most(need)

    def most_in_flight(self, recompute: Recompute) -> Floats:
        """How many micro-batches each stage has room for, as a fraction; negative where for none."""
        if recompute not in self._room:
            self._room[recompute] = (
                np.full(self.forward.shape, inf)
                if self.limit == inf
                else self._most(lambda in_flight, moment: self.bytes(in_flight, recompute, moment))
            )
        return self._room[recompute]

    def _most(self, need: Callable[[float, Moment], Floats]) -> Floats:
        """`need`: bytes with so many micro-batches held. At each moment the ledger is a line of them."""
        most = self._most_at(need(1, "passes"), need(2, "passes"))
        if not optimizer_named(self.optimizer).has_temporaries(self.ledger.get("precision", FLOAT32)):
            return most
        return np.minimum(most, self._most_at(need(1, "step"), need(2, "step")))

    def _most_at(self, one: Floats, two: Floats) -> Floats:
        """From the bytes with one micro-batch held, and with two."""
        base, each = 2 * one - two, two - one
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.where(each > 0, (self.limit - base) / each, np.where(one <= self.limit, inf, -inf))
        # A stage that fits to the byte may not be lost to rounding.
        room: Floats = most * (1 + 1e-12)
        return room

    def bytes(self, in_flight: float, recompute: Recompute, moment: Moment = "any") -> Floats:
        """What each stage needs on one replica."""
        options: LedgerOptions = {**self.ledger, "moment": moment}
        return self.table.memory(in_flight, recompute, self.optimizer, self.replicas, **options)

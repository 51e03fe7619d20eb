"""What all stages cost on a group of replicas: seconds, and the micro-batches that there is memory for."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np
import numpy.typing as npt

from ...cost_models.memory import LedgerOptions, Recompute
from ..stage_table import Floats, StageTable


@dataclass(frozen=True, eq=False)
class ReplicaGroupCosts:
    """What all stages cost on so many devices of these kinds, so joined. Tables as of `StageTable`.

    Seconds are those of the slowest replica; `accumulation`: of a backward what the first of a step does not
    take; `exposed_allreduce`: of the all-reduce that follows the last backward.
    """

    table: StageTable
    replicas: int
    per_replica_batch: int
    size: int
    forward: Floats
    backward: Floats
    accumulation: Floats
    exposed_allreduce: Floats
    limit: float
    optimizer: str
    ledger: LedgerOptions
    least_tied: Floats | float = 0.0
    """Of sums of tied weights' gradients, at the least: they follow the all-reduce."""
    _room: dict[str, Floats] = field(default_factory=dict)

    def backward_of(self, micro_batches: int) -> tuple[Floats, Floats]:
        """Backward seconds of a micro-batch, and what of them the first of several does not take; a single
        one is the first."""
        if micro_batches > 1:
            return self.backward, self.accumulation
        return self.backward - self.accumulation, np.zeros_like(self.accumulation)

    def room(self, recompute: Recompute, start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> Floats:
        """(pairs,): `most_in_flight` of some stages alone."""
        if recompute in self._room:
            return self._room[recompute][start, end]
        if self.limit == inf:
            return np.full(len(start), inf)
        one, two = (
            self.table.memory_of(
                start, end, in_flight, recompute, self.optimizer, self.replicas, **self.ledger
            )
            for in_flight in (1, 2)
        )
        return self._most(one, two)

    def most_in_flight(self, recompute: Recompute) -> Floats:
        """How many micro-batches each stage has room for, as a fraction; negative where for none. The ledger
        is a line of the micro-batches that are held."""
        if recompute not in self._room:
            unlimited = self.limit == inf
            self._room[recompute] = (
                np.full(self.forward.shape, inf)
                if unlimited
                else self._most(self.bytes(1, recompute), self.bytes(2, recompute))
            )
        return self._room[recompute]

    def _most(self, one: Floats, two: Floats) -> Floats:
        """From the bytes with one micro-batch held, and with two."""
        base, each = 2 * one - two, two - one
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.where(each > 0, (self.limit - base) / each, np.where(one <= self.limit, inf, -inf))
        # A stage that fits to the byte may not be lost to rounding.
        room: Floats = most * (1 + 1e-12)
        return room

    def bytes(self, in_flight: float, recompute: Recompute) -> Floats:
        """What each stage needs on one replica."""
        return self.table.memory(in_flight, recompute, self.optimizer, self.replicas, **self.ledger)

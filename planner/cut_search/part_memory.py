"""Which parts of the layers have room on a place of a program, whatever else lies on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

from ...cost_models.hardware import Device
from ...cost_models.memory import Training, total, with_reserve
from ...cost_models.schedules import Program, StageSlot
from ...cost_models.stage_bytes import Amount
from ..search.space import Space
from ..stage_table import Floats, StageTable, ledger_options


@dataclass(frozen=True, eq=False)
class PartMemory:
    """Of a program whose devices have these `ranks`, `tables` and `kinds`; `anywhere`: on any devices."""

    space: Space
    program: Program
    ranks: Sequence[tuple[int, ...]]
    tables: Sequence[StageTable]
    kinds: Sequence[Sequence[Device]]
    anywhere: bool

    def fits(self, mode: str) -> dict[StageSlot, npt.NDArray[np.bool_]]:
        """By slot, which parts have room on a device with nothing of its other parts, but for what the
        optimizer's step and, with ZeRO, exchanges between replicas need: one that has none is on no plan."""
        program, space = self.program, self.space
        fits = {}
        for slot in program.parts_by_slot:
            kinds = self.kinds[slot.device]
            limit = space.limit(self.ranks[slot.device]) if not self.anywhere else inf
            if self.anywhere and len(kinds) == 1:
                limit = space.limit([0])
            if limit == inf:
                fits[slot] = np.ones_like(self.tables[0].valid)
            else:
                fits[slot] = self._least_bytes(slot, mode, kinds) <= limit * (1 + 1e-12)
        return fits

    def _least_bytes(self, slot: StageSlot, mode: str, kinds: Sequence[Device]) -> Floats:
        program, space, table = self.program, self.space, self.tables[slot.device]
        count = 0 if program.splits_backward else program.micro_batches
        stage = space.with_buffers(replace(table.stage_bytes, gathered=None), count)
        part = program.parts_by_slot[slot]
        holders = {rank for pipe in program.pipes for rank in self.ranks[pipe[part].device]}
        context = min(float(ledger_options(kind, space.dtype)["context_bytes"]) for kind in kinds)
        training = Training(space.optimizer, space.number_bytes, len(holders), space.zero)
        shares = [program.share(micro_batch) for micro_batch in range(program.micro_batches)]
        whole = stage.saved + stage.saved_input
        if program.splits_backward:
            waits, stays = (whole, 0.0) if mode == "never" else (stage.input, whole)
            activations: Amount = self._most_in_parts(
                slot, waits + stage.output, stays + stage.pending - stage.released
            )
            communication = sum(shares) * (2 * stage.received + stage.sent)
        else:
            most = self._most_in_flight[slot]
            # Of a backward of its own, and of the last forward before one.
            again = np.maximum(most * stage.input, min(shares) * (stage.input + whole))
            activations = most * whole if mode == "never" else again
            pipe, alone = program.pipes[0], len(program.pipes) == 1
            received = alone and part > 0 and pipe[part - 1].device != slot.device
            sent = alone and part + 1 < len(pipe) and pipe[part + 1].device != slot.device
            communication = received * stage.received + sent * stage.sent
        if not space.zero:
            communication = communication + training.exchange_bytes(stage)
        terms = {
            **training.states(stage),
            "activations": activations,
            "communication": communication,
            "workspace": stage.workspace if mode == "never" else 0.0 * whole,
        }
        return np.broadcast_to(total(with_reserve(terms, context)), table.valid.shape)

    def _most_in_parts(self, slot: StageSlot, waiting: Amount, behind: Amount) -> Floats:
        """The most that micro-batches hold of a slot's part where each holds `waiting` bytes from its F on,
        and `behind` more from the start of its B."""
        pairs = self._levels[slot]
        amounts = [np.asarray(levels[0] * waiting + levels[1] * behind) for levels in pairs]
        most: Floats = np.max(amounts, axis=0)
        return most

    @cached_property
    def _levels(self) -> dict[StageSlot, set[tuple[float, float]]]:
        """By slot, during its actions: micro-batches in flight, and those of them that have a W and whose B
        has begun; without pairs beside which another has as many of both, or more in flight and fewer of
        the others, so that it holds as much whatever the bytes' sign."""
        program, levels = self.program, dict[StageSlot, set[tuple[float, float]]]()
        if "levels" in program.derived:
            earlier: dict[StageSlot, set[tuple[float, float]]] = program.derived["levels"]
            return earlier
        for device, own in enumerate(program.actions):
            split = {action[1:] for action in own if action.kind == "W"}
            now: dict[StageSlot, list[float]] = {}
            for action in own:
                share, slot = program.share(action.micro_batch), StageSlot(device, action.chunk)
                level = now.setdefault(slot, [0.0, 0.0])
                in_parts = action[1:] in split
                level[0] += share if action.kind == "F" else 0.0
                level[1] += share if action.kind == "B" and in_parts else 0.0
                levels.setdefault(slot, set()).add((level[0], level[1]))
                if action.kind == ("W" if in_parts else "B"):
                    level[:] = level[0] - share, level[1] - (share if in_parts else 0.0)
        levels = {slot: most_pairs(pairs) for slot, pairs in levels.items()}
        program.derived["levels"] = levels
        return levels

    @cached_property
    def _most_in_flight(self) -> dict[StageSlot, float]:
        """By slot, the most micro-batches whose forward has begun and whose last backward has not ended."""
        program, most = self.program, dict[StageSlot, float]()
        if "most_in_flight" in program.derived:
            return dict[StageSlot, float](program.derived["most_in_flight"])
        for device, own in enumerate(program.actions):
            split = {action[1:] for action in own if action.kind == "W"}
            level = dict[int, float]()
            for action in own:
                share, slot = program.share(action.micro_batch), StageSlot(device, action.chunk)
                if action.kind == "F":
                    level[action.chunk] = level.get(action.chunk, 0.0) + share
                    most[slot] = max(most.get(slot, 0.0), level[action.chunk])
                elif action.kind == ("W" if action[1:] in split else "B"):
                    level[action.chunk] -= share
        program.derived["most_in_flight"] = most
        return most


def most_pairs(pairs: set[tuple[float, float]]) -> set[tuple[float, float]]:
    """Those of which one is the largest a x + b y, whatever b, for a of at least 0."""
    needed, least, most = set[tuple[float, float]](), inf, -inf
    for x, y in sorted(pairs, reverse=True):
        if y < least or y > most:
            needed.add((x, y))
            least, most = min(least, y), max(most, y)
    return needed

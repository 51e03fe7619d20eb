"""What plans have in common that are bounded together, and the memory that their parts need at the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ..cost_models.memory import Training, total, with_reserve
from ..cost_models.stage_bytes import Amount, StageBytes
from .pipeline_config import UNPROPOSED
from .search.space import Space
from .stage_table import Floats, StageTable, ledger_options


@dataclass(frozen=True, eq=False)
class PlanSettings:
    """What the plans have in common.

    Up to `gpus` devices, which together do `capacity` times the least work in a second, the slowest `slowest`
    times; `counts` of replicas; `micro_batches` of `size` samples; parts in `copies`, which hold `one_model`
    or several; whether a backward `splits`; `modes` of recomputation: always, never, first_layers, offload or
    any. `straight`: one part a device. `first`: the share of a micro-batch that is first on its way. `turns`:
    cuts between parts of the same devices, where there are others (None: any number); or all parts may be
    `together`. `layers`: by number of replicas, seconds of a micro-batch, (layers,) each: f, b and w.
    """

    space: Space
    gpus: int
    capacity: float
    slowest: float
    counts: tuple[int, ...]
    size: int
    micro_batches: int
    copies: int
    one_model: bool
    splits: bool
    modes: str
    straight: bool
    first: float
    turns: int | None
    together: bool
    layers: Sequence[tuple[Floats, Floats, Floats]]

    def memory(self, count: int, table: StageTable) -> tuple[Floats, Floats]:
        """The shares of a device's memory that parts need by themselves, with one micro-batch; and without
        what comes and goes, which the parts of a device need together: when a micro-batch has passed the
        last of them, all hold it."""
        stage, space, nothing = table.stage_bytes, self.space, np.zeros(table.valid.shape)
        limits = [inf if kind.memory_bytes is None else kind.memory_bytes for kind in space.topology.kinds]
        limit = min(max(limits), inf if space.memory_limit is None else space.memory_limit)
        if limit == inf:
            return nothing, nothing
        contexts = [ledger_options(kind, space.dtype)["context_bytes"] for kind in space.topology.kinds]
        holders = count if self.copies == 1 else self.gpus
        training = Training(space.optimizer, space.number_bytes, holders, space.zero)
        temporaries = training.step_temporaries(stage)
        states = total(training.states(stage))
        if not space.zero:
            states = states + training.exchange_bytes(stage)
        at_work = np.maximum(self._at_work(stage), 0.0 if temporaries is None else temporaries)
        waits = states + (self._waiting(stage) if self.copies == 1 else 0.0)
        room = max(limit - min(contexts), 1e-9)
        need, share = (
            total(with_reserve({"bytes": amount}, 0)) / room for amount in (states + at_work, waits)
        )
        return nothing + need, nothing + share

    def _at_work(self, stage: StageBytes) -> Amount:
        """Bytes of one micro-batch, or its first share, and the workspace of its forward, or of its whole
        backward: all that its forward saves or, where it runs again, what is kept for that and, of a whole
        backward, what it saves then."""
        whole = stage.saved + stage.saved_input
        if self.modes in UNPROPOSED:
            return self.first * np.minimum(whole, stage.input)
        again = stage.input if self.splits else stage.input + whole
        activations = {"never": whole, "always": again}.get(self.modes, np.minimum(whole, again))
        return self.first * activations + stage.workspace

    def _waiting(self, stage: StageBytes) -> Amount:
        """Bytes of a micro-batch, or its first share, between its forward and its backward."""
        whole = stage.saved + stage.saved_input
        return self.first * (whole if self.modes == "never" else np.minimum(whole, stage.input))

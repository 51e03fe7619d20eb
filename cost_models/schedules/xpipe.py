"""XPipe: 1F1B without a flush, on weights predicted for the time of the update instead of stashed ones.

Global batches of T micro-batches, here two; the first of each (F0, F2, F4) predicts for the others:

    stage 0  F0 F1 F2 .  .  B0 F3 B1|F4 B2 F5 B3|.  B4 .  B5|
    stage 1  .  F0 F1 .  B0 F2 B1|F3 B2 F4 B3|F5 B4 .  B5|
    stage 2  .  .  F0 B0 F1 B1|F2 B2 F3 B3|F4 B4 F5 B5|

A stage updates its weights after the last backward of a global batch (|). Between the forward of a global
batch and its own update others come: the weights are predicted over that many with Adam's moments, for the
forward and again for the backward, and no earlier version is kept. The first micro-batch of a global batch
predicts and the others take its prediction, while forwards of one global batch and backwards of another take
turns: so both predictions are there, beside the weights that the update changes, whatever T is.
Guan et al., "XPipe", arXiv 1911.04610.
Needs of the runtime: Adam-like moments to predict with, a prediction per global batch and pass. Weight
versions: 3, two of them predicted. Staleness: ceil((p - 1 - i) / T) updates on stage i, for which the
prediction makes up.
"""

from __future__ import annotations

from .action import (
    Program,
    Schedule,
    check_at_least,
    check_virtual_stages,
    linear_program,
    same_on_every_stage,
)
from .one_f_one_b import in_flight, stage_lists


def program(
    stages: int, micro_batches: int, virtual_stages: int = 1, update_every: int | None = None
) -> Program:
    """1F1B's lists, `micro_batches` in a row; `update_every`: T, those of a global batch (None: the
    stages)."""
    check_virtual_stages("xpipe", virtual_stages, 1)
    every = stages if update_every is None else update_every
    check_at_least("xpipe", "micro-batches an update", every, 1, "one global batch")
    return linear_program(stage_lists(stages, micro_batches), update_every=every)


def staleness(stage: int, stages: int, micro_batches: int, update_every: int | None = None) -> int:
    """Updates between the weights that a global batch finds and those that its gradient changes.

    In the list of stage i the forward of micro-batch n comes after the backward of n - (p - i); global batch
    k starts with n = k T, so that of the k updates before its own ceil((p - 1 - i) / T) are still to come.
    """
    every = stages if update_every is None else update_every
    return min(-(-(stages - 1 - stage) // every), (micro_batches - 1) // every)


SCHEDULE = Schedule(
    "xpipe",
    program,
    source='Guan et al., "XPipe", arXiv 1911.04610',
    needs="an optimizer with moments to predict weights with, for every global batch's forward and backward",
    bubble="none in steady state",
    in_flight_formula="min(m, p-i)",
    synchronous=False,
    weight_versions=same_on_every_stage(3),
    staleness=staleness,
    closed_in_flight=in_flight,
)

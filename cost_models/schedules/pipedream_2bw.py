"""PipeDream-2BW: 1F1B without a flush, gradients added up over micro-batches, two versions of the weights.

Updates every three micro-batches (| marks where a stage's weights change):

    stage 0  F0 F1 F2 .  .  B0 F3 B1 F4 B2|F5 B3 .  B4 .  B5|
    stage 1  .  F0 F1 .  B0 F2 B1 F3 B2|F4 B3 F5 B4 .  B5|
    stage 2  .  .  F0 B0 F1 B1 F2 B2|F3 B3 F4 B4 F5 B5|

With at least p micro-batches to an update, those in flight use two versions at most: a micro-batch runs
everywhere on the version that was the newest on stage 0 when it entered, later ones on the next
(double-buffered weights). Every gradient, on every stage, is applied one update late:
W(t+1) = W(t) - lr * gradient(W(t-1)).
Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1 and figure 2.
Needs of the runtime: two versions of the weights, updates beside the running pipeline. Weight versions: 2.
Staleness: 1, on all stages.
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
    """1F1B's lists, `micro_batches` in a row, with an update after each `update_every` (None: the stages)."""
    check_virtual_stages("pipedream-2bw", virtual_stages, 1)
    every = stages if update_every is None else update_every
    check_at_least("pipedream-2bw", "micro-batches an update", every, stages, "the stages")
    return linear_program(stage_lists(stages, micro_batches), update_every=every)


SCHEDULE = Schedule(
    "pipedream-2bw",
    program,
    source='Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1',
    needs="two versions of the weights, an update every p micro-batches or more beside the running pipeline",
    bubble="none in steady state",
    in_flight_formula="min(m, p-i)",
    synchronous=False,
    weight_versions=same_on_every_stage(2),
    staleness=same_on_every_stage(1),
    closed_in_flight=in_flight,
)

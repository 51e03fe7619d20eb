"""AutoPipe: 1F1B whose first micro-batch is sliced into halves, so that the fill takes half as long.

Micro-batch 0 in halves, here 0 and 1 (half a forward and half a backward each); a tick is half a forward, a
backward takes two forwards:

    F0 F1 F2 -  F3 -  .  .  B0 -  B1 -  .  .  .  .  .  .  B2 -  -  -  .  .  B3 -  -  -
    .  F0 F1 .  F2 -  B0 -  B1 -  F3 -  .  .  B2 -  -  -  .  .  B3 -  -  -
    .  .  F0 F1 B0 -  B1 -  F2 -  B2 -  -  -  F3 -  B3 -  -  -

The last stage starts after (p - 1) / 2 forwards instead of p - 1. For it not to wait after the halves until
the next whole micro-batch has come down the pipeline, (p-1)F/2B micro-batches have to be sliced
(`sliced`): one is enough for five stages where B = 2F.
Liu et al., "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning and Micro-batch
Slicing", CLUSTER 2022.
Needs of the runtime: micro-batches of different size. Weight versions: 1. Staleness: 0.
"""

from __future__ import annotations

from .action import Action, Program, Schedule, StageSlot, check_at_least, check_virtual_stages
from .one_f_one_b import in_flight, stage_lists


def program(stages: int, micro_batches: int, virtual_stages: int = 1, sliced: int = 1) -> Program:
    """1F1B's lists with each of the first `sliced` micro-batches as two entries of half a micro-batch.

    Raises UsageError where `sliced` is negative or more than there are.
    """
    check_virtual_stages("autopipe", virtual_stages, 1)
    check_at_least("autopipe", "sliced micro-batches", sliced, 0, "none")
    check_at_least("autopipe", "micro-batches", micro_batches, sliced, "those that are sliced")
    halves = [(2 * m, 2 * m + 1) for m in range(sliced)]
    whole = [(m + sliced,) for m in range(sliced, micro_batches)]
    entries: list[tuple[int, ...]] = [*halves, *whole]
    actions = tuple(
        tuple(Action(kind, entry) for kind, m, _ in own for entry in entries[m])
        for own in stage_lists(stages, micro_batches)
    )
    pipe = tuple(StageSlot(stage) for stage in range(stages))
    shares = tuple(1 / len(parts) for parts in entries for _ in parts)
    return Program(actions, (pipe,), (0,) * len(shares), shares=shares)


SCHEDULE = Schedule(
    "autopipe",
    program,
    source='Liu et al., "AutoPipe", CLUSTER 2022',
    needs="micro-batches of different size: the first in halves",
    bubble="t/(t+m(F+B)), t = (p-1)(F/2+B), where F <= B and (p-1)F <= 2B",
    in_flight_formula="min(m, p-i)",
    closed_in_flight=in_flight,
)

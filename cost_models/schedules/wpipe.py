"""WPipe: interleaved 1F1B of two groups of layers without a flush; only the first group is updated late.

Two devices, two micro-batches to an update; lower case: the chunk of the second group; | where a
chunk's weights change:

    F0 F1 f0 f1 .  b0 F2 b1|F3 B0 f2 B1|f3 b2 .  b3|B2 B3|
    .  F0 F1 f0 b0 f1 b1|F2 B0 F3 B1|f2 b2 f3 b3|B2 B3|

Each device holds one chunk of either group. A period is the forwards and backwards of one group: the forwards
of the next mini-batch's first group come before the backwards of this one's. So the second group finishes an
update before it starts the next and needs one version of its weights; the first group's next forwards run
between its backwards, on the newer of two versions, its gradients one update late: half of the versions and
of the late gradients of 2BW.
Yang et al., "Group-based Interleaved Pipeline Parallelism for Large-scale DNN Training", ICLR 2022.
Needs of the runtime: two chunks a device, two versions of the first one's weights, an update of
one chunk beside the running pipeline. Weight versions: 2 of the first chunk, 1 of the second, 1.5 on
average. Staleness: 1 in the first chunk, 0 in the second.
"""

from __future__ import annotations

from .action import (
    Program,
    Schedule,
    check_at_least,
    check_multiple,
    check_virtual_stages,
    same_on_every_stage,
)
from .interleaved import alternate_actions, list_turns, looped_pipe


def program(
    stages: int, micro_batches: int, virtual_stages: int = 2, update_every: int | None = None
) -> Program:
    """`micro_batches` in a row, in rounds of `update_every` (None: the stages), which must divide them."""
    check_virtual_stages("wpipe", virtual_stages, 2)
    every = stages if update_every is None else update_every
    check_at_least("wpipe", "micro-batches an update", every, stages, "the stages")
    check_multiple("wpipe", micro_batches, every, "the stages" if update_every is None else "an update")
    forwards, backwards = list_turns((0, 1), micro_batches, every), list_turns((1, 0), micro_batches, every)
    # p - 1 - i forwards ahead of the second group's first backward, as in 1F1B: with more, those of a later
    # round would come before the group's update.
    ahead = [every + stages - 1 - stage for stage in range(stages)]
    actions = tuple(tuple(alternate_actions(forwards, backwards, count)) for count in ahead)
    return Program(actions, looped_pipe(stages, 2), (0,) * micro_batches, update_every=every)


SCHEDULE = Schedule(
    "wpipe",
    program,
    source='Yang et al., "Group-based Interleaved Pipeline Parallelism", ICLR 2022',
    needs="two chunks of layers on a device, updated apart; two versions of the first chunk's weights",
    bubble="none in steady state",
    in_flight_formula="p-i/2",
    synchronous=False,
    default_virtual_stages=2,
    weight_versions=same_on_every_stage(1.5),
    chunk_versions=(2, 1),
    staleness=same_on_every_stage(1),
)

"""AvgPipe: several pipelines at once on the same devices, each training its own model; an average ties them.

Two pipelines (lower case: the second), two stages, two micro-batches each:

    F0 f1 F2 f3 B0 b1 .  .  B2 b3
    .  F0 f1 B0 b1 F2 f3 B2 b3

Each pipeline runs 1F1B over its own global batch; a device takes the pipelines in turn, so that one computes
where the other waits. With `advance` further forwards ahead a pipeline goes from 1F1B towards GPipe's order
(advance forward propagation), for long transfers. After each global batch a pipeline pulls its weights
towards a reference model, and the reference towards them (elastic averaging). Chen et al., "Elastic Averaging
for Efficient Pipelined DNN Training", PPoPP 2023. Needs of the runtime: a process for each pipeline on every
device, weights of all pipelines and of the reference (`copies`). Weight versions: 1 in each pipeline.
Staleness: 0 within a pipeline, whose weights drift from the others' between averages.
"""

from __future__ import annotations

from .action import Action, Program, Schedule, StageSlot, check_at_least, check_multiple, check_virtual_stages
from .one_f_one_b import alternate_passes

PIPELINES = 2


def program(
    stages: int, micro_batches: int, virtual_stages: int = 1, pipelines: int = PIPELINES, advance: int = 0
) -> Program:
    """`micro_batches` of all pipelines together, dealt out in turn: a multiple of `pipelines`."""
    check_virtual_stages("avgpipe", virtual_stages, 1)
    check_at_least("avgpipe", "pipelines", pipelines, 1, "one to train")
    check_at_least("avgpipe", "advance", advance, 0, "1F1B's own order")
    check_multiple("avgpipe", micro_batches, pipelines, "the pipelines")
    each = micro_batches // pipelines
    actions = tuple(
        tuple(
            Action(kind, m * pipelines + pipe, pipe)
            for kind, m, _ in alternate_passes(min(each, stages - stage + advance), each)
            for pipe in range(pipelines)
        )
        for stage in range(stages)
    )
    pipes = tuple(tuple(StageSlot(stage, pipe) for stage in range(stages)) for pipe in range(pipelines))
    return Program(actions, pipes, tuple(m % pipelines for m in range(micro_batches)))


SCHEDULE = Schedule(
    "avgpipe",
    program,
    source='Chen et al., "Elastic Averaging for Efficient Pipelined DNN Training", PPoPP 2023',
    needs="a process for each of two pipelines on every device, a reference model to average with",
    bubble="(p-1)/(m+p-1), m of both pipelines",
    in_flight_formula="min(m, 2(p-i))",
    copies=PIPELINES + 1,
    trains_one_model=False,
)

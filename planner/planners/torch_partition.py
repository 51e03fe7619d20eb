"""The partition of PyTorch's open pull request 179212, `auto_partition` of torch.distributed.pipelining.

github.com/pytorch/pytorch/pull/179212 (April 2026), made again from what its description and public code of
the same algorithm say, none of it copied. Stages, of a device several with interleaved 1F1B, start as the
partition whose slowest stage is fastest. A step is simulated under the schedule, with a transfer between two
stages, and the stage that is longest on its critical path between the first backward and the last forward is
the critical one. It gives its first layer to the stages before it, or its last one to the stage behind; the
stages up to the cut that moved are balanced again. Each partition so made is simulated, and goes on where its
critical stage is not further back. The shortest step counts.

Here and not there: a layer is what lies between two allowed cuts; the critical path's middle part is told by
time, not by the turns of an aligned schedule; 2 p micro-batches are simulated at the most, and at most
`MOST_PARTITIONS` of one shape; every number of stages with the replicas that use all devices is tried. Its
interleaved zero-bubble schedule of several stages a device is not in pplan: ZB-H1, of one, stands for it,
with half a backward for each part, as the pull request has it where nothing else is said.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...cost_models.errors import UsageError
from ...cost_models.schedules import find_schedule
from ...cost_models.simulator.dependencies import NONE, Order, resolve_order
from ..balance import balanced_ends
from ..candidate import Proposal
from ..pipeline_config import PipelineConfig
from ..stage_table import Floats
from .base import Ends, Planner, full_shapes, shared_configs

if TYPE_CHECKING:
    from ..problem import Problem

PARTS = {"1f1b": 1, "interleaved": 2, "zb-h1": 1}
"""The schedules it knows, and the stages of a device that it takes by default."""
MOST_PARTITIONS = 50
"""That are simulated of one shape."""
FORWARD, WEIGHT = 0, 2
"""Kinds of actions, as `Order.kind` has them."""


def _propose(problem: Problem) -> Iterator[Proposal]:
    """For each micro-batch size, schedule and shape on all devices the partition, and its step."""
    for stages, replicas in full_shapes(problem):
        for config in _configs(problem, replicas) if stages > 1 else ():
            plan = _find_partition(problem, config, stages, replicas)
            if plan is not None:
                yield plan


def _refusal(problem: Problem) -> str:
    if problem.usable_gpus == 1:
        return "one device has no pipeline"
    return "too few layers or micro-batches for any number of stages, or a schedule that it does not know"


PLANNERS = (Planner("torch-partition", _propose, _refusal),)


def _configs(problem: Problem, replicas: int) -> list[PipelineConfig]:
    own = [
        replace(config, virtual_stages=PARTS[config.schedule])
        for config in problem.configs
        if config.schedule in PARTS and config.virtual_stages in (1, PARTS[config.schedule])
    ]
    return shared_configs(problem, dict.fromkeys(own), replicas)


def _find_partition(problem: Problem, config: PipelineConfig, stages: int, replicas: int) -> Proposal | None:
    """None where the schedule does not run with these numbers."""
    space, parts, micro_batches = problem.space, stages * config.virtual_stages, config.micro_batches
    order = _short_order(config, stages)
    if order is None or parts > space.chain.max_stages:
        return None
    group = space.replica_group(config.micro_batch_size, range(replicas))
    forward, backward = np.diagonal(group.forward, 1), np.diagonal(group.backward, 1)
    latency, each = space.routes.route(tuple(range(replicas)), tuple(range(replicas, 2 * replicas)))
    sent = latency + each * replicas * np.asarray(group.table.crossing)
    ends, seconds = partition(order, forward, backward, sent, space.budget.check)
    bounds = zip((0, *ends), ends, strict=False)
    work = [float((forward + backward)[begin:end].sum()) for begin, end in bounds]
    slowest = max(sum(work[device::stages]) for device in range(stages))
    places = order.program.pipes[0]
    return Proposal(
        config,
        tuple(group.table.cut_points[end] for end in ends),
        tuple(tuple(range(place.device * replicas, (place.device + 1) * replicas)) for place in places),
        seconds + (micro_batches - order.program.micro_batches) * slowest,
    )


def _short_order(config: PipelineConfig, stages: int) -> Order | None:
    """Of at most 2 p micro-batches; None where the schedule does not run with these numbers."""
    if config.micro_batches < stages:
        return None
    count = min(config.micro_batches, 2 * stages)
    schedule = find_schedule(config.schedule)
    with suppress(UsageError):
        if config.virtual_stages > 1 and config.micro_batches % stages:
            return None
        return resolve_order(schedule.program(stages, count, config.virtual_stages))
    return None


def partition(
    order: Order, forward: Floats, backward: Floats, sent: Floats, check: Callable[[], None] = lambda: None
) -> tuple[Ends, float]:
    """The best partition of blocks of these seconds, and its simulated step. `sent`: seconds of the transfer
    at each cut, from 0 to the number of blocks; `check`: called before each simulation."""
    work, parts = forward + backward, order.program.slots

    def simulate(ends: Ends) -> tuple[float, int]:
        check()
        bounds = list(zip((0, *ends), ends, strict=False))
        first, second = ([float(own[a:b].sum()) for a, b in bounds] for own in (forward, backward))
        return simulate_parts(order, first, second, [float(sent[end]) for end in ends])

    first = balanced_ends(work, parts)
    seconds, critical = simulate(first)
    best = seconds, first
    partitions, queue = {first}, deque([(first, critical)])
    while queue and len(partitions) < MOST_PARTITIONS:
        ends, critical = queue.popleft()
        for other in _next_partitions(work, ends, critical):
            if other in partitions or len(partitions) == MOST_PARTITIONS:
                continue
            partitions.add(other)
            seconds, part = simulate(other)
            best = min(best, (seconds, other))
            if part <= critical:
                queue.append((other, part))
    return best[1], best[0]


def _next_partitions(work: Floats, ends: Ends, critical: int) -> Iterator[Ends]:
    """With the first layer of the critical part before it, and with its last one behind it; none of the first
    part."""
    begin, end = (0, *ends)[critical], ends[critical]
    if critical == 0 or end - begin < 2:
        return
    yield (*balanced_ends(work[: begin + 1], critical), *ends[critical:])
    if critical + 1 < len(ends):
        yield (*balanced_ends(work[: end - 1], critical + 1), *ends[critical + 1 :])


def simulate_parts(
    order: Order, forward: Sequence[float], backward: Sequence[float], sent: Sequence[float]
) -> tuple[float, int]:
    """Seconds of a step of parts of these seconds, with `sent` seconds from each part to the next and back;
    and the part that is longest on a critical path between the first backward and the last forward."""
    kinds, places = order.kind.tolist(), order.place.tolist()
    previous, source = order.previous.tolist(), order.source.tolist()
    halves = [
        own / 2 if split or kind == WEIGHT else own
        for own, split, kind in zip(
            (backward[place] for place in places), order.splits.tolist(), kinds, strict=True
        )
    ]
    start, end, cause = [0.0] * len(kinds), [0.0] * len(kinds), [NONE] * len(kinds)
    for at, kind in enumerate(kinds):
        place = places[at]
        if previous[at] != NONE:
            start[at], cause[at] = end[previous[at]], previous[at]
        if source[at] != NONE:
            arrival = end[source[at]] + sent[place - 1 if kind == FORWARD else place]
            if arrival > start[at]:
                start[at], cause[at] = arrival, source[at]
        end[at] = start[at] + (forward[place] if kind == FORWARD else halves[at])
    begin = min(second for second, kind in zip(start, kinds, strict=True) if kind != FORWARD)
    until = max(second for second, kind in zip(end, kinds, strict=True) if kind == FORWARD)
    last = max(range(len(end)), key=end.__getitem__)
    return end[last], _longest_part(last, cause, start, end, places, (begin, max(begin, until)))


def _longest_part(
    last: int,
    cause: Sequence[int],
    start: Sequence[float],
    end: Sequence[float],
    places: Sequence[int],
    within: tuple[float, float],
) -> int:
    """On the path of causes that ends with the action `last`: of its actions that begin and end within the
    seconds, else of all; the earliest of equal parts."""
    inside, everywhere = defaultdict[int, float](float), defaultdict[int, float](float)
    at = last
    while at != NONE:
        seconds = end[at] - start[at]
        everywhere[places[at]] += seconds
        if within[0] <= start[at] and end[at] <= within[1]:
            inside[places[at]] += seconds
        at = cause[at]
    own = inside or everywhere
    return min(own, key=lambda part: (-own[part], part))

"""AutoPipe and PyTorch's `auto_partition`: partitions that move layers off the stage the step waits for.

Both start from the partition whose slowest stage is fastest and simulate a step. Then they take the first
block from the stage for which the step waits, and rebalance the stages before it. Blocks are the layers
between two allowed cuts. At most 2 p micro-batches are simulated; the others take the seconds of the slowest
stage.

AutoPipe: Liu et al., "AutoPipe: A Fast Pipeline Parallelism Approach with Balanced Partitioning and
Micro-batch Slicing", CLUSTER 2022, section III. It starts from the partition whose slowest stage is fastest,
and simulates 1F1B without transfers. The master stage is the last that has no idle time between its first and
its last forward; the step is shorter where less lies before it. So its first block goes to the stages before
it, which are balanced again, until the master stage is the first one, has one block, or a partition comes
again; the shortest step counts. Its slicing of the first
micro-batch is the schedule `autopipe` of the simulator, which pplan's plans do not have.

`torch-partition` is PyTorch's open pull request 179212, `auto_partition` of torch.distributed.pipelining.
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
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice, pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...cost_models.errors import UsageError
from ...cost_models.program_order import NONE, Order, resolve_order
from ...cost_models.schedules import find_schedule
from ..balance import balanced_ends
from ..candidate import PipelineConfig, Proposal
from ..stage_table import Floats
from .base import Ends, Planner, full_shapes, shared_configs
from .replica_groups import equal_shapes

if TYPE_CHECKING:
    from ..problem import Problem

PARTS = {"1f1b": 1, "interleaved": 2, "zb-h1": 1}
"""Schedules of PyTorch's method, and its default stages per device."""
MOST_PARTITIONS = 50
"""Most partitions of one shape that are simulated."""
FORWARD, WEIGHT = 0, 2
"""Kinds of actions, see `Order.kind`."""


class Times(NamedTuple):
    """Start and end of each action, and the action after which it starts."""

    start: list[float]
    end: list[float]
    cause: list[int]


Critical = Callable[[Order, Times], int]
"""Function that returns the part for which a step waits."""


def _autopipe(problem: Problem) -> Iterator[Proposal]:
    """Yield the partition of each micro-batch size and shape on all devices, with its shortest step."""
    space = problem.space
    for choice, stages, replicas in equal_shapes(problem):
        space.budget.check()
        group = space.replica_group(choice.size, range(replicas))
        forward, backward = np.diagonal(group.forward, 1), np.diagonal(group.backward, 1)
        ends, seconds = autopipe_partition(forward, backward, stages, choice.micro_batches)
        yield choice.propose(space, ends, [replicas] * stages, seconds)


def autopipe_partition(
    forward: Floats, backward: Floats, stages: int, micro_batches: int
) -> tuple[Ends, float]:
    """Return AutoPipe's partition of blocks, and the seconds of its simulated step.

    Of more than 2 p micro-batches, the others take the seconds of the slowest stage.

    Args:
        forward: Forward seconds of the blocks.
        backward: Backward seconds of the blocks.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
    """
    count = min(micro_batches, 2 * stages)
    order, sent = _resolve("1f1b", stages, count, 1), np.zeros(len(forward) + 1)
    rule = partial(partition, critical=master_stage, both_sides=False, most=inf, more=micro_batches - count)
    return rule(order, forward, backward, sent)


def master_stage(order: Order, times: Times) -> int:
    """Return the last stage without idle time between its first and its last forward, else the slowest."""
    idle, busy, last = defaultdict[int, float](float), defaultdict[int, float](float), dict[int, int]()
    actions = list(zip(order.place.tolist(), order.kind.tolist(), order.previous.tolist(), strict=True))
    last.update({place: at for at, (place, kind, _) in enumerate(actions) if kind == FORWARD})
    for at, (place, _, previous) in enumerate(actions):
        busy[place] += times.end[at] - times.start[at]
        if previous != NONE and at <= last[place]:
            idle[place] += times.start[at] - times.end[previous]
    without = [stage for stage in last if idle[stage] <= 1e-12 * max(times.end)]
    return max(without, default=max(busy, key=lambda stage: (busy[stage], stage)))


def _torch_partition(problem: Problem) -> Iterator[Proposal]:
    """Yield the partition for each micro-batch size, schedule and shape on all devices."""
    configs = [
        replace(config, virtual_stages=PARTS[config.schedule])
        for config in problem.configs
        if config.schedule in PARTS and config.virtual_stages in (1, PARTS[config.schedule])
    ]
    for stages, replicas in full_shapes(problem):
        for config in shared_configs(problem, dict.fromkeys(configs), replicas) if stages > 1 else ():
            plan = _find_partition(problem, config, stages, replicas)
            if plan is not None:
                yield plan


def _refusal(problem: Problem) -> str:
    if problem.usable_gpus == 1:
        return "one device has no pipeline"
    return "too few layers or micro-batches for any number of stages, or a schedule that it does not know"


PLANNERS = (Planner("autopipe", _autopipe), Planner("torch-partition", _torch_partition, _refusal))


def _find_partition(problem: Problem, config: PipelineConfig, stages: int, replicas: int) -> Proposal | None:
    """Return the partition; None if the schedule does not run with these numbers."""
    space, parts, micro_batches = problem.space, stages * config.virtual_stages, config.micro_batches
    divides = config.virtual_stages == 1 or micro_batches % stages == 0
    if micro_batches < stages or not divides or parts > space.chain.max_stages:
        return None
    count = min(micro_batches, 2 * stages)
    try:
        order = _resolve(config.schedule, stages, count, config.virtual_stages)
    except UsageError:
        return None
    group = space.replica_group(config.micro_batch_size, range(replicas))
    forward, backward = np.diagonal(group.forward, 1), np.diagonal(group.backward, 1)
    latency, pace = space.routes.route(tuple(range(replicas)), tuple(range(replicas, 2 * replicas)))
    sent = latency + pace * replicas * np.asarray(group.table.crossing)
    ends, seconds = partition(order, forward, backward, sent, check=space.budget.check)
    work = _sums(ends, forward + backward)
    slowest = max(sum(work[device::stages]) for device in range(stages))
    places = order.program.pipes[0]
    return Proposal(
        config,
        tuple(group.table.cut_points[end] for end in ends),
        tuple(tuple(range(place.device * replicas, (place.device + 1) * replicas)) for place in places),
        seconds + (micro_batches - count) * slowest,
    )


@lru_cache(maxsize=64)
def _resolve(schedule: str, stages: int, micro_batches: int, parts: int) -> Order:
    return resolve_order(find_schedule(schedule).program(stages, micro_batches, parts))


def partition(
    order: Order,
    forward: Floats,
    backward: Floats,
    sent: Floats,
    *,
    critical: Critical | None = None,
    both_sides: bool = True,
    most: float = MOST_PARTITIONS,
    more: int = 0,
    check: Callable[[], None] = lambda: None,
) -> tuple[Ends, float]:
    """Return the partition with the shortest step, starting from the balanced one, and its simulated seconds.

    Args:
        order: The actions of a step.
        forward: Forward seconds of each block.
        backward: Backward seconds of each block.
        sent: Seconds of the transfer at each cut, from 0 to the number of blocks.
        critical: Function that returns the part for which a step waits. Defaults to `critical_part`.
        both_sides: Whether to try partitions that give the last block of the critical part to the next part,
            too. Those whose critical part is further back are then not continued.
        most: Most partitions to simulate.
        more: Micro-batches beyond those of the order, which take the seconds of the slowest part.
        check: Function that is called before each simulation.
    """
    work, steps = forward + backward, dict[Ends, float]()
    queue = deque([(balanced_ends(work, order.program.slots), inf)])
    while queue:
        ends, earlier = queue.popleft()
        if ends in steps or len(steps) >= most:
            continue
        check()
        part_seconds = _sums(ends, forward), _sums(ends, backward)
        times = _run(order, *part_seconds, [float(sent[end]) for end in ends])
        steps[ends] = max(times.end) + more * max(map(sum, zip(*part_seconds, strict=True)))
        part = (critical or critical_part)(order, times)
        if part <= earlier or not both_sides:
            following = islice(_next_partitions(work, ends, part), 2 if both_sides else 1)
            queue += [(next_ends, part) for next_ends in following]
    seconds, ends = min((seconds, ends) for ends, seconds in steps.items())
    return ends, seconds


def _sums(ends: Ends, seconds: Floats) -> list[float]:
    """Return the seconds of each part."""
    return [float(seconds[begin:end].sum()) for begin, end in pairwise((0, *ends))]


def _next_partitions(work: Floats, ends: Ends, critical: int) -> Iterator[Ends]:
    """Yield partitions with the first layer of the critical part before it, and with its last layer after it.

    The first part gives no layers.
    """
    begin, end = (0, *ends)[critical], ends[critical]
    if critical == 0 or end - begin < 2:
        return
    yield (*balanced_ends(work[: begin + 1], critical), *ends[critical:])
    if critical + 1 < len(ends):
        yield (*balanced_ends(work[: end - 1], critical + 1), *ends[critical + 1 :])


def critical_part(order: Order, times: Times) -> int:
    """Return the part that is longest on a critical path between the first backward and the last forward."""
    forwards = (order.kind == FORWARD).tolist()
    begin = min(second for second, is_forward in zip(times.start, forwards, strict=True) if not is_forward)
    until = max(second for second, is_forward in zip(times.end, forwards, strict=True) if is_forward)
    last = max(range(len(times.end)), key=times.end.__getitem__)
    return _longest_part(last, times, order.place.tolist(), (begin, max(begin, until)))


def _run(order: Order, forward: Sequence[float], backward: Sequence[float], sent: Sequence[float]) -> Times:
    """Return the times of a step, with `sent` seconds from each part to the next and back."""
    start, end, cause = times = Times([], [], [])
    columns = (order.kind, order.place, order.previous, order.source, order.splits)
    for kind, place, previous, source, split in zip(*(column.tolist() for column in columns), strict=True):
        begin, cause_action = (end[previous] if previous != NONE else 0.0), previous
        if source != NONE:
            arrival = end[source] + sent[place - 1 if kind == FORWARD else place]
            if arrival > begin:
                begin, cause_action = arrival, source
        seconds = backward[place] / 2 if split or kind == WEIGHT else backward[place]
        start.append(begin)
        cause.append(cause_action)
        end.append(begin + (forward[place] if kind == FORWARD else seconds))
    return times


def _longest_part(last: int, times: Times, places: Sequence[int], within: tuple[float, float]) -> int:
    """Return the longest part on the path of causes that ends with action `last`, the earliest of equal ones.

    Only actions within the interval count, or all if none exist.
    """
    inside, everywhere = defaultdict[int, float](float), defaultdict[int, float](float)
    at = last
    while at != NONE:
        start, end = times.start[at], times.end[at]
        everywhere[places[at]] += end - start
        if within[0] <= start and end <= within[1]:
            inside[places[at]] += end - start
        at = times.cause[at]
    seconds_by_part = inside or everywhere
    return min(seconds_by_part, key=lambda part: (-seconds_by_part[part], part))

"""Ways to train on the same devices that are no plans of pplan: by time models of their own.

Data parallelism through all-reduces without overlap, parameter servers and shared memory
(`cost_models.data_parallel`), HetPipe's virtual workers, and Asteroid's unequal shares. They are told with
their time, memory and staleness; what staleness does to the loss is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ...cost_models import arguments, data_parallel
from ...cost_models.arguments import Options, option
from ...cost_models.collectives import all_reduce_seconds
from ...cost_models.data_parallel import Pace, Workers
from ...cost_models.document import Record
from ...cost_models.errors import UsageError
from ...cost_models.quantities import format_count, format_seconds
from ..alternatives import accumulating
from ..candidate import Proposal, ScoredPlan
from ..joint_search import plan_with
from ..plan_simulation import energy_joules, plan_stages
from ..planners import find_planner
from ..planners.asteroid import find_asteroid_plan, shared_load, shared_step
from ..planners.hetpipe import POLICIES, HetPipePlan, find_hetpipe_plan
from ..planners.replica_groups import micro_batch_choices
from ..problem import Problem
from ..scoring import possible


class OtherMethod(Record):
    """A way to train by its own time model; `step_seconds` of as many samples as the global batch has.

    `memory_bytes`: of the device that needs most. `staleness`: updates (mini-batches, of HetPipe) that a
    gradient misses, in the mean or, where `staleness_bounded`, at the most; 0 of synchronous ones. `reason`:
    why there is none. `energy_joules`: of synchronous ones, where the watts of the devices are given.
    """

    name: str
    step_seconds: float | None = None
    samples_per_second: float | None = None
    memory_bytes: int | None = None
    staleness: float | None = None
    energy_joules: float | None = None
    staleness_bounded: bool = False
    detail: str = ""
    reason: str = ""


@dataclass(frozen=True)
class OtherMethodOptions(Options):
    """`servers`: parameter servers, each with a port of its own; `staleness`: the bound of stale-synchronous
    workers, in updates, and the clock distance of HetPipe, in waves; `push_every`, `fetch_every`: Downpour's
    periods, in gradients; `memory_bandwidth`: bytes per second of the memory that Hogwild's workers share
    (None: no Hogwild). `watts`: by kind of device, while it computes and while it waits."""

    servers: int = option(1, arguments.whole)
    staleness: int = option(3, partial(arguments.whole, at_least=0))
    push_every: int = option(4, arguments.whole)
    fetch_every: int = option(4, arguments.whole)
    memory_bandwidth: float | None = option(None, arguments.optional_number)
    watts: Mapping[str, tuple[float, float]] | None = option(None, arguments.watts)


def list_other_methods(problem: Problem, options: OtherMethodOptions) -> list[OtherMethod]:
    """All of them for a problem, in a fixed order. Raises UsageError for watts of other kinds of devices."""
    check_watts(problem, options.watts)
    return [
        *_data_parallel(problem, options),
        *(_hetpipe(problem, policy, options.staleness) for policy in POLICIES),
        *_asteroid(problem, options.watts or {}),
    ]


def check_watts(problem: Problem, watts: Mapping[str, tuple[float, float]] | None) -> None:
    """Raises UsageError for a kind of device that the machine does not have."""
    kinds = [kind.name for kind in problem.topology.kinds]
    for name in watts or {}:
        if name not in kinds:
            raise UsageError(f"watts of {name}: the machine has none", f"It has: {', '.join(kinds)}.")


def _data_parallel(problem: Problem, options: OtherMethodOptions) -> Iterator[OtherMethod]:
    names = ("all-reduce", "synchronous", "asynchronous", "stale-synchronous", "downpour", "hogwild")
    if problem.gpus == 1:
        yield from (OtherMethod(name=f"dp-{name}", reason="one device") for name in names)
        return
    plan = plan_with(find_planner("data-parallel"), accumulating(problem))
    if isinstance(plan, str):
        yield from (OtherMethod(name=f"dp-{name}", reason=plan) for name in names)
        return
    workers = make_workers(problem, plan, options.servers)
    ledger = plan_stages(problem.space, plan)[0].memory
    whole, stateless = sum(ledger.values()), sum(ledger.values()) - ledger.get("optimizer", 0)
    reduced = all_reduce_seconds(problem.topology, range(problem.gpus), workers.gradient_bytes)
    step, busy = max(workers.compute_seconds) + reduced, dict(enumerate(workers.compute_seconds))
    energy = energy_joules(problem.topology, busy, step, options.watts or {})
    pace, detail = Pace(problem.gpus / step, 0.0), "all-reduce after the backward"
    row = _row(problem, "dp-all-reduce", pace, whole, detail)
    yield row.model_copy(update={"energy_joules": energy})
    served = f"{options.servers} parameter server{'s' * (options.servers > 1)}"
    yield _row(problem, "dp-synchronous", data_parallel.synchronous(workers), stateless, served)
    yield _row(problem, "dp-asynchronous", data_parallel.asynchronous(workers), stateless, served)
    stale = data_parallel.stale_synchronous(workers, options.staleness)
    yield _row(problem, "dp-stale-synchronous", stale, stateless, f"{served}, bound {options.staleness}")
    periods = f"{served}, push every {options.push_every}, fetch every {options.fetch_every}"
    downpour = data_parallel.asynchronous(workers, options.push_every, options.fetch_every)
    yield _row(problem, "dp-downpour", downpour, stateless, periods)
    yield _hogwild(problem, workers, options, stateless)


def _hogwild(problem: Problem, workers: Workers, options: OtherMethodOptions, memory: int) -> OtherMethod:
    if options.memory_bandwidth is None:
        return OtherMethod(name="dp-hogwild", reason="memory_bandwidth of the shared weights is not given")
    if problem.gpus > problem.topology.gpus_per_node:
        return OtherMethod(name="dp-hogwild", reason="the devices share no memory: they are in several nodes")
    pace = data_parallel.hogwild(workers, options.memory_bandwidth)
    return _row(problem, "dp-hogwild", pace, memory, "weights in shared memory, no locks")


def _row(problem: Problem, name: str, pace: Pace, memory: int, detail: str) -> OtherMethod:
    step = pace.seconds(problem.gpus)
    return OtherMethod(
        name=name,
        step_seconds=step,
        samples_per_second=problem.mini_batch / step,
        memory_bytes=memory,
        staleness=pace.staleness,
        staleness_bounded=pace.bounded,
        detail=detail,
    )


def make_workers(problem: Problem, plan: ScoredPlan, servers: int) -> Workers:
    """The workers of a data-parallel plan: each computes its part of the global batch for one gradient."""
    space, config, n = problem.space, plan.config, problem.gpus
    again = 0 if plan.recompute[0] == "never" else 1
    seconds = {}
    for kind in problem.topology.kinds:
        costs = space.kind_table(kind, -(-config.micro_batch_size // n)).costs
        forward, backward = costs.forward_seconds.sum(), costs.backward_seconds.sum()
        each = float((1 + again) * forward + backward) * kind.seconds_scale
        seconds[kind] = config.micro_batches * each
    trainable = space.chain.trainable_bytes
    link = problem.topology.link(0, n - 1)
    return Workers(
        compute_seconds=tuple(seconds[problem.topology.device(rank)] for rank in range(n)),
        gradient_bytes=float(space.gradients(trainable).sum()),
        weight_bytes=float(trainable.sum()),
        bandwidth_bytes_per_second=link.bandwidth_bytes_per_second,
        latency_seconds=link.latency_seconds,
        servers=servers,
    )


def _hetpipe(problem: Problem, policy: str, distance: int) -> OtherMethod:
    name, plan = f"hetpipe-{policy.lower()}", find_hetpipe_plan(problem, policy, distance)
    if not isinstance(plan, HetPipePlan):
        return OtherMethod(name=name, reason=plan)
    return OtherMethod(
        name=name,
        step_seconds=problem.mini_batch / plan.samples_per_second,
        samples_per_second=plan.samples_per_second,
        memory_bytes=round(max(own.memory_bytes for own in plan.workers)),
        staleness=plan.global_staleness,
        staleness_bounded=True,
        detail=f"{format_count(len(plan.workers), 'virtual worker')} of "
        f"{format_count(len(plan.workers[0].devices), 'device')}, "
        f"{plan.concurrent} x {plan.mini_batch_size} under way in each, clock distance {distance}",
    )


def _asteroid(problem: Problem, watts: Mapping[str, tuple[float, float]]) -> Iterator[OtherMethod]:
    """The plan with the least latency, where its shares are unequal: else it is a plan of pplan."""
    plans = [
        (plan.latency_seconds, plan, choice)
        for choice in micro_batch_choices(problem.configs)
        if (plan := find_asteroid_plan(problem, choice)) is not None
    ]
    if not plans:
        return
    _, plan, choice = min(plans, key=lambda own: own[0])
    if all(len(set(own)) == 1 for own in plan.samples):
        return
    config = choice.config(recomputes=False)
    proposal = Proposal(config, plan.ends, plan.devices, plan.latency_seconds)
    simulates = possible(problem.space, proposal)
    step = shared_step(problem.space, proposal, plan.samples) if simulates else plan.latency_seconds
    most, busy = shared_load(problem.space, plan, choice)
    shares = " | ".join(":".join(map(str, own)) for own in plan.samples[:8])
    yield OtherMethod(
        name="asteroid-shares",
        step_seconds=step,
        samples_per_second=problem.mini_batch / step,
        memory_bytes=round(most),
        staleness=0.0,
        energy_joules=energy_joules(problem.topology, busy, step, watts),
        detail=f"{shares} samples of each of {choice.micro_batches} micro-batches, "
        f"{'simulated; ' if simulates else ''}{format_seconds(plan.latency_seconds)} by its own estimate",
    )

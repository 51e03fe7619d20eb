"""Comparison of plans: those of several files, or what every named planner makes of one plan's problem.

Other methods are ways to train on the same devices that are not plans of pplan, with separate time models:
data parallelism through all-reduces without overlap, parameter servers and shared memory
(`cost_models.data_parallel`), HetPipe's virtual workers, and Asteroid's unequal shares. They are listed with
their time, memory and staleness. The effect of staleness on the loss is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, ClassVar

from ...cost_models import arguments, data_parallel
from ...cost_models.arguments import Converted, Options, option, options_class
from ...cost_models.collectives import all_reduce_seconds
from ...cost_models.data_parallel import Pace, Workers
from ...cost_models.document import Document, Record
from ...cost_models.errors import UsageError
from ...cost_models.quantities import compare_steps, format_bytes, format_count, format_seconds, html_table
from ..alternatives import accumulating
from ..asynchronous import bubble
from ..candidate import SEARCHED, Proposal, ScoredPlan
from ..joint_search import BEST, JointSearchResult, find_best_plan, plan_with
from ..plan_file import TIE, Plan, PlanRow, plan_row
from ..plan_options import PlanOptions
from ..plan_simulation import busy_seconds, energy_joules, plan_stages
from ..planners import PLANNERS, find_planner
from ..planners.asteroid import find_asteroid_plan, shared_load, shared_step
from ..planners.hetpipe import POLICIES, HetPipePlan, find_hetpipe_plan
from ..planners.replica_groups import micro_batch_choices
from ..problem import Problem
from ..scoring import possible
from .explain_context import ExplainContext

Watts = Mapping[str, tuple[float, float]]


class ComparisonRow(Record):
    """A plan in a comparison, or the `reason` why a planner has none.

    Attributes:
        name: Name of the plan or planner.
        plan: The plan.
        bubble: Idle share of the devices' time.
        gap: Step over the best bound that the searches behind the compared plans proved for its problem,
            minus 1. None if none exists.
        slower: Seconds per sample over those of the first plan, minus 1.
        estimate_seconds: Step by the planner's own estimate.
        energy_joules: Energy of a step, if the power of the devices is given.
        tokens_per_second_per_gpu: Throughput of a GPU by the plan's prediction, for a transformer.
        tflops_per_gpu: Model FLOPs in 10**12 per second and GPU, for a transformer.
        mfu: Model FLOPs utilization, for a transformer.
        reason: Why no plan exists.
    """

    name: str
    plan: PlanRow | None = None
    bubble: float | None = None
    gap: float | None = None
    slower: float | None = None
    estimate_seconds: float | None = None
    energy_joules: float | None = None
    tokens_per_second_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    reason: str = ""

    @property
    def step_seconds(self) -> float | None:
        """Step of the plan in seconds; None if no plan exists."""
        return None if self.plan is None else self.plan.step_seconds

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of the fullest device; None if no plan exists."""
        return None if self.plan is None else max(self.plan.memory_bytes)


class PlanComparison(Document):
    """Plans in the given order, then those of the planners, fastest first.

    `first_slower` is the first plan's seconds per sample over those of the best other plan, minus 1.
    `other_methods` are methods that are not plans of pplan, by their time models.
    """

    kind: ClassVar[str] = "comparison"

    rows: list[ComparisonRow]
    first_slower: float | None
    notes: list[str] = []
    other_methods: list[OtherMethod] = []

    def __repr__(self) -> str:
        """Return the names of the plans."""
        return f"<PlanComparison of {', '.join(row.name for row in self.rows[:8])}>"

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        rows = [
            [
                row.name,
                "-" if row.step_seconds is None else format_seconds(row.step_seconds),
                "-" if row.slower is None else compare_steps(1 + row.slower, 1),
                "-" if row.memory_bytes is None else format_bytes(row.memory_bytes),
                row.reason or (row.plan and row.plan.schedule) or "",
            ]
            for row in self.rows
        ]
        return html_table("Plans", ("plan", "step", "vs. the first", "most memory", "configuration"), rows)


def compare_plans(
    plans_by_name: Sequence[tuple[str, Plan]],
    context: ExplainContext | None = None,
    watts: Watts | None = None,
) -> PlanComparison:
    """Compare plans.

    Args:
        plans_by_name: The plans by name.
        context: Problem of the first plan. If given, all named planners are compared with it, too.
        watts: Power of the devices by kind, for the energy of their steps.
    """
    first = plans_by_name[0][1]
    bounds = [_bound(plan) for _, plan in plans_by_name]
    rows, methods, energy = list[ComparisonRow](), list[OtherMethod](), None
    if context is not None:
        answer = find_best_plan(context.problem, tuple(PLANNERS))
        rows = _of_planners(context, answer, watts or {})
        methods = list_other_methods(context.problem, OtherMethodOptions(watts=watts))
        busy, step = busy_seconds(first.stages, first.micro_batches), first.prediction.step_seconds
        energy = energy_joules(context.problem.topology, busy, step, watts or {})
        searched = (_problem(first), answer.result.bound_seconds)
    plan_rows = [
        _row(
            name,
            plan.row,
            _proven_bound(plan, [*bounds, searched] if plan is first and context is not None else bounds),
            bubble=plan.prediction.bubble,
            energy_joules=energy if plan is first else None,
            tokens_per_second_per_gpu=plan.prediction.tokens_per_second_per_gpu,
            tflops_per_gpu=plan.prediction.tflops_per_gpu,
            mfu=plan.prediction.mfu,
        )
        for name, plan in plans_by_name
    ]
    all_rows, rate = [*plan_rows, *rows], first.mini_batch / first.prediction.step_seconds
    rates = [row.plan.samples_per_second for row in all_rows[1:] if row.plan is not None]
    return PlanComparison(
        rows=[
            row
            if row.plan is None
            else row.model_copy(update={"slower": rate / row.plan.samples_per_second - 1})
            for row in all_rows
        ],
        first_slower=max(rates) / rate - 1 if rates else None,
        notes=list(_differences(plans_by_name)),
        other_methods=methods,
    )


Key = tuple[str, ...]
"""Values that identify a problem."""


def _problem(plan: Plan) -> Key:
    """Return what plans share if one bound holds for their steps."""
    return tuple(plan.problem.values())


def _bound(plan: Plan) -> tuple[Key, float]:
    """Return what was proven about all plans of the problem; 0 without a search of all plans."""
    default = PlanOptions()
    same: dict[str, Any] = {name: getattr(default, name) for name in _NOT_NARROWING}
    narrowed = replace(plan.options, **same) != default
    nothing = plan.is_fixed_partition or narrowed or plan.objective is not None
    return _problem(plan), 0.0 if nothing else plan.prediction.lower_bound_seconds


_NOT_NARROWING = (
    "mini_batch",
    "optimizer",
    "runtime",
    "time_limit",
    "planner",
    "robust",
    "slow_devices",
    "seconds_of",
)
"""Options that do not exclude plans, or that belong to the problem."""


def _proven_bound(plan: Plan, bounds: Sequence[tuple[Key, float]]) -> float:
    """Return the best bound on the plan's step, or 0: its own, or that of a search of its problem."""
    step, plan_bound = plan.prediction.step_seconds, plan.prediction.lower_bound_seconds
    key = _problem(plan)
    searched = plan.schedule in SEARCHED and plan.training is None
    shared = max((seconds for other, seconds in bounds if other == key and searched), default=0.0)
    if 0 < shared <= step * (1 + TIE):
        return shared
    return 0.0 if plan.is_fixed_partition else plan_bound


def _row(name: str, plan: PlanRow, bound: float, **figures: Any) -> ComparisonRow:
    """Return a plan's row with its gap to a bound (0 for none) and other figures."""
    step = plan.step_seconds
    gap = max(step / bound - 1, 0.0) if 0 < bound <= step * (1 + TIE) else None
    return ComparisonRow(name=name, plan=plan, gap=gap, **figures)


def _of_planners(context: ExplainContext, answer: JointSearchResult, watts: Watts) -> list[ComparisonRow]:
    """Return rows of the joint search and each named planner, those without a plan last."""
    plans: dict[str, ScoredPlan | str] = {BEST: answer.best or "no plan fits", **answer.by_planner}
    rows = [_of_planner(context, answer, name, plan, watts) for name, plan in plans.items()]
    return sorted(rows, key=lambda row: row.step_seconds or inf)


def _of_planner(
    context: ExplainContext, answer: JointSearchResult, name: str, plan: ScoredPlan | str, watts: Watts
) -> ComparisonRow:
    if isinstance(plan, str):
        return ComparisonRow(name=name, reason=plan)
    space, step = context.problem.space, plan.step_seconds
    stages = plan_stages(space, plan)
    busy = busy_seconds(stages, plan.config.micro_batches)
    return _row(
        name,
        plan_row(plan, memory_bytes=[stage.memory_bytes for stage in stages]),
        answer.result.bound_seconds,
        bubble=bubble(space, plan),
        # The estimate is shown in the row of the planner that proposed the best plan.
        estimate_seconds=None if name == BEST else plan.proposal.estimate_seconds,
        energy_joules=energy_joules(context.problem.topology, busy, step, watts),
    )


def _differences(plans_by_name: Sequence[tuple[str, Plan]]) -> Iterator[str]:
    """Yield settings in which the plans differ, so that their figures cannot be compared directly."""
    (first, reference), *further = plans_by_name
    for name, plan in further:
        if plan.model != reference.model:
            yield f"{name} is for {plan.model}, {first} for {reference.model}"
        elif plan.profile.sha256 != reference.profile.sha256:
            yield f"{name} was made from another profile than {first}"
        if plan.mini_batch != reference.mini_batch:
            batches = f"{plan.mini_batch}, {first} {reference.mini_batch}"
            yield f"{name} has global batch {batches}: compare samples/s"
        if plan.topology != reference.topology:
            yield f"{name} is for {plan.topology or 'an unknown machine'}"
        elif plan.problem["machine"] != reference.problem["machine"]:
            yield f"{name} is for a machine of other figures than that of {first}"
        states = [field for field in _STATES if plan.problem[field] != reference.problem[field]]
        if states:
            plan_states, first_states = (
                ", ".join(f"{key} {of.problem[key]}" for key in states) for of in (plan, reference)
            )
            yield f"{name} has {plan_states}, {first} {first_states}: memory and time are not compared alike"


_STATES = ("runtime", "optimizer", "precision", "gradients", "ZeRO")
"""Values of a plan's problem on which its memory and its schedules depend."""


class OtherMethod(Record):
    """A way to train that is not a plan of pplan, by its time model.

    Attributes:
        name: Name of the method.
        step_seconds: Seconds for as many samples as the global batch has.
        samples_per_second: Samples per second.
        memory_bytes: Bytes of the fullest device.
        staleness: Updates (mini-batches for HetPipe) that a gradient misses, on average, or at most if
            `staleness_bounded`; 0 for synchronous methods.
        energy_joules: Energy of a step of a synchronous method, if the power of the devices is given.
        staleness_bounded: Whether `staleness` is a maximum.
        detail: Settings of the method.
        reason: Why the method does not apply.
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


@options_class
class OtherMethodOptions(Options):
    """Options of the other methods.

    Attributes:
        servers: Number of parameter servers, each with its own port.
        staleness: Most updates by which stale-synchronous workers may differ, and HetPipe's clock distance in
            waves.
        push_every: Downpour's push period in gradients.
        fetch_every: Downpour's fetch period in gradients.
        memory_bandwidth: Bytes per second of the memory that Hogwild's workers share. None for no Hogwild.
        watts: By kind of device, power while computing and while waiting.
    """

    servers: int = option(1, arguments.whole)
    staleness: int = option(3, partial(arguments.whole, at_least=0))
    push_every: int = option(4, arguments.whole)
    fetch_every: int = option(4, arguments.whole)
    memory_bandwidth: float | None = option(None, arguments.optional_number)
    watts: Converted[Watts | str | None, Watts | None] = option(None, arguments.watts)


def list_other_methods(problem: Problem, options: OtherMethodOptions) -> list[OtherMethod]:
    """Return all other methods for a problem, in a fixed order.

    Raises:
        UsageError: The power is given for kinds of devices that the machine does not have.
    """
    check_watts(problem, options.watts)
    return [
        *_data_parallel(problem, options),
        *(_hetpipe(problem, policy, options.staleness) for policy in POLICIES),
        *_asteroid(problem, options.watts or {}),
    ]


def check_watts(problem: Problem, watts: Mapping[str, tuple[float, float]] | None) -> None:
    """Check that the machine has the kinds of devices for which power is given.

    Raises:
        UsageError: It does not.
    """
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
    row = _method(problem, "dp-all-reduce", pace, whole, detail)
    yield row.model_copy(update={"energy_joules": energy})
    served = f"{options.servers} parameter server{'s' * (options.servers > 1)}"
    yield _method(problem, "dp-synchronous", data_parallel.synchronous(workers), stateless, served)
    yield _method(problem, "dp-asynchronous", data_parallel.asynchronous(workers), stateless, served)
    stale = data_parallel.stale_synchronous(workers, options.staleness)
    yield _method(problem, "dp-stale-synchronous", stale, stateless, f"{served}, bound {options.staleness}")
    periods = f"{served}, push every {options.push_every}, fetch every {options.fetch_every}"
    downpour = data_parallel.asynchronous(workers, options.push_every, options.fetch_every)
    yield _method(problem, "dp-downpour", downpour, stateless, periods)
    yield _hogwild(problem, workers, options, stateless)


def _hogwild(problem: Problem, workers: Workers, options: OtherMethodOptions, memory: int) -> OtherMethod:
    if options.memory_bandwidth is None:
        return OtherMethod(name="dp-hogwild", reason="memory_bandwidth of the shared weights is not given")
    if problem.gpus > problem.topology.gpus_per_node:
        return OtherMethod(name="dp-hogwild", reason="the devices share no memory: they are in several nodes")
    pace = data_parallel.hogwild(workers, options.memory_bandwidth)
    return _method(problem, "dp-hogwild", pace, memory, "weights in shared memory, no locks")


def _method(problem: Problem, name: str, pace: Pace, memory: int, detail: str) -> OtherMethod:
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
    """Return the workers of a data-parallel plan.

    Each computes its part of the global batch for one gradient.
    """
    space, config, n = problem.space, plan.config, problem.gpus
    recomputes = 0 if plan.recompute[0] == "never" else 1
    seconds = {}
    for kind in problem.topology.kinds:
        costs = space.kind_table(kind, -(-config.micro_batch_size // n)).costs
        forward, backward = costs.forward_seconds.sum(), costs.backward_seconds.sum()
        micro_batch_seconds = float((1 + recomputes) * forward + backward) * kind.seconds_scale
        seconds[kind] = config.micro_batches * micro_batch_seconds
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
        memory_bytes=round(max(worker.memory_bytes for worker in plan.workers)),
        staleness=plan.global_staleness,
        staleness_bounded=True,
        detail=f"{format_count(len(plan.workers), 'virtual worker')} of "
        f"{format_count(len(plan.workers[0].devices), 'device')}, "
        f"{plan.concurrent} x {plan.mini_batch_size} under way in each, clock distance {distance}",
    )


def _asteroid(problem: Problem, watts: Mapping[str, tuple[float, float]]) -> Iterator[OtherMethod]:
    """Yield the plan with the least latency if its shares are unequal; otherwise it is a plan of pplan."""
    plans = [
        (plan.latency_seconds, plan, choice)
        for choice in micro_batch_choices(problem.configs)
        if (plan := find_asteroid_plan(problem, choice)) is not None
    ]
    if not plans:
        return
    _, plan, choice = min(plans, key=lambda row: row[0])
    if all(len(set(stage)) == 1 for stage in plan.samples):
        return
    config = choice.config(recomputes=False)
    proposal = Proposal(config, plan.ends, plan.devices, plan.latency_seconds)
    simulates = possible(problem.space, proposal)
    step = shared_step(problem.space, proposal, plan.samples) if simulates else plan.latency_seconds
    most, busy = shared_load(problem.space, plan, choice)
    shares = " | ".join(":".join(map(str, stage)) for stage in plan.samples[:8])
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

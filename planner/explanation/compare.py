"""Plans side by side: those of several files, or what every named planner makes of one plan's problem.

Other methods are ways to train on the same devices that are no plans of pplan, by time models of their own.
Data parallelism through all-reduces without overlap, parameter servers and shared memory
(`cost_models.data_parallel`), HetPipe's virtual workers, and Asteroid's unequal shares. They are told with
their time, memory and staleness; what staleness does to the loss is not predicted.
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
    """A plan in a comparison; where a planner has none, `reason` says why. `gap`: of the step over the best
    bound that the searches behind the plans compared proved of its problem, less 1; None where there is none.
    `estimate_seconds`: of the step as its planner counts it. `slower`: seconds a sample over those of the
    first plan, less 1. `energy_joules`: of a step, where the watts of the devices are given. The throughput
    of a GPU is that of the plan's prediction, for a transformer's configuration."""

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
        """Step time of the plan; None where there is none."""
        return None if self.plan is None else self.plan.step_seconds

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of the device that needs most."""
        return None if self.plan is None else max(self.plan.memory_bytes)


class PlanComparison(Document):
    """The plans in the order in which they were given, then what the planners made, the fastest first.

    `first_slower`: the first plan's seconds a sample over those of the best of the others, less 1.
    `other_methods`: what is no plan of pplan, by its own time model.
    """

    kind: ClassVar[str] = "comparison"

    rows: list[ComparisonRow]
    first_slower: float | None
    notes: list[str] = []
    other_methods: list[OtherMethod] = []

    def __repr__(self) -> str:
        return f"<PlanComparison of {', '.join(row.name for row in self.rows[:8])}>"

    def _repr_html_(self) -> str:
        """Of a notebook."""
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
    """The plans by their names; with the problem of the first, what all named planners make of it, too, and
    the energy of their steps where the `watts` are given."""
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
    own = [
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
    every, rate = [*own, *rows], first.mini_batch / first.prediction.step_seconds
    rates = [row.plan.samples_per_second for row in every[1:] if row.plan is not None]
    return PlanComparison(
        rows=[
            row
            if row.plan is None
            else row.model_copy(update={"slower": rate / row.plan.samples_per_second - 1})
            for row in every
        ],
        first_slower=max(rates) / rate - 1 if rates else None,
        notes=list(_differences(plans_by_name)),
        other_methods=methods,
    )


Key = tuple[str, ...]


def _problem(plan: Plan) -> Key:
    """What plans have in common of whose steps one bound tells."""
    return tuple(plan.problem.values())


def _bound(plan: Plan) -> tuple[Key, float]:
    """What was proven of all plans of the problem; 0 where there was no search, or one of some of them."""
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
"""Options that leave the search all plans of a problem, or are of the problem."""


def _proven_bound(plan: Plan, bounds: Sequence[tuple[Key, float]]) -> float:
    """The best bound on the plan's step, 0 where there is none: its own, or of a search for its problem among
    whose plans it is."""
    step, own = plan.prediction.step_seconds, plan.prediction.lower_bound_seconds
    key = _problem(plan)
    searched = plan.schedule in SEARCHED and plan.training is None
    shared = max((seconds for other, seconds in bounds if other == key and searched), default=0.0)
    if 0 < shared <= step * (1 + TIE):
        return shared
    return 0.0 if plan.is_fixed_partition else own


def _row(name: str, plan: PlanRow, bound: float, **figures: Any) -> ComparisonRow:
    """A plan against a bound, 0 where there is none, with other figures."""
    step = plan.step_seconds
    gap = max(step / bound - 1, 0.0) if 0 < bound <= step * (1 + TIE) else None
    return ComparisonRow(name=name, plan=plan, gap=gap, **figures)


def _of_planners(context: ExplainContext, answer: JointSearchResult, watts: Watts) -> list[ComparisonRow]:
    """The joint search, and each named planner; those without a plan last."""
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
        # That of the planner which proposed the best plan is told in its own row.
        estimate_seconds=None if name == BEST else plan.proposal.estimate_seconds,
        energy_joules=energy_joules(context.problem.topology, busy, step, watts),
    )


def _differences(plans_by_name: Sequence[tuple[str, Plan]]) -> Iterator[str]:
    """Settings in which the plans differ, so that their figures cannot be compared directly."""
    (first, own), *others = plans_by_name
    for name, plan in others:
        if plan.model != own.model:
            yield f"{name} is for {plan.model}, {first} for {own.model}"
        elif plan.profile.sha256 != own.profile.sha256:
            yield f"{name} was made from another profile than {first}"
        if plan.mini_batch != own.mini_batch:
            yield f"{name} has global batch {plan.mini_batch}, {first} {own.mini_batch}: compare samples/s"
        if plan.topology != own.topology:
            yield f"{name} is for {plan.topology or 'an unknown machine'}"
        elif plan.problem["machine"] != own.problem["machine"]:
            yield f"{name} is for a machine of other figures than that of {first}"
        states = [field for field in _STATES if plan.problem[field] != own.problem[field]]
        if states:
            one, two = (", ".join(f"{key} {of.problem[key]}" for key in states) for of in (plan, own))
            yield f"{name} has {one}, {first} {two}: memory and time are not compared alike"


_STATES = ("runtime", "optimizer", "precision", "gradients", "ZeRO")
"""Of a plan's problem, what its memory and its schedules depend on."""


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


@options_class
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
    watts: Converted[Watts | str | None, Watts | None] = option(None, arguments.watts)


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

"""A candidate as a plan: its record without comparisons, its stages and prediction, and what limits them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil, inf
from typing import Literal

from ..cost_models.errors import DefectError
from ..cost_models.machines import is_gpu
from ..cost_models.memory import repeat_word, round_ledger
from ..cost_models.quantities import format_bytes
from ..cost_models.runtime import OFFLOAD
from ..cost_models.timeline import simulate
from ..cost_models.topology import Topology
from ..cost_models.topology_file import UNNAMED, to_toml
from .assembly import Assembly
from .asynchronous import ASYNCHRONOUS, assemble_candidate, steady_bubble
from .candidate import ScoredPlan
from .coverage import describe_coverage, describe_search
from .plan_file import (
    BUFFER_WARNING,
    TIE,
    DefaultMiniBatch,
    Plan,
    PlannedStage,
    PlanShape,
    Prediction,
    ProfileReference,
    Recompute,
    SharedWeight,
)
from .plan_options import PlanOptions
from .plan_simulation import optimizer_step
from .problem import Problem
from .scoring import assemble, write_order
from .search.branch_and_bound import SearchResult
from .search.space import Space, divide_batch


def plan_without_comparison(
    problem: Problem, best: ScoredPlan, result: SearchResult, *, model: str, profile: ProfileReference
) -> Plan:
    """A candidate as a plan, without what it is compared with."""
    topology = problem.topology
    return Plan(
        **dict(plan_shape(best)),
        model=model,
        mini_batch=problem.mini_batch,
        order=write_order(best.proposal),
        optimizer=problem.options.optimizer,
        precision=problem.precision.name,
        gradient_dtype=problem.precision.gradient_dtype,
        zero=problem.options.zero,
        runtime=problem.options.runtime,
        gpus=topology.gpus,
        gpus_per_node=topology.gpus_per_node,
        device_kind=_device_kind(topology, profile),
        topology=topology.describe(),
        machine=to_toml(topology),
        stages=plan_stages(problem.space, best),
        tied=shared_weights(problem.space, best),
        prediction=_prediction(problem, best, result),
        options=_settled(problem),
        searched=describe_search(problem),
        default_mini_batch=_default_mini_batch(problem),
        layer_names=list(problem.chain.names),
        profile=profile,
    )


def _settled(problem: Problem) -> PlanOptions:
    """The options; where stages may offload, with the bandwidth that was planned with."""
    host = problem.space.host
    return problem.options if host is None else replace(problem.options, host_bandwidth=host.bandwidth)


def _device_kind(topology: Topology, profile: ProfileReference) -> Literal["GPU", "CPU"]:
    measured_on_cpu = profile.device.split(":")[0] == "cpu"
    return "CPU" if measured_on_cpu and not any(is_gpu(kind.name) for kind in topology.kinds) else "GPU"


def _prediction(problem: Problem, best: ScoredPlan, result: SearchResult) -> Prediction:
    step, bound = best.step_seconds, _bound(best, result.bound_seconds)
    sizes = {divide_batch(best.config.micro_batch_size, count) for count in best.proposal.replicas}
    off = [problem.chain.uncertainty_at(size) for size in sizes]
    shares = [share for share in off if share is not None]
    interval = None
    if problem.space.has_spread:
        from .robust.resampling import estimate_interval  # most profiles have no spread

        interval = estimate_interval(problem.space, best)
    assembly = assemble(problem.space, best.proposal, best.recompute)
    update = optimizer_step(assembly, best.config.micro_batches)
    return Prediction(
        step_seconds=step,
        samples_per_second=problem.mini_batch / step,
        bubble=bubble(problem.space, best),
        lower_bound_seconds=bound,
        gap=step / bound - 1,
        exact=result.exact,
        bound_covers=describe_coverage(problem, result),
        root_bound_seconds=_bound(best, result.root_bound_seconds),
        uncertainty=max(shares) if shares else None,
        low_seconds=None if interval is None else interval.low_seconds,
        high_seconds=None if interval is None else interval.high_seconds,
        optimizer_seconds=None if update is None else update.seconds,
    )


def _bound(best: ScoredPlan, bound: float) -> float:
    """The bound, less what is rounding. Raises DefectError for one above the step."""
    if bound > best.step_seconds * (1 + TIE):
        raise DefectError(f"a bound of {bound!r} s for a plan ({best.config}) of {best.step_seconds!r} s")
    return min(bound, best.step_seconds)


def list_machine_warnings(problem: Problem) -> list[str]:
    """Warnings about unknown figures of the machine."""
    if problem.options.memory_limit is not None:
        return []
    return [
        f"the memory of {'the devices' if kind.name == UNNAMED else kind.name} is not known: no plan is "
        "refused for what it holds; `memory` gives it"
        for kind in problem.topology.kinds
        if kind.memory_bytes is None
    ]


def list_search_warnings(problem: Problem, *, exact: bool) -> list[str]:
    """Warnings about a search of a part of the request, or one that the time limit ended before its proof.

    Args:
        problem: The problem, after its search.
        exact: The answer is proven to be the best of all that were allowed. Then the time did not decide it.
    """
    warnings = []
    if problem.unsearched_reason:
        searched = " and ".join(problem.schedules)
        warnings.append(
            f"schedule={problem.options.schedule!r}: only {searched} "
            f"{'was' if len(problem.schedules) == 1 else 'were'} searched, as {problem.unsearched_reason}"
        )
    if exact or not problem.budget.was_interrupted:
        return warnings
    return [
        *warnings,
        f"the time limit of {problem.options.time_limit:g} s ended the search: on another run or machine "
        "the answer may be another; `time_limit` gives more",
    ]


def list_buffer_warnings(problem: Problem, assembly: Assembly) -> list[str]:
    """That a device of a plan for any runtime may lack room in PyTorch's pipelining, which has buffers for
    what it receives in all micro-batches of a step (see `receive_ahead`)."""
    others = assembly.program.splits_backward or not assembly.schedule.synchronous
    if problem.runtime is not None or others:
        return []
    ahead = replace(assembly, receives_ahead=True)
    beyond, device = max(
        (sum(ahead.ledger(device).values()) - problem.space.limit(ranks), -device)
        for device, ranks in enumerate(assembly.ranks)
    )
    if beyond <= 0:
        return []
    return [
        f"{BUFFER_WARNING}{assembly.ranks[-device][0]} needs {format_bytes(beyond)} more than "
        f"its limit: it has buffers for what a stage receives in all {assembly.program.micro_batches} "
        "micro-batches of a step; `runtime` torch plans with them"
    ]


def _default_mini_batch(problem: Problem) -> DefaultMiniBatch | None:
    """How the global batch was chosen; None where it was given."""
    if problem.options.mini_batch is not None:
        return None
    return DefaultMiniBatch(samples_per_device=problem.samples_per_device, others=[])


def plan_stages(space: Space, plan: ScoredPlan) -> list[PlannedStage]:
    """The parts of the layers in order. Where a device has several, the memory is that of all of them."""
    assembly = assemble_candidate(space, plan)
    forward, backward = assembly.by_place("forward"), assembly.by_place("backward")
    shares = assembly.first_shares("forward")
    mixed = plan_recompute(plan) == "selective"
    stages = []
    for part, place in enumerate(assembly.program.pipes[0]):
        (first, end), mode = plan.proposal.bounds[part], plan.recompute[part]
        repeats = repeat_word(mode) != "never"
        recompute = float(shares[place.device, 0, 0] * forward[place][0]) if repeats else 0.0
        ledger = round_ledger(assembly.ledger(place.device))
        stages.append(
            PlannedStage(
                first_layer=first,
                last_layer=end - 1,
                replicas=len(plan.proposal.devices[part]),
                devices=list(plan.proposal.devices[part]),
                forward_seconds=float(forward[place][0]),
                backward_seconds=float(backward[place][0] + recompute),
                memory_bytes=sum(ledger.values()),
                memory_limit_bytes=_whole(space.limit(assembly.ranks[place.device])),
                memory=ledger,
                recompute=mode if mixed else None,
                host_bytes=_host_bytes(assembly, part) if mode == OFFLOAD else None,
            )
        )
    return stages


def _host_bytes(assembly: Assembly, part: int) -> int:
    """What a replica keeps on its host at most, of a schedule with one stage a device."""
    device, program = assembly.program.pipes[0][part].device, assembly.program
    in_flight = assembly.schedule.in_flight(device, program.devices, program.micro_batches)
    return ceil(in_flight * assembly.offloaded_bytes(part))


def energy_joules(
    topology: Topology, busy: Mapping[int, float], step: float, watts: Mapping[str, tuple[float, float]]
) -> float | None:
    """Of a step of so many seconds: `busy` seconds of each rank that is used, at the watts of its kind while
    it computes and while it waits; None where a kind has none."""
    kinds = {rank: topology.device(rank).name for rank in busy}
    if not set(kinds.values()) <= set(watts):
        return None
    power = {rank: watts[kind] for rank, kind in kinds.items()}
    return sum(
        seconds * power[rank][0] + max(step - seconds, 0.0) * power[rank][1] for rank, seconds in busy.items()
    )


def busy_seconds(stages: Iterable[PlannedStage], micro_batches: int) -> dict[int, float]:
    """By rank, what its stages compute in a step."""
    busy = dict[int, float]()
    for stage in stages:
        seconds = micro_batches * (stage.forward_seconds + stage.backward_seconds)
        for rank in stage.devices:
            busy[rank] = busy.get(rank, 0.0) + seconds
    return busy


def shared_weights(space: Space, plan: ScoredPlan) -> list[SharedWeight]:
    """The weights that several of its parts use."""
    sums = {own.name: own.seconds for own in assemble(space, plan.proposal, plan.recompute).tied_sums}
    weights = []
    for weight in space.chain.tied:
        parts = [part for part, bounds in enumerate(plan.proposal.bounds) if weight.is_used(*bounds)]
        if len(parts) > 1:
            seconds = sums.get(weight.name, 0.0)
            weights.append(
                SharedWeight(tensor=weight.name, bytes=round(weight.bytes), stages=parts, sum_seconds=seconds)
            )
    return weights


def _whole(limit: float) -> int | None:
    return None if limit == inf else int(limit)


_PLAN_WORDS: Mapping[str, Recompute] = {"never": "never", "always": "always", "except_last": "except_last"}


def plan_recompute(plan: ScoredPlan) -> Recompute:
    """The plan's word: `selective` where the stages differ, run their first layers again, or offload."""
    modes = set(plan.recompute)
    return _PLAN_WORDS.get(modes.pop(), "selective") if len(modes) == 1 else "selective"


def run_in_words(plan: ScoredPlan) -> str:
    """Its micro-batches, schedule and recomputation: `32 x 8, 1f1b, recompute never`."""
    config = plan.config
    virtual = f", {config.virtual_stages} virtual stages" if config.virtual_stages > 1 else ""
    words = set(plan.recompute)
    mode = (words.pop() if len(words) == 1 else "selective").replace("_", " ")
    return f"{config.micro_batches} x {config.micro_batch_size}, {config.schedule}{virtual}, recompute {mode}"


def bubble(space: Space, plan: ScoredPlan) -> float:
    """Idle share of the devices' time; of an asynchronous schedule in its steady state."""
    if plan.config.schedule in ASYNCHRONOUS:
        return steady_bubble(space, plan)
    assembly = assemble(space, plan.proposal, plan.recompute)
    return simulate(assembly.program, assembly.costs()).bubble


class PlanSummary(PlanShape):
    """A plan and its predicted step in a row. By part of the layers, in order: `balance`, `devices` and
    `stage_recompute`."""

    step_seconds: float
    samples_per_second: float
    replicas: list[int]
    devices: list[list[int]]
    stage_recompute: list[str]


def plan_shape(plan: ScoredPlan) -> PlanShape:
    """The layers of each part of a scored plan, and how they run."""
    config = plan.config
    return PlanShape(
        balance=[end - first for first, end in plan.proposal.bounds],
        micro_batches=config.micro_batches,
        micro_batch_size=config.micro_batch_size,
        schedule=config.schedule,
        virtual_stages=config.virtual_stages,
        recompute=plan_recompute(plan),
    )


def summarize(plan: ScoredPlan) -> PlanSummary:
    """The summary of a scored plan."""
    return PlanSummary(
        **dict(plan_shape(plan)),
        step_seconds=plan.step_seconds,
        samples_per_second=plan.config.mini_batch / plan.step_seconds,
        replicas=list(plan.proposal.replicas),
        devices=[list(ranks) for ranks in plan.proposal.devices],
        stage_recompute=list(plan.recompute),
    )

"""A scored plan as a plan file, without what it is compared with: what no search is needed for."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..cost_models.errors import DefectError
from ..cost_models.machines.catalogue import is_gpu
from ..cost_models.machines.topology_options import UNNAMED
from ..cost_models.machines.topology_text import to_toml
from ..cost_models.quantities import format_bytes
from ..cost_models.topology import Topology
from .assembly import Assembly
from .candidate import ScoredPlan
from .coverage import describe_coverage, describe_search
from .plan_file import Plan
from .plan_options import PlanOptions
from .plan_records import BUFFER_WARNING, TIE, DefaultMiniBatch, Prediction, ProfileReference
from .plan_stages import bubble, optimizer_step, plan_recompute, plan_stages, shared_weights
from .problem import Problem
from .scoring import assemble, write_order
from .search.branch_and_bound import SearchResult
from .search.space import divide_batch


def plan_without_comparison(
    problem: Problem, best: ScoredPlan, result: SearchResult, *, model: str, profile: ProfileReference
) -> Plan:
    """A candidate as a plan, without what it is compared with."""
    topology, config = problem.topology, best.config
    stages = plan_stages(problem.space, best)
    return Plan(
        model=model,
        balance=_balance(best),
        mini_batch=problem.mini_batch,
        micro_batches=config.micro_batches,
        micro_batch_size=config.micro_batch_size,
        schedule=config.schedule,
        order=write_order(best.proposal),
        virtual_stages=config.virtual_stages,
        optimizer=problem.options.optimizer,
        precision=problem.precision.name,
        gradient_dtype=problem.precision.gradient_dtype,
        zero=problem.options.zero,
        recompute=plan_recompute(best),
        runtime=problem.options.runtime,
        gpus=topology.gpus,
        gpus_per_node=topology.gpus_per_node,
        device_kind=_device_kind(topology, profile),
        topology=topology.describe(),
        machine=to_toml(topology),
        stages=stages,
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


def _balance(best: ScoredPlan) -> list[int]:
    return [end - first for first, end in best.proposal.bounds]


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

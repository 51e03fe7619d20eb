"""From costs and options to a plan file, with its comparisons, warnings and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ..cost_models.errors import DefectError, UsageError
from ..cost_models.layer import Chain
from ..cost_models.machines.catalogue import is_gpu
from ..cost_models.machines.topology_text import to_toml
from ..cost_models.quantities import format_count
from ..cost_models.topology import Topology
from .alternatives import find_alternatives, score_baselines
from .candidate import ScoredPlan
from .coverage import describe_coverage, describe_search
from .infeasible import no_plan_fits
from .joint_search import JointSearchResult, find_best_plan
from .mini_batch import choose_mini_batch
from .plan_file import Plan
from .plan_options import PlanOptions
from .plan_records import TIE, Prediction, ProfileReference
from .plan_simulation import align_profiles
from .plan_stages import bubble, list_prediction_limits, plan_recompute, plan_stages, shared_weights
from .problem import Problem
from .robust.resampling import estimate_interval
from .scoring import assemble, write_order
from .search.branch_and_bound import SearchResult
from .search.space import divide_batch


def solve_problem(
    chain: Chain,
    topology: Topology,
    options: PlanOptions,
    *,
    model: str,
    profile: ProfileReference,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
    profiles: Mapping[str, Chain] | None = None,
) -> Plan:
    """The fastest plan of the searched space, with what was proven and what it is compared with.

    `profiles`: the same layers as measured on the kinds of devices that have a profile of their own, by its
    name in the topology. Raises UsageError for options that cannot be, InfeasibleError where nothing fits.
    """
    problem = build_problem(chain, topology, options, profile, profiles or {}).with_time_limit()
    answer = find_best_plan(problem)
    if answer.best is None:
        raise no_plan_fits(problem)
    return build_plan(problem, answer, model=model, profile=profile, notes=notes, warnings=warnings)


def build_problem(
    chain: Chain,
    topology: Topology,
    options: PlanOptions,
    profile: ProfileReference,
    profiles: Mapping[str, Chain],
) -> Problem:
    """The problem. Raises UsageError, for profiles that are missing or of other layers, too."""
    own = align_profiles(chain, profiles)
    for kind in topology.kinds:
        if kind.profile is not None and kind.profile not in own:
            raise UsageError(
                f"the topology says that {kind.name} has a profile of its own, {kind.profile}: it is missing",
                "Give that profile, or the device's speed relative to the profiled one.",
            )
    return Problem(chain, topology, options, profile.dtype, own, amp=profile.amp, device=profile.device)


def build_plan(
    problem: Problem,
    answer: JointSearchResult,
    *,
    model: str,
    profile: ProfileReference,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Plan:
    """The plan file of an answer that holds a plan; `warnings` and `notes` come before its own."""
    best = answer.best
    if best is None:
        raise no_plan_fits(problem)
    baselines, alternatives = score_baselines(problem, answer), find_alternatives(problem, answer)
    plan = plan_without_comparison(problem, best, answer.result, model=model, profile=profile)
    own = list(list_prediction_limits(assemble(problem.space, best.proposal, best.recompute)))
    compared = {row.size for row in baselines if row.size is not None}
    compared |= {divide_batch(other.micro_batch_size, other.replicas) for other in alternatives}
    others = [text for text in _outside(problem, compared) if text not in own]
    return plan.model_copy(
        update={
            "baselines": [row.record for row in baselines],
            "alternatives": alternatives,
            "warnings": list(dict.fromkeys([*warnings, *list_problem_warnings(problem), *own])),
            "notes": list(dict.fromkeys([*notes, *_notes(problem), *others])),
        }
    )


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
        options=problem.options,
        searched=describe_search(problem),
        default_mini_batch=choose_mini_batch(problem, try_others=False),
        layer_names=list(problem.chain.names),
        profile=profile,
    )


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
    interval = estimate_interval(problem.space, best)
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
    )


def _bound(best: ScoredPlan, bound: float) -> float:
    """The bound, less what is rounding. Raises DefectError for one above the step."""
    if bound > best.step_seconds * (1 + TIE):
        raise DefectError(f"a bound of {bound!r} s for a plan ({best.config}) of {best.step_seconds!r} s")
    return min(bound, best.step_seconds)


def list_problem_warnings(problem: Problem) -> list[str]:
    """Warnings about unknown figures of the machine, and about a search that the time limit ended."""
    warnings = []
    if problem.options.memory_limit is None:
        warnings += [
            f"the memory of {kind.name} is not known: no plan is refused for what it holds; `memory` gives it"
            for kind in problem.topology.kinds
            if kind.memory_bytes is None
        ]
    if problem.budget.was_interrupted:
        warnings.append(
            f"the time limit of {problem.options.time_limit:g} s ended the search: on another run or machine "
            "the answer may be another; `time_limit` gives more"
        )
    return warnings


def _notes(problem: Problem) -> list[str]:
    gpus, runtime = problem.gpus, problem.runtime
    notes = [
        f"a {kind.name} is taken as {kind.speed:g} times as fast as the profiled device"
        for kind in problem.topology.kinds
        if kind.speed != 1
    ]
    if problem.precision.limitation:
        notes.append(problem.precision.limitation)
    most = problem.space.chain.max_stages
    if gpus > most and runtime is not None and runtime.replicas == "none":
        notes.append(
            f"the allowed cuts make at most {format_count(most, 'stage')}, "
            f"fewer than {format_count(gpus, 'GPU')}"
        )
    if problem.usable_gpus < gpus and runtime is not None:
        usable = format_count(problem.usable_gpus, "GPU")
        notes.append(f"{runtime.name} is one process: it reaches the {usable} of one node")
    return notes


def _outside(problem: Problem, sizes: Iterable[int]) -> list[str]:
    """What of the costs at these sizes was extrapolated."""
    space = replace(problem.space, past_largest=True)
    return [text for size in sorted(sizes) if (text := space.table(size).costs.outside)]

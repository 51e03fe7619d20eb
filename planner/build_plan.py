"""From costs and options to a plan file, with its comparisons, warnings and notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..cost_models.errors import UsageError
from ..cost_models.layer import Chain, align_profiles
from ..cost_models.memory import Recompute
from ..cost_models.quantities import format_count, format_rate
from ..cost_models.runtime import OFFLOAD
from ..cost_models.timeline import step_seconds
from ..cost_models.topology import Topology
from .alternatives import find_alternatives, larger_micro_batches, score_baselines
from .assembly import Assembly
from .candidate import Proposal, ScoredPlan
from .infeasible import no_plan_fits
from .joint_search import JointSearchResult, find_best_plan
from .plan_document import (
    list_buffer_warnings,
    list_machine_warnings,
    list_search_warnings,
    plan_without_comparison,
)
from .plan_file import FIXED_PARTITION, Partition, Plan, ProfileReference
from .plan_options import PlanOptions
from .plan_simulation import list_prediction_limits, optimizer_note
from .problem import Problem
from .scoring import assemble, fastest
from .search.branch_and_bound import SearchResult
from .search.space import divide_batch
from .search.stage_recompute import stage_modes
from .unfit import UNFIT, list_failures, memory_text, most_lacking
from .universal_bound import universal_bound


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
    return Problem(
        chain,
        topology,
        options,
        profile.dtype,
        own,
        amp=profile.amp,
        device=profile.device,
        sharers=profile.tensor_parallel,
    )


def build_plan(
    problem: Problem,
    answer: JointSearchResult,
    *,
    model: str,
    profile: ProfileReference,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
    choice: tuple[ScoredPlan, Assembly] | None = None,
    exact: bool | None = None,
) -> Plan:
    """The plan file of an answer that holds a plan; `warnings` and `notes` come before its own.

    `choice`: a plan, made ready for the simulator, that warnings and notes are to be of, where an objective
    chose another one than the fastest. `exact`: the choice is proven (default: the fastest plan is).
    """
    best = answer.best
    if best is None:
        raise no_plan_fits(problem)
    baselines, alternatives = score_baselines(problem, answer), find_alternatives(problem, answer)
    plan = plan_without_comparison(problem, best, answer.result, model=model, profile=profile)
    own_plan, assembly = choice or (best, assemble(problem.space, best.proposal, best.recompute))
    own = list(list_prediction_limits(assembly))
    limits = [*larger_micro_batches(problem, own_plan), *list_buffer_warnings(problem, assembly)]
    ended = list_search_warnings(problem, exact=answer.result.exact if exact is None else exact)
    compared = {row.size for row in baselines if row.size is not None}
    compared |= {divide_batch(other.micro_batch_size, other.replicas) for other in alternatives}
    others = [text for text in _outside(problem, compared) if text not in own]
    update = optimizer_note(assembly, own_plan.step_seconds, own_plan.config.micro_batches)
    return plan.model_copy(
        update={
            "baselines": [row.record for row in baselines],
            "alternatives": alternatives,
            "warnings": list(
                dict.fromkeys([*warnings, *list_machine_warnings(problem), *ended, *limits, *own])
            ),
            "notes": list(
                dict.fromkeys([*notes, *_notes(problem), *_offload_note(problem, own_plan), *others, *update])
            ),
        }
    )


def _offload_note(problem: Problem, plan: ScoredPlan) -> Iterator[str]:
    """What is taken for granted of copies to the host."""
    host = problem.space.host
    if host is None or OFFLOAD not in plan.recompute:
        return
    is_stated = problem.options.host_bandwidth is not None
    source = "as given" if is_stated else "an assumption: 85 % of the GPU's PCIe link, shared with none"
    yield (
        f"what stages offload goes to the host's memory, and comes back, at {format_rate(host.bandwidth)} "
        f"({source}), in turn with computing; nothing of it was measured on a GPU, and PyTorch rounds each "
        "pinned tensor up to a power of two"
    )


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
            f"fewer than {format_count(gpus, 'device')}"
        )
    if problem.usable_gpus < gpus and runtime is not None:
        usable = format_count(problem.usable_gpus, "device")
        notes.append(f"{runtime.name} is one process: it reaches the {usable} of one node")
    return notes


def _outside(problem: Problem, sizes: Iterable[int]) -> list[str]:
    """What of the costs at these sizes was extrapolated."""
    space = replace(problem.space, past_largest=True)
    return [text for size in sorted(sizes) if (text := space.table(size).costs.outside)]


def plan_partition(
    problem: Problem,
    partition: Partition,
    *,
    model: str,
    profile: ProfileReference,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Plan:
    """The partition with the best of the problem's configurations, as a plan; one that does not fit says so
    in its warnings. No search says how good it is: the bound is one on all plans with such micro-batches, of
    any schedule in the running.

    Raises UsageError for too few devices, a cut that the profile does not allow, and numbers that the
    schedule does not run.
    """
    if partition.gpus > problem.gpus:
        sharers = profile.tensor_parallel
        shared = f", which {sharers} GPUs share each" if sharers > 1 else ""
        raise UsageError(
            f"gpus={problem.gpus * sharers}: the partition takes "
            f"{format_count(partition.gpus, 'device')}{shared}",
            f"Give as many: gpus={partition.gpus * sharers}",
        )
    _check_cuts(problem, partition)
    proposals = _proposals(problem, partition)
    best = fastest(problem.space, proposals) if partition.stage_recompute is None else None
    lacking: list[str] = []
    if best is None:
        best, lacking = _best_trial(problem, proposals, partition.stage_recompute)
    schedules = dict.fromkeys((*problem.allowed_schedules, best.config.schedule))
    # One that does not fit, or that the options exclude, is none of the plans that the bound is of.
    bound = min(universal_bound(problem, schedules, best.step_seconds), best.step_seconds)
    result = SearchResult(
        best=best, bound_seconds=bound, root_bound_seconds=bound, exact=False, universal=True
    )
    plan = plan_without_comparison(problem, best, result, model=model, profile=profile)
    assembly = assemble(problem.space, best.proposal, best.recompute)
    texts = dict.fromkeys(
        [*lacking, *warnings, *list_machine_warnings(problem), *list_prediction_limits(assembly)]
    )
    all_notes = list(dict.fromkeys([*notes, *optimizer_note(assembly, best.step_seconds)]))
    return plan.model_copy(update={"searched": FIXED_PARTITION, "warnings": list(texts), "notes": all_notes})


def _check_cuts(problem: Problem, partition: Partition) -> None:
    chain = problem.chain
    together = problem.cut_chain.cut_after
    for stage, end in enumerate(partition.ends[:-1]):
        if not chain.cut_after[end - 1]:
            raise UsageError(
                f"stage {stage} ends after layer {end - 1}, {chain.names[end - 1]}, where the profile allows "
                "no cut",
                "pplan show PROFILE says why; profile with another `granularity` where the cut is real.",
            )
        if not together[end - 1]:
            raise UsageError(
                f"stage {stage} ends after layer {end - 1}, {chain.names[end - 1]}, between layers that "
                f"share a weight ({problem.untied_reason})",
                "Move the cut, or plan for another runtime: runtime='torch' trains it.",
            )


def _proposals(problem: Problem, partition: Partition) -> list[Proposal]:
    """With every configuration that its schedule runs. Raises the UsageError of the last where none does."""
    proposals: list[Proposal] = []
    refusal: UsageError | None = None
    for config in problem.configs:
        try:
            proposal = partition.proposal(config)
        except UsageError as error:
            refusal = error
            continue
        failed = next(list_failures(problem.space, proposal), None)
        if failed is None:
            proposals.append(proposal)
        else:
            refusal = UsageError(
                f"the partition cannot be run: {failed}",
                "Use other cuts, fewer `replicas`, or micro-batches of more samples (`micro_batches`).",
            )
    if refusal is not None and not proposals:
        raise refusal
    return proposals


def _best_trial(
    problem: Problem, proposals: Sequence[Proposal], words: tuple[Recompute, ...] | None
) -> tuple[ScoredPlan, list[str]]:
    """The fastest that fits; where none does, the one that lacks least, and what it lacks. `words`: of the
    stages' recomputation (None: as much as each may)."""
    trials = []
    for proposal in proposals:
        modes = words or (stage_modes(proposal.config)[-1],) * len(proposal.ends)
        assembly = assemble(problem.space, proposal, modes)
        step = float(step_seconds(assembly.program, assembly.costs())[0])
        trials.append((most_lacking(problem.space, assembly), ScoredPlan(proposal, modes, step), assembly))
    (bytes_short, device, needed), plan, assembly = min(
        trials, key=lambda trial: (max(0.0, trial[0][0]), trial[1].step_seconds)
    )
    if bytes_short <= 0:
        return plan, []
    return plan, [f"it {UNFIT}: {memory_text(assembly, device, needed, bytes_short)}"]

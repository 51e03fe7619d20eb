"""Plan files from scored plans, with comparisons, warnings and notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..cost_models.errors import DefectError, UsageError
from ..cost_models.layer import Chain, align_profiles
from ..cost_models.machines import is_gpu
from ..cost_models.memory import Recompute
from ..cost_models.quantities import format_bytes, format_count, format_rate
from ..cost_models.runtime import OFFLOAD
from ..cost_models.timeline import step_seconds
from ..cost_models.topology import Topology
from ..cost_models.topology_file import UNNAMED, to_toml
from .alternatives import baseline_row, find_alternatives, larger_micro_batches, score_baselines
from .assembly import Assembly
from .asynchronous import assemble_candidate, bubble
from .candidate import Proposal, ScoredPlan
from .coverage import describe_coverage, describe_search
from .joint_search import JointSearchResult
from .plan_file import (
    BUFFER_WARNING,
    FIXED_PARTITION,
    TIE,
    Baseline,
    DefaultMiniBatch,
    Partition,
    Plan,
    PlanRow,
    Prediction,
    ProfileReference,
    plan_shape,
)
from .plan_options import ASYNCHRONOUS, PlanOptions
from .plan_simulation import (
    list_prediction_limits,
    optimizer_note,
    optimizer_step,
    plan_stages,
    shared_weights,
)
from .problem import Problem
from .scoring import UNFIT, assemble, fastest, list_failures, memory_text, most_lacking, write_order
from .search.branch_and_bound import SearchResult
from .search.space import divide_batch
from .search.stage_recompute import stage_modes
from .universal_bound import universal_bound


def build_problem(
    chain: Chain,
    topology: Topology,
    options: PlanOptions,
    profile: ProfileReference,
    profiles: Mapping[str, Chain],
) -> Problem:
    """Return the problem.

    Args:
        chain: Costs of the layers on the profiled device.
        topology: Devices and links.
        options: Options of the plan.
        profile: Reference to the profile.
        profiles: Further profiles by the names in the topology.

    Raises:
        UsageError: A profile is missing or has other layers.
    """
    aligned = align_profiles(chain, profiles)
    for kind in topology.kinds:
        if kind.profile is not None and kind.profile not in aligned:
            raise UsageError(
                f"the topology names the profile {kind.profile} for {kind.name}, which was not given",
                "Give that profile, or state the device's speed relative to the profiled one.",
            )
    return Problem(
        chain,
        topology,
        options,
        profile.dtype,
        aligned,
        amp=profile.amp,
        device=profile.device,
        sharers=profile.tensor_parallel,
    )


def build_plan(
    problem: Problem,
    best: ScoredPlan,
    result: SearchResult,
    answer: JointSearchResult | None,
    *,
    model: str,
    profile: ProfileReference,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
    exact: bool | None = None,
) -> Plan:
    """Build the plan of a scored plan, with its comparisons, warnings and notes.

    Args:
        problem: What was asked.
        best: The scored plan: the fastest, or the one that an objective chose.
        result: What the search proved about the steps of all plans, its bound included.
        answer: The fastest plan with those of named planners, for baselines and alternatives. None for a plan
            without comparisons.
        model: Name of the model.
        profile: The profile from which the plan was made.
        notes: Notes to put first.
        warnings: Warnings to put first.
        exact: Whether `best` is proven optimal. Defaults to that of `result`.
    """
    plan = plan_without_comparison(problem, best, result, model=model, profile=profile)
    assembly = assemble_candidate(problem.space, best)
    limits = list(list_prediction_limits(assembly))
    warnings = [*warnings, *list_machine_warnings(problem), *list_norm_warnings(problem, best)]
    warnings += list_search_warnings(problem, exact=result.exact if exact is None else exact)
    compared: dict[str, list[Baseline] | list[PlanRow]] = {}
    if answer is not None:
        baselines, alternatives = score_baselines(problem, answer), find_alternatives(problem, answer)
        rows = [baseline_row(name, plan) for name, plan in baselines.items()]
        compared = {"baselines": rows, "alternatives": alternatives}
        warnings += [*larger_micro_batches(problem, best), *list_buffer_warnings(problem, assembly)]
        sizes = {
            divide_batch(plan.config.micro_batch_size, min(plan.proposal.replicas))
            for plan in baselines.values()
            if isinstance(plan, ScoredPlan)
        }
        sizes |= {divide_batch(other.micro_batch_size, other.replicas[0]) for other in alternatives}
        space = replace(problem.space, past_largest=True)
        outside = [
            text for size in sorted(sizes) if (text := space.table(size).costs.outside) and text not in limits
        ]
        update = optimizer_note(assembly, best.step_seconds, best.config.micro_batches)
        notes = [*notes, *_notes(problem, best), *outside, *update]
    texts = {"warnings": unique([*warnings, *limits]), "notes": unique(notes)}
    return plan.model_copy(update=compared | texts)


def unique(texts: Iterable[str]) -> list[str]:
    """Return the texts in order without repetitions."""
    return list(dict.fromkeys(texts))


def _notes(problem: Problem, plan: ScoredPlan) -> Iterator[str]:
    """Yield assumptions about the devices, the runtime and copies to the host."""
    gpus, runtime, host = problem.gpus, problem.runtime, problem.space.host
    for kind in problem.topology.kinds:
        if kind.speed != 1:
            yield f"a {kind.name} is assumed to be {kind.speed:g} times as fast as the profiled device"
    if problem.precision.limitation:
        yield problem.precision.limitation
    most = problem.space.chain.max_stages
    if gpus > most:
        stages, devices = format_count(most, "stage"), format_count(gpus, "device")
        yield (
            f"the allowed cuts make at most {stages}, fewer than {devices}: "
            "a profile with granularity='fine' may have more"
        )
    if problem.usable_gpus < gpus and runtime is not None:
        usable = format_count(problem.usable_gpus, "device")
        yield f"{runtime.name} is one process: it reaches the {usable} of one node"
    if host is not None and OFFLOAD in plan.recompute:
        source = "an assumption: 85 % of the GPU's PCIe link, not shared"
        if problem.options.host_bandwidth is not None:
            source = "as given"
        yield (
            f"offloaded activations are copied to the host and back at "
            f"{format_rate(host.bandwidth)} ({source}), without overlap with compute; this was not measured "
            "on a GPU, and PyTorch rounds each pinned tensor up to a power of two"
        )


def plan_partition(
    problem: Problem,
    partition: Partition,
    *,
    model: str,
    profile: ProfileReference,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Plan:
    """Build the plan of a given partition with the best of the problem's configurations.

    A plan that does not fit says so in its warnings. Nothing is searched: the bound holds for all plans with
    these micro-batches and the allowed schedules.

    Args:
        problem: What was asked.
        partition: The given partition.
        model: Name of the model.
        profile: The profile from which the plan is made.
        notes: Notes to put first.
        warnings: Warnings to put first.

    Raises:
        UsageError: Too few devices, a cut that the profile forbids, or numbers that the schedule does not
            run.
    """
    if partition.gpus > problem.gpus:
        sharers = profile.tensor_parallel
        shared = f", which {sharers} GPUs share each" if sharers > 1 else ""
        raise UsageError(
            f"gpus={problem.gpus * sharers}: the partition needs "
            f"{format_count(partition.gpus, 'device')}{shared}",
            f"Use gpus={partition.gpus * sharers}.",
        )
    _check_cuts(problem, partition)
    proposals = _proposals(problem, partition)
    best = fastest(problem.space, proposals) if partition.stage_recompute is None else None
    lacking: list[str] = []
    if best is None:
        best, lacking = _best_trial(problem, proposals, partition.stage_recompute)
    schedules = dict.fromkeys((*problem.allowed_schedules, best.config.schedule))
    # A plan that does not fit, or that the options exclude, may be faster than the bound.
    bound = min(universal_bound(problem, schedules, best.step_seconds), best.step_seconds)
    result = SearchResult(
        best=best, bound_seconds=bound, root_bound_seconds=bound, exact=False, universal=True
    )
    plan = plan_without_comparison(problem, best, result, model=model, profile=profile)
    assembly = assemble_candidate(problem.space, best)
    texts = [*lacking, *warnings, *list_machine_warnings(problem), *list_prediction_limits(assembly)]
    notes = unique([*notes, *optimizer_note(assembly, best.step_seconds)])
    return plan.model_copy(update={"searched": FIXED_PARTITION, "warnings": unique(texts), "notes": notes})


def _check_cuts(problem: Problem, partition: Partition) -> None:
    chain = problem.chain
    together = problem.cut_chain.cut_after
    for stage, end in enumerate(partition.ends[:-1]):
        if not chain.cut_after[end - 1]:
            raise UsageError(
                f"stage {stage} ends after layer {end - 1}, {chain.names[end - 1]}, where the profile allows "
                "no cut",
                "See pplan show PROFILE for the reason. Move the cut, or profile with another `granularity`.",
            )
        if not together[end - 1]:
            raise UsageError(
                f"stage {stage} ends after layer {end - 1}, {chain.names[end - 1]}, between layers that "
                f"share a weight ({problem.untied_reason})",
                "Move the cut, or plan for another runtime: runtime='torch' trains it.",
            )


def _proposals(problem: Problem, partition: Partition) -> list[Proposal]:
    """Return the partition with every configuration that its schedule runs.

    Raises the last UsageError if none exists.
    """
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
    """Return the fastest configuration that fits, else the one that lacks least memory, and what it lacks.

    `words` are the recomputation modes of the stages. None for as much recomputation as possible.
    """
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


def plan_without_comparison(
    problem: Problem, best: ScoredPlan, result: SearchResult, *, model: str, profile: ProfileReference
) -> Plan:
    """Build the plan of a scored plan without comparisons, for which `build_plan` adds them.

    If stages may offload, its options name the bandwidth that was assumed.

    Args:
        problem: What was asked.
        best: The scored plan.
        result: What the search proved.
        model: Name of the model.
        profile: The profile from which the plan is made.
    """
    topology, options, host = problem.topology, problem.options, problem.space.host
    on_cpu = profile.device.split(":")[0] == "cpu" and not any(is_gpu(kind.name) for kind in topology.kinds)
    is_default, samples = options.mini_batch is None, problem.samples_per_device
    return Plan(
        **dict(plan_shape(best)),
        model=model,
        mini_batch=problem.mini_batch,
        order=write_order(best.proposal),
        optimizer=options.optimizer,
        precision=problem.precision.name,
        gradient_dtype=problem.precision.gradient_dtype,
        zero=options.zero,
        runtime=options.runtime,
        gpus=topology.gpus,
        gpus_per_node=topology.gpus_per_node,
        device_kind="CPU" if on_cpu else "GPU",
        topology=topology.describe(),
        machine=to_toml(topology),
        stages=plan_stages(problem.space, best),
        tied=shared_weights(problem.space, best),
        prediction=_prediction(problem, best, result),
        options=options if host is None else replace(options, host_bandwidth=host.bandwidth),
        searched=describe_search(problem),
        default_mini_batch=DefaultMiniBatch(samples_per_device=samples) if is_default else None,
        layer_names=list(problem.chain.names),
        profile=profile,
    )


def _prediction(problem: Problem, best: ScoredPlan, result: SearchResult) -> Prediction:
    step, bound = best.step_seconds, _bound(best, result.bound_seconds)
    sizes = {divide_batch(best.config.micro_batch_size, count) for count in best.proposal.replicas}
    off = [problem.chain.uncertainty_at(size) for size in sizes]
    shares = [share for share in off if share is not None]
    interval = None
    if problem.space.has_spread:
        from .robust import SHARED_MEMORY, estimate_interval  # most profiles have no spread

        interval = estimate_interval(problem.space, best)
        noise = max((own for size in sizes if (own := problem.chain.whole_spread_at(size))), default=None)
        shares_memory = problem.device == "cpu" and problem.options.seconds_of is None
        if interval is not None and best.config.schedule not in ASYNCHRONOUS:
            is_shared = shares_memory and best.proposal.device_count > 1
            interval = interval.widened(step, noise, SHARED_MEMORY * is_shared)
    update = optimizer_step(assemble_candidate(problem.space, best), best.config.micro_batches)
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
    """Return the bound without rounding errors.

    Raises DefectError for a bound above the step.
    """
    if bound > best.step_seconds * (1 + TIE):
        raise DefectError(
            f"the bound {bound!r} s is above the plan's step {best.step_seconds!r} s ({best.config})"
        )
    return min(bound, best.step_seconds)


def list_machine_warnings(problem: Problem) -> list[str]:
    """Return warnings about unknown figures of the machine."""
    if problem.options.memory_limit is not None:
        return []
    return [
        f"the memory of {'the devices' if kind.name == UNNAMED else kind.name} is not known: no plan is "
        "refused for what it holds; `memory` gives it"
        for kind in problem.topology.kinds
        if kind.memory_bytes is None
    ]


LEAST_SAMPLES = 8
"""Samples from which the batch norm of a micro-batch resembles that of a whole batch."""


def list_norm_warnings(problem: Problem, best: ScoredPlan) -> list[str]:
    """Return a warning if batch norms normalise few samples.

    Batch norms inside larger layers are not known.
    """
    samples, norms = best.config.micro_batch_size // max(best.proposal.replicas), problem.chain.batch_norms
    if not norms or samples >= min(LEAST_SAMPLES, best.config.mini_batch):
        return []
    return [
        f"{norms[0]} is a batch norm: it normalises each micro-batch of {format_count(samples, 'sample')} a "
        f"replica by itself, unlike training with whole batches; min_micro_batch={LEAST_SAMPLES} gives it as "
        "many (maybe after pplan profile with larger `micro_batch_sizes`)"
    ]


def list_search_warnings(problem: Problem, *, exact: bool) -> list[str]:
    """Return warnings about a partial search, or one that the time limit ended before its proof.

    Args:
        problem: The problem, after its search.
        exact: Whether the answer is proven optimal. Then the time limit did not affect it.
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
    """Return a warning if a device lacks room for the buffers of PyTorch's pipelining (`receive_ahead`).

    A plan for a given runtime already counts them, so only plans for any runtime are checked.
    """
    not_applicable = assembly.program.splits_backward or not assembly.schedule.synchronous
    if problem.runtime is not None or not_applicable:
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

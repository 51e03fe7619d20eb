"""A partition that was made elsewhere, as a plan: what it will take under pplan's costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cost_models.errors import UsageError
from ..cost_models.memory import Recompute
from ..cost_models.quantities import format_count
from ..cost_models.schedules import find_schedule
from ..cost_models.timeline import step_seconds
from .candidate import Proposal, ScoredPlan
from .pipeline_config import PipelineConfig
from .plan_document import (
    list_machine_warnings,
    list_prediction_limits,
    optimizer_note,
    plan_without_comparison,
)
from .plan_file import FIXED_PARTITION, Plan
from .plan_records import ProfileReference
from .problem import Problem
from .scoring import assemble, fastest
from .search.branch_and_bound import SearchResult
from .search.stage_recompute import stage_modes
from .unfit import UNFIT, list_failures, memory_text, most_lacking
from .universal_bound import universal_bound


@dataclass(frozen=True)
class FixedPartition:
    """The layers before each stage's end, `virtual_stages` of them on each device, in order, and replicas;
    `devices`: the ranks, device after device with its replicas (None: from rank 0 on); `recompute`: of one
    stage a device, a word for each (None: as the configurations have it)."""

    ends: tuple[int, ...]
    virtual_stages: int = 1
    replicas: int = 1
    devices: tuple[int, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None

    @property
    def gpus(self) -> int:
        """Devices that it takes."""
        return len(self.ends) // self.virtual_stages * self.replicas

    def proposal(self, config: PipelineConfig) -> Proposal:
        """With a schedule and micro-batches.

        Raises UsageError where the schedule does not run with these numbers.
        """
        own = replace(config, virtual_stages=self.virtual_stages)
        devices = len(self.ends) // self.virtual_stages
        program = find_schedule(own.schedule).program(devices, own.micro_batches, own.virtual_stages)
        devices_in_order, count = self.devices or range(self.gpus), self.replicas
        ranks = [
            tuple(sorted(devices_in_order[place.device * count : (place.device + 1) * count]))
            for place in program.pipes[0]
        ]
        return Proposal(own, self.ends, tuple(ranks))


def plan_partition(
    problem: Problem,
    partition: FixedPartition,
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
    best = fastest(problem.space, proposals) if partition.recompute is None else None
    lacking: list[str] = []
    if best is None:
        best, lacking = _best_trial(problem, _trials(proposals, partition.recompute))
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


def _check_cuts(problem: Problem, partition: FixedPartition) -> None:
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


def _proposals(problem: Problem, partition: FixedPartition) -> list[Proposal]:
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


Trial = tuple[Proposal, tuple[Recompute, ...]]


def _trials(proposals: Sequence[Proposal], words: tuple[Recompute, ...] | None) -> list[Trial]:
    """The proposals with what each of their stages recomputes: these words, or as much as it may."""
    if words is not None:
        return [(proposal, words) for proposal in proposals]
    return [(proposal, (stage_modes(proposal.config)[-1],) * len(proposal.ends)) for proposal in proposals]


def _best_trial(problem: Problem, trials: Sequence[Trial]) -> tuple[ScoredPlan, list[str]]:
    """The fastest that fits; where none does, the one that lacks least, and what it lacks."""
    assemblies = [assemble(problem.space, *trial) for trial in trials]
    lacks = [max(0.0, most_lacking(problem.space, assembly)[0]) for assembly in assemblies]
    steps = [float(step_seconds(assembly.program, assembly.costs())[0]) for assembly in assemblies]
    index = min(range(len(trials)), key=lambda own: (lacks[own], steps[own]))
    (proposal, modes), assembly, step = trials[index], assemblies[index], steps[index]
    bytes_short, device, needed = most_lacking(problem.space, assembly)
    if bytes_short <= 0:
        return ScoredPlan(proposal, modes, step), []
    note = f"it {UNFIT}: {memory_text(assembly, device, needed, bytes_short)}"
    return ScoredPlan(proposal, modes, step), [note]

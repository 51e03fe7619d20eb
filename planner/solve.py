"""From costs and wishes to a plan: what is searched, what it is compared with, and what is said about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cost_models.layer import Chain
from ..cost_models.runtime import RUNTIMES, Runtime
from ..cost_models.schedules import SCHEDULES
from ..cost_models.topology import Topology
from .baselines import PARTITIONS, fixed_partition
from .data_parallel import DataParallel, data_parallel
from .infeasible import no_plan_fits
from .plan_file import Alternative, Baseline, Plan, PlannedStage, Prediction, ProfileReference
from .planned import data_parallel_bubble, data_parallel_stage, pipeline_bubble, pipeline_stages
from .problem import Problem, Wishes
from .search import TIE, Candidate, Found, search
from .setting import Setting, settings


def solve(
    chain: Chain,
    topology: Topology,
    wishes: Wishes,
    *,
    model: str,
    profile: ProfileReference,
    notes: Sequence[str] = (),
) -> Plan:
    """The fastest plan of the searched space, with what was proven and what it is compared with.

    The space: straight pipelines of 1 stage to as many as there are devices, every allowed cut, schedule,
    recomputation and micro-batch count that the wishes allow; and, where no schedule was asked for by name
    and the runtime runs replicas, data parallelism over all devices.

    Raises UsageError for wishes that cannot be, InfeasibleError where nothing fits.
    """
    problem = Problem(chain, topology, wishes)
    found = search(problem.space, problem.settings, problem.stage_counts)
    replicated = _replicated(problem)
    best, others = _best(problem, found, replicated)
    return Plan(
        model=model,
        balance=[stage.last_layer - stage.first_layer + 1 for stage in best.stages],
        mini_batch=problem.mini_batch,
        micro_batches=best.setting.micro_batches,
        micro_batch_size=best.setting.micro_batch_size,
        schedule=best.setting.schedule,
        optimizer=wishes.optimizer,
        recompute=best.setting.recompute,
        runtime=wishes.runtime,
        gpus=topology.gpus,
        topology=topology.describe(),
        stages=best.stages,
        prediction=_prediction(best, found, others),
        baselines=_baselines(problem, replicated),
        alternatives=_alternatives(problem, found),
        searched=problem.searched(),
        notes=[*notes, *_notes(problem, best)],
        layer_names=list(chain.names),
        profile=profile,
    )


@dataclass(frozen=True)
class _Best:
    """The plan that won."""

    setting: Setting
    stages: list[PlannedStage]
    step_seconds: float
    bubble: float


@dataclass(frozen=True)
class _Replicated:
    """Data parallelism over all devices, or why there is none."""

    plan: DataParallel | None
    reason: str


def _replicated(problem: Problem) -> _Replicated:
    if problem.gpus == 1:
        return _Replicated(None, "there is one GPU")
    recomputes, count = problem.recomputes(None), problem.wishes.micro_batches
    return _Replicated(*data_parallel(problem.space, problem.gpus, problem.mini_batch, recomputes, count))


def _best(problem: Problem, found: Found, replicated: _Replicated) -> tuple[_Best, list[float]]:
    """The best plan of the space, and the steps of the plans in it that are no straight pipelines."""
    space, straight = problem.space, found.best
    parallel = replicated.plan if problem.may_replicate else None
    others = [parallel.step_seconds] if parallel else []
    if parallel and (straight is None or parallel.step_seconds < straight.step_seconds * (1 - TIE)):
        stages, bubble = [data_parallel_stage(space, parallel)], data_parallel_bubble(space, parallel)
        return _Best(parallel.setting, stages, parallel.step_seconds, bubble), others
    if straight is None:
        raise no_plan_fits(space, problem.settings, problem.freest_settings, problem.stage_counts)
    stages, bubble = pipeline_stages(space, straight), pipeline_bubble(space, straight)
    return _Best(straight.setting, stages, straight.step_seconds, bubble), others


def _prediction(best: _Best, found: Found, others: Sequence[float]) -> Prediction:
    step, samples = best.step_seconds, best.setting.mini_batch
    bound = min(found.bound_seconds, *others, step)
    return Prediction(
        step_seconds=step,
        samples_per_second=samples / step,
        bubble=best.bubble,
        lower_bound_seconds=bound,
        gap=step / bound - 1,
        exact=bound >= step * (1 - TIE),
        root_bound_seconds=min(found.root_bound_seconds, *others, step),
    )


def _baselines(problem: Problem, replicated: _Replicated) -> list[Baseline]:
    """One GPU, data parallelism and the simple partitions, each with its best setting under the wishes."""
    alone = replace(problem.space, runtime=None)
    accumulating = settings(problem.mini_batch, ("1f1b",), problem.recomputes(None), problem.sizes)
    one = search(alone, accumulating, [1]).best
    rows = [_baseline("one-gpu", one, "does not fit"), _data_parallel_baseline(replicated)]
    space, stages = problem.space, problem.gpus
    rows += [_baseline(name, *fixed_partition(space, problem.settings, name, stages)) for name in PARTITIONS]
    return rows


def _baseline(name: str, plan: Candidate | None, reason: str) -> Baseline:
    if plan is None:
        return Baseline(name=name, step_seconds=None, reason=reason)
    return Baseline(name=name, step_seconds=plan.step_seconds, detail=str(plan.setting))


def _data_parallel_baseline(replicated: _Replicated) -> Baseline:
    plan = replicated.plan
    if plan is None:
        return Baseline(name="data-parallel", step_seconds=None, reason=replicated.reason)
    setting = plan.setting
    detail = (
        f"{setting.micro_batches} x {setting.micro_batch_size} over {plan.replicas} GPUs, "
        f"recompute {setting.recompute}"
    )
    return Baseline(name="data-parallel", step_seconds=plan.step_seconds, detail=detail)


def _alternatives(problem: Problem, found: Found) -> list[Alternative]:
    """The best straight plan for the runtimes of each kind, and the best of all stages where fewer win."""
    made = []
    for names in _kinds():
        runtime = RUNTIMES[names[0]]
        own = problem.settings_for(runtime, tuple(SCHEDULES))
        if own:
            best = search(replace(problem.space, runtime=runtime), own, problem.stage_counts)
            made += _alternative(problem, best, names, "")
    most = problem.stage_counts[-1]
    if found.best is not None and len(found.best.ends) < most:
        longest = search(problem.space, problem.settings, [most])
        made += _alternative(problem, longest, [], f"the fastest straight plan of {most} stages")
    return made


def _kinds() -> list[list[str]]:
    """Names of the runtimes, those that run the same plans together."""
    kinds: dict[Runtime, list[str]] = {}
    for name, runtime in RUNTIMES.items():
        kinds.setdefault(replace(runtime, name=""), []).append(name)
    return list(kinds.values())


def _alternative(problem: Problem, found: Found, runtimes: list[str], reason: str) -> list[Alternative]:
    if found.best is None:
        return []
    setting, step = found.best.setting, found.best.step_seconds
    stages = pipeline_stages(problem.space, found.best)
    return [
        Alternative(
            runtimes=runtimes,
            balance=[stage.last_layer - stage.first_layer + 1 for stage in stages],
            schedule=setting.schedule,
            micro_batches=setting.micro_batches,
            micro_batch_size=setting.micro_batch_size,
            recompute=setting.recompute,
            step_seconds=step,
            samples_per_second=problem.mini_batch / step,
            memory_bytes=[stage.memory_bytes for stage in stages],
            exact=found.exact,
            reason=reason,
        )
    ]


def _notes(problem: Problem, best: _Best) -> list[str]:
    chain, gpus = problem.chain, problem.gpus
    notes = []
    if problem.wishes.mini_batch is None:
        notes.append(
            f"mini-batch {problem.mini_batch}: the largest measured size ({chain.sizes[-1]}) times "
            f"{gpus} GPUs; --mini-batch sets another"
        )
    size = best.setting.micro_batch_size / best.stages[0].replicas
    outside = problem.space.table(size).costs.outside
    if outside:
        notes.append(outside)
    if gpus > chain.max_stages:
        notes.append(f"the allowed cuts make at most {chain.max_stages} stages, fewer than {gpus} GPUs")
    return notes

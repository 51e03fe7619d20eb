"""How many devices share every layer, chosen with the cuts, replicas and micro-batches.

Where costs are known of layers that 1, 2, 4 devices share, each number is a problem of its own: with the
layers' costs for it, and a topology in which every group of so many neighbours is a device. All stages share
alike. The answer is the fastest plan of all these problems, and the least of their bounds holds for every
plan of each. All have the same global batch; where none is given, that of the fewest sharers, who leave the
most devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf

from ..cost_models.errors import InfeasibleError, UsageError
from ..cost_models.quantities import either, format_seconds
from .build_plan import build_plan, list_search_warnings
from .coverage import describe_coverage, describe_search
from .infeasible import no_plan_fits
from .joint_search import JointSearchResult, find_best_plan, without_plan
from .mini_batch import smaller_defaults
from .plan_file import TIE, DefaultMiniBatch, DegreeResult, Plan, ProfileReference
from .plan_options import PlanOptions
from .problem import Problem
from .search.branch_and_bound import SearchResult


@dataclass(frozen=True)
class DegreeProblem:
    """The problem in which so many devices share every layer; `profile`, `notes` and `warnings`: of the costs
    that it is made of."""

    tensor_parallel: int
    problem: Problem
    profile: ProfileReference
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class _DegreeSolution:
    """A problem with its answer."""

    own: DegreeProblem
    answer: JointSearchResult
    result: SearchResult
    """Of the answer; where it has no plan, with the bound of all that were allowed."""

    @property
    def step_seconds(self) -> float:
        """Of the best plan; inf where there is none."""
        best = self.answer.best
        return inf if best is None else best.step_seconds


def solve_degrees(
    problems: Sequence[DegreeProblem],
    *,
    model: str,
    left_out: Sequence[DegreeResult] = (),
    compared: bool = True,
) -> Plan:
    """The fastest plan of all `problems`, those of the fewest sharers first, with a bound on the plans of
    all.

    Each may take an equal part of the time limit. `left_out`: numbers of sharers that are no problem, with
    the reason. `compared`: with the baselines and alternatives of its number of sharers. Raises
    InfeasibleError where nothing fits.
    """
    options = problems[0].problem.options
    first_solutions: list[_DegreeSolution] = []
    for first in _with_smaller_batches(problems[0]):
        usable, unusable = _same_batch(first, problems[1:])
        share = options.time_limit / len(usable)
        solved = [_solve(own, share) for own in usable]
        if min(each.step_seconds for each in solved) < inf:
            plan = _plan(solved, model, [*left_out, *unusable], compared=compared)
            return _with_request(plan, options, first.problem)
        first_solutions = first_solutions or solved
    raise _nothing_fits(first_solutions)


def _with_smaller_batches(first: DegreeProblem) -> Iterator[DegreeProblem]:
    """The problem; where no global batch was given, with half of its default one, a quarter and so on."""
    yield first
    for problem in smaller_defaults(first.problem):
        yield replace(first, problem=problem)


def _same_batch(
    first: DegreeProblem, others: Sequence[DegreeProblem]
) -> tuple[list[DegreeProblem], list[DegreeResult]]:
    """All with the first one's global batch, and those that cannot have it."""
    usable, unusable = [first], []
    for own in others:
        options = replace(own.problem.options, mini_batch=first.problem.mini_batch)
        try:
            usable.append(replace(own, problem=replace(own.problem, options=options)))
        except UsageError as error:
            unusable.append(DegreeResult(tensor_parallel=own.tensor_parallel, reason=error.what))
    return usable, unusable


def _solve(own: DegreeProblem, seconds: float) -> _DegreeSolution:
    options = replace(own.problem.options, time_limit=seconds)
    problem = replace(own.problem, options=options).with_time_limit()
    answer = find_best_plan(problem)
    result = answer.result if answer.best is not None else without_plan(problem, answer.result)
    return _DegreeSolution(replace(own, problem=problem), answer, result)


def _plan(
    solved: Sequence[_DegreeSolution], model: str, left_out: Sequence[DegreeResult], *, compared: bool
) -> Plan:
    """The best of the plans, with what holds for all."""
    best = min(solved, key=lambda each: each.step_seconds)
    own = best.own
    if best.answer.best is None:
        raise no_plan_fits(own.problem)
    plan = build_plan(
        own.problem,
        best.answer.best,
        best.answer.result,
        best.answer if compared else None,
        model=model,
        profile=own.profile,
        notes=own.notes,
        warnings=own.warnings,
    )
    rows = [*map(_row, solved), *left_out]
    notes = [_words(row) for row in rows if row.tensor_parallel != own.tensor_parallel]
    prediction = plan.prediction.model_copy(update=_proof(plan, solved))
    ended = [
        text for each in solved for text in list_search_warnings(each.own.problem, exact=prediction.exact)
    ]
    return plan.model_copy(
        update={
            "sharing": sorted(rows, key=lambda row: row.tensor_parallel),
            "prediction": prediction,
            "warnings": list(dict.fromkeys([*plan.warnings, *ended])),
            "searched": _of_all(solved, lambda each: describe_search(each.own.problem)),
            "notes": [*plan.notes, *notes],
        }
    )


def _proof(plan: Plan, solved: Sequence[_DegreeSolution]) -> dict[str, object]:
    """Of the prediction: what holds for the plans of every number of sharers."""
    own = plan.prediction
    bound = min(own.lower_bound_seconds, *(each.result.bound_seconds for each in solved))
    exact = bound >= own.step_seconds * (1 - TIE)
    bound = own.step_seconds if exact else bound
    roots = [each.result.root_bound_seconds for each in solved]
    return {
        "lower_bound_seconds": bound,
        "root_bound_seconds": min(bound, own.root_bound_seconds or bound, *roots),
        "gap": own.step_seconds / bound - 1,
        "exact": exact,
        "bound_covers": _of_all(solved, lambda each: describe_coverage(each.own.problem, each.result)),
    }


def _of_all(solved: Sequence[_DegreeSolution], describe: Callable[[_DegreeSolution], str]) -> str:
    """What is said of the plans of each number of sharers; once, where it is the same of all."""
    parts = {each.own.tensor_parallel: describe(each).split(", ") for each in solved}
    columns = zip(*(own[::-1] for own in parts.values()), strict=False)
    same = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    ends = next(iter(parts.values()))
    tail, heads = ", ".join(ends[len(ends) - same :]), {n: own[: len(own) - same] for n, own in parts.items()}
    if not any(heads.values()):
        return f"every layer on {either(list(heads))} devices; {tail}"
    words = [f"{n}: {', '.join(own)}" for n, own in heads.items()]
    return f"every layer on {'; or on '.join(words)}" + (f"; {tail}" if tail else "")


def _row(solved: _DegreeSolution) -> DegreeResult:
    step, bound = solved.step_seconds, solved.result.bound_seconds
    return DegreeResult(
        tensor_parallel=solved.own.tensor_parallel,
        step_seconds=None if step == inf else step,
        lower_bound_seconds=None if bound == inf else min(bound, step),
        reason="" if step < inf else "no plan fits" if bound == inf else "no plan was found that fits",
    )


def _words(row: DegreeResult) -> str:
    who = "one device has" if row.tensor_parallel == 1 else f"{row.tensor_parallel} devices share"
    if row.step_seconds is None:
        return f"where {who} every layer: {row.reason}"
    return f"where {who} every layer, the best plan found takes {format_seconds(row.step_seconds)} a step"


def _with_request(plan: Plan, options: PlanOptions, first: Problem) -> Plan:
    """The plan with what was asked for, and how its global batch was chosen where none was given."""
    changes: dict[str, object] = {"options": options}
    if options.mini_batch is None:
        samples = first.samples_per_device
        changes["default_mini_batch"] = DefaultMiniBatch(samples_per_device=samples, others=[])
    return plan.model_copy(update=changes)


def _nothing_fits(solved: Sequence[_DegreeSolution]) -> InfeasibleError:
    """What the most sharers lack, who need the least memory each."""
    last = solved[-1].own
    error = no_plan_fits(last.problem)
    return InfeasibleError(
        f"where {last.tensor_parallel} devices share every layer, and where fewer do: {error.what}",
        "Use more memory or devices, or give costs of layers that more devices share.",
    )

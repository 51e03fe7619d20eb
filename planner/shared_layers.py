"""Number of devices that share every layer, chosen together with cuts, replicas and micro-batches.

If costs are known of layers that 1, 2, 4, ... devices share, each number is a problem of its own: with the
layers' costs for it, and a topology in which every group of that many neighbours is one device. All stages
share alike. The answer is the fastest plan of all problems, and the least of their bounds holds for every
plan. All have the same global batch. By default that is the one for the fewest sharers, which leave the most
devices.
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
    """The problem in which `tensor_parallel` devices share every layer.

    `profile`, `notes` and `warnings` are those of its costs.
    """

    tensor_parallel: int
    problem: Problem
    profile: ProfileReference
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class _DegreeSolution:
    """A problem with its answer."""

    source: DegreeProblem
    answer: JointSearchResult
    result: SearchResult
    """Result of the answer; without a plan, with the bound on all allowed plans."""

    @property
    def step_seconds(self) -> float:
        """Step of the best plan; inf if none exists."""
        best = self.answer.best
        return inf if best is None else best.step_seconds


def solve_degrees(
    problems: Sequence[DegreeProblem],
    *,
    model: str,
    left_out: Sequence[DegreeResult] = (),
    compared: bool = True,
) -> Plan:
    """Return the fastest plan of all problems, with a bound on the plans of all.

    Each problem may take an equal part of the time limit.

    Args:
        problems: Problems by number of sharers, fewest first.
        model: Name of the model.
        left_out: Numbers of sharers without a problem, with the reason.
        compared: Whether to add baselines and alternatives.

    Raises:
        InfeasibleError: Nothing fits.
    """
    options = problems[0].problem.options
    first_solutions: list[_DegreeSolution] = []
    for first in _with_smaller_batches(problems[0]):
        usable, unusable = _same_batch(first, problems[1:])
        share = options.time_limit / len(usable)
        solved = [_solve(degree_problem, share) for degree_problem in usable]
        if min(solution.step_seconds for solution in solved) < inf:
            plan = _plan(solved, model, [*left_out, *unusable], compared=compared)
            return _with_request(plan, options, first.problem)
        first_solutions = first_solutions or solved
    raise _nothing_fits(first_solutions)


def _with_smaller_batches(first: DegreeProblem) -> Iterator[DegreeProblem]:
    """Yield the problem.

    Without a given global batch, also with half of its default one, a quarter and so on.
    """
    yield first
    for problem in smaller_defaults(first.problem):
        yield replace(first, problem=problem)


def _same_batch(
    first: DegreeProblem, further: Sequence[DegreeProblem]
) -> tuple[list[DegreeProblem], list[DegreeResult]]:
    """Return the problems with the first one's global batch, and the reasons of those that cannot have it."""
    usable, unusable = [first], []
    for degree_problem in further:
        options = replace(degree_problem.problem.options, mini_batch=first.problem.mini_batch)
        try:
            usable.append(replace(degree_problem, problem=replace(degree_problem.problem, options=options)))
        except UsageError as error:
            unusable.append(DegreeResult(tensor_parallel=degree_problem.tensor_parallel, reason=error.what))
    return usable, unusable


def _solve(degree_problem: DegreeProblem, seconds: float) -> _DegreeSolution:
    options = replace(degree_problem.problem.options, time_limit=seconds)
    problem = replace(degree_problem.problem, options=options).with_time_limit()
    answer = find_best_plan(problem)
    result = answer.result if answer.best is not None else without_plan(problem, answer.result)
    return _DegreeSolution(replace(degree_problem, problem=problem), answer, result)


def _plan(
    solved: Sequence[_DegreeSolution], model: str, left_out: Sequence[DegreeResult], *, compared: bool
) -> Plan:
    """Return the best of the plans, with what holds for all."""
    best = min(solved, key=lambda solution: solution.step_seconds)
    degree_problem = best.source
    if best.answer.best is None:
        raise no_plan_fits(degree_problem.problem)
    plan = build_plan(
        degree_problem.problem,
        best.answer.best,
        best.answer.result,
        best.answer if compared else None,
        model=model,
        profile=degree_problem.profile,
        notes=degree_problem.notes,
        warnings=degree_problem.warnings,
    )
    rows = [*map(_row, solved), *left_out]
    notes = [_words(row) for row in rows if row.tensor_parallel != degree_problem.tensor_parallel]
    prediction = plan.prediction.model_copy(update=_proof(plan, solved))
    ended = [
        text
        for solution in solved
        for text in list_search_warnings(solution.source.problem, exact=prediction.exact)
    ]
    return plan.model_copy(
        update={
            "sharing": sorted(rows, key=lambda row: row.tensor_parallel),
            "prediction": prediction,
            "warnings": list(dict.fromkeys([*plan.warnings, *ended])),
            "searched": _of_all(solved, lambda solution: describe_search(solution.source.problem)),
            "notes": [*plan.notes, *notes],
        }
    )


def _proof(plan: Plan, solved: Sequence[_DegreeSolution]) -> dict[str, object]:
    """Return the fields of the prediction that hold for the plans of every number of sharers."""
    prediction = plan.prediction
    bound = min(prediction.lower_bound_seconds, *(solution.result.bound_seconds for solution in solved))
    exact = bound >= prediction.step_seconds * (1 - TIE)
    bound = prediction.step_seconds if exact else bound
    roots = [solution.result.root_bound_seconds for solution in solved]
    return {
        "lower_bound_seconds": bound,
        "root_bound_seconds": min(bound, prediction.root_bound_seconds or bound, *roots),
        "gap": prediction.step_seconds / bound - 1,
        "exact": exact,
        "bound_covers": _of_all(
            solved, lambda solution: describe_coverage(solution.source.problem, solution.result)
        ),
    }


def _of_all(solved: Sequence[_DegreeSolution], describe: Callable[[_DegreeSolution], str]) -> str:
    """Return the descriptions of all solutions; equal endings are stated once."""
    parts = {solution.source.tensor_parallel: describe(solution).split(", ") for solution in solved}
    columns = zip(*(words_of_number[::-1] for words_of_number in parts.values()), strict=False)
    same = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    ends = next(iter(parts.values()))
    tail, heads = (
        ", ".join(ends[len(ends) - same :]),
        {n: words_of_number[: len(words_of_number) - same] for n, words_of_number in parts.items()},
    )
    if not any(heads.values()):
        return f"every layer on {either(list(heads))} devices; {tail}"
    words = [f"{n}: {', '.join(words_of_number)}" for n, words_of_number in heads.items()]
    return f"every layer on {'; or on '.join(words)}" + (f"; {tail}" if tail else "")


def _row(solved: _DegreeSolution) -> DegreeResult:
    step, bound = solved.step_seconds, solved.result.bound_seconds
    return DegreeResult(
        tensor_parallel=solved.source.tensor_parallel,
        step_seconds=None if step == inf else step,
        lower_bound_seconds=None if bound == inf else min(bound, step),
        reason="" if step < inf else "no plan fits" if bound == inf else "no plan was found that fits",
    )


def _words(row: DegreeResult) -> str:
    who = "one device has" if row.tensor_parallel == 1 else f"{row.tensor_parallel} devices share"
    if row.step_seconds is None:
        return f"if {who} every layer: {row.reason}"
    return f"if {who} every layer, the best plan found takes {format_seconds(row.step_seconds)} a step"


def _with_request(plan: Plan, options: PlanOptions, first: Problem) -> Plan:
    """Return the plan with the request, and how its default global batch was chosen."""
    changes: dict[str, object] = {"options": options}
    if options.mini_batch is None:
        samples = first.samples_per_device
        changes["default_mini_batch"] = DefaultMiniBatch(samples_per_device=samples, others=[])
    return plan.model_copy(update=changes)


def _nothing_fits(solved: Sequence[_DegreeSolution]) -> InfeasibleError:
    """Return the error for the most sharers, which need the least memory each."""
    last = solved[-1].source
    error = no_plan_fits(last.problem)
    return InfeasibleError(
        f"if {last.tensor_parallel} or fewer devices share every layer: {error.what}",
        "Use more memory or devices, or profile layers that more devices share.",
    )

"""Every function of planner/ that returns a bound, and the check that holds it against all plans.

Names are those of `functions_about_bounds`: file, class and function. A function that is about bounds and
not in this list is a mistake: `tests/proofs` fails until it is registered, and reached by the attack.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

STEP = "bound, exact"
LATE = "bound, exact of throughput"
AIM = "objective's bound, objective exact"
MEMORY = "memory bound, bound, exact"
UNFINISHED = "unfinished plans, bound, exact"
PARTED = "parted layers, bound, exact"
REACHED = "furthest ends, bound, exact"
EXPLAINED = "what-if, second best, other stages"

BOUNDS: dict[str, str] = {
    "universal_bound.py:_simple_bound": STEP,
    "universal_bound.py:_pipeline_bound": STEP,
    "universal_bound.py:_is_straight": "which schedules `search.bound` serves",
    "universal_bound.py:PlanSet._launches": STEP,
    "universal_bound.py:PlanSet._longest_layer": STEP,
    "universal_bound.py:PlanSet.simple": STEP,
    "alternatives.py:_alternative": "alternatives",
    "alternatives.py:_for_runtimes": "alternatives",
    "alternatives.py:_interleaved_alternatives": "alternatives",
    "explanation/explain_context.py:resolve": EXPLAINED,
    "explanation/step_limits.py:_without_memory_limit": EXPLAINED,
    "explanation/rivals.py:_other_devices": EXPLAINED,
    "explanation/rivals.py:_rival": EXPLAINED,
    "explanation/rivals.py:_without": EXPLAINED,
    "explanation/rivals.py:_without_cut": EXPLAINED,
    "explanation/explanation.py:_solve_what_if": EXPLAINED,
    "joint_search.py:find_best_plan": STEP,
    "joint_search.py:_bound_of_allowed": STEP,
    "joint_search.py:joint_search": STEP,
    "joint_search.py:with_bound": STEP,
    "coverage.py:is_searched": STEP,
    "scoring.py:_score_trials": STEP,
    "scoring.py:busiest_seconds": STEP,
    "objectives/least_cost.py:least_cost": AIM,
    "objectives/least_cost.py:_CostSearch._work_cost": AIM,
    "objectives/least_cost.py:_CostSearch._bound": AIM,
    "objectives/frontier.py:_point": "frontier's bound, frontier's point",
    "objectives/least_memory.py:least_memory": AIM,
    "objectives/throughput.py:_join_bounds": LATE,
    "objectives/throughput.py:fastest_asynchronous": LATE,
    "objectives/steady_search.py:SteadySearch.fastest": LATE,
    "cut_search/shape_search.py:search_shapes": LATE,
    "search/branch_and_bound.py:search": STEP,
    "search/branch_and_bound.py:_BranchAndBound.run": STEP,
    "search/branch_and_bound.py:_BranchAndBound._explore": "stopped, bound, exact",
    "search/bounds_gpipe.py:GPipeBound.root": STEP,
    "search/bounds_gpipe.py:GPipeBound.rows": STEP,
    "search/bounds_gpipe.py:GPipeBound.extend": STEP,
    "search/bounds_gpipe.py:whole_bound_gpipe": STEP,
    "search/bounds_gpipe.py:_total": STEP,
    "search/bounds_1f1b.py:RoundTripBound.root": STEP,
    "search/bounds_1f1b.py:RoundTripBound.rows": STEP,
    "search/bounds_1f1b.py:RoundTripBound.extend": STEP,
    "search/bounds_1f1b.py:whole_bound_1f1b": STEP,
    "search/subproblem.py:Subproblem.root": STEP,
    "search/subproblem.py:Subproblem.may_improve": STEP,
    "search/subproblem.py:Subproblem._bound": STEP,
    "search/subproblem.py:Subproblem.extend": STEP,
    "search/subproblem.py:_chunks": STEP,
    "search/pipelines.py:Pipelines.step_seconds": STEP,
    "search/bound.py:CompletionBound.extend": UNFINISHED,
    "search/bound.py:FamilyBound.joined": MEMORY,
    "search/bound.py:MemoryBound._improve": MEMORY,
    "search/bound.py:MemoryBound._look": MEMORY,
    "search/bound.py:MemoryBound._whole_range": MEMORY,
    "search/bound.py:MemoryBound.least": MEMORY,
    "search/bound.py:MemoryBound.single": STEP,
    "search/bound.py:PricedSums.padded": MEMORY,
    "search/bound.py:StageRange.bound": MEMORY,
    "search/bound.py:StageRange.least": MEMORY,
    "search/family.py:bounded_counts": MEMORY,
    "search/family.py:quick_bound": STEP,
    "search/family.py:shared_work": MEMORY,
    "search/stage_figures.py:make_stage_figures": MEMORY,
    "search/stage_figures.py:Choice._group": MEMORY,
    "search/stage_figures.py:Choice.exposed_allreduce": MEMORY,
    "search/stage_figures.py:Choice.least_exposed": REACHED,
    "search/stage_figures.py:Choice.all_columns": MEMORY,
    "search/subproblem.py:Subproblem._completion": STEP,
    "search/bound.py:MemoryBound.completion": STEP,
    "search/subproblem.py:Subproblem._least_sum": STEP,
    "search/fill_bound.py:fill_bound": PARTED,
    "search/fill_bound.py:_least": PARTED,
    "search/fill_bound.py:_FillProgramme.improve_price": PARTED,
    "search/fill_bound.py:_FillProgramme.bound": PARTED,
    "search/reach_bound.py:ReachBound.fewest_devices": REACHED,
    "build_plan.py:_bound": STEP,
    "build_plan.py:_prediction": STEP,
    "universal_bound.py:universal_bound": STEP,
    "universal_bound.py:work_bound": AIM,
}
"""By name, the checks that hold it against all plans."""

ATTACKED_BY_TESTS: dict[str, str] = {
    "synthesis/exchanges.py:improve_order": "tests/planner/synthesis/test_orders.py",
    "synthesis/orders.py:OrderProblem.bound": "tests/planner/synthesis/test_orders.py",
    "search/first_link.py:FirstLink.extra_seconds": "tests/planner/search/test_first_link.py",
    "cut_search/schedule_search.py:search_schedules": "tests/planner/cut_search/test_cut_search.py",
    "degrees/stage_divisions.py:lower_bound": "tests/planner/degrees/test_degree_search.py",
    "degrees/interleaved_bound.py:interleaved_bound": "tests/planner/degrees/test_degree_search.py",
    "degrees/linear_bound.py:DivisionProgramme.value": "tests/planner/degrees/test_division_search.py",
    "degrees/division_search.py:DivisionSearch.advance": "tests/planner/degrees/test_division_search.py",
    "degrees/division_search.py:DivisionSearch.bound_root": "tests/planner/degrees/test_division_search.py",
    "degrees/division_bound.py:least_division": "tests/planner/degrees/test_degree_search.py",
    "degrees/stage_degree_bound.py:stage_bound": "tests/planner/degrees/test_stage_degrees.py",
    "degrees/stage_degree_search.py:search_stage_degrees": "tests/planner/degrees/test_stage_degrees.py",
    "joint_search.py:without_plan": "tests/proofs/test_shared_layers.py",
    "shared_layers.py:solve_degrees": "tests/proofs/test_shared_layers.py",
}
"""Bounds on plans of transformers by degrees, which no problem of the attack has, on orders of stages, and on
cuts, which the attack's problems meet as well."""

NOT_BOUNDS: dict[str, str] = {
    "infeasible.py:no_plan_fits": "bytes, not seconds",
    "joint_search.py:_faster_of": "a choice of answers, which with_bound bounds",
    "cut_search/shape_search.py:ShapeSearch._extend": "a part of search_schedules",
    "cut_search/shape_search.py:ShapeSearch._finish": "a part of search_schedules",
    "cut_search/shape_search.py:ShapeSearch._least": "seconds that a bound is made of",
    "cut_search/shape_search.py:ShapeSearch.begin": "a part of search_schedules",
    "cut_search/shape_search.py:ShapeSearch.exhaust": "a part of search_schedules",
    "synthesis/exchanges.py:_Exchanges.anneal": "makes orders, which are simulated",
    "search/bound.py:MemoryBound._halve": "a part of MemoryBound.least, attacked with it",
    "search/bound.py:FamilyBound.move_prices": "prices, with any of which the bound holds",
    "search/bound.py:best_prices": "prices, with any of which the bound holds",
    "coverage.py:_is_bounded": "a part of is_searched, of large problems",
    "objectives/solve_objective.py:_robust_aim": "of a robust plan no bound is said",
    "candidate.py:Proposal.bounds": "first and last layers of stages",
    "degrees/degree_plan.py:build_degree_plan": "the bound of an answer, as a plan says it",
    "degrees/degree_search.py:_best_division": "the plan of some divisions",
    "degrees/degree_search.py:search_degrees": "the parts below are attacked",
    "degrees/interleaved_bound.py:least_interleaved": "a part of search_degrees, attacked with it",
    "degrees/stage_degree_bound.py:PipelineBounds._root": "a part of search_stage_degrees, attacked with it",
    "degrees/degree_search.py:_BestPlans.try_combination": "a part of search_degrees, attacked with it",
    "degrees/division_search.py:DivisionSearch.bound_seconds": "what DivisionSearch.advance proves",
    "degrees/linear_bound.py:_times": "a part of DivisionProgramme.value, attacked with it",
    "degrees/degree_search.py:_BestPlans.bound": "a part of search_degrees, attacked with it",
    "degrees/degree_search.py:_BestPlans._bound_any_again": "a part of search_degrees, attacked with it",
    "degrees/degree_search.py:_BestPlans.search_divisions": "a part of search_degrees, attacked with it",
    "degrees/interleaved_bound.py:mean_interleaved": "a part of lower_bound",
    "degrees/stage_degree_search.py:_Search.bound_seconds": "what search_stage_degrees returns",
    "degrees/stage_degree_search.py:_Search._follow": "a part of search_stage_degrees, attacked with it",
    "degrees/stage_degree_search.py:_Search._bounds_with": "a part of search_stage_degrees, attacked with it",
    "degrees/stage_degree_search.py:_Search._longer": "a part of search_stage_degrees, attacked with it",
    "degrees/degree_search.py:_BestPlans.fit": "plans of pipelines that did not fit, by their bound",
    "degrees/degree_search.py:DegreeAnswer.gap": "what the answer's bound leaves",
    "synthesis/synthesize.py:_candidates": "leaves out what its bound excludes",
    "explanation/rivals.py:runners_up": "which answers are told of, by the bounds that they have",
    "explanation/compare.py:_bound": "a bound that a plan's file says",
    "explanation/compare.py:_row": "a gap to a bound that a plan's file or a search says",
    "objectives/solve_objective.py:solve_objective": "copies the figures of an answer into a plan",
    "plan_file.py:Plan.row": "figures of a plan, copied",
    "weight_moves.py:assign_devices": "layers of stages, `bounds`",
    "explanation/compare.py:_problem": "what plans have in common of whose steps one bound tells",
    "explanation/compare.py:_proven_bound": "a bound that a plan's file says",
    "problem.py:Problem.any_count": "whether every number of replicas counts; attacked with many devices",
    "search/budget.py:SearchBudget.extend": "what computing bounds costs",
    "coverage.py:describe_coverage": "says in words what a bound is about",
    "build_plan.py:plan_partition": "a partition that was given: its bound is its own step",
    "objectives/solve_objective.py:_additional_space": "says in words what a bound is about",
    "search/least_exchange.py:LeastExchanges.exposed_seconds": "seconds that bounds are made of",
    "problem_grid.py:make_row": "figures of a plan, copied",
    "shared_layers.py:_row": "figures of an answer, copied",
    "build_plan.py:build_plan": "warns of an answer that is not proven",
    "objectives/frontier.py:build_frontier": "warns of points that are not proven",
    "shared_layers.py:_plan": "warns of answers that are not proven",
}
"""By name, what else is meant."""

_WORDS = re.compile(r"\bbounds?\b|\bbounded\b|\bat the least\b.*\bstep\b", re.IGNORECASE)
_NAMES = re.compile(r"bound|^root$|^extend$|^rows$")


def functions_about_bounds(planner: Path) -> Iterator[str]:
    """Functions whose name or docstring says so, and those that make a `SearchResult` or an `Aim`."""
    for path in sorted(planner.rglob("*.py")):
        for name, node in _functions(ast.parse(path.read_text(encoding="utf-8"))):
            about = _NAMES.search(node.name) or _WORDS.search(ast.get_docstring(node) or "")
            if about or _makes_claims(node):
                yield f"{path.relative_to(planner).as_posix()}:{name}"


def _functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield within + node.name, node
            yield from _functions(node, f"{within}{node.name}.<locals>.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{within}{node.name}.")


def _makes_claims(node: ast.FunctionDef) -> bool:
    """Whether it sets what is proven: an argument `bound_seconds`, `lower_bound`, `lower_bound_seconds`,
    `exact`, `proven` or the like of a call."""
    words = {"bound_seconds", "lower_bound", "lower_bound_seconds", "exact", "proven"}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            if any(keyword.arg in words for keyword in inner.keywords):
                return True
            if isinstance(inner.func, ast.Name) and inner.func.id == "SearchResult":
                return True
    return False

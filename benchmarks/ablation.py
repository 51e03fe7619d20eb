"""Measure each mechanism of the search: python benchmarks/ablation.py [NAME ...] [--problems A B ...]

Solves problems with each mechanism removed in turn, by replacing its functions or constants in the running
process. Problems are those of problems.py, by name, and the random ones of proofs.py, by kind and seed, as
`levels:3`. Each run is a process of its own. Prints, with and without the mechanism, the processor seconds,
the step and the gap, and ends with the mechanisms whose removal makes no step slower and no gap larger. Such
a mechanism must save time, or it goes. The problems that are solved by default take about twenty minutes of
processor time.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from attack.attack import quickly_solved, reference
from attack.problems import KINDS, case_of
from large_cases import Row, solve_apart, solve_case
from problems import CASES

from pplan.cost_models.errors import InfeasibleError
from pplan.planner import joint_search, other_schedules, problem, universal_bound
from pplan.planner.build_plan import build_problem
from pplan.planner.cut_search.shape_search import ShapeSearch
from pplan.planner.objectives import throughput
from pplan.planner.search import bound, branch_and_bound, near_plans, subproblem
from pplan.planner.search.bound import FamilyBound, MemoryBound
from pplan.planner.search.bounds_1f1b import RoundTripBound
from pplan.planner.search.near_plans import Incumbent
from pplan.planner.search.placements import Placement, list_placements
from pplan.planner.search.subproblem import Subproblem

DEFAULT = ("A", "B", "D", "E", "H", "levels:2", "schedules:0", "runtimes:2", "throughput:17")
NONE = "none"
PROBLEMS = {case.name: case for case in CASES}
SMALLEST = 1e-6
"""Relative difference of steps, and difference of gaps, that counts."""


class Removal(NamedTuple):
    """Replacement that removes a mechanism of the search. Removals of one name are done together.

    Attributes:
        name: The mechanism.
        purpose: What it is for.
        target: Module or class in which something is replaced.
        attribute: Name of the function or constant.
        replacement: Its value without the mechanism.
    """

    name: str
    purpose: str
    target: Any
    attribute: str
    replacement: Any


def nothing(*_: object, **__: object) -> list[Any]:
    """Replaces a function that proposes plans."""
    return []


def none(*_: object, **__: object) -> None:
    """Replaces a function that may find something."""


def zero(*_: object) -> float:
    """Replaces a bound."""
    return 0.0


def same(stages: Any, *_: object) -> Any:
    """Replaces a change of stages."""
    return stages


def close(memory_bound: Any, low: float, _: object) -> None:
    """Replaces the search for the shortest step that has room for a pipeline."""
    memory_bound._closed = min(memory_bound._closed, low)


def within(incumbent: Any, *_: object) -> float:
    """Replaces the scoring of plans near a pipeline."""
    return float(incumbent.within)


def never(*_: object) -> bool:
    """Replaces a question whether a search may begin."""
    return False


def rows(bounds: Any, _: int) -> tuple[Any, ...]:
    """Replaces the bounds on the stages that are missing."""
    return (np.zeros(bounds.choices.shape),) * 4


def first_order(topology: Any) -> list[Placement]:
    """Replaces the orders of the devices by that of their ranks."""
    return list_placements(topology)[:1]


def next_position(_: object, position: int) -> list[int]:
    """Replaces the positions at which a stage may begin."""
    return [position]


ROUND_TRIPS = dict.fromkeys(("1f1b", "gpipe"), RoundTripBound)

REMOVALS = [
    Removal("memory bound", "bound on all families", MemoryBound, "least", zero),
    Removal("memory bound", "bound on all families", MemoryBound, "left", none),
    Removal("memory bound", "bound on all families", MemoryBound, "single", zero),
    Removal("prices", "cutting planes of the memory bound", FamilyBound, "move_prices", none),
    Removal("first link", "two stages on many nodes", FamilyBound, "joined", zero),
    Removal("ranges", "halvings of the longest stage", bound, "NARROW", inf),
    Removal("traced plans", "plans near the bound", Incumbent, "__call__", within),
    Removal("completion bound", "memory bound at nodes", MemoryBound, "completion", none),
    Removal("beams", "plans to start the search from", Subproblem, "seed", none),
    Removal("fill bound", "cuts inside layers", bound, "fill_bound", zero),
    Removal("baselines", "plans to start from", joint_search, "_allowed_plans", nothing),
    Removal("round trips", "1F1B under pins", RoundTripBound, "rows", rows),
    Removal("round trips", "1F1B under pins", RoundTripBound, "root", zero),
    Removal("round trips", "1F1B under pins", subproblem, "BOUNDS", ROUND_TRIPS),
    Removal("flow shops", "GPipe under pins", subproblem, "BOUNDS", ROUND_TRIPS),
    Removal("any devices", "any devices for a stage", problem, "may_search_any", never),
    Removal("orders", "orders of the devices", problem, "list_placements", first_order),
    Removal("free devices", "stages that begin with a node", Placement, "starts_after", next_position),
    Removal("pipeline bound", "imported plans", universal_bound, "_pipeline_bound", zero),
    Removal("all cuts", "proofs of other schedules", ShapeSearch, "exhaust", none),
    Removal("cut descent", "cuts of other schedules", ShapeSearch, "descend", none),
    Removal("near shapes", "shapes of good plans first", other_schedules, "MOST_NEAR", 0),
    Removal("proposals", "other schedules", other_schedules, "propose_other_schedules", nothing),
    Removal("proposals", "other schedules", other_schedules, "propose_parts", nothing),
    Removal("pairs", "WPipe", throughput, "wpipe_shapes", nothing),
    Removal("local search", "steps between plans", branch_and_bound, "improve_plans", none),
    Removal("equal pipelines", "deep pipelines", branch_and_bound, "score_equal", none),
    Removal("reach bound", "long chains", MemoryBound, "_halve", close),
    Removal("whole nodes", "many devices", near_plans, "_whole_nodes", same),
]
PURPOSES = {removal.name: removal.purpose for removal in REMOVALS}


def solve_without(name: str, mechanism: str, limit: float) -> Row:
    """Solve a problem in this process, without a mechanism."""
    with ExitStack() as stack:
        for removal in REMOVALS:
            if removal.name == mechanism:
                stack.enter_context(patch.object(removal.target, removal.attribute, removal.replacement))
        if name not in PROBLEMS:
            return solve_random(name)
        case = PROBLEMS[name]
        return solve_case(replace(case, limit=limit * case.limit))


def solve_random(name: str) -> Row:
    """Solve the random problem of a kind and a seed, as `levels:3`."""
    kind, seed = name.split(":")
    case = case_of(int(seed), kind)
    start = time.process_time()
    asked = build_problem(case.chain, case.topology, case.options, reference(case), case.profiles)
    try:
        found = quickly_solved(case, asked).prediction
    except InfeasibleError:
        return {"seconds": round(time.process_time() - start, 1), "step": inf, "gap": 0.0}
    gap = 0.0 if found.exact else found.gap
    return {"seconds": round(time.process_time() - start, 1), "step": found.step_seconds, "gap": gap}


def problem_name(name: str) -> str:
    """Name of a problem, checked. Raises ArgumentTypeError."""
    kind, _, seed = name.partition(":")
    if name not in PROBLEMS and not (kind in KINDS and seed.isdecimal()):
        raise argparse.ArgumentTypeError(f"{name}: neither a problem of problems.py nor KIND:SEED")
    return name


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"mechanisms: {', '.join(PURPOSES)}")
    parser.add_argument("--problems", nargs="+", default=DEFAULT, type=problem_name, metavar="NAME")
    parser.add_argument("--limit", type=float, default=1.0, help="multiplies all time limits")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        name, mechanism = options.one
        print(json.dumps(solve_without(name, mechanism, options.limit)))
        return
    if unknown := set(options.names) - set(PURPOSES):
        parser.error(f"no such mechanism: {', '.join(sorted(unknown))}")

    def solve(name: str, mechanism: str) -> Row:
        return solve_apart(__file__, "--limit", str(options.limit), "--one", name, mechanism)

    whole = {name: solve(name, NONE) for name in options.problems}
    useless = []
    print(
        f"{'removed':<18}{'problem':<12}{'CPU s':>6}{'to':>7}{'step':>10}{'to':>10}{'gap':>9}{'to':>9}  for"
    )
    for mechanism in options.names or PURPOSES:
        is_useful = False
        for name, row in whole.items():
            reduced = solve(name, mechanism)
            slower = float(reduced["step"]) > float(row["step"]) * (1 + SMALLEST)
            wider = float(reduced["gap"]) > float(row["gap"]) + SMALLEST
            is_useful |= slower or wider
            print(
                f"{mechanism:<18}{name:<12}{row['seconds']:>6.1f}{reduced['seconds']:>7.1f}{row['step']:>10.6g}"
                f"{reduced['step']:>10.6g}{row['gap']:>9.3%}{reduced['gap']:>9.3%}"
                f"{' SLOWER' if slower else ''}{' WIDER' if wider else ''}  {PURPOSES[mechanism]}",
                flush=True,
            )
        useless += [] if is_useful else [mechanism]
    print(f"\nWithout effect on step and gap here: {', '.join(useless) or 'none'}")


if __name__ == "__main__":
    main()

"""Orders of small plans, with the numbers that they are made from, against golden files.

`test_orders.py` holds them to the simulator and to every order that there is; which order a rule makes, and
which an improvement finds, is here. `make golden` rewrites the files: read the diff.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from itertools import chain, repeat
from math import inf
from typing import Any

import pytest

from pplan.cost_models.memory import Recompute
from pplan.cost_models.schedules import find_schedule
from pplan.planner.candidate import Proposal
from pplan.planner.joint_search import find_best_plan
from pplan.planner.pipeline_config import PipelineConfig
from pplan.planner.search.budget import SearchBudget
from pplan.planner.synthesis import synthesize as synthesis
from pplan.planner.synthesis.deep_orders import deep_orders
from pplan.planner.synthesis.fill_orders import fill_orders
from pplan.planner.synthesis.insert_orders import insert_orders
from pplan.planner.synthesis.local_search import improve_order
from pplan.planner.synthesis.order_problem import KINDS, Lists, OrderProblem
from pplan.planner.synthesis.run_order import list_steps, run_order
from pplan.planner.synthesis.synthesize import make_candidate, synthesize

Cases = Mapping[str, Any]
Golden = Callable[[str, str], None]
AsText = Callable[[object], str]
RULES = (deep_orders, insert_orders, fill_orders)
PLANS: dict[str, tuple[str, int, tuple[int, ...], float, tuple[Recompute, ...]]] = {
    "1f1b": ("1f1b", 1, (3, 6, 9), inf, ("never",) * 3),
    "zb-h1": ("zb-h1", 1, (2, 5, 9), inf, ("never",) * 3),
    "zb-h1 in little memory": ("zb-h1", 1, (3, 6, 9), 1500, ("never",) * 3),
    "zb-h1 recomputing": ("zb-h1", 1, (4, 6, 9), 1200, ("always", "never", "never")),
    "zb-v": ("zb-v", 2, (1, 2, 4, 5, 7, 9), 2500, ("never",) * 6),
    "interleaved": ("interleaved", 2, (1, 2, 4, 5, 7, 9), inf, ("never",) * 6),
}


def line(lists: Lists) -> str:
    """By device: F0 is a forward of part 0."""
    return " | ".join(" ".join(f"{KINDS[kind]}{part}" for kind, part in own) for own in lists)


def rows(problem: OrderProblem, lists: Lists) -> dict[str, object]:
    """What the rules make, and what exchanges make of an order, with its run."""
    content: dict[str, object] = {}
    for rule in RULES:
        orders = list(rule(problem))
        runs = [run_order(problem, order) for order in orders]
        content[rule.__name__] = {
            "orders": [len(orders), sha256("\n".join(map(line, orders)).encode()).hexdigest()[:12]],
            "steps": [None if run is None else run.step for run in runs],
            "fit": "".join("01"[problem.fits(order)] for order in orders),
        }
    run = run_order(problem, lists)
    assert run is not None
    content["run"] = [run.step, run.device_ends, run.critical_path(problem)]
    for turns in (20, 300):
        is_over = chain(repeat(False, turns), repeat(True)).__next__
        improved, step = improve_order(problem, lists, problem.bound(), is_over, seed=turns)
        content[f"improved {turns}"] = [step, line(improved)]
    return content


@pytest.mark.parametrize("name", PLANS)
def test_orders(name: str, cases: Cases, golden: Golden, as_text: AsText) -> None:
    base, chunks, ends, memory, modes = PLANS[name]
    case = type(cases["two devices"])(
        40,
        9,
        4,
        {"micro_batches": 6, "mini_batch": 6},
        {"latency": 0.1, "per_node": 2},
        {"cuts": 1.1, "adding": 0.4},
    )
    if memory < inf:
        case = replace(case, machine={**case.machine, "memory": int(memory)})
    problem = case.problem(schedule=base)
    program = find_schedule(base).program(3, 6, chunks)
    devices = tuple((slot.device,) for slot in program.pipes[0])
    config = PipelineConfig(base, "by_stage", 6, 1, chunks)
    numbers = make_candidate(problem, Proposal(config, ends, devices), modes).problem
    lists = list_steps(program)
    assert lists is not None
    content: dict[str, object] = {"problem": numbers, "bound": numbers.bound()}
    if numbers.is_line:
        content |= {"most": [numbers.most_in_flight, numbers.most_behind_backward]}
    golden(f"planner/orders/{name.replace(' ', '_')}.txt", as_text(content | rows(numbers, lists)))


@pytest.mark.parametrize("memory", [None, 1500])
def test_plans_with_orders(
    memory: int | None, cases: Cases, golden: Golden, as_text: AsText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a solver: the best of a few exchanges."""
    monkeypatch.setattr(synthesis, "has_solver", lambda: False)
    monkeypatch.setattr(synthesis, "CHANGES_A_SECOND", 20_000)
    monkeypatch.setattr(SearchBudget, "of_seconds", lambda seconds: SearchBudget(1e9 * seconds))
    case = type(cases["two devices"])(
        41, 7, 3, {"micro_batches": 4, "mini_batch": 4}, {"latency": 0.1, "memory": memory}
    )
    problem = case.problem(schedule="synthesized", time_limit=0.5, max_stages=3)
    answer = find_best_plan(replace(problem, options=replace(problem.options, schedule="any")))
    plans = synthesize(problem, answer.best, answer.result.other_plans)
    lines = [f"{own.step_seconds:.7g} s, {own.config}, {own.proposal.ends}, {own.recompute}" for own in plans]
    golden(f"planner/orders/plans_{memory}.txt", as_text({"plans": lines, "before": answer.best}))

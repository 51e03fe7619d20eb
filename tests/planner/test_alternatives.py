"""The best plans for other runtimes, with searches whose plans are written down here: of which runtimes, with
which options, and what is proven of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain, TiedWeight
from pplan.cost_models.runtime import RUNTIMES
from pplan.cost_models.topology import Topology
from pplan.planner import alternatives
from pplan.planner.alternatives import (
    _answers,
    _for_runtime,
    score_baselines,
)
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.joint_search import OUT_OF_TIME, JointSearchResult
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest
from pplan.planner.search.branch_and_bound import SearchResult
from pplan.planner.search.budget import SearchBudget

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
MakeProblem = Callable[..., Problem]
Patch = pytest.MonkeyPatch


@pytest.fixture
def make_problem(make_chain: MakeChain, make_topology: MakeTopology) -> MakeProblem:
    """A function of (gpus, **options): six layers that may be cut anywhere, all with weights to train."""

    def make(gpus: int = 2, *, tied: tuple[int, ...] = (), **options: Any) -> Problem:
        weights = np.full(6, 40.0)
        chain = replace(make_chain(1, 6, cuts=1.1), parameter_bytes=weights, trainable_bytes=weights)
        if tied:
            chain = replace(chain, tied=(TiedWeight("shared", 20.0, 20.0, tied),))
        return Problem(chain, make_topology(gpus), PlanOptions(**{"mini_batch": 8, **options}))

    return make


def scored(
    problem: Problem, schedule: str, *devices: tuple[int, ...], recompute: str = "by_stage"
) -> ScoredPlan:
    """A plan of even stages on these devices, as it is simulated."""
    config = PipelineConfig(schedule, recompute, 4, 2)  # type: ignore[arg-type]
    ends = tuple(6 * (stage + 1) // len(devices) for stage in range(len(devices)))
    plan = fastest(problem.space, [Proposal(config, ends, devices)])
    assert plan is not None
    return plan


def noted(log: list[Any], entry: Any, answer: Any) -> Any:
    """The answer of a function that notes what it was asked."""
    log.append(entry)
    return answer


def answer(
    plan: ScoredPlan | None, *, exact: bool = True, by_planner: dict[str, Any] | None = None
) -> JointSearchResult:
    bound = 0.0 if plan is None else plan.step_seconds
    return JointSearchResult(SearchResult(plan, bound, bound, exact=exact), by_planner or {})


class TestAnswers:
    """Whether the best plan of all is known to be the best of a runtime."""

    def runs(self, problem: Problem, name: str, plan: ScoredPlan | None, *, exact: bool = True) -> bool:
        own = _for_runtime(problem, name, "auto" if name == "torch" else "1f1b")
        assert own is not None
        return _answers(own, answer(plan, exact=exact))

    def test_where_it_runs_it_so(self, make_problem: MakeProblem) -> None:
        problem = make_problem(4)
        plan = scored(problem, "1f1b", (0,), (1,))
        assert set(plan.recompute) == {"never"}
        runtimes = [name for name, own in RUNTIMES.items() if "1f1b" in own.schedules and not own.one_process]
        ran = {name for name in runtimes if self.runs(problem, name, plan)}
        assert ran == set(runtimes) != set()
        for name in ran:
            assert not self.runs(problem, name, plan, exact=False)
            assert not self.runs(problem, name, None)
            assert not self.runs(problem, name, scored(problem, "1f1b", (0,), (2,)))  # not in rank order
            assert not self.runs(problem, name, scored(problem, "1f1b", (0,), (1, 2)))  # unequal replicas
            assert not self.runs(problem, name, scored(problem, "zb-h1", (0,), (1,), recompute="never"))


def test_baselines_beside_the_planners(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """One device and data parallelism first, whatever planners made; where the time is over, only what was
    made before."""
    problem = make_problem()
    own, shared = scored(problem, "1f1b", (0,), (1,)), scored(problem, "1f1b", (0, 1))
    asked = list[Any]()
    monkeypatch.setattr(
        alternatives,
        "plan_with",
        lambda planner, _: noted(asked, planner.name, shared if asked else "why"),
    )
    rows = score_baselines(
        problem, answer(own, by_planner={"even": own, "megatron": "no blocks", "one-gpu": own})
    )
    assert asked == ["one-gpu", "data-parallel"]
    expected = [("one-gpu", "why"), ("data-parallel", shared), ("even", own), ("megatron", "no blocks")]
    assert list(rows.items()) == expected
    over = replace(problem, budget=SearchBudget(seconds=0.0))
    rows = score_baselines(over, answer(own, by_planner={"even": own, "one-gpu": own}))
    assert list(rows.items()) == [("one-gpu", own), ("data-parallel", OUT_OF_TIME), ("even", own)]

"""The best plans for other runtimes, with searches whose plans are written down here: of which runtimes, with
which options, and what is proven of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain, TiedWeight
from pplan.cost_models.runtime import RUNTIMES
from pplan.cost_models.topology import Topology
from pplan.planner import alternatives
from pplan.planner.alternatives import (
    CUT_SHORT,
    WORK,
    WORTH,
    _answers,
    _for_runtime,
    _in_rank_order,
    _keeps_weights,
    _kinds,
    _schedule,
    accumulating,
    find_alternatives,
    larger_micro_batches,
    score_baselines,
)
from pplan.planner.candidate import SEARCHED, PipelineConfig, Proposal, ScoredPlan
from pplan.planner.joint_search import OUT_OF_TIME, JointSearchResult, plan_with
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import find_planner
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


def test_runtimes_that_train_so_and_run_what_is_searched(make_problem: MakeProblem) -> None:
    """Each once; together those that differ in nothing but their names, and what no search asks."""
    kinds = _kinds(make_problem())
    names = [name for own in kinds for name in own]
    assert sorted(names) == sorted(
        name for name, own in RUNTIMES.items() if own.trains("float32", 0) and own.schedules & set(SEARCHED)
    )
    for own in kinds:
        first, *others = (RUNTIMES[name] for name in own)
        for other in others:
            assert other.schedules & set(SEARCHED) == first.schedules & set(SEARCHED)
            assert (other.replicas, other.one_process, other.recompute, other.tied) == (
                *(first.replicas, first.one_process, first.recompute, first.tied),
            )
    spread = {name for own in _kinds(make_problem(zero=1)) for name in own}
    assert spread == {name for name in names if 1 in RUNTIMES[name].zero}


def test_the_schedule_that_a_runtime_is_solved_with(make_problem: MakeProblem) -> None:
    """The one that is searched, where there is one; what was asked for, where something was."""
    for name, own in RUNTIMES.items():
        searched = [schedule for schedule in SEARCHED if schedule in own.schedules]
        expected = searched[0] if len(searched) == 1 else "auto"
        assert _schedule(make_problem(), own) == expected, name
        assert _schedule(make_problem(schedule="gpipe"), own) == "gpipe"
    assert _schedule(make_problem(), RUNTIMES["torchgpipe"]) == "gpipe"
    assert _schedule(make_problem(), RUNTIMES["deepspeed"]) == "1f1b"
    assert _schedule(make_problem(), RUNTIMES["torch"]) == "auto"


def test_the_problem_of_a_runtime(make_problem: MakeProblem) -> None:
    own = _for_runtime(make_problem(4, precision="fp32"), "deepspeed", "1f1b")
    assert own is not None
    assert (own.options.runtime, own.options.schedule, own.options.precision) == ("deepspeed", "1f1b", "fp32")
    assert _for_runtime(make_problem(), "torchgpipe", "1f1b") is None  # which it does not run


def test_a_problem_that_is_too_large_or_of_one_planner(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    named = make_problem(planner="even")
    assert find_alternatives(named, answer(scored(named, "1f1b", (0,), (1,)))) == []
    free = make_problem()
    plan = scored(free, "1f1b", (0,), (1,))
    assert find_alternatives(free, answer(plan)) != []
    monkeypatch.setattr(alternatives, "is_large", lambda *_: True)
    assert find_alternatives(free, answer(plan)) == []


def test_a_search_without_time_starts_from_the_answer(make_problem: MakeProblem) -> None:
    """A runtime that runs the answer gets no slower plan, whatever else was scored first."""
    problem = make_problem(4, precision="fp32")
    plan = plan_with(find_planner("data-parallel"), problem)
    alone = plan_with(find_planner("one-gpu"), problem)
    assert isinstance(plan, ScoredPlan)
    assert isinstance(alone, ScoredPlan)
    assert plan.step_seconds < alone.step_seconds
    result = SearchResult(plan, 0.0, 0.0, exact=False)
    over = replace(problem, budget=SearchBudget.of_seconds(1e-9))
    others = find_alternatives(over, JointSearchResult(result, {"one-gpu": alone}))
    steps = {name: (other.step_seconds, other.reason) for other in others for name in other.runtimes}
    step, reason = steps["torch"]
    assert (step, reason) == (plan.step_seconds, CUT_SHORT)


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_said_of_each(exact: bool, make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """The plan that was found for it, on devices in rank order, with its own samples a second and bytes;
    proven where it was, and stays on its devices."""
    problem = make_problem(4)
    asked = list[Any]()

    def search(own: Problem, seeds: list[ScoredPlan], work: float) -> SearchResult:
        del seeds
        asked.append((own.options.runtime, work))
        schedule = own.schedules[0]
        none = own.options.runtime == "deepspeed"
        devices = ((0,), (3,)) if schedule == "gpipe" else ((0,), (1,))
        mode = "always" if own.runtime is not None and not own.runtime.recompute_by_stage else "by_stage"
        plan = None if none else scored(own, schedule, *devices, recompute=mode)
        return SearchResult(plan, 0.0, 0.0, exact=exact)

    monkeypatch.setattr(alternatives, "run_search", search)
    others = find_alternatives(problem, answer(None))
    assert [work for _, work in asked] == [WORK] * len(_kinds(problem))
    assert {name for own in others for name in own.runtimes} == {
        name for own in _kinds(problem) for name in own if "deepspeed" not in own
    }
    for own in others:
        runtime = _for_runtime(problem, own.runtimes[0], own.schedule)
        assert runtime is not None
        mode = "always" if own.recompute == "always" else "by_stage"
        plan = scored(runtime, own.schedule, (0,), (1,), recompute=mode)
        assert own.exact == (exact and own.schedule != "gpipe")
        assert own.step_seconds == plan.step_seconds
        assert own.samples_per_second == pytest.approx(8 / plan.step_seconds)
        assert (own.balance, own.replicas, own.micro_batches, own.micro_batch_size) == ([3, 3], [1, 1], 4, 2)
        assert len(own.memory_bytes) == 2
        assert min(own.memory_bytes) > 0
        assert own.reason == ""


def test_plans_with_devices_left_free_between_stages(make_problem: MakeProblem) -> None:
    problem = make_problem(4)
    close, apart = scored(problem, "1f1b", (0,), (1, 2)), scored(problem, "1f1b", (0,), (2, 3))
    assert _in_rank_order(problem, close) is close
    moved = _in_rank_order(problem, apart)
    assert moved is not None
    assert moved.proposal.devices == ((0,), (1, 2))
    assert moved == close


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

    def test_where_it_does_not_recompute_so(self, make_problem: MakeProblem) -> None:
        problem = make_problem(4)
        plan = scored(problem, "1f1b", (0,), (1,))
        again = replace(plan, recompute=("always", "never"))
        for name, own in RUNTIMES.items():
            if "1f1b" in own.schedules and not own.receives_ahead:
                assert self.runs(problem, name, again) == own.recompute_by_stage

    def test_where_it_keeps_the_users_of_a_weight_together(self, make_problem: MakeProblem) -> None:
        """Layers 1 and 4 share one: a runtime that keeps no copies of it has no cut between them."""
        problem = make_problem(4, tied=(1, 4))
        plan = scored(problem, "1f1b", (0,), (1,))
        for name, own in RUNTIMES.items():
            if "1f1b" in own.schedules and not own.receives_ahead:
                assert self.runs(problem, name, plan) == (own.tied != "none")


@pytest.mark.parametrize(
    ("tied", "ends", "any_two"),
    [((0, 5), True, True), ((1, 4), True, True), ((2, 4), False, True), ((3, 5), None, True)],
)
def test_weights_that_stages_share(
    tied: tuple[int, ...], ends: bool | None, any_two: bool, make_problem: MakeProblem
) -> None:
    """Of three stages of two layers: of the first and the last one, or of others, or of one alone."""
    problem = make_problem(4, tied=tied)
    plan = scored(problem, "1f1b", (0,), (1,), (2,))
    stages = sorted({layer // 2 for layer in tied})
    for own in RUNTIMES.values():
        expected = {"any": any_two, "ends": stages == [0, 2], "none": False}[own.tied]
        assert _keeps_weights(own, problem, plan) == expected, own.name
    assert ends is None or (stages == [0, 2]) == ends
    alone = make_problem(4, tied=(2, 3))
    assert all(
        _keeps_weights(own, alone, scored(alone, "1f1b", (0,), (1,), (2,))) for own in RUNTIMES.values()
    )


def test_what_one_device_and_data_parallelism_are_free_of(make_problem: MakeProblem) -> None:
    """Of all options that leave plans out, not of what is trained."""
    problem = make_problem(
        4,
        mini_batch=None,
        micro_batches=4,
        schedule="gpipe",
        recompute="never",
        runtime="torchgpipe",
        use_all=True,
        max_stages=3,
        cut_after=("layer1",),
        pins=(("layer0", 0),),
        optimizer="adam",
        memory_limit=5000,
    )
    own = accumulating(problem).options
    assert (own.mini_batch, own.micro_batches) == (problem.mini_batch, None)
    assert (own.schedule, own.recompute, own.runtime) == ("1f1b", "auto", None)
    assert (own.use_all, own.max_stages, own.cut_after, own.pins) == (False, None, (), ())
    assert (own.optimizer, own.memory_limit) == ("adam", 5000)
    assert own.precision == problem.precision.name


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


def test_larger_micro_batches_than_were_measured(make_problem: MakeProblem, monkeypatch: Patch) -> None:
    """Twice to sixteen times as large, as the micro-batches divide, beyond the largest that was measured on
    the stage with the fewest replicas; said where they save a twentieth of the step."""
    problem = make_problem(4, mini_batch=64)
    last = problem.chain.sizes[-1]
    config = PipelineConfig("1f1b", "by_stage", 24, last)
    best = ScoredPlan(Proposal(config, (3, 6), ((0,), (1, 2))), ("never",) * 2, 10.0)
    seen = list[Any]()

    def score(space: Any, proposals: Any, limit: float, *, required: bool) -> Any:
        assert space.past_largest
        assert not required
        seen.append(([(own.config.micro_batches, own.config.micro_batch_size) for own in proposals], limit))
        return SimpleNamespace(step_seconds=5.0, config=proposals[0].config)

    monkeypatch.setattr(alternatives, "fastest", score)
    (text,) = larger_micro_batches(problem, best)
    assert seen == [([(12, 2 * last), (6, 4 * last), (3, 8 * last)], 10.0 * (1 - WORTH))]
    assert f"at most {last} samples: with {2 * last}, extrapolated, " in text
    assert "would take 5.00 s a step, 2 x faster" in text
    shared = replace(best, proposal=replace(best.proposal, devices=((0, 1), (2, 3))))
    larger_micro_batches(problem, shared)
    assert seen[1][0] == [(6, 4 * last), (3, 8 * last)]  # 2 x on two replicas was measured
    assert larger_micro_batches(make_problem(mini_batch=64, micro_batches=8), best) == []
    other = replace(best, proposal=replace(best.proposal, config=replace(config, schedule="zb-h1")))
    assert larger_micro_batches(problem, other) == []
    monkeypatch.setattr(alternatives, "fastest", lambda *_, **__: None)
    assert larger_micro_batches(problem, best) == []

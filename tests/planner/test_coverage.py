"""A bound holds for every plan that the answer was allowed to be, and says which these are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from math import inf
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import DefectError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.build_plan import build_problem
from pplan.planner.candidate import SEARCHED, Proposal, ScoredPlan
from pplan.planner.coverage import describe_coverage, is_searched, to_searched_devices
from pplan.planner.joint_search import find_best_plan, joint_search, plan_with, run_search, with_bound
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners import BASELINES, PLANNERS
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest
from pplan.planner.search.branch_and_bound import SearchResult

MakeChain = Callable[..., Chain]
REFERENCE = ProfileReference(file="toy.profile.json", sha256="0" * 64)
MIB = 2**20


def solved(chain: Chain, topology: Topology, **options: Any) -> Plan:
    return solve_objective(
        Objective(),
        build_problem(chain, topology, PlanOptions(**options), REFERENCE, {}),
        model="toy",
        profile=REFERENCE,
    )


def uneven_nodes() -> Topology:
    """Three devices and two."""
    levels = (Level("node", 3, Link(30.0, 0.0)), Level("network", None, Link(20.0, 0.0)))
    return Topology((Group(Device("toy", None), 5),), levels)


def one_fast(slow: int = 3) -> Topology:
    """A device of 2.5 times the speed, before others of its node."""
    groups = (Group(Device("fast", None, 2.5), 1), Group(Device("slow", None), slow))
    return Topology(groups, (Level("node", None, Link(20.0, 0.0)),))


def gpt() -> Chain:
    """Six blocks between an embedding and a head, as the README has them, measured at four samples."""
    rows = [(0.2, 0.5, 8.0, 0.0625, 393.0), *[(4.0, 8.0, 8.0, 224.0, 192.08)] * 6]
    rows += [(0.1, 0.2, 8.0, 8.0, 0.01), (6.1, 12.2, 196.5, 196.5, 393.0)]
    forward, backward, output, saved, parameters = np.array(rows).T
    layers = len(rows)
    nothing = np.zeros((layers, 1))
    return Chain(
        names=("embed", *(f"layers.{index}" for index in range(6)), "norm", "head"),
        sizes=(4,),
        parameter_bytes=MIB * parameters,
        trainable_bytes=MIB * parameters,
        buffer_bytes=np.zeros(layers),
        cut_after=np.append(np.ones(layers - 1, dtype=np.bool_), False),
        input_bytes_per_sample=16384.0,
        forward_seconds=1e-3 * forward[:, None],
        backward_seconds=1e-3 * backward[:, None],
        output_bytes=MIB * output[:, None],
        saved_bytes=MIB * saved[:, None],
        saved_input_bytes=nothing,
        workspace_bytes=nothing,
        forward_host_seconds=nothing,
        backward_host_seconds=nothing,
        scales_with_samples=True,
    )


def four_gpus(memory_gib: float) -> Topology:
    device = Device("toy", int(memory_gib * 2**30))
    return Topology((Group(device, 4),), (Level("node", None, Link(250e9, 5e-6)),))


TRAINING: dict[str, Any] = {"mini_batch": 64, "micro_batches": 16, "optimizer": "adam"}


class TestTheReadmesExample:
    """1F1B and GPipe are searched; of the others plans are proposed."""

    def test_what_is_searched_is_exact(self) -> None:
        plan = solved(gpt(), four_gpus(6), **TRAINING)
        assert plan.prediction.step_seconds == pytest.approx(0.431, rel=2e-3)
        assert plan.prediction.exact
        assert plan.schedule in SEARCHED
        assert "1f1b or gpipe" in plan.prediction.bound_covers
        assert "consecutive devices in rank order" in plan.prediction.bound_covers
        assert "interleaved" not in plan.prediction.bound_covers

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("options", "schedule", "seconds"),
        [
            ({"schedule": "zb-h1"}, "zb-h1", 0.4152),
            ({"runtime": "torch"}, "dualpipe-v", 0.3992),
            ({"schedule": "any"}, "dualpipe-v", 0.3932),
        ],
        ids=["named", "runtime", "any"],
    )
    def test_cuts_of_other_schedules_are_searched(
        self, options: dict[str, Any], schedule: str, seconds: float
    ) -> None:
        """Faster than 1F1B's best plan. ZB-H1 would take 0.4073 s with [3, 5, 1] layers, if there were
        6.5 GiB instead of 6 for what lies between the two parts of a backward."""
        plan = solved(gpt(), four_gpus(6), **TRAINING, **options)
        predicted = plan.prediction
        assert plan.schedule == schedule
        assert predicted.step_seconds == pytest.approx(seconds, rel=1e-3)
        assert predicted.exact
        assert "zb-h1" in predicted.bound_covers
        assert "any order" in predicted.bound_covers

    def test_naive_replicas_share_a_micro_batch(self) -> None:
        """Nothing overlaps, and four replicas take a quarter of the time all the same."""
        options = {"mini_batch": 64, "micro_batches": 16, "schedule": "naive"}
        best = solved(gpt(), four_gpus(40), **options).prediction
        even = solved(gpt(), four_gpus(40), planner="even", **options).prediction
        assert best.step_seconds < even.step_seconds / 1.9
        assert not even.exact
        assert even.lower_bound_seconds <= best.step_seconds

    def test_a_proposed_interleaved_plan_is_an_alternative(self) -> None:
        plan = solved(gpt(), four_gpus(40), mini_batch=16, micro_batches=4)
        rows = [other for other in plan.alternatives if other.schedule == "interleaved"]
        assert plan.schedule in SEARCHED
        assert rows
        for row in rows:
            assert not row.exact
            assert row.reason == "a heuristic's proposal: schedule='any' searches for better ones"

    def test_the_planner_of_interleaved_pipelines_may_be_asked(self) -> None:
        plan = solved(gpt(), four_gpus(40), mini_batch=16, micro_batches=4, planner="interleaved")
        assert plan.schedule == "interleaved"
        assert not plan.prediction.exact
        assert "interleaved" in plan.prediction.bound_covers


@pytest.mark.parametrize("seed", [11, 25])
class TestAPlannersOtherPlacement:
    """DAPPLE takes devices of both nodes for the first stage: no order that is searched does."""

    WISHES: dict[str, Any] = {"mini_batch": 16, "micro_batches": 4, "recompute": "never", "schedule": "1f1b"}

    @pytest.fixture(autouse=True)
    def orders_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As of more devices, of which not any are searched for each stage."""
        monkeypatch.setattr("pplan.planner.problem.may_search_any", lambda *_: False)

    def made(self, seed: int, make_chain: MakeChain, **more: Any) -> Problem:
        chain = make_chain(seed, 7, traffic=0.3, cuts=1.1)
        return Problem(chain, uneven_nodes(), PlanOptions(**self.WISHES, **more))

    @pytest.mark.slow
    def test_it_is_the_answer_and_not_proven(self, seed: int, make_chain: MakeChain) -> None:
        problem = self.made(seed, make_chain)
        space, dapple = run_search(problem), plan_with(PLANNERS["dapple"], problem)
        assert isinstance(dapple, ScoredPlan)
        assert space.exact
        assert dapple.step_seconds < 0.98 * space.bound_seconds
        answer = find_best_plan(problem, (*BASELINES, "dapple"))
        assert isinstance(answer.by_planner["dapple"], ScoredPlan)
        assert answer.best is not None
        assert answer.best.step_seconds <= dapple.step_seconds * (1 + 1e-9)
        assert answer.result.universal
        assert not answer.result.exact
        assert answer.result.bound_seconds < 0.999 * dapple.step_seconds

    def test_its_own_plan_has_a_bound_that_holds_for_it(self, seed: int, make_chain: MakeChain) -> None:
        named = find_best_plan(self.made(seed, make_chain, planner="dapple")).result
        assert named.best is not None
        assert not named.exact
        assert named.universal
        assert named.bound_seconds < 0.999 * named.best.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 6))
def test_no_other_assignment_of_the_devices_is_faster(seed: int, make_chain: MakeChain) -> None:
    """Of four devices of two kinds, every one, for the cuts and replicas of the answer."""
    topology = one_fast()
    chain = make_chain(seed, 6, traffic=0.2, cuts=1.1)
    problem = Problem(chain, topology, PlanOptions(mini_batch=8))
    answer = find_best_plan(problem)
    best = answer.best
    assert best is not None
    replicas = best.proposal.replicas
    others = []
    for order in permutations(range(4), sum(replicas)):
        ranks = iter(order)
        devices = tuple(tuple(next(ranks) for _ in range(count)) for count in replicas)
        others.append(Proposal(best.config, best.proposal.ends, devices))
    other = fastest(problem.space, others)
    assert other is not None
    assert best.step_seconds <= other.step_seconds * (1 + 1e-9)
    in_order = run_search(problem)
    assert in_order.exact
    assert answer.result.exact == (best.step_seconds >= in_order.bound_seconds * (1 - 1e-9))


@pytest.mark.parametrize(
    ("seed", "devices", "layers"),
    [(3, 4, 5), pytest.param(1, 5, 7, marks=pytest.mark.slow), pytest.param(2, 4, 9, marks=pytest.mark.slow)],
)
def test_no_assignment_of_devices_of_as_many_kinds_is_faster(
    seed: int, devices: int, layers: int, make_chain: MakeChain
) -> None:
    """Every permutation, of devices no two of which are alike, for the cuts and replicas of the answer."""
    groups = tuple(Group(Device(f"kind{i}", None, 1 + 0.3 * i), 1) for i in range(devices))
    topology = Topology(groups, (Level("node", None, Link(20.0, 0.0)),))
    problem = Problem(make_chain(seed, layers, traffic=0.02, cuts=1.1), topology, PlanOptions(mini_batch=8))
    best = find_best_plan(problem).best
    assert best is not None
    others = []
    for order in permutations(range(devices), sum(best.proposal.replicas)):
        ranks = iter(order)
        own = tuple(tuple(next(ranks) for _ in range(count)) for count in best.proposal.replicas)
        others.append(Proposal(best.config, best.proposal.ends, own))
    other = fastest(problem.space, others)
    assert other is not None
    assert best.step_seconds <= other.step_seconds * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["memory", "cost", "throughput"])
def test_objectives_say_which_plans_they_speak_of(name: str, make_chain: MakeChain) -> None:
    prices = {"": 1.0} if name == "cost" else {}
    problem = Problem(make_chain(2, 6, traffic=0.2, cuts=1.1), one_fast(1), PlanOptions(mini_batch=4))
    plan = solve_objective(Objective(name, prices=prices), problem, model="toy", profile=REFERENCE)
    assert "devices" in plan.prediction.bound_covers
    if plan.objective is not None:
        assert "devices" in plan.objective.covers


def test_devices_that_are_alike_are_searched(make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pplan.planner.problem.may_search_any", lambda *_: False)
    problem = Problem(make_chain(1, 6, cuts=1.1), one_fast(), PlanOptions(mini_batch=4))
    config = problem.configs[0]
    shuffled = Proposal(config, (2, 4, 6), ((2,), (1, 3), (0,)))
    assert not is_searched(problem, shuffled)
    assert to_searched_devices(problem, shuffled).devices == ((1,), (2, 3), (0,))
    between = Proposal(config, (2, 4, 6), ((2,), (0,), (1, 3)))
    assert to_searched_devices(problem, between) == between
    assert not is_searched(problem, replace(shuffled, config=replace(config, schedule="zb-h1")))


def test_no_bound_is_lowered_to_a_step(make_chain: MakeChain) -> None:
    """A plan of the searched space below the search's bound: one of the two is wrong."""
    problem = Problem(make_chain(1, 3, cuts=1.1), one_fast(1), PlanOptions(mini_batch=4))
    found = run_search(problem)
    assert found.best is not None
    wrong = SearchResult(found.best, 2 * found.bound_seconds, found.bound_seconds, exact=True)
    with pytest.raises(DefectError, match="is below its bound"):
        with_bound(problem, found.best, wrong)


@pytest.mark.parametrize(
    ("options", "free", "limits"),
    [
        ({}, "any cuts, replicas and recomputation", ()),
        ({"max_stages": 3}, "any cuts, replicas and recomputation", ("at most 3 stages",)),
        (
            {"min_micro_batch": 1},
            "any cuts, replicas and recomputation",
            ("at least 1 sample of a micro-batch on each replica",),
        ),
        (
            {"recompute": "never", "use_all": True},
            "any cuts and replicas",
            ("recompute never", "on all devices"),
        ),
        ({"pins": [("layer3", 1)]}, "any cuts, replicas and recomputation", ("under `pins`",)),
        ({"runtime": "torch"}, "any cuts and recomputation", ("equal replicas",)),
    ],
)
@pytest.mark.parametrize("schedule", ["interleaved", "any"])
def test_what_options_ask_of_other_schedules_is_said(
    schedule: str, options: dict[str, Any], free: str, limits: tuple[str, ...], make_chain: MakeChain
) -> None:
    """Of at most three stages "all plans of interleaved: any cuts" was said, where four are faster."""
    problem = Problem(
        make_chain(1, 6), uneven_nodes(), PlanOptions(mini_batch=4, schedule=schedule, **options)
    )
    for universal in (True, False):
        words = describe_coverage(problem, SearchResult(None, 1.0, 1.0, exact=False, universal=universal))
        words = words[words.index("all plans of") :]
        assert f": {free}, 2 to 4 virtual stages" in words
        assert words.endswith(", ".join(["any order of the devices", *limits]))


def test_nothing_fits(make_chain: MakeChain) -> None:
    found = joint_search(Problem(make_chain(1, 6), one_fast(), PlanOptions(mini_batch=4, memory_limit=1)))
    assert (found.best, found.bound_seconds) == (None, inf)


@pytest.mark.slow
def test_above_64_devices_the_bound_has_any_replicas_in_any_order(make_chain: MakeChain) -> None:
    """The search has neither: the plan's file says both."""
    topology = Topology((Group(Device("toy", None), 66),), (Level("node", None, Link(20.0, 0.0)),))
    plan = solved(make_chain(1, 3), topology, mini_batch=66, micro_batches=1)
    assert "any number of replicas" in plan.prediction.bound_covers
    assert "any order of the devices" in plan.prediction.bound_covers
    assert "in rank order" in plan.searched
    assert "any" not in plan.searched

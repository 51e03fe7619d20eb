"""The fewest dollars against every plan of small spaces, and the prices that a user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.quantities import percent
from pplan.cost_models.topology import Device, Group, Level, Link, Topology, two_level_topology
from pplan.planner.candidate import Proposal
from pplan.planner.objectives.least_cost import least_cost
from pplan.planner.objectives.objective import Objective, parse_objective, parse_prices, price_by_kind
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import ProfileReference
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest

FAST = Link(1e18, 0.0)
MakeProblem = Callable[..., Problem]
EveryPlan = Callable[[Problem], list[tuple[Proposal, float, float]]]


def dollars(problem: Problem, prices: Mapping[str, float], proposal: Proposal, step: float) -> float:
    """A sample."""
    ranks = [rank for own in proposal.devices for rank in own]
    hourly = sum(prices[problem.topology.device(rank).name] for rank in ranks)
    return hourly / 3600 * step / problem.mini_batch


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 4))]
)
def test_cheapest_of_all_plans(seed: int, make_problem: MakeProblem, every_plan: EveryPlan) -> None:
    problem = make_problem(seed, 3 + seed % 2, 3, memory=[None, 800, 600][seed % 3])
    every = every_plan(problem)
    outcome = least_cost(problem, {"toy": 2.5})
    if not every:
        assert outcome.best is None
        return
    least = min(dollars(problem, {"toy": 2.5}, proposal, step) for proposal, step, _ in every)
    assert outcome.aim is not None
    assert outcome.aim.value == pytest.approx(least, rel=1e-9)
    assert outcome.aim.exact
    assert outcome.aim.lower_bound <= least * (1 + 1e-9)


def mixed(problem: Problem) -> Problem:
    """The first device is a fast, dear one; the others are as they were."""
    device = problem.topology.device(0)
    groups = (Group(Device("big A100", device.memory_bytes, speed=2.0), 1), Group(device, problem.gpus - 1))
    return replace(problem, topology=Topology(groups, problem.topology.levels))


@pytest.mark.parametrize(("seed", "price"), [(0, 0.5), (1, 20.0), (2, 3.0)])
def test_prices_by_kind(seed: int, price: float, make_problem: MakeProblem, every_plan: EveryPlan) -> None:
    """Of the plans on the first n devices, for any n."""
    problem = mixed(make_problem(seed, 3, 3))
    prices = {"big A100": price, "toy": 1.0}
    outcome = least_cost(problem, {"A100": price, "": 1.0})
    least = min(dollars(problem, prices, proposal, step) for proposal, step, _ in every_plan(problem))
    assert outcome.aim is not None
    assert outcome.aim.value <= least * (1 + 1e-9)


@pytest.mark.parametrize(
    ("seed", "price"),
    [(0, 3.0), *(pytest.param(*own, marks=pytest.mark.slow) for own in [(1, 20.0), (2, 3.0)])],
)
def test_the_cheapest_devices_may_stand_last(
    seed: int, price: float, make_problem: MakeProblem, every_plan: EveryPlan
) -> None:
    """Twice as fast for more than twice the price: no plan on the others alone is cheaper than the answer,
    and none on any neighbours is below the bound."""
    problem = mixed(make_problem(seed, 3, 3))
    prices = {"big A100": price, "toy": 1.0}
    outcome = least_cost(problem, {"A100": price, "": 1.0})
    assert outcome.aim is not None
    assert outcome.best is not None
    assert {rank for own in outcome.best.proposal.devices for rank in own} <= {1, 2}
    alone = 0
    for proposal in dict.fromkeys(proposal for proposal, _, _ in every_plan(problem)):
        for start in range(3 - proposal.device_count + 1):
            devices = tuple(tuple(rank + start for rank in own) for own in proposal.devices)
            moved = replace(proposal, devices=devices)
            scored = fastest(problem.space, [moved])
            assert scored is not None
            cost = dollars(problem, prices, moved, scored.step_seconds)
            assert cost >= outcome.aim.lower_bound * (1 - 1e-9)
            if start > 0:
                alone += 1
                assert cost >= outcome.aim.value * (1 - 1e-9)
    assert alone > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "memory", "fast_memory", "price"),
    [
        (0, None, None, 1.5),
        (1, 450, 270, 2.2),
        (1, 450, 450, 1.5),
        (2, 450, 450, 2.5),
        (3, 350, 210, 1.5),
        (3, 550, 880, 1.5),
    ],
)
def test_two_devices_of_two_kinds_each(
    seed: int,
    memory: float | None,
    fast_memory: float | None,
    price: float,
    make_problem: MakeProblem,
    every_plan_anywhere: EveryPlan,
) -> None:
    """A node of each kind. No plan on any devices is below the bound, nor, here, cheaper than the answer."""
    problem = make_problem(seed, 3, 4, memory=memory)
    device, link = problem.topology.device(0), problem.topology.levels[0].link
    fast = Device("fast", None if fast_memory is None else round(fast_memory * 1e6), speed=2.0)
    slower = replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / 4)
    levels = (Level("node", 2, link), Level("network", None, slower))
    problem = replace(problem, topology=Topology((Group(fast, 2), Group(device, 2)), levels))
    prices = {"fast": price, "toy": 1.0}
    outcome = least_cost(problem, prices)
    plans = [(proposal, step) for proposal, step, _ in every_plan_anywhere(problem)]
    least = min(dollars(problem, prices, proposal, step) for proposal, step in plans)
    assert outcome.aim is not None
    assert outcome.aim.value == pytest.approx(least, rel=1e-9)
    assert outcome.aim.lower_bound <= least * (1 + 1e-9)
    devices = [{rank for own in proposal.devices for rank in own} for proposal, _ in plans]
    assert any(own & {0, 1} and own & {2, 3} for own in devices)


def test_the_mini_batch_is_that_of_all_devices(make_problem: MakeProblem) -> None:
    """Where no global batch is requested it grows with the devices: fewer of them train the same one."""
    problem = make_problem(1, 3, 3, mini_batch=None)
    outcome = least_cost(problem, {"": 1.0})
    assert outcome.best is not None
    assert outcome.best.config.mini_batch == problem.mini_batch == 96


def test_use_all_leaves_no_device_free(make_problem: MakeProblem) -> None:
    problem = make_problem(1, 3, 3, use_all=True)
    outcome = least_cost(problem, {"": 1.0})
    assert outcome.best is not None
    assert outcome.best.proposal.device_count == 3


@pytest.mark.parametrize(
    ("text", "prices"),
    [("2.5", {"": 2.5}), ("$2", {"": 2.0}), ("A100=2.5, T4 = 0.35", {"A100": 2.5, "T4": 0.35})],
)
def test_prices_as_they_are_written(text: str, prices: dict[str, float]) -> None:
    assert parse_prices(text) == prices


@pytest.mark.parametrize("text", ["", "cheap", "=2", "A100=2,A100=3", "1,2", "A100=two"])
def test_prices_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="price"):
        parse_prices(text)


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_a_price_is_above_zero(price: float) -> None:
    with pytest.raises(UsageError, match="must be above 0"):
        Objective("cost", prices={"": price})


def test_every_kind_has_a_price(make_problem: MakeProblem) -> None:
    topology = mixed(make_problem(0, 3, 3)).topology
    assert price_by_kind({"a100": 2.0, "": 1.0}, topology) == {"big A100": 2.0, "toy": 1.0}
    with pytest.raises(UsageError, match="no price of toy"):
        price_by_kind({"A100": 2.0}, topology)
    with pytest.raises(UsageError, match="T4=1': matches no device"):
        price_by_kind({"": 2.0, "T4": 1.0}, topology)


@pytest.mark.parametrize(
    ("text", "name", "slack"),
    [("step-time", "step-time", 0.05), ("memory", "memory", 0.05), ("memory:10%", "memory", 0.1)],
)
def test_objectives_as_they_are_written(text: str, name: str, slack: float) -> None:
    made = parse_objective(text)
    assert made.name == name
    assert made.slack == pytest.approx(slack)


@pytest.mark.parametrize(
    ("text", "prices", "word"),
    [
        ("speed", None, "not known"),
        ("memory:much", None, "percent"),
        ("throughput:5%", None, "takes no share"),
        ("cost", None, "needs the price"),
        ("step-time", {"": 1.0}, "`price` with objective='step-time'"),
    ],
)
def test_objectives_that_cannot_be(text: str, prices: dict[str, float] | None, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_objective(text, prices)
    assert word in str(caught.value)


def test_notes_are_of_the_plan_and_not_of_the_fastest(make_problem: MakeProblem) -> None:
    """One device is the cheapest, all are the fastest: the optimizer takes another share of that step."""
    problem = make_problem(1, 4, 3, optimizer="adam")
    weights = np.full(4, 2e12)
    problem = replace(
        problem,
        chain=replace(problem.chain, parameter_bytes=weights, trainable_bytes=weights),
        topology=two_level_topology(Device("NVIDIA H100 80GB HBM3", None), 3, 8, FAST, FAST),
    )
    profile = ProfileReference(file="toy.profile.json", sha256="0" * 64)
    plan = solve_objective(Objective("cost", prices={"": 2.0}), problem, model="toy", profile=profile)
    fastest_plan = solve_objective(Objective(), problem, model="toy", profile=profile)
    assert fastest_plan.prediction.step_seconds < 0.7 * plan.prediction.step_seconds
    for own in (plan, fastest_plan):
        (note,) = (text for text in own.notes if text.startswith("optimizer step not included"))
        updated = max(stage.memory["weights"] for stage in own.stages) * 28 / 4
        share = updated / 3.35e12 / own.prediction.step_seconds
        assert note.endswith(f"{percent(share)} of the step")

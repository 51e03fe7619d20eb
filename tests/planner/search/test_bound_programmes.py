"""The programmes inside bounds against the least over everything that they choose among, written out.

A mistake that only weakens a bound breaks no plan, and one in a corner that no small problem reaches is not
seen by brute force over plans: here a programme must be its formula, to the last digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import PipelineConfig
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.search.bound import MOST_MOVE, best_prices
from pplan.planner.search.family import Family
from pplan.planner.search.fill_bound import _FillProgramme
from pplan.planner.search.least_collectives import all_reduce_pace
from pplan.planner.search.placements import list_placements
from pplan.planner.search.space import Space
from pplan.planner.search.stage_figures import _as_fast, _cut_seconds, _smaller, list_choices

MakeChain = Callable[..., Chain]
SPEEDS = ((1.0, 1.0, 1.0), (1.0, 0.5), (2.0, 1.0, 0.5, 0.5))


def problems(make_chain: MakeChain, layers: int) -> Iterator[Problem]:
    """On devices of one, two and three kinds."""
    for seed, speeds in enumerate(SPEEDS):
        groups = tuple(Group(Device(f"{speed}", None, speed=speed), 1) for speed in speeds)
        topology = Topology(groups, (Level("node", None, Link(50.0, 0.1)),))
        chain = make_chain(seed, layers, cuts=1.1, adding=0.5)
        yield Problem(chain, topology, PlanOptions(mini_batch=12))


class TestFill:
    """`fill_bound`, for a range of the longest stage's seconds and a price."""

    def test_every_layer_has_the_replicas_that_suit_it(self, make_chain: MakeChain) -> None:
        seen = set()
        for problem in problems(make_chain, 3):
            kinds = problem.topology.count_kinds(range(problem.gpus))
            fastest = max(kind.speed for kind in kinds)
            for family in problem.families:
                programme = _FillProgramme(problem.space, family, 0.1)
                prices = {kind: (kind.speed / fastest) ** 1.1 for kind in kinds}
                paid = sum(prices[kind] * count for kind, count in kinds.items())
                assert programme.paid_devices == pytest.approx(paid)
                for low, high, price in ((0.5, 3.0, 4.0), (2.0, 9.0, 0.5), (2.0, 9.0, 40.0)):
                    least = self.least(problem, family, prices, high, price)
                    expected = (family.config.micro_batches - 1) * low + sum(least) - price * paid
                    assert programme.bound(low, high, price) == pytest.approx(expected, rel=1e-8)
                    seen.add(np.isfinite(expected))
        assert seen == {True, False}

    def least(
        self, problem: Problem, family: Family, prices: dict[Device, float], high: float, price: float
    ) -> list[float]:
        """By layer; inf where no number of replicas brings it below `high`."""
        least, config = [float("inf")] * len(problem.chain), family.config
        again = 2 if config.recompute == "always" else 1
        for (kind, dear), replicas in product(prices.items(), family.replicas):
            share = -(-config.micro_batch_size // replicas)
            if replicas > config.micro_batch_size or not problem.chain.reaches(share):
                continue
            costs, paid = problem.chain.at(share), price * dear * replicas
            for layer in range(len(problem.chain)):
                x = float(again * costs.forward_seconds[layer] + costs.backward_seconds[layer]) / kind.speed
                later = x - float(costs.accumulation[layer]) / kind.speed
                if x > high:
                    continue
                whole = config.schedule != "gpipe" and paid < high
                least[layer] = min(least[layer], (paid - high + x if whole else paid * x / high) + later)
        return least


class TestFigures:
    """`make_stage_figures`."""

    def test_what_a_stage_of_a_kind_takes(self, make_chain: MakeChain) -> None:
        """Devices as fast, transfers, and what of an all-reduce may be left where other layers lie around."""
        kinds = tuple(Device(f"{speed}", None, speed=speed) for speed in (1.0, 2.0, 0.5))
        own = Device("own", None, profile="own.profile.json")
        assert [_as_fast(kind, kinds, [3, 4, 5]) for kind in kinds] == [7, 4, 12]
        assert _as_fast(own, (*kinds, own), [3, 4, 5, 1]) == 13
        chain = make_chain(1, 4, cuts=1.1, traffic=3.0)
        weights = chain.parameter_bytes * np.array([20.0, 0.01, 20.0, 0.01])
        chain = replace(chain, trainable_bytes=weights)
        levels = (Level("node", 2, Link(40.0, 0.2)), Level("network", None, Link(10.0, 0.3)))
        space = Space(chain, Topology((Group(kinds[0], 4),), levels), "sgd")
        table, costs = space.table(2), chain.at(2)
        sent = np.append(0.0, costs.output_bytes)
        sent[0], sent[-1] = table.crossing[[0, -1]]
        assert _cut_seconds(space.topology, table) == pytest.approx(sent / 50 + [0, 0.2, 0.2, 0.2, 0])
        family = Family(PipelineConfig("1f1b", "never", 2, 8), list_placements(space.topology)[0], (4,))
        (choice,) = list_choices(space, family)[3]
        pace = all_reduce_pace(space.topology, 4)
        expected = pace * costs.trainable_bytes - costs.backward_seconds
        assert choice.least_exposed() == pytest.approx(expected)
        small, large = chain.at(1), chain.at(4)
        assert _smaller(large, small).input_bytes == _smaller(small, large).input_bytes == small.input_bytes


@pytest.mark.parametrize("seed", range(40))
def test_the_best_price_of_one_kind(seed: int) -> None:
    """No price of a fine grid raises the least line more, nor does the linear programme of several kinds."""
    rng = np.random.default_rng(seed)
    lines = [(float(rng.uniform(0, 5)), rng.normal(0, 3, 1)) for _ in range(rng.integers(1, 7))]
    price = float(rng.uniform(0.1, 3))
    (best,) = best_prices(lines, np.array([price]), np.ones(1)).tolist()
    alike = [(value, np.append(slope, 0)) for value, slope in lines]
    solved, _ = best_prices(alike, np.full(2, price), np.ones(2)).tolist()
    grid = np.append(np.linspace(price / MOST_MOVE, price * MOST_MOVE, 1001), solved)
    least = np.min([value + slope[0] * np.append(grid, best) for value, slope in lines], axis=0)
    assert price / MOST_MOVE <= best <= price * MOST_MOVE
    assert least[-1] >= least.max() - 1e-9

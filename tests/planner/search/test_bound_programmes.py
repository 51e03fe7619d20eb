"""The programmes inside bounds against the least over everything that they choose among, written out.

A mistake that only weakens a bound breaks no plan, and one in a corner that no small problem reaches is not
seen by brute force over plans: here a programme must be its formula, to the last digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.search import fluid_bound, relaxed_problem, relaxed_programme, relaxed_stages
from pplan.planner.search.fill_bound import _FillProgramme
from pplan.planner.search.fluid_bound import _FluidProgramme
from pplan.planner.search.least_collectives import all_reduce_pace
from pplan.planner.search.least_exchange import exposed_exchange
from pplan.planner.search.relaxed_bound import _by_speed
from pplan.planner.search.relaxed_problem import RelaxedProblem, Weights
from pplan.planner.search.relaxed_programme import price_stages
from pplan.planner.search.relaxed_stages import (
    _as_fast,
    _cut_seconds,
    _smaller,
    make_relaxed_stages,
)
from pplan.planner.search.space import Space
from pplan.planner.search.subproblem import Family

MakeChain = Callable[..., Chain]
SPEEDS = ((1.0, 1.0, 1.0), (1.0, 0.5), (2.0, 1.0, 0.5, 0.5))


def problems(make_chain: MakeChain, layers: int) -> Iterator[Problem]:
    """On devices of one, two and three kinds."""
    for seed, speeds in enumerate(SPEEDS):
        groups = tuple(Group(Device(f"{speed}", None, speed=speed), 1) for speed in speeds)
        topology = Topology(groups, (Level("node", None, Link(50.0, 0.1)),))
        chain = make_chain(seed, layers, cuts=1.1, adding=0.5)
        yield Problem(chain, topology, PlanOptions(mini_batch=12))


class TestFluid:
    """`fluid_bound`, with few cells and runs, so that all can be written out."""

    @pytest.fixture(autouse=True)
    def _coarse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("CELLS", 6), ("RUNS", 3), ("WIDTH", 1.7)):
            monkeypatch.setattr(fluid_bound, name, value)

    @pytest.mark.parametrize("most_fill", [0.6, 1.5, 32.0])
    def test_the_least_devices_of_all_choices(
        self, make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch, most_fill: float
    ) -> None:
        monkeypatch.setattr(fluid_bound, "MOST_FILL", most_fill)
        answers = set()
        for programme in self.programmes(make_chain):
            work = programme._least_seconds * programme.family.config.micro_batches
            for step in work * np.geomspace(0.1, 3, 8):
                answers.add(more := programme.needs_more(float(step)))
                assert more == (self.fewest(programme, float(step), most_fill) > programme._paid)
        assert answers == {True, False}

    def programmes(self, make_chain: MakeChain) -> Iterator[_FluidProgramme]:
        for problem in problems(make_chain, 4):
            kinds = problem.topology.count_kinds(range(problem.gpus))
            for family in problem.families:
                if family.config.micro_batches > 1 and family.config.schedule == "1f1b":
                    prices = tuple(kind.speed / 2 for kind in kinds)
                    yield _FluidProgramme(problem.space, family, prices)

    def fewest(self, programme: _FluidProgramme, step: float, most_fill: float) -> float:
        """Priced devices; a stage behind `before` seconds has step - before for its micro-batches, and its
        own first one, which takes step / (M - 1) at the most, besides."""
        count = programme.family.config.micro_batches
        cell = min(most_fill * programme._least_seconds, step) / fluid_bound.CELLS
        totals = []
        for choice in product(*(list(zip(*own, strict=True)) for own in programme._choices)):
            before, total = 0, 0.0
            for seconds, needs in choice:
                total += count * needs / min(step, step + step / (count - 1) - cell * before)
                before = min(before + int(seconds / cell), fluid_bound.CELLS - 1)
            totals.append(total)
        return min(totals)

    def test_a_run_needs_no_more_than_any_choice_of_its_layers(self, make_chain: MakeChain) -> None:
        for programme in self.programmes(make_chain):
            devices, seconds = programme._layers
            tight = 0
            for run, (least_seconds, needs) in zip(programme._runs, programme._choices, strict=True):
                assert (np.diff(least_seconds) > 0).all()
                assert (np.diff(needs) < 0).all()
                for rows in product(range(len(devices)), repeat=run.stop - run.start):
                    at = (list(rows), range(run.start, run.stop))
                    own = int(np.searchsorted(least_seconds, seconds[at].sum() * (1 + 1e-12), "right")) - 1
                    assert devices[at].sum() >= needs[own] * (1 - 1e-9)
                    tight += devices[at].sum() <= needs[own] * 1.3 + 1e-9
            assert tight >= len(programme._runs)

    def test_what_a_layer_costs(self, make_chain: MakeChain) -> None:
        """The fewest devices with a share, priced, times seconds of a micro-batch; what the first backward of
        a step does not take is left out of the mean."""
        problem = next(problems(make_chain, 3))
        for family in problem.families:
            programme = _FluidProgramme(problem.space, family, (0.5,))
            config, expected = family.config, []
            again, size = config.recompute == "always", config.micro_batch_size
            for count in family.replicas:
                share = -(-size // count)
                if count <= size and problem.chain.reaches(share):
                    costs = problem.chain.at(share)
                    once = costs.accumulation / config.micro_batches
                    x = (1 + again) * costs.forward_seconds + costs.backward_seconds
                    expected.append((0.5 * -(-size // share) * (x - once), x))
            own = sorted(np.hstack(pair).tolist() for pair in zip(*programme._layers, strict=True))
            assert np.array(own) == pytest.approx(np.array(sorted(np.hstack(e).tolist() for e in expected)))


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


class TestRelaxed:
    """The least sums of `relaxed_problem`, over all pipelines of the relaxed stages."""

    @pytest.mark.parametrize("most", [4, 9])
    def test_deep_pipelines_are_bounded_where_the_sum_is_a_bound(
        self, make_chain: MakeChain, most: int
    ) -> None:
        """The last bound is of all numbers of stages from there to the most: of no such number more stages
        may remain than the sum is a bound of."""
        seen = set()
        for problem in problems(make_chain, 3):
            for family in {own.config: own for own in problem.families}.values():
                stages = make_relaxed_stages(problem.space, family)
                assert stages is not None
                own = RelaxedProblem(family.config, stages, most, np.inf)
                prices = np.full(len(stages.kinds), 1e-3)
                for weights in own.weights:
                    bounds = price_stages(own, weights, 1e-3, 1e3, prices).bounds
                    counts = [[count] for count in range(1, own.depth + 1)]
                    counts[-1] += [most]
                    holds = [all(np.isfinite(own.coefficient(weights, n)) for n in each) for each in counts]
                    assert [bool(bound > -np.inf) for bound in bounds] == holds
                    seen.add((holds[-2], holds[-1]))
        assert (True, False) in seen

    @pytest.mark.parametrize(("schedule", "most"), [("1f1b", 8), ("1f1b", 1), ("gpipe", 8)])
    def test_the_least_of_all_pipelines(
        self, make_chain: MakeChain, schedule: str, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`most`: micro-batches in flight up to which the longest stage's own seconds count."""
        for module in (relaxed_problem, relaxed_programme):
            monkeypatch.setattr(module, "EVERY_IN_FLIGHT", most)
        finite = 0
        for problem in problems(make_chain, 3):
            families = [own for own in problem.families if own.config.schedule == schedule]
            several = [own for own in families if own.config.micro_batches > 3]
            for family in {own.config.recompute: own for own in several}.values():
                stages = make_relaxed_stages(problem.space, family)
                assert stages is not None
                own = RelaxedProblem(family.config, stages, 3, np.inf)
                prices = np.linspace(0.5, 2.0, len(stages.kinds))
                for weights, (low, high) in product(own.weights, ((0.1, 4.0), (2.0, 1e3))):
                    bounds = price_stages(own, weights, low, high, prices).bounds
                    for count, bound in enumerate(bounds, start=1):
                        if not np.isfinite(own.coefficient(weights, count)):
                            assert bound == -np.inf
                            continue
                        paid = float(prices @ stages.devices)
                        sums = self.sums(own, weights, (low, high), prices, count)
                        least = min(sums, default=np.inf) - paid
                        assert bound == pytest.approx(least, rel=1e-8)
                        finite += bool(np.isfinite(least))
        assert finite > 20

    def test_the_least_step_of_one_stage(self, make_chain: MakeChain) -> None:
        """All micro-batches, what the first backward does not take, and the all-reduce; or its launches."""
        for problem in problems(make_chain, 3):
            for family in problem.families:
                stages = make_relaxed_stages(problem.space, family)
                assert stages is not None
                config, own = family.config, RelaxedProblem(family.config, stages, 3, np.inf)
                x = own.seconds(own.in_flight(1))[:, 0, -1]
                f, a, e, host = (
                    getattr(stages, name)[:, 0, -1]
                    for name in ("forward", "accumulation", "exposed_allreduce", "launches")
                )
                once = a + f if config.recompute == "except_last" else a
                steps = [
                    max(config.micro_batches * x[i] - once[i], config.micro_batches * host[i]) + e[i]
                    for i in np.flatnonzero(np.isfinite(x))
                ]
                assert own.single_stage_step == pytest.approx(min(steps, default=np.inf), rel=1e-8)

    def sums(
        self,
        problem: RelaxedProblem,
        weights: Weights,
        limits: tuple[float, float],
        prices: np.ndarray[Any, np.dtype[np.float64]],
        count: int,
    ) -> Iterator[float]:
        """Of all pipelines of `count` stages, any of them taken for s."""
        stages, places = problem.stages, problem.cut_points
        for inner in combinations(range(1, places - 1), count - 1):
            ends = (0, *inner, places - 1)
            for chosen in product(range(len(stages.kind)), repeat=count):
                rows = [
                    self.row(problem, weights, limits, count - index, (choice, *pair))
                    for index, (choice, pair) in enumerate(zip(chosen, pairwise(ends), strict=True))
                ]
                paid = sum(float(prices[stages.kind[own]] * stages.replicas[own]) for own in chosen)
                for s in range(count):
                    parts = [row[(index > s) - (index < s)] for index, row in enumerate(rows)]
                    if np.isfinite(sum(parts)):
                        yield sum(parts) + paid

    def row(
        self,
        problem: RelaxedProblem,
        weights: Weights,
        limits: tuple[float, float],
        remaining: int,
        at: tuple[int, int, int],
    ) -> tuple[float, float, float]:
        """What a stage counts as s, behind s, and, last, before s."""
        config, own, (low, high) = problem.config, problem.stages, limits
        x = float(problem.seconds(problem.in_flight(remaining))[at])
        if x > high:
            return (np.inf,) * 3
        f, a, e = (float(table[at]) for table in (own.forward, own.accumulation, own.exposed_allreduce))
        c, count = float(own.cut[at[0], at[2]]), config.micro_batches
        plain = x - f if config.recompute == "except_last" else x
        held = count if config.schedule == "gpipe" else min(count, remaining)
        longest = max(x, low)
        if config.schedule == "1f1b" and held > relaxed_problem.EVERY_IN_FLIGHT:
            double = weights.name == "double"
            busy = (count - held + 1 + (0 if double else (held - 1) / 2)) * low
        elif config.schedule == "gpipe":
            busy = (count - (0.5 if config.recompute == "except_last" else 0.0)) * longest
        elif weights.name == "double":
            busy = (count - held + 1) * longest
        else:
            busy = (count - held + 1) * longest + (held - 1) * max(f, x - f, low / 2)
        once = 1.0 if weights.reduced else 0.0
        around = 2.0 if weights.name == "double" else 1.0
        return (
            busy + around * 2 * c - a + once * e,
            around * (plain + 2 * c) - a,
            f + c if weights.reduced else plain + 2 * c - a,
        )

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
        left = exposed_exchange(space, 4, table, costs.backward_seconds, exact=False)
        pace = all_reduce_pace(space.topology, 4)
        for start, end in combinations(range(5), 2):
            gradients = costs.trainable_bytes[start:end].sum()
            backward = costs.backward_seconds[start:end].sum()
            assert left[start, end] == pytest.approx(max(pace * gradients - backward, 0.0))
        small, large = chain.at(1), chain.at(4)
        assert _smaller(large, small).input_bytes == _smaller(small, large).input_bytes == small.input_bytes

    def test_faster_kinds_are_no_cheaper(self) -> None:
        speeds = (1.0, 2.0, 1.0, 0.5)
        kinds = [SimpleNamespace(speed=speed) for speed in speeds]
        problem: Any = SimpleNamespace(stages=SimpleNamespace(kinds=kinds))
        assert _by_speed(problem, np.array([3.0, 2.0, 1.0, 2.5])).tolist() == [3.0, 3.0, 3.0, 2.5]

    def test_cuts_of_a_long_chain(self, make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of 24 equal layers between seven places: every fourth cut, and stages without the outer layers."""
        monkeypatch.setattr(relaxed_stages, "MOST_PLACES", 7)
        chain = make_chain(0, 24, cuts=1.1, sizes=(1,))
        ones = np.ones_like(chain.forward_seconds)
        chain = replace(chain, forward_seconds=ones, backward_seconds=ones)
        chain = replace(chain, forward_host_seconds=ones, backward_host_seconds=0 * ones)
        problem = Problem(chain, SPACE, PlanOptions(mini_batch=2, micro_batches=2, schedule="1f1b"))
        stages = make_relaxed_stages(problem.space, problem.families[0])
        assert stages is not None
        assert not stages.exact
        assert stages.cut_points == (0, 4, 8, 12, 16, 20, 24)
        for table in (stages.forward, stages.launches):
            for start, end in product(range(7), repeat=2):
                layers = np.inf if end < start or start == 6 else max(4 * (end - start - 1), 0)
                assert table[0, start, end] == layers
        assert not stages.cut.any()


SPACE = Topology((Group(Device("toy", None), 2),), (Level("node", None, Link(1e9, 0.0)),))

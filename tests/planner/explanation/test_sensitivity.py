"""Where another plan becomes better, of plans whose seconds are curves: against the crossings by algebra."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.explanation import rivals
from pplan.planner.explanation.explain_context import MANY
from pplan.planner.explanation.rivals import HALVINGS, STEPS, WORTH, Sensitivity, _links, _PlanRace
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.search.budget import SearchBudget

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


@dataclass(frozen=True)
class Curve:
    """A plan of `fixed` seconds and `varied` ones that a factor divides, or multiplies."""

    fixed: float
    varied: float
    divides: bool

    def seconds(self, factor: float) -> float:
        return self.fixed + (self.varied / factor if self.divides else self.varied * factor)


class Race:
    """A race of curves: `known` from the first, `hidden` where the problem is solved again."""

    def __init__(
        self, present: Curve, known: Sequence[Curve], hidden: Sequence[Curve], *, gpus: int = 2
    ) -> None:
        self.curves = [present, *known, *hidden]
        self.solved: list[float] = []
        self.gpus, self.forbidden = gpus, set[Curve]()
        self.race = _PlanRace(
            self.plan(present, 1.0), self.varied, present.divides, [self.plan(own, 1.0) for own in known]
        )

    def plan(self, curve: Curve, factor: float) -> Any:
        return SimpleNamespace(proposal=curve, step_seconds=curve.seconds(factor))

    def varied(self, factor: float) -> Any:
        return SimpleNamespace(
            space=factor, usable_gpus=self.gpus, allows=lambda curve: curve not in self.forbidden
        )

    def fastest(self, factor: float, curves: Sequence[Curve]) -> Any:
        plans = [self.plan(curve, factor) for curve in curves]
        return min(plans, key=lambda plan: plan.step_seconds, default=None)

    def resolve(self, problem: Any, *_: object) -> Any:
        self.solved.append(problem.space)
        return SimpleNamespace(best=self.fastest(problem.space, self.curves))


@pytest.fixture
def make_race(monkeypatch: pytest.MonkeyPatch) -> type[Race]:
    """Races whose plans are scored and found by their curves."""
    now: list[Race] = []

    class Own(Race):
        def __init__(self, *curves: Any, **more: Any) -> None:
            super().__init__(*curves, **more)
            now[:] = [self]

    monkeypatch.setattr(rivals, "fastest", lambda factor, own: now[0].fastest(factor, own))
    monkeypatch.setattr(rivals, "resolve", lambda *own: now[0].resolve(*own))
    monkeypatch.setattr(rivals, "plan_row", lambda plan: plan)
    monkeypatch.setattr(rivals, "Crossover", SimpleNamespace)
    return Own


def crossing(present: Curve, rival: Curve, end: float) -> float | None:
    """Where between 1 and `end` the rival begins to be faster by more than `WORTH`."""
    fixed = (1 - WORTH) * present.fixed - rival.fixed
    varied = rival.varied - (1 - WORTH) * present.varied
    # The rival is better where varied * x < fixed, x being the factor or one over it.
    if varied == 0 or fixed / varied <= 0:
        return None
    x = fixed / varied
    factor = 1 / x if present.divides else x
    if not 0 < log(factor) / log(end) < 1:
        return None
    middle = (factor * end) ** 0.5
    return factor if rival.seconds(middle) < present.seconds(middle) * (1 - WORTH) else None


def random_curves(seed: int) -> list[Curve]:
    """The present one, the fastest at a factor of 1, and others."""
    random, divides = np.random.default_rng(seed), bool(seed % 2)
    curves = [Curve(fixed, varied, divides) for fixed, varied in random.uniform(0.05, 1.0, (4, 2)).tolist()]
    return sorted(curves, key=lambda own: own.seconds(1.0))


@pytest.mark.parametrize("end", [16.0, 1 / 16, 3.0, 1 / 3])
def test_the_nearest_crossing_is_found(end: float, make_race: type[Race]) -> None:
    """Of rivals that are known and of those that solving again brings, to the accuracy of the steps."""
    turned = 0
    for seed in range(60):
        present, *others = random_curves(seed)
        known = seed % 3
        own = make_race(present, others[:known], others[known:])
        factors = [factor for rival in others if (factor := crossing(present, rival, end)) is not None]
        turn = own.race.turn(end)
        assert len(own.solved) == len(set(own.solved))
        if not factors:
            assert turn is None
            continue
        assert turn is not None, seed
        turned += 1
        first = min(factors, key=lambda factor: abs(log(factor)))
        late = log(turn.factor / first) / log(end)
        assert -1e-9 < late <= 1 / STEPS / 2**HALVINGS + 1e-9, (seed, turn.factor, first)
        assert turn.plan_seconds == present.seconds(turn.factor)
        assert turn.rival.step_seconds < turn.plan_seconds * (1 - WORTH)
    assert 10 < turned < 60


def test_on_many_devices_it_is_solved_again_at_the_end_alone(make_race: type[Race]) -> None:
    present, rival = Curve(0.1, 1.0, True), Curve(1.2, 0.01, True)
    for gpus, solved in ((MANY, [1 / 16, 1 / 4]), (MANY + 1, [1 / 16])):
        own = make_race(present, [], [Curve(9.0, 1.0, True)], gpus=gpus)
        assert own.race.turn(1 / 16) is None
        assert own.solved == solved
    # It is beaten from a factor of 1 / 1.12 on, which the rival that is known shows without solving.
    own = make_race(present, [rival], [])
    turn = own.race.turn(1 / 16)
    assert turn is not None
    assert crossing(present, rival, 1 / 16) == pytest.approx(turn.factor, rel=0.025)


def test_what_the_options_forbid_is_no_rival(make_race: type[Race]) -> None:
    present, rival = Curve(0.1, 1.0, True), Curve(1.2, 0.01, True)
    own = make_race(present, [rival], [])
    own.forbidden.add(rival)
    own.curves.remove(rival)
    assert own.race.turn(1 / 16) is None


def test_nothing_is_solved_where_all_become_slower_and_the_plan_does_not(make_race: type[Race]) -> None:
    """A plan that does not depend on the factor is beaten by none that was slower before."""
    own = make_race(Curve(1.0, 0.0, True), [Curve(0.2, 0.9, True)], [])
    assert own.race.turn(1 / 16) is None
    assert own.solved == []
    turn = own.race.turn(16.0)  # faster links: the other one gains
    assert turn is not None
    assert own.solved != []


@pytest.mark.parametrize(
    ("gpus", "per_node", "names"),
    [
        (1, 8, []),
        (4, 8, ["bandwidth of all links"]),
        (4, 4, ["bandwidth of all links"]),
        (4, 2, ["bandwidth of all links", "bandwidth between nodes"]),
        (4, 1, ["bandwidth of all links"]),  # which are all between nodes
    ],
)
def test_links_whose_bandwidth_is_varied(
    gpus: int, per_node: int, names: list[str], make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    """From a sixteenth to sixteen times, of links of 20 and 5 bytes a second, which may not have less than
    one."""
    topology = make_topology(gpus, per_node=per_node)
    problem = Problem(make_chain(1, 6), topology, PlanOptions(mini_batch=8))
    variations = list(_links(problem))
    assert [own.what for own in variations] == names
    for own in variations:
        assert own.faster_above
        assert own.ends[1] == 16.0
        assert own.ends[0] == pytest.approx(1 / 5)
        twice = own.varied(2.0).topology.levels
        rates = [level.link.bandwidth_bytes_per_second for level in twice]
        assert rates == ([20.0, 10.0] if "between" in own.what else [40.0, 10.0])


def test_seconds_of_the_heaviest_stage_are_varied(
    make_chain: MakeChain, make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last, from a quarter to four times; with a larger factor all plans are slower. Of several parts of a
    stage the first."""
    problem = Problem(make_chain(1, 6, cuts=1.1), make_topology(1), PlanOptions(mini_batch=8))
    places = [(SimpleNamespace(device=device), part) for part, device in ((0, 0), (1, 1), (2, 1), (3, 0))]
    context: Any = SimpleNamespace(
        budget=SearchBudget(),
        problem=problem,
        assembly=SimpleNamespace(
            program=SimpleNamespace(parts_by_slot=SimpleNamespace(items=lambda: places)),
            ranks=[[0], [1]],
        ),
        present=SimpleNamespace(
            config=SimpleNamespace(virtual_stages=2),
            proposal=SimpleNamespace(bounds=((0, 1), (1, 3), (3, 5), (5, 6))),
        ),
    )
    asked = list[Any]()

    def reach(_: Any, __: Any, own: Any) -> Any:
        asked.append(own)
        return Sensitivity(what=own.what, least=own.ends[0], most=own.ends[1], below=None, above=None)

    monkeypatch.setattr(rivals, "_reach", reach)
    (answer,) = rivals.sensitivities(context, [], 1)
    words = "seconds of the layers of the first part of device 1"
    assert (answer.what, answer.first_layer, answer.last_layer) == (words, 1, 2)
    assert (answer.least, answer.most, asked[0].faster_above) == (0.25, 4.0, False)
    own = asked[0].varied(3.0).chain
    slower = own.forward_seconds / problem.chain.forward_seconds
    assert slower[:, 0].tolist() == pytest.approx([1, 3, 3, 1, 1, 1])

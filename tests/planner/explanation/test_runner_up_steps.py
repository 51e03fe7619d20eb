"""The steps to the runner-up plans, with searches whose plans are written down here: what is forbidden, what
counts as just as fast, and what is proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.explanation import rivals
from pplan.planner.explanation.explain_context import SECONDS
from pplan.planner.explanation.rivals import (
    MOST_LISTED,
    MOST_SHAPES,
    TIES,
    _as_fast,
    _Best,
    _differs,
    _fastest,
    _other_devices,
    _other_stage_counts,
    _search_counts,
    _shapes,
    _without,
    _without_cut,
    runners_up,
)
from pplan.planner.plan_file import TIE

Patch = pytest.MonkeyPatch
CONFIG = PipelineConfig("1f1b", "never", 4, 2)


def plan(
    seconds: float,
    ends: tuple[int, ...] = (3, 6),
    devices: tuple[tuple[int, ...], ...] | None = None,
    schedule: str = "1f1b",
    virtual: int = 1,
) -> ScoredPlan:
    config = replace(CONFIG, schedule=schedule, virtual_stages=virtual)
    devices = devices or tuple((stage,) for stage in range(len(ends)))
    return ScoredPlan(Proposal(config, ends, devices), ("never",) * len(ends), seconds)


@dataclass
class Context:
    """A plan of three stages of two of six layers, that takes four seconds, and a problem of up to four."""

    present: ScoredPlan = field(default_factory=lambda: plan(4.0, (2, 4, 6)))
    must_cut: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ("1f1b", "gpipe")
    every_replica_count: bool = True

    @property
    def problem(self) -> Any:
        chain = SimpleNamespace(cut_after=np.array([True] * 5 + [False]), sizes=(1,), max_stages=6)
        limits = SimpleNamespace(must_cut=self.must_cut)
        table = SimpleNamespace(cut_points=(0, 1, 2, 3, 4, 5, 6))
        space = SimpleNamespace(chain=chain, limits=limits, table=lambda _: table)
        return SimpleNamespace(
            space=space,
            chain=chain,
            families=["families"],
            stage_counts=range(1, 5),
            schedules=self.schedules,
            every_replica_count=self.every_replica_count,
            configs=[CONFIG],
            allows=lambda _: True,
        )


def test_what_is_as_fast() -> None:
    for factor, expected in ((1.0, True), (1 + 9 * TIE, True), (1 - 9 * TIE, True), (1 + 11 * TIE, False)):
        assert _as_fast(plan(4.0 * factor), plan(4.0)) == expected
    assert not _as_fast(plan(4.0 * (1 - 11 * TIE)), plan(4.0))
    assert _fastest([None, plan(3.0), plan(2.0), plan(5.0)]) == plan(2.0)
    assert _fastest([None]) is None


def test_other_numbers_of_stages(monkeypatch: Patch) -> None:
    """All but the plan's own, from the seeds that have such; of schedules that are not searched the best."""
    asked = list[Any]()

    def near(_: Any, families: Any, counts: Any, seeds: Any, seconds: float) -> Any:
        asked.append((families, counts, seeds, seconds))
        return SimpleNamespace(best=plan(5.0), exact=True)

    monkeypatch.setattr(rivals, "search_near", near)
    monkeypatch.setattr(rivals, "fastest", lambda _, own: plan(4.5) if own else None)
    context: Any = Context()
    two, three, other = plan(5.0), plan(6.0, (1, 2, 6)), plan(5.0, (2, 6), schedule="zb-h1")
    own = _other_stage_counts(context, [two, three, other])
    assert (own.plan, own.proven) == (plan(4.5), True)
    assert asked.pop() == (["families"], [1, 2, 4], [two.proposal], SECONDS / 4)
    own = _search_counts(context.problem, [1], [two.proposal])
    assert own.plan == plan(5.0)
    # Two virtual stages on each of two devices are two stages.
    chunked: Any = Context(plan(4.0, (1, 2, 3, 6), devices=((0,), (1,)) * 2, virtual=2))
    _other_stage_counts(chunked, [two, three])
    assert asked.pop()[1:3] == ([1, 3, 4], [three.proposal])


def test_plans_without_cuts(monkeypatch: Patch) -> None:
    """Of as many stages, from seeds that do not have them, and from the plan with its own cut moved."""
    asked = list[Any]()

    def near(space: Any, families: Any, counts: Any, seeds: Any, seconds: float) -> Any:
        asked.append((space, families, counts, seeds, seconds))
        return SimpleNamespace(best=plan(5.0, (1, 4, 6)), exact=False)

    def with_cuts(_: Any, cuts: Any) -> Any:
        places = np.flatnonzero(cuts).tolist()
        return SimpleNamespace(places=places, chain=SimpleNamespace(max_stages=len(places) + 1))

    monkeypatch.setattr(rivals, "search_near", near)
    monkeypatch.setattr(rivals, "with_cuts", with_cuts)
    moved = plan(0.0, (1, 4, 6)).proposal
    monkeypatch.setattr(rivals, "_move_cut", lambda *own: [moved] if own[2] == 2 else [])
    context: Any = Context()
    seeds = [plan(5.0), plan(6.0, (3, 4, 6)), plan(6.0, (2, 5, 6)), plan(6.0, (1, 5, 6))]
    own = _without(context, seeds, [2, 5])
    assert (own.plan, own.proven) == (plan(5.0, (1, 4, 6)), False)
    space, families, counts, others, seconds = asked.pop()
    assert (space.places, families, counts) == ([0, 2, 3], ["families"], [3])
    assert others == [seeds[1].proposal, moved]
    assert seconds == SECONDS / 8
    none = _without(context, seeds, [2, 3, 4, 5])
    assert (none.plan, none.proven, asked) == (None, True, [])
    heuristic: Any = Context(plan(4.0, (2, 4, 6), schedule="zb-h1"))
    monkeypatch.setattr(rivals, "fastest", lambda _, own: plan(4.5) if own == others else None)
    own = _without(heuristic, seeds, [2, 5])
    assert (own.plan, own.proven, asked) == (plan(4.5), False, [])


def test_a_cut_is_forbidden_with_those_that_take_its_place(monkeypatch: Patch) -> None:
    """As long as plans are as fast, up to so many, and where the options do not ask for the cut."""
    asked = list[list[int]]()
    answers: list[_Best] = []

    def without(_: Any, __: Any, forbidden: Sequence[int]) -> _Best:
        asked.append(list(forbidden))
        return answers[len(asked) - 1]

    monkeypatch.setattr(rivals, "_without", without)
    context: Any = Context()
    ties = [plan(4.0, (1, 4, 6)), plan(4.0, (3, 4, 6))]
    answers[:] = [_Best(ties[0], True), _Best(ties[1], True), _Best(plan(4.4), True)]
    own = _without_cut(context, [], 2)
    assert own == _Best(plan(4.4), True, tuple(ties))
    assert asked == [[2], [2, 1], [2, 1, 3]]
    asked.clear()
    answers[:] = [_Best(ties[0], True), _Best(None, False)]
    assert _without_cut(context, [], 2) == _Best(None, False, (ties[0],))
    asked.clear()
    answers[:] = [_Best(plan(4.0, (1, 4, 6)), True)] * TIES
    own = _without_cut(context, [], 2)
    assert (own.plan, own.proven, len(own.ties), len(asked)) == (None, False, TIES, TIES)
    asked.clear()
    fixed: Any = Context(must_cut=(1,))
    assert _without_cut(fixed, [], 2) == _Best(None, True, ())
    assert asked == []
    answers[:] = [_Best(plan(4.0, (1, 2, 6)), True)]
    assert _without_cut(fixed, [], 4) == _Best(None, False, (plan(4.0, (1, 2, 6)),))


def test_other_devices_of_the_same_stages(monkeypatch: Patch) -> None:
    """One after another of those that make a difference, until one is not as fast."""
    shapes: list[Any] = [((0,), (1,), (2,)), ((0,), (1,), (3,)), ((0, 1), (2,), (3,)), ((0,), (1, 2), (3,))]
    steps = dict(zip(shapes, (3.0, 4.0, 4.0, 5.0), strict=True))
    monkeypatch.setattr(rivals, "_shapes", lambda *_: (shapes, "every"))
    monkeypatch.setattr(rivals, "_differs", lambda _, devices: devices != shapes[0])

    def score(_: Any, proposals: Sequence[Proposal]) -> ScoredPlan | None:
        plans = [plan(steps[own.devices], own.ends, own.devices) for own in proposals]
        return min(plans, key=lambda own: own.step_seconds, default=None)

    monkeypatch.setattr(rivals, "fastest", score)
    own = _other_devices(Context())  # type: ignore[arg-type]
    tied = [plan(4.0, (2, 4, 6), shape) for shape in shapes[1:3]]
    assert own == _Best(plan(5.0, (2, 4, 6), shapes[3]), "every", tuple(tied))  # type: ignore[arg-type]
    steps[shapes[3]] = 4.0
    assert _other_devices(Context()).plan is None  # type: ignore[arg-type]
    for other in (plan(4.0, schedule="zb-h1"), plan(4.0, (1, 2, 3, 6), ((0,), (1,)) * 2, virtual=2)):
        assert _other_devices(Context(other)) == _Best(None, False)  # type: ignore[arg-type]


def test_devices_that_make_a_difference(monkeypatch: Patch) -> None:
    """More or fewer on a stage; else where the step of the same configuration is another."""
    context: Any = Context()
    steps: dict[Any, float] = {
        ((0,), (1,), (3,)): 4.0 * (1 + 2 * TIE),
        ((1,), (0,), (2,)): 4.0 * (1 + TIE / 2),
    }
    monkeypatch.setattr(
        rivals, "fastest", lambda _, own: plan(steps[own[0].devices]) if own[0].devices in steps else None
    )
    assert _differs(context, ((0, 1), (2,), (3,)))
    assert not _differs(context, ((0,), (1,), (2,)))
    assert _differs(context, ((0,), (1,), (3,)))
    assert not _differs(context, ((1,), (0,), (2,)))
    assert _differs(context, ((3,), (1,), (2,)))


def test_how_many_choices_of_devices_are_looked_at(monkeypatch: Patch) -> None:
    """With replicas that share a micro-batch; whether these are all."""
    listed: list[Any] = [((n,), (n + 1,)) for n in range(MOST_SHAPES)]
    asked = list[Any]()

    def shapes(_: Any, family: Any, stages: int, allowed: Sequence[int]) -> Any:
        asked.append((family.name, stages, allowed))
        return iter(listed)

    monkeypatch.setattr(rivals, "_neighbours", lambda *_: [])
    monkeypatch.setattr(rivals, "_list_shapes", shapes)
    placement = object()
    families = [SimpleNamespace(name=n, placement=placement, replicas=(1, 2, 4)) for n in "ab"]
    families.append(SimpleNamespace(name="c", placement=object(), replicas=(1, 3)))
    problem: Any = SimpleNamespace(
        configs=[replace(CONFIG, micro_batch_size=n) for n in (1, 2)], families=families
    )
    own = plan(4.0).proposal
    assert _shapes(problem, own) == (listed, True)
    assert asked == [("b", 2, [1, 2]), ("c", 2, [1])]
    listed.append(((0, 1), (2, 3)))
    assert _shapes(problem, own) == (listed[:-1], False)
    listed[:] = listed[:2] * (MOST_LISTED // 2)
    assert _shapes(problem, own) == (listed[:2], True)
    listed.append(listed[0])
    assert _shapes(problem, own) == (listed[:2], False)


@pytest.mark.parametrize(
    ("change", "second", "others"),
    [
        ({}, True, True),
        ({"every_replica_count": False}, False, False),
        ({"schedules": ("1f1b", "zb-h1")}, False, False),
    ],
)
def test_the_runners_up(change: dict[str, Any], second: bool, others: bool, monkeypatch: Patch) -> None:
    """The best of each kind that is not as fast, how much slower, and what is proven."""
    monkeypatch.setattr(rivals, "plan_row", lambda own: own)
    monkeypatch.setattr(rivals, "RunnerUp", SimpleNamespace)
    context: Any = Context(**change)
    own: dict[str, _Best] = {"2": _Best(plan(6.0), True), "4": _Best(plan(5.0, (1, 6)), True)}
    own |= {"devices": _Best(plan(7.0), True), "stages": _Best(plan(4.5, (6,)), True)}
    monkeypatch.setattr(rivals, "_other_stage_counts", lambda *_: own["stages"])
    monkeypatch.setattr(rivals, "_without_cut", lambda _, __, end: own[str(end)])
    monkeypatch.setattr(rivals, "_other_devices", lambda _: own["devices"])
    answer: Any = runners_up(context, [], 1)
    assert (answer.second_best.plan, answer.second_best.slower) == (plan(4.5, (6,)), 0.125)
    assert answer.second_best.differs == "cuts, replicas or devices"
    assert (answer.other_stages.plan, answer.other_stages.slower) == (plan(4.5, (6,)), 0.125)
    assert answer.other_stages.differs == "number of stages"
    assert (answer.second_best.proven, answer.other_stages.proven) == (second, others)
    assert answer.as_fast is None
    assert sorted(each.step_seconds for each in answer.plans) == [4.5, 5.0, 6.0, 7.0]
    own["stages"] = _Best(plan(4.0, (6,)), True)
    answer = runners_up(context, [], 1)
    assert answer.as_fast == plan(4.0, (6,))
    assert (answer.second_best.plan, answer.second_best.proven) == (plan(5.0, (1, 6)), False)
    assert (answer.other_stages.plan, answer.other_stages.slower) == (plan(4.0, (6,)), 0.0)
    own["stages"] = _Best(None, False)
    answer = runners_up(context, [], 1)
    assert (answer.other_stages.plan, answer.other_stages.slower, answer.other_stages.proven) == (
        None,
        None,
        False,
    )
    assert not answer.second_best.proven
    own["stages"], tie = _Best(None, True), plan(4.0, (1, 4, 6))
    own["2"] = _Best(None, True, (tie,))
    answer = runners_up(context, [], 1)
    assert (answer.as_fast, answer.second_best.proven, answer.other_stages.proven) == (tie, False, others)
    monkeypatch.setattr(rivals, "MOST_CUTS", 1)
    own["4"], own["2"] = _Best(plan(5.0), True), _Best(plan(6.0), True)
    assert not runners_up(context, [], 1).second_best.proven

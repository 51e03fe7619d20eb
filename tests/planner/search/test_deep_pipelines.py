"""Which even pipelines of many devices are looked at, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Link, Topology, two_level_topology
from pplan.planner.pipeline_config import PipelineConfig
from pplan.planner.search import deep_pipelines
from pplan.planner.search.budget import SearchBudget
from pplan.planner.search.deep_pipelines import MOST_FITTING, MOST_TRIED, _shapes, propose_deep
from pplan.planner.search.placements import list_placements
from pplan.planner.search.space import Space
from pplan.planner.search.subproblem import Family

MakeChain = Callable[..., Chain]
Shape = tuple[tuple[int, ...], tuple[float, ...]]


def topology(*speeds: float) -> Topology:
    """A kind of devices for each speed, one after another in one node."""
    link = Link(100.0, 0.0)
    groups = tuple(
        Group(Device(f"kind {speed}", None, speed), speeds.count(speed)) for speed in dict.fromkeys(speeds)
    )
    own = two_level_topology(groups[0].device, len(speeds), len(speeds), link, link)
    return Topology(groups, own.levels)


@pytest.mark.parametrize(
    ("speeds", "layers", "size", "counts", "expected"),
    [
        # As many on each: eight, four or two stages; three layers make no more than three stages.
        ((1.0,) * 8, 10, 4, (1, 2, 4), [(1,) * 8, (2,) * 4, (4,) * 2]),
        ((1.0,) * 8, 8, 4, (1, 2, 4), [(1,) * 8, (2,) * 4, (4,) * 2]),
        ((1.0,) * 8, 7, 4, (1, 2, 4), [(2,) * 4, (4,) * 2]),
        ((1.0,) * 8, 3, 4, (1, 2, 4), [(4,) * 2]),
        # What is left over of the devices is left free.
        ((1.0,) * 7, 10, 4, (1, 2, 4), [(1,) * 7, (2,) * 3, (4,)]),
        # No more replicas than a micro-batch has samples.
        ((1.0,) * 8, 10, 3, (1, 2, 4), [(1,) * 8, (2,) * 4]),
        # Of devices of half the speed also twice as many on a stage, where there may be so many.
        ((1.0,) * 4 + (0.5,) * 4, 10, 4, (1, 2), [(1,) * 8, (1, 1, 1, 1, 2, 2), (2,) * 4]),
        (
            (1.0,) * 4 + (0.5,) * 4,
            10,
            4,
            (1, 2, 4),
            [(1,) * 8, (1, 1, 1, 1, 2, 2), (2,) * 4, (2, 2, 4), (4, 4)],
        ),
        ((0.5,) * 2 + (1.0,) * 2, 10, 4, (1, 2), [(1,) * 4, (2, 1, 1), (2, 2)]),
    ],
)
def test_replicas_of_even_pipelines(
    speeds: tuple[float, ...],
    layers: int,
    size: int,
    counts: tuple[int, ...],
    expected: list[tuple[int, ...]],
    make_chain: MakeChain,
) -> None:
    """On one order of the devices; each stage is as slow as the slowest of its devices."""
    own = topology(*speeds)
    space = Space(make_chain(1, layers, cuts=1.1), own, "sgd")
    placement = next(each for each in list_placements(own) if each.ranks == tuple(range(len(speeds))))
    family = Family(PipelineConfig("1f1b", "never", 8, size), placement, counts)
    shapes = list(_shapes(space, family))
    assert [shape.replicas for shape in shapes] == expected
    for shape in shapes:
        first, scales = 0, []
        for count in shape.replicas:
            scales.append(max(1 / speed for speed in speeds[first : first + count]))
            first += count
        assert shape.scales == pytest.approx(tuple(scales))


def test_replicas_whose_shares_were_not_measured_are_left_out(make_chain: MakeChain) -> None:
    """Four samples on one device, where two are the most that the profile has."""
    own = topology(1.0, 1.0, 1.0, 1.0)
    family = Family(PipelineConfig("1f1b", "never", 2, 4), list_placements(own)[0], (1, 2, 4))
    space = Space(make_chain(1, 4, cuts=1.1, sizes=(1, 2)), own, "sgd")
    assert [shape.replicas for shape in _shapes(space, family)] == [(2, 2), (4,)]


@dataclass(frozen=True)
class Stub:
    """A shape with an estimate, of so many plans."""

    least_seconds: float
    replicas: tuple[int, ...]
    plans: int = 1


def proposed(
    shapes: list[Stub], monkeypatch: pytest.MonkeyPatch, limit: Callable[[], float]
) -> list[tuple[float, int]]:
    space: Any = SimpleNamespace(budget=SearchBudget(1e9))
    family: Any = SimpleNamespace(config=PipelineConfig("1f1b", "never", 5, 1))
    monkeypatch.setattr(deep_pipelines, "_shapes", lambda *_: iter(shapes))
    monkeypatch.setattr(
        deep_pipelines,
        "_as_recomputed",
        lambda shape: ((shape.least_seconds, number) for number in range(shape.plans)),
    )
    return list(propose_deep(space, [family], limit))  # type: ignore[arg-type]


def test_plans_are_made_ready_by_their_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest stage times the micro-batches and the stages before the last: (5 + p - 1) s."""
    shapes = [Stub(2.0, (1,) * 4), Stub(3.0, (1,)), Stub(1.0, (1,) * 16), Stub(2.25, (1,) * 4, 2)]
    # 16, 15, 20 and 18 seconds.
    order = [(3.0, 0), (2.0, 0), (2.25, 0), (2.25, 1), (1.0, 0)]
    assert proposed(shapes, monkeypatch, lambda: 100.0) == order
    assert proposed(shapes, monkeypatch, lambda: 20.0) == order[:4]
    assert proposed(shapes, monkeypatch, lambda: 18.0) == order[:2]


def test_so_many_are_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit, those without a plan not counted; and no more than are tried."""
    many = [Stub(float(number + 1), (1,), number % 2) for number in range(40)]
    assert proposed(many, monkeypatch, lambda: 1e9) == [
        (float(own), 0) for own in (2, 4, 6, 8)[:MOST_FITTING]
    ]
    none = [Stub(float(number + 1), (1,), 0) for number in range(MOST_TRIED)]
    assert proposed([*none, Stub(1e3, (1,))], monkeypatch, lambda: 1e9) == []
    assert proposed([*none[1:], Stub(1e3, (1,))], monkeypatch, lambda: 1e9) == [(1e3, 0)]

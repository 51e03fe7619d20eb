"""The steps of `fill_bound`, with loops, and with programmes whose answers are written down here."""

from __future__ import annotations

from itertools import product
from math import inf, log, sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.search import fill_bound as fill
from pplan.planner.search.budget import SearchBudget
from pplan.planner.search.family import SAFE
from pplan.planner.search.fill_bound import _FillProgramme

Patch = pytest.MonkeyPatch


def kinds(*speeds: float, profile: str | None = None) -> Any:
    """Two devices of each speed."""
    return {SimpleName(speed, profile): 2 for speed in speeds}


class SimpleName:
    """A kind of device."""

    def __init__(self, speed: float, profile: str | None) -> None:
        self.speed, self.profile = speed, profile


def family_of(micro_batches: int, schedule: str = "1f1b") -> Any:
    config = SimpleNamespace(micro_batches=micro_batches, schedule=schedule)
    return SimpleNamespace(config=config, placement=SimpleNamespace(ranks=(0, 1)))


def space_of(own: Any) -> Any:
    return SimpleNamespace(topology=SimpleNamespace(count_kinds=lambda _: own), budget=SearchBudget())


@pytest.mark.parametrize("best", [0.2, 0.9, 1.0, 1.3, 2.0, 40.0])
def test_a_price_moves_as_long_as_it_gains(best: float, monkeypatch: Patch) -> None:
    """By a fifth, up or else down, and so often at the most."""
    steps = [1.2**n for n in range(-fill.MOST_MOVES, fill.MOST_MOVES + 1)]

    def bound(_: Any, low: float, high: float, price: float) -> float:
        assert (low, high) == (1.0, 2.0)
        return 10.0 - abs(log(price / best))

    monkeypatch.setattr(_FillProgramme, "bound", bound)
    own = _FillProgramme(None, None, 0.0).improve_price(1.0, 2.0, 1.0)  # type: ignore[arg-type]
    least, price = max((10.0 - abs(log(step / best)), step) for step in steps)
    assert list(own) == pytest.approx([least, price])
    monkeypatch.setattr(_FillProgramme, "bound", lambda *_: 3.0)
    assert _FillProgramme(None, None, 0.0).improve_price(1.0, 2.0, 1.0) == (3.0, 1.0)  # type: ignore[arg-type]


class Ranges:
    """A programme whose bound on a range is the least of a curve, less a part of its width."""

    def __init__(self, loose: float, micro_batches: int = 4) -> None:
        self.loose, self.family, self.paid_devices = loose, family_of(micro_batches), 5.0
        self.asked = list[tuple[float, float, float]]()

    def improve_price(self, low: float, high: float, price: float) -> tuple[float, float]:
        self.asked.append((low, high, price))
        nearest = min(max(low, 2.0), high)
        return 10.0 + (nearest - 2.0) ** 2 - self.loose * (high - low), price + 1.0


def test_the_least_of_all_ranges() -> None:
    """Halved where they are weakest, on a scale of ratios, from a part of the work to a step without the
    first micro-batch."""
    own = Ranges(3.0)
    assert 9.95 < fill._least(own, 4.0, 4.0, 60.0) <= 10.0  # type: ignore[arg-type]
    middle = sqrt(1.0 * 20.0)
    assert own.asked[:2] == [(1.0, middle, 0.8), (middle, 20.0, 0.8)]
    second = min(own.asked[:2], key=lambda row: (max(4.0, Ranges(3.0).improve_price(*row)[0]), row))
    middle = sqrt(second[0] * second[1])
    assert own.asked[2:4] == [(second[0], middle, 1.8), (middle, second[1], 1.8)]
    assert len(own.asked) % 2 == 0
    assert len(own.asked) <= 2 * fill.MOST_RANGES
    tight = Ranges(0.01)
    assert fill._least(tight, 4.0, 4.0, 60.0) == pytest.approx(10.0, abs=1e-4)  # type: ignore[arg-type]
    assert len(tight.asked) < 2 * fill.MOST_RANGES
    assert sqrt(fill.NARROW) < min(high / low for low, high, _ in tight.asked) <= fill.NARROW
    high = Ranges(3.0)
    assert fill._least(high, 4.0, 4.0, 6.0) == 6.0  # type: ignore[arg-type]
    assert fill._least(high, 9.0, 4.0, 6.0) == 6.0  # type: ignore[arg-type]
    weak = Ranges(1e6)
    assert fill._least(weak, 4.0, 4.0, 60.0) == 4.0  # type: ignore[arg-type]


def test_when_ranges_are_not_narrow_at_the_end(monkeypatch: Patch) -> None:
    """The weakest range that is left."""
    monkeypatch.setattr(fill, "MOST_RANGES", 2)
    own = Ranges(3.0)
    least = fill._least(own, 4.0, 4.0, 60.0)  # type: ignore[arg-type]
    assert len(own.asked) == 4
    left = [*own.asked[2:], own.asked[0] if own.asked[2][0] == own.asked[1][0] else own.asked[1]]
    assert least == max(4.0, min(Ranges(3.0).improve_price(*row)[0] for row in left))


def test_when_a_fill_programme_is_asked(monkeypatch: Patch) -> None:
    asked = list[Any]()
    answers = {0.0: 5.0, 0.1: 6.0}

    def least(programme: Any, quick: float, work: float, step: float) -> float:
        asked.append((programme[2], quick, work, step))
        return answers[programme[2]]

    quick = [2.0]
    monkeypatch.setattr(fill, "quick_bound", lambda *_: quick[0])
    monkeypatch.setattr(fill, "shared_work", lambda *_: 1.5)
    monkeypatch.setattr(fill, "_FillProgramme", lambda *own: own)
    monkeypatch.setattr(fill, "_least", least)
    one, two = space_of(kinds(1.0)), space_of(kinds(1.0, 0.5))
    assert fill.fill_bound(one, family_of(1), 9.0) == 2.0
    assert fill.fill_bound(one, family_of(4), inf) == 2.0
    assert fill.fill_bound(one, family_of(4), 2.0) == 2.0
    assert fill.fill_bound(one, family_of(4), 1.0) == 1.0
    assert fill.fill_bound(space_of(kinds(1.0, profile="own")), family_of(4), 9.0) == 2.0
    quick[0] = 0.0
    assert fill.fill_bound(one, family_of(4), 9.0) == 0.0
    assert asked == []
    quick[0] = 2.0
    assert fill.fill_bound(one, family_of(2), 9.0) == 5.0
    assert asked == [(0.0, 2.0, 1.5, 9.0)]
    assert fill.fill_bound(two, family_of(4), 9.0) == 6.0
    assert asked[1:] == [(0.0, 2.0, 1.5, 9.0), (0.1, 2.0, 1.5, 9.0)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(4))
def test_every_layer_has_what_suits_it(seed: int, schedule: str) -> None:
    """At a price: of the choices that are within the range, the cheapest for each layer."""
    random = np.random.default_rng(seed)
    choices = [
        SimpleNamespace(price=price, seconds=x, after=x / 2, shortest=x.min(), longest=x.max())
        for price in (1.0, 2.0, 4.0)
        for x in [random.integers(1, 30, 5) / 8 / price]
    ]
    budget = SearchBudget(1e6)
    space: Any = SimpleNamespace(chain=range(5), budget=budget)
    own: Any = _FillProgramme(space, family_of(6, schedule), 0.0)
    vars(own).update({"_choices": choices, "paid_devices": 3.0})
    for low, high, price in product((0.5, 1.0), (0.4, 1.5, 3.0), (0.1, 0.8, 5.0)):
        total = 0.0
        for layer in range(5):
            values = [inf]
            for choice in choices:
                x, later, paid = choice.seconds[layer], choice.after[layer], price * choice.price
                if x <= high:
                    whole = schedule == "1f1b" and paid < high
                    values.append(paid - high + x + later if whole else paid * x / high + later)
            total += min(values)
        before = budget.remaining
        assert own.bound(low, high, price) == pytest.approx((5 * low + total - price * 3.0) * SAFE)
        listed = sum(choice.shortest <= high for choice in choices)
        assert before - budget.remaining == pytest.approx(fill.WORK * 5 * listed)

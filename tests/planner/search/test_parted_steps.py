"""The steps of the bounds with layers that may be parted, once more with loops, and with programmes whose
answers are written down here."""

from __future__ import annotations

from functools import cache
from itertools import pairwise, product
from math import ceil, inf, log, sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.search import fill_bound as fill
from pplan.planner.search import fluid_bound as fluid
from pplan.planner.search.budget import SearchBudget
from pplan.planner.search.fill_bound import _FillProgramme
from pplan.planner.search.fluid_bound import HALVINGS, _FluidProgramme
from pplan.planner.search.relaxed_problem import SAFE

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


@pytest.mark.parametrize("true", [1.0, 2.5, 7.9, 8.0])
def test_the_largest_step_that_is_too_short(true: float) -> None:
    """Of halvings on a scale of ratios, from 1 to 8."""
    asked = []

    def needs_more(step: float) -> bool:
        asked.append(step)
        return step < true

    own = fluid._largest(SimpleNamespace(needs_more=needs_more), 1.0, 8.0)  # type: ignore[arg-type]
    assert asked[:2] == [8.0, sqrt(8.0)]
    assert len(asked) == 1 + HALVINGS
    assert own <= true <= own * 8 ** (1 / 2**HALVINGS) * (1 + 1e-12)
    assert own == max([1.0, *(step for step in asked if step < true)])
    always: Any = SimpleNamespace(needs_more=lambda _: True)
    assert fluid._largest(always, 1.0, 8.0) == 8.0


def test_when_a_fluid_programme_is_asked(monkeypatch: Patch) -> None:
    """Not of one micro-batch, without a plan, of kinds with costs of their own, or where the quick bound is
    as high; of kinds of different speeds at several prices, until one proves all."""
    asked = list[Any]()
    answers = iter(list[float]())
    monkeypatch.setattr(fluid, "quick_bound", lambda *_: 2.0)
    monkeypatch.setattr(fluid, "_FluidProgramme", lambda *own: own)

    def largest(programme: Any, low: float, step: float) -> float:
        asked.append((programme[2], low, step))
        return next(answers)

    monkeypatch.setattr(fluid, "_largest", largest)
    space = space_of(kinds(1.0))
    assert fluid.fluid_bound(space, family_of(1), 9.0) == 2.0
    assert fluid.fluid_bound(space, family_of(1), 1.0) == 1.0
    assert fluid.fluid_bound(space, family_of(4), inf) == 2.0
    assert fluid.fluid_bound(space, family_of(4), 1.5) == 1.5
    assert fluid.fluid_bound(space, family_of(4), 2.0) == 2.0
    assert fluid.fluid_bound(space_of(kinds(1.0, profile="own")), family_of(4), 9.0) == 2.0
    assert asked == []
    answers = iter([5.0, 6.0])
    assert fluid.fluid_bound(space, family_of(2), 9.0) == 5.0
    assert asked == [((1.0,), 2.0, 9.0)]
    asked.clear()
    answers = iter([5.0, 6.0, 7.0])
    assert fluid.fluid_bound(space_of(kinds(1.0, 0.5)), family_of(4), 9.0) == 7.0
    assert [(own[0], own[1]) for own in asked] == [
        ((1.0, pytest.approx(0.5 * 0.5**discount)), low)
        for discount, low in zip(fluid.DISCOUNTS, (2.0, 5.0, 6.0), strict=True)
    ]
    asked.clear()
    answers = iter([5.0, 9.0])
    two = space_of(kinds(2.0, 4.0))
    before = two.budget.remaining
    assert fluid.fluid_bound(two, family_of(4), 9.0) == 9.0
    assert len(asked) == 2
    assert before == two.budget.remaining == inf
    spent: Any = space_of(kinds(1.0))
    spent.budget = SearchBudget(3e8)
    answers = iter([5.0])
    fluid.fluid_bound(spent, family_of(4), 9.0)
    assert spent.budget.remaining == pytest.approx(1e8)


class Layers:
    """Of a few choices, devices times seconds and seconds of each layer."""

    def __init__(self, seed: int, monkeypatch: Patch, layers: int = 6) -> None:
        random = np.random.default_rng(seed)
        self.micro_batches, self.paid = int(random.integers(2, 6)), float(random.integers(2, 7))
        self.seconds = random.integers(1, 20, (3, layers)) / 8
        self.devices = self.seconds * np.array([[1.0], [1.3], [2.0]])
        self.seconds /= np.array([[1.0], [1.9], [2.9]])
        if seed % 3 == 0:
            self.seconds[:, 2] = self.devices[:, 2] = 0.0
        programme: Any = _FluidProgramme(None, family_of(self.micro_batches), ())  # type: ignore[arg-type]
        vars(programme).update({"_layers": (self.devices, self.seconds), "_paid": self.paid})
        self.programme = programme
        for name, value in (("RUNS", 4), ("CELLS", 24), ("WIDTH", 1.3)):
            monkeypatch.setattr(fluid, name, value)

    def runs(self) -> list[tuple[int, int]]:
        """Each ends behind the layer in which another fourth of the seconds is reached."""
        least = self.seconds.min(axis=0).tolist()
        ends = set()
        for quarter in (1, 2, 3):
            before = 0.0
            for layer, own in enumerate(least):
                before += own
                if before >= sum(least) * quarter / 4:
                    ends.add(layer + 1)
                    break
        points = sorted({0, *ends, len(least)})
        return list(pairwise(points))

    @cache  # noqa: B019
    def choices(self) -> list[list[tuple[float, float]]]:
        """By run, seconds from which on so many devices times seconds are needed: what lines show."""
        each = []
        for first, end in self.runs():
            devices, seconds = self.devices[:, first:end].tolist(), self.seconds[:, first:end].tolist()
            columns = range(end - first)
            least, most = (sum(pick(row[i] for row in seconds) for i in columns) for pick in (min, max))
            if least == 0:
                each.append([(0.0, 0.0)])
                continue
            count = ceil(log(most / least) / log(1.3)) + 1
            steepest = max(map(sum, devices)) / least
            slopes = [0.0, *(steepest * 1e-5 * 1e6 ** (i / 59) for i in range(60))]
            rows: list[tuple[float, float]] = []
            for number in range(count):
                high = least * 1.3 ** (number + 1)
                need = 0.0
                for slope in slopes:
                    line = sum(
                        min(d[i] + slope * s[i] for d, s in zip(devices, seconds, strict=True))
                        for i in columns
                    )
                    need = max(need, line - slope * high)
                rows.append((least * 1.3**number, need))
            each.append([row for i, row in enumerate(rows) if i == 0 or row[1] < rows[i - 1][1]])
        return each

    def least_devices(self, step: float) -> float:
        """For a step: by cell of the seconds before, the least so far."""
        fill = min(32.0 * sum(self.seconds.min(axis=0)), step)
        cell = fill / 24
        costs = {0: 0.0}
        for run in self.choices():
            later: dict[int, float] = {}
            for before, cost in costs.items():
                left = min(step, step + step / (self.micro_batches - 1) - cell * before)
                for seconds, need in run:
                    at = min(23, before + min(23, int(seconds / cell)))
                    later[at] = min(later.get(at, inf), cost + need * self.micro_batches / left)
            costs = later
        return min(costs.values())


@pytest.mark.parametrize("seed", range(9))
def test_the_fluid_programme_once_more(seed: int, monkeypatch: Patch) -> None:
    own = Layers(seed, monkeypatch)
    assert [(run.start, run.stop) for run in own.programme._runs] == own.runs()
    assert own.programme._least_seconds == pytest.approx(sum(own.seconds.min(axis=0)))
    expected = own.choices()
    assert len(own.programme._choices) == len(expected)
    for (seconds, needs), rows in zip(own.programme._choices, expected, strict=True):
        assert seconds.tolist() == pytest.approx([row[0] for row in rows])
        assert needs.tolist() == pytest.approx([row[1] for row in rows], abs=1e-9)
    answers = set()
    for step in np.geomspace(0.5, 80.0, 60).tolist():
        least = own.least_devices(step)
        if abs(least - own.paid) > 1e-6:
            assert own.programme.needs_more(step) == (least > own.paid)
            answers.add(least > own.paid)
    assert answers == {True, False}


def test_layers_that_take_nothing_need_nothing(monkeypatch: Patch) -> None:
    own = Layers(0, monkeypatch)
    own.seconds[:] = own.devices[:] = 0.0
    assert not own.programme.needs_more(1.0)


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_of_a_run_needs_less(seed: int, monkeypatch: Patch) -> None:
    """Of all choices of its layers, those that take so long need as much as is said of their range."""
    own = Layers(seed, monkeypatch)
    for run, (seconds, needs) in zip(own.programme._runs, own.programme._choices, strict=True):
        columns = range(run.start, run.stop)
        for chosen in product(range(3), repeat=len(columns)):
            took = sum(own.seconds[pick, at] for pick, at in zip(chosen, columns, strict=True))
            devices = sum(own.devices[pick, at] for pick, at in zip(chosen, columns, strict=True))
            which = np.searchsorted(seconds, took * (1 + 1e-12), side="right") - 1
            assert devices >= needs[which] * (1 - 1e-9)


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

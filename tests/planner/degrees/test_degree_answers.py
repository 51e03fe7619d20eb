"""The search of degrees from its combinations to its answer, with bounds and plans that stand here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pplan.cost_models.errors import InfeasibleError, UsageError
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.training_setting import TrainingSetting
from pplan.planner.degrees import degree_search as module
from pplan.planner.degrees.degree_combinations import Combination
from pplan.planner.degrees.degree_refusals import _again, nothing_fits
from pplan.planner.degrees.degree_search import (
    DegreeAnswer,
    DegreePlan,
    _best_division,
    _layer_tables,
    _more_again,
    search_degrees,
)

Patch = pytest.MonkeyPatch
NO_LIMIT = float("inf")
SHAPE: Any = SimpleNamespace(name="toy", blocks=6)


def one(
    tensor: int = 1, stages: int = 2, again: int | None = None, virtual: int = 1, **more: Any
) -> Combination:
    known = {"recompute": "full" if again else "none", "virtual_stages": virtual, "recompute_blocks": again}
    setting = TrainingSetting(4, Tokens(64, 2), **(known | more))
    return Combination(ParallelDegrees(tensor, 1, 1, stages, 2), setting)


def plan(seconds: float, own: Combination | None = None) -> DegreePlan:
    own, estimate = own or one(), SimpleNamespace(step_seconds=seconds, peak_bytes=seconds)
    return DegreePlan(own.degrees, own.setting, (3, 3), estimate, None)  # type: ignore[arg-type]


def answer(*plans: DegreePlan, bound: float = 5.0, table: Any = None) -> Any:
    costs: Any = SimpleNamespace(table=table)
    return DegreeAnswer(SHAPE, 4, None, costs, plans, bound, 1, 9.0)  # type: ignore[arg-type]


def test_what_an_answer_says(monkeypatch: Patch) -> None:
    """The gap of the best plan, and the products of its layers, of which a table may not have all."""
    assert answer(plan(6.0), plan(9.0)).gap == pytest.approx(0.2)
    layers = SimpleNamespace(blocks={True: "a", False: "b"}, embedding="e", head="h", predictor="p")
    monkeypatch.setattr(module, "LayerTable", lambda *own: layers if own[0] is SHAPE else None)
    monkeypatch.setattr(module, "products", list)
    assert answer(plan(6.0)).kernels == ["a", "b", "e", "h"]
    with_predictors = answer(plan(6.0, one(predictors=1)))
    assert with_predictors.kernels == ["a", "b", "e", "h", "p"]
    assert with_predictors.assumed_kernels == with_predictors.kernels
    known = answer(plan(6.0), table=SimpleNamespace(has=lambda kernel: kernel in "ah"))
    assert known.assumed_kernels == ["b", "e"]


def test_layers_of_combinations(monkeypatch: Patch) -> None:
    """One table for those whose virtual stages and blocks that run again differ alone."""
    made = list[Any]()

    class Table:
        def __init__(self, shape: Any, degrees: Any, setting: Any, costs: Any) -> None:
            assert (shape, costs) == (SHAPE, "costs")
            made.append((degrees, setting))

        def with_setting(self, setting: Any) -> Any:
            return made.index(self.key), setting

        @property
        def key(self) -> Any:
            return made[self.number]

        number = -1

    def make(*own: Any) -> Any:
        table = Table(*own)
        table.number = len(made) - 1
        return table

    monkeypatch.setattr(module, "LayerTable", make)
    every = [one(), one(virtual=2), one(again=1), one(again=2, virtual=3), one(2), one(again=1)]
    found: Any = list(_layer_tables(SHAPE, every, "costs"))  # type: ignore[arg-type]
    assert [combination for combination, _ in found] == every
    assert [layers for _, layers in found] == [
        (n, own.setting) for n, own in zip((0, 0, 1, 1, 2, 1), every, strict=True)
    ]
    assert [own.virtual_stages for _, own in made] == [1, 1, 1]
    assert [own.recompute_blocks for _, own in made] == [None] * 3


def test_more_blocks_that_run_again(monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "most_recompute_blocks", lambda *_: 3)
    layers: Any = SimpleNamespace(with_setting=lambda setting: setting)
    assert _more_again(SHAPE, layers, one()) is None
    assert _more_again(SHAPE, layers, one(again=3)) is None
    for again in (1, 2):
        following: Any = _more_again(SHAPE, layers, one(again=again))
        assert following == (one(again=again + 1).setting, one(again=again + 1))


class Plans:
    """What is tried, and when it is enough."""

    def __init__(self, memory: float) -> None:
        self.memory, self.worst, self.bound, self.log = memory, NO_LIMIT, 7.0, list[Any]()
        self.best, self.plans, self.attempts = {"a": "plan"}, (plan(8.0), plan(9.0)), ["attempt"]

    def try_combination(self, layers: Any, combination: Combination) -> None:
        self.log.append((layers, combination.recompute_blocks))
        if len(self.log) == self.enough:
            self.worst = 3.0

    enough = 99

    def useful(self, _: Any) -> float:
        return 6.0

    def fit(self) -> None:
        self.log.append("fit")

    def improve(self) -> None:
        self.log.append("improve")

    def search_divisions(self) -> None:
        self.log.append("search")


def test_combinations_by_their_bounds(monkeypatch: Patch) -> None:
    """The least first, each followed by itself with one block more that runs again, until none is of use."""
    every = [one(1), one(2, again=1), one(4), one(8)]
    bounds = {(1, None): 4.0, (2, 1): 1.0, (2, 2): 2.5, (2, 3): 5.0, (4, None): 2.0, (8, None): 3.0}
    made = list[Plans]()

    def plans(memory: float, candidate: object) -> Plans:
        assert candidate is None
        made.append(Plans(memory))
        return made[-1]

    monkeypatch.setattr(module, "_BestPlans", plans)
    monkeypatch.setattr(module, "list_combinations", lambda *_: iter(every))
    monkeypatch.setattr(module, "most_recompute_blocks", lambda *_: 3)

    def tables(_: Any, given: Any, __: Any) -> Any:
        return [(own, Layers(own.degrees.tensor, own.recompute_blocks)) for own in given]

    monkeypatch.setattr(module, "_layer_tables", tables)
    monkeypatch.setattr(module, "lower_bound", lambda layers: bounds[layers.key])

    search: Any = search_degrees
    found = search(SHAPE, 4, "costs", "options", 9.0)
    ends = ["fit", "improve", "search"]
    assert [own[0].key for own in made[0].log[:-3]] == [
        (2, 1),
        (4, None),
        (2, 2),
        (8, None),
        (1, None),
        (2, 3),
    ]
    assert made[0].log[-3:] == ends
    assert made[0].memory == 9.0
    assert (found.bound_seconds, found.combinations, found.limit_bytes, found.devices) == (7.0, 6, 9.0, 4)
    assert found.plans == made[0].plans
    monkeypatch.setattr(Plans, "enough", 3)
    search(SHAPE, 4, "costs", "options", 9.0)
    assert [own[0].key for own in made[1].log[:-3]] == [(2, 1), (4, None), (2, 2)]  # 3.0 is of no use
    monkeypatch.setattr(Plans, "plans", (plan(6.0),), raising=False)

    class Unfit(Plans):
        def __init__(self, memory: float, candidate: object) -> None:
            assert candidate is None
            super().__init__(memory)
            self.best = {}

    asked = list[Any]()
    monkeypatch.setattr(module, "_BestPlans", Unfit)

    def nothing_fits(*own: Any) -> InfeasibleError:
        asked.append(own)
        return InfeasibleError("none", "", {})

    monkeypatch.setattr(module, "nothing_fits", nothing_fits)
    with pytest.raises(InfeasibleError):
        search(SHAPE, 4, "costs", "options", 9.0)
    assert asked == [(SHAPE, 4, 6, ["attempt"], 9.0)]
    monkeypatch.setattr(module, "list_combinations", lambda *_: iter(()))
    monkeypatch.setattr(module, "nothing_possible", lambda *_: UsageError("nothing", ""))
    with pytest.raises(UsageError):
        search(SHAPE, 4, "costs", "options", 9.0)


class Layers:
    """Known by tensor degree and blocks that run again."""

    def __init__(self, tensor: int, again: int | None) -> None:
        self.key = tensor, again

    def with_setting(self, setting: Any) -> Layers:
        return Layers(self.key[0], setting.recompute_blocks)


def test_the_faster_of_two_divisions(monkeypatch: Patch) -> None:
    """Even blocks, and that of the least bound, of those that fit."""
    steps = {(3, 3): (5.0, 9.0), (2, 4): (4.0, 10.0), (4, 2): (3.0, 10.5)}
    setting = SimpleNamespace(even_blocks=lambda blocks, stages: [blocks // stages] * stages)
    layers: Any = SimpleNamespace(setting=setting, shape=SHAPE, slots=2)
    asked = list[Any]()

    def estimate(_: Any, counts: Any) -> Any:
        asked.append(counts)
        return SimpleNamespace(step_seconds=steps[counts][0], peak_bytes=steps[counts][1])

    monkeypatch.setattr(module, "estimate_stages", estimate)
    own = _best_division(layers, (2, 4), one(), 10.0)
    assert (own.blocks, own.estimate.step_seconds, own.degrees) == ((2, 4), 4.0, one().degrees)
    assert asked == [(3, 3), (2, 4)]
    assert _best_division(layers, (4, 2), one(), 11.0).blocks == (4, 2)
    assert _best_division(layers, (4, 2), one(), 10.0).blocks == (3, 3)


def test_every_number_that_runs_again_where_nothing_fits() -> None:
    """Also those that were passed over, of even stages those that change them."""

    def layers(again: int) -> Any:
        setting = SimpleNamespace(even_blocks=lambda *_: (2, 4, 3))
        return SimpleNamespace(
            least_bytes=lambda: 1.0,
            peak_bytes=lambda _: {3: 4.0}.get(again, 5.0),
            setting=setting,
            slots=3,
            with_setting=lambda setting: layers(setting.recompute_blocks),
        )

    error = nothing_fits(SHAPE, 4, 17, [(layers(1), one(again=1))], 3.0)
    assert "recompute first 3 needs least, 4" in error.what


def test_what_needs_least_where_nothing_fits() -> None:
    """Of even stages, in the order of what they need at least, until none can need less."""
    asked = list[int]()

    def layers(number: int, least: float, peak: float) -> Any:
        def bytes_of(counts: Any) -> float:
            assert counts == ("even", 6, 3)
            asked.append(number)
            return peak

        setting = SimpleNamespace(even_blocks=lambda blocks, slots: ("even", blocks, slots))
        return SimpleNamespace(least_bytes=lambda: least, peak_bytes=bytes_of, setting=setting, slots=3)

    gib = 2.0**30
    attempts = [
        (layers(0, 5 * gib, 6 * gib), one(8)),
        (layers(1, 2 * gib, 5 * gib), one(2, again=3)),
        (layers(2, 1 * gib, 7 * gib), one(1)),
        (layers(3, 3 * gib, 5 * gib), one(4)),
    ]
    error = nothing_fits(SHAPE, 4, 17, attempts, 3 * gib)
    assert asked == [2, 1, 3]
    assert error.what.startswith("toy: none of 17 combinations was found to fit: of those with even stages ")
    assert f"{one(2).degrees.describe()}, micro-batches of 2, recompute first 3 needs least, 5" in error.what
    assert "of which 3" in error.what
    assert "more than 4 devices" in error.hint
    assert (_again(one()), _again(one(again=2))) == ("recompute none", "recompute first 2")

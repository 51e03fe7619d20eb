"""The steps of the searches of degrees: boxes of divisions one after another, beginnings of pipelines, and
the programme of blocks with degrees of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import ceil
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.transformer.layer_table import LIBRARIES
from pplan.cost_models.transformer.rank_costs import PassSeconds
from pplan.cost_models.transformer.training_setting import block_ranges, even_blocks
from pplan.cost_models.transformer.training_step import pipeline_seconds
from pplan.cost_models.transformer.weight_update import ParameterCounts, update_seconds
from pplan.planner.degrees import degree_search, division_search, layer_degrees, stage_degree_search
from pplan.planner.degrees.degree_options import DegreeOptions
from pplan.planner.degrees.division_box import DivisionBox
from pplan.planner.degrees.division_search import BOX_PATHS, FITTED, ROOT_PATHS, DivisionSearch, _Open
from pplan.planner.degrees.layer_degrees import PARTS, _later, _Pipeline, plan_layer_degrees
from pplan.planner.degrees.linear_bound import BoxSolution
from pplan.planner.degrees.stage_degree_search import MOST_STEPS, _Beginning, _Search

from .test_layer_degrees import random_case

Patch = pytest.MonkeyPatch
NO_LIMIT = float("inf")


def noted(log: list[Any], entry: Any, answer: Any) -> Any:
    """The answer of a function that notes what it was asked."""
    log.append(entry)
    return answer


def box(low: Sequence[int], high: Sequence[int], blocks: int = 6, devices: int = 2) -> DivisionBox:
    own = DivisionBox.of_fewest(blocks, [0] * len(low), [blocks] * len(low), devices)
    return replace(own, low=np.array(low), high=np.array(high))


def division_of(counts: tuple[int, ...], seconds: float) -> Any:
    return counts, SimpleNamespace(step_seconds=seconds)


class Divisions:
    """A search whose programmes, bytes and steps stand here."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.own: Any = object.__new__(DivisionSearch)
        self.log = list[Any]()
        self.bytes, self.steps, self.bounds = dict[Any, float](), dict[Any, float](), dict[Any, float]()
        layers: Any = SimpleNamespace(
            peak_bytes=lambda counts: self.bytes.get(counts, 5.0), least_update_seconds=1.0
        )
        self.own.layers = layers
        self.own.memory_bytes, self.own.best, self.own.boxes, self.own.work = 10.0, None, 0, 0
        self.own._number, self.own._trials, self.own._closed, self.own._open = 0, set(), NO_LIMIT, []
        self.own._forwards, self.own._paths_help = 64, True
        monkeypatch.setattr(
            division_search, "interleaved_bound", lambda _, counts: self.bounds.get(counts, 0.0)
        )
        monkeypatch.setattr(
            division_search, "estimate_stages", lambda _, counts: division_of(counts, self.steps[counts])[1]
        )
        monkeypatch.setattr(
            division_search,
            "improve_division",
            lambda _, counts, memory: noted(
                self.log, ("improve", memory), division_of(counts, self.steps[counts])
            ),
        )

    def open(self, seconds: float, own: DivisionBox | None = None) -> None:
        table = SimpleNamespace(rows=7)
        table.copy = lambda: table
        self.own._open.append(_Open(seconds, len(self.own._open), own or box([0, 0], [6, 6]), table))  # type: ignore[arg-type]


def test_a_division_that_is_tried(monkeypatch: Patch) -> None:
    """As a plan, where its bound, its bytes and its step allow; its path goes to the programme."""
    own = Divisions(monkeypatch)
    own.own.programme = SimpleNamespace(whole_amounts=lambda counts: counts)
    own.own._add_path = lambda amounts: own.log.append(("path", amounts))
    a, b, c, d = (1, 5), (2, 4), (3, 3), (4, 2)
    own.steps = {a: 8.0, b: 7.0, c: 6.0, d: 9.0}
    own.bounds, own.bytes = {a: 9.0}, {b: 10.1, c: 10.0}
    own.own._try(a, 9.0)
    own.own._try(b, 9.0)
    assert (own.own.best, own.log) == (None, [])
    own.own._try(d, 9.0)
    assert (own.own.best, own.log) == (None, [("path", d)])
    own.own._try(c, 9.0)
    assert own.own.best == division_of(c, 6.0)
    assert own.log[1:] == [("path", c), ("improve", 10.0)]
    own.own._try(a, 99.0)  # its bound is above the best
    own.bounds = {a: 5.0}
    own.own._paths_help = False
    own.own._try(a, 99.0)
    assert own.own.best == division_of(c, 6.0)
    own.steps[a] = 5.5
    own.own._try(a, 5.5)
    assert own.own.best == division_of(c, 6.0)
    own.own._try(a, 5.6)
    assert own.own.best == division_of(a, 5.5)
    assert len(own.log) == 4


def test_divisions_near_a_solution(monkeypatch: Patch) -> None:
    """Each once; of the first boxes with blocks moved until it fits."""
    own = Divisions(monkeypatch)
    tried = list[Any]()
    own.own._try = lambda counts, enough: tried.append((counts, enough))
    monkeypatch.setattr(division_search, "round_division", lambda _, amounts: tuple(map(round, amounts)))
    fitted: dict[Any, Any] = {(2, 4): (3, 3), (1, 5): None}
    monkeypatch.setattr(
        division_search, "fit_division", lambda _, counts, memory: fitted[counts] if memory == 10.0 else 0
    )
    own.own.boxes = FITTED
    own.own._try_near(np.array([1.9, 4.1]), 8.0)
    own.own._try_near(np.array([2.1, 3.9]), 8.0)
    own.own._try_near(np.array([1.1, 4.9]), 8.0)
    assert tried == [((3, 3), 8.0)]
    own.own.boxes = FITTED + 1
    own.own._try_near(np.array([1.1, 4.9]), 8.0)
    own.own._try_near(np.array([0.1, 5.9]), 7.0)
    assert tried == [((3, 3), 8.0), ((0, 6), 7.0)]


def test_the_box_of_the_least_bound_is_next(monkeypatch: Patch) -> None:
    """What takes too long is closed with its bound; the parts of the others are opened."""
    own = Divisions(monkeypatch)
    solutions = {1.0: 3.0, 2.0: 9.0, 4.0: 2.0}
    amounts: Any = "amounts"
    own.own._solve = lambda opened, enough: noted(
        own.log, (opened.seconds, enough), BoxSolution(solutions[opened.seconds], amounts)
    )
    parts = [box([0, 0], [2, 6]), box([3, 0], [2, 6]), box([3, 0], [6, 3])]
    own.own._parts = lambda _, solution: parts if solution.amounts == "amounts" else []
    pushed = list[Any]()
    own.own._push = lambda seconds, part, _, enough: pushed.append((seconds, part, enough))
    own.own.advance(8.0)
    assert own.log == []
    for seconds in (1.0, 2.0, 4.0):
        own.open(seconds)
    assert own.own.bound_seconds == 1.0
    own.own.advance(1.0)
    assert (own.log, own.own.boxes) == ([], 0)
    own.own.advance(8.0)
    assert (own.log, own.own.boxes) == ([(1.0, 8.0)], 1)
    assert pushed == [(3.0, parts[0], 8.0), (3.0, parts[2], 8.0)]
    own.own.advance(9.0)
    assert (own.own._closed, len(pushed)) == (9.0, 2)
    assert own.own.bound_seconds == 4.0
    own.own.advance(8.0)
    assert [seconds for seconds, *_ in pushed[2:]] == [4.0, 4.0]
    assert own.own.bound_seconds == 9.0
    own.own._closed = NO_LIMIT
    assert own.own.bound_seconds == NO_LIMIT
    own.open(5.0)
    solutions[5.0] = 4.0
    own.own.advance(3.0)
    assert len(own.own._open) == 1
    own.own._closed = 2.0
    assert own.own.bound_seconds == 2.0


def test_boxes_of_one_division_are_closed(monkeypatch: Patch) -> None:
    """With what it takes, if it fits; other boxes are opened, each with a number of its own."""
    own = Divisions(monkeypatch)
    tried = list[Any]()
    own.own._try = lambda counts, enough: tried.append((counts, enough))
    own.steps, own.bytes = {(2, 4): 6.0, (3, 3): 5.0, (1, 5): 7.0}, {(3, 3): 11.0, (2, 4): 10.0}
    own.own._push(3.0, box([0, 0], [6, 6]), "table", 8.0)
    own.own._push(2.0, box([0, 1], [6, 6]), "table", 8.0)
    assert [(each.seconds, each.number, each.table) for each in own.own._open] == [
        (2.0, 2, "table"),
        (3.0, 1, "table"),
    ]
    for counts, closed in (((3, 3), NO_LIMIT), ((2, 4), 6.0), ((1, 5), 6.0)):
        own.own._push(1.0, box(counts, counts), "table", 8.0)
        assert own.own._closed == closed
        assert tried[-1] == (counts, 8.0)
    assert len(own.own._open) == 2


def test_paths_while_they_help(monkeypatch: Patch) -> None:
    """Of the first box up to forty, of others four; until the step is close, or a path adds too little."""
    own = Divisions(monkeypatch)
    values, pipelines = list[float](), list[float]()
    near = list[Any]()

    def solve(box_: Any, table: Any, enough: float) -> BoxSolution:
        del box_, table
        assert enough == 90.0
        own.log.append("solve")
        return BoxSolution(values.pop(0), np.array([[1.0, 2.0], [0.5, 0.5]]))

    def add(seconds: Any) -> float:
        assert seconds == "seconds"
        own.log.append("path")
        return pipelines.pop(0)

    own.own.programme = SimpleNamespace(solve=solve, add_path=add, stage_seconds=lambda _: "seconds")
    own.own._try_near = lambda amounts, enough: near.append((amounts.tolist(), enough))

    def ask(boxes: int, steps: list[float], paths: list[float]) -> float:
        own.own._open.clear()
        own.open(0.0)
        values[:], pipelines[:] = steps, paths
        own.own.boxes, own.own.work = boxes, 0
        own.log.clear()
        near.clear()
        found = own.own._solve(own.own._open[0], 90.0).seconds
        solved, added = own.log.count("solve"), own.log.count("path")
        assert own.own.work == 7 * solved + 64 // 16 * added
        assert near == ([([1.5, 2.5], 90.0)] if found < 90.0 else [])
        return float(found)

    rising = [float(n) for n in range(1, 80)]
    far = [1e6] * 80
    assert ask(1, list(rising), list(far)) == 1.0 + ROOT_PATHS
    assert ask(2, list(rising), list(far)) == 1.0 + BOX_PATHS
    assert ask(2, [10.0, 11.0, 11.0 + 1e-9, 12.0], list(far)) == 11.0 + 1e-9
    assert ask(2, [10.0, 11.0, 12.0], [1e6, 10.0]) == 11.0  # 10 and the update are 11
    assert ask(2, [10.0, 11.0, 12.0], [1e6, 10.0 + 1e-6, 10.0]) == 12.0
    assert ask(2, [10.0, 90.0, 91.0], list(far)) == 90.0
    assert ask(2, [95.0], list(far)) == 95.0
    own.own._paths_help = False
    assert ask(1, list(rising), []) == 1.0


def test_parts_that_leave_the_solution_out() -> None:
    """By the device whose blocks are the least whole, else by the stage; of whole ones by the widest."""
    own: Any = object.__new__(DivisionSearch)
    whole = DivisionBox.of_fewest(8, [0] * 4, [8] * 4, 2)

    def parts(*amounts: float, of: DivisionBox = whole) -> list[Any]:
        rows = np.array([amounts]) / 2
        found = own._parts(of, BoxSolution(0.0, np.concatenate([rows, rows])))
        assert len(found) == 2
        return [
            (each.low.tolist(), each.high.tolist(), each.device_low.tolist(), each.device_high.tolist())
            for each in found
        ]

    few, many = parts(1.0, 2.0, 2.6, 2.1)
    assert (few[3][0], many[2][0]) == (3, 4)
    few, many = parts(1.25, 2.5, 1.75, 2.5)
    assert (few[1][1], many[0][1]) == (2, 3)
    narrow = replace(whole, low=np.array([1, 0, 0, 0]), high=np.array([1, 4, 3, 8]))
    few, many = parts(1.0, 4.0, 2.0, 1.0, of=narrow)
    assert (few[1][3], many[0][3]) == (1, 2)
    few, _ = parts(1.0, 0.0, -1.0, 8.0, of=narrow)
    assert few[1][3] == 7  # no more than one less than there may be
    fixed = replace(whole, device_low=np.array([4, 4]), device_high=np.array([4, 4]))
    few, many = parts(1.25, 2.0, 2.75, 2.4, of=fixed)
    assert (few[1][3], many[0][3]) == (2, 3)  # of devices that have so many the stages are split
    assert parts(1.00005, 2.0, 3.0, 2.0) == parts(1.0, 2.0, 3.0, 2.0)


def search(best: float = 100.0) -> Any:
    return _Search("shape", "topology", "options", best)  # type: ignore[arg-type]


def test_beginnings_are_followed() -> None:
    """Of each size and number of stages so many; what is left out bounds the rest; until it is of no use."""
    own = search()
    bounds = SimpleNamespace(roots={2: 10.0, 3: 30.0, 4: 100.0}, tables="tables")
    own.add(bounds, [2, 3, 4])
    assert (own.pipelines, own.bound_seconds) == (3, 10.0)
    asked = list[Any]()
    answers = {2: 20.0, 3: 25.0, 4: 0.0}
    own._follow = lambda _, count, width: noted(asked, (count, width), answers[count])
    own.run(5)
    assert asked == [(2, 5), (3, 5)]
    assert own.open == [(20.0, 2, bounds), (30.0, 3, bounds)]
    assert own.bound_seconds == 20.0
    own.best_seconds = 30.0
    own.run(7)
    assert asked[2:] == [(2, 7)]
    assert own.open == [(20.0, 2, bounds)]
    own.steps = MOST_STEPS
    own.run(9)
    assert len(asked) == 3
    assert own.open == [(20.0, 2, bounds)]
    own.steps, answers[2] = MOST_STEPS - 1, 30.0
    own.run(9)
    assert (own.open, own.bound_seconds) == ([], 30.0)


def test_the_widest_that_are_kept() -> None:
    """Stage after stage the beginnings of the least bounds; of what is left out the first counts."""
    own = search()
    tree: dict[Any, list[tuple[float, Any]]] = {
        (): [(3.0, "a"), (1.0, "b"), (2.0, "c")],
        ("b",): [(6.0, "d"), (4.0, "e")],
        ("c",): [(5.0, "f"), (99.0, "g"), (120.0, "h")],
        ("a",): [(3.0, "i")],
    }
    asked, finished = list[Any](), list[Any]()

    def longer(_: Any, each: _Beginning, after: int, most: int) -> Any:
        asked.append((each.stages, after, most))
        return [_Beginning(bound, (*each.stages, name)) for bound, name in tree[each.stages]]

    own._longer = longer
    own._finish = lambda tables, each: finished.append((tables, each.stages))
    bounds = SimpleNamespace(tables="tables")
    assert own._follow(bounds, 2, 2) == 3.0
    assert asked == [((), 1, 3), (("b",), 0, 3), (("c",), 0, 3)]
    assert finished == [("tables", ("b", "e")), ("tables", ("c", "f"))]
    finished.clear()
    own.best_seconds = 5.0
    assert own._follow(bounds, 2, 3) == 6.0
    assert finished == [("tables", ("a", "i")), ("tables", ("b", "e"))]
    assert own._follow(bounds, 2, 9) == NO_LIMIT


def test_a_pipeline_that_is_done(monkeypatch: Patch) -> None:
    """What it takes, no less than its bound; the first of equal ones stays."""
    own, asked = search(20.0), list[Any]()
    monkeypatch.setattr(
        stage_degree_search,
        "pipeline_seconds",
        lambda seconds, cuts, many: asked.append((seconds, cuts, many)) or 12.0,  # type: ignore[func-returns-value]
    )
    stages = tuple(
        SimpleNamespace(enter=n, seconds=10 * n, update=float(u)) for n, u in ((0, 2), (1, 5), (2, 3))
    )
    tables = SimpleNamespace(micro_batches=4)
    own._finish(tables, _Beginning(1.0, stages))  # type: ignore[arg-type]
    assert asked == [([0, 10, 20], [1, 2], 4)]
    assert (own.best_seconds, own.best) == (17.0, (tables, stages))
    own._finish(tables, _Beginning(18.0, stages[:1]))  # type: ignore[arg-type]
    assert own.best == (tables, stages)
    own.best_seconds, own.best = 19.0, None
    own._finish(tables, _Beginning(18.0, stages))  # type: ignore[arg-type]
    assert (own.best_seconds, own.best) == (18.0, (tables, stages))
    own._finish(tables, _Beginning(18.0, stages[:2]))  # type: ignore[arg-type]
    assert own.best == (tables, stages)


def fewest_parts(whole: _Pipeline, choices: list[Any], stage: int, blocks: range, space: float) -> float:
    """Of every way to choose whose blocks need no more parts of the memory than there are, the least."""
    room, parts = whole.memory_bytes - LIBRARIES - space, PARTS * len(blocks)
    least = NO_LIMIT
    for picks in product(choices, repeat=len(blocks)) if room > 0 else ():
        seconds, used = 0.0, 0
        for place, (own, block) in enumerate(zip(picks, blocks, strict=True)):
            roles = [0] * (stage == 0 and place == 0)
            roles += [2] * (stage == whole.stages - 1 and place == len(blocks) - 1)
            both, bytes = whole._block_costs(own, whole.shape.routed[block], roles, stage)
            seconds += both
            used += ceil(bytes / room * parts - 1e-9)
        changes = sum(whole._change(a, b) for a, b in pairwise(picks))
        if used <= parts:
            least = min(least, seconds + 2 * whole.micro_batches * changes)
    return least


@pytest.mark.parametrize("seed", range(8))
def test_the_programme_counts_in_parts_of_the_memory(seed: int) -> None:
    """In memories that are short, what it finds is the least of all that fits when rounded up."""
    random = Random(seed)
    shape, topology, costs, options = random_case(random)
    shape = shape.with_blocks(min(shape.blocks, 3))
    stages = 1 + seed % 2
    whole = _Pipeline(shape, topology, costs, options, NO_LIMIT, stages, random.choice((4, 8)))
    choices = random.sample(whole.choices, min(4, len(whole.choices)))
    found = set()
    for stage, blocks in enumerate(block_ranges(even_blocks(shape.blocks, stages))):
        needs = sorted(
            sum(whole._block_costs(own, shape.routed[block], [], stage)[1] for block in blocks)
            for own in choices
        )
        for room in (needs[0] * 0.7, needs[0] * 1.1, needs[-1], needs[-1] * 1.4, needs[-1] * 3, 1e13):
            space = 1e5
            whole.memory_bytes = LIBRARIES + space + room
            seconds, picks = whole._programme(choices, stage, blocks, space)
            assert seconds == pytest.approx(fewest_parts(whole, choices, stage, blocks, space), rel=1e-12)
            if seconds < NO_LIMIT:
                assert len(picks) == len(blocks)
            found.add(seconds == NO_LIMIT)
        whole.memory_bytes = LIBRARIES + 1e5
        assert whole._programme(choices, stage, blocks, 1e5) == (NO_LIMIT, [])
    assert found == {False, True}
    assert _later(np.arange(4.0), 0).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert _later(np.arange(4.0), 3).tolist() == [NO_LIMIT] * 3 + [0.0]
    assert _later(np.arange(4.0), 4).tolist() == [NO_LIMIT] * 4


@pytest.mark.parametrize("seed", range(8))
def test_a_stage_whose_blocks_differ(seed: int) -> None:
    """Its seconds, its update and its bytes, from what each block has, and the embedding and head with the
    degrees of the block beside them."""
    random = Random(seed)
    shape, topology, costs, options = random_case(random)
    stages = 1 + seed % 2
    whole = _Pipeline(shape, topology, costs, options, NO_LIMIT, stages, 8)
    for stage, blocks in enumerate(block_ranges(even_blocks(shape.blocks, stages))):
        picks = [random.choice(whole.choices) for _ in blocks]
        kinds = [shape.routed[block] for block in blocks]
        parts = [own.seconds[kind] for own, kind in zip(picks, kinds, strict=True)]
        updates: dict[Any, list[ParameterCounts]] = {}
        for own, kind in zip(picks, kinds, strict=True):
            updates.setdefault(own.own.degrees, []).append(own.parameters[kind])
        alive = min(whole.micro_batches, stages - stage)
        bytes = LIBRARIES + sum(o.states[k] + alive * o.saved[k] for o, k in zip(picks, kinds, strict=True))
        space = max(own.workspace for own in picks)
        for role, own in [(0, picks[0])] * (stage == 0) + [(2, picks[-1])] * (stage == stages - 1):
            parts.append(own.ends[role])
            updates[own.own.degrees].append(own.layers.parameters(range(0), role))
            bytes += own.end_states[role]
            if role == 2:
                bytes += alive * own.end_saved + own.end_placeholders
                space = max(space, own.end_workspace)
        changes = sum(whole._change(a, b) for a, b in pairwise(picks))
        found = whole._stage_seconds(stage, picks, blocks)
        assert found.forward == pytest.approx(changes + sum(part.forward for part in parts))
        assert found.backward == pytest.approx(changes + sum(part.backward for part in parts))
        expected = 0.0
        for degrees, counts in updates.items():
            total = ParameterCounts(sum(own.dense for own in counts), sum(own.routed for own in counts))
            expected += update_seconds(total, degrees, costs)
        assert whole._update_seconds(stage, picks, blocks) == pytest.approx(expected)
        for degrees in updates:
            alike = [n for n, own in enumerate(picks) if own.own.degrees == degrees]
            bytes += picks[alike[-1]].placeholders[frozenset(kinds[n] for n in alike)]
        assert whole._stage_bytes(stage, picks, blocks) == pytest.approx(bytes + space)


def test_a_plan_of_its_stages(monkeypatch: Patch) -> None:
    """The step of what each stage takes, cuts between degrees, the longest update and the most bytes."""
    random = Random(3)
    shape, topology, costs, options = random_case(random)
    shape = shape.with_blocks(2)
    whole = _Pipeline(shape, topology, costs, options, NO_LIMIT, 2, 8)
    first, last = whole.choices[0], whole.choices[-1]
    picks: dict[int, Any] = {0: [first], 1: [last]}
    monkeypatch.setattr(_Pipeline, "_choose", lambda _, stage, __: picks[stage])
    monkeypatch.setattr(_Pipeline, "_stage_seconds", lambda _, stage, __, ___: PassSeconds(1.0 + stage, 2.0))
    monkeypatch.setattr(_Pipeline, "_update_seconds", lambda _, stage, *__: (0.5, 0.25)[stage])
    monkeypatch.setattr(_Pipeline, "_stage_bytes", lambda _, stage, *__: (3.0, 4.0)[stage])
    plan = whole.plan()
    assert plan is not None
    cut = whole._cut(first.stage_devices(0), last.stage_devices(whole.size))
    step = pipeline_seconds([PassSeconds(1.0, 2.0), PassSeconds(2.0, 2.0)], [cut], whole.micro_batches)
    assert (plan.step_seconds, plan.peak_bytes) == (step + 0.5, 4.0)
    assert plan.stages == ((first.own,), (last.own,))
    assert (plan.samples, plan.micro_batches) == (8, whole.micro_batches)
    picks[1] = None
    assert whole.plan() is None


def test_which_pipelines_of_blocks_are_planned(monkeypatch: Patch) -> None:
    """Stages that divide the devices, sizes that divide the batch; those that may be faster than the best."""
    asked = list[tuple[int, int, bool]]()

    class Own:
        def __init__(self, *given: Any) -> None:
            self.key = given[-2:]
            asked.append((*self.key, False))

        def least_seconds(self) -> float:
            return 4.0 if self.key[0] == 4 else 1.0

        def plan(self) -> Any:
            asked[-1] = (*self.key, True)
            seconds = {(1, 4): 5.0, (1, 8): 3.0, (2, 8): 3.0}.get(self.key)
            return None if seconds is None else SimpleNamespace(step_seconds=seconds, key=self.key)

    monkeypatch.setattr(layer_degrees, "_Pipeline", Own)
    shape, topology = SimpleNamespace(blocks=6), SimpleNamespace(gpus=12)
    options = DegreeOptions(mini_batch=8, sequence=64)
    plan: Any = plan_layer_degrees(shape, topology, None, options, 1.0)  # type: ignore[arg-type]
    assert plan.key == (1, 8)
    assert asked == [(s, n, s < 4) for s in (1, 2, 4) for n in (1, 2, 4, 8)]
    options = DegreeOptions(mini_batch=12, sequence=64)
    asked.clear()
    plan_layer_degrees(shape, SimpleNamespace(gpus=3), None, options, 1.0)  # type: ignore[arg-type]
    assert [n for _, n, _ in asked] == [1, 2, 3, 4, 6, 12]


def test_all_divisions_of_interleaved_pipelines(monkeypatch: Patch) -> None:
    """A part at a time of the pipeline with the least bound, as long as it may be faster than the best, and
    there is work left."""
    asked = list[Any]()
    bounds = {"a": [3.0, 7.0], "b": [5.0, 5.5, 5.75, 5.875]}

    class Own:
        def __init__(self, layers: Any, memory: float) -> None:
            assert memory == 100
            self.layers, self.work, self.bound_seconds = layers, 0, 0.0
            self.best: Any = None

        def advance(self, enough: float) -> None:
            asked.append((self.layers, enough))
            self.work += 30_000
            self.bound_seconds = bounds[self.layers].pop(0)
            if self.layers == "b":
                self.best = ("counts", SimpleNamespace(step_seconds=6.0))

    monkeypatch.setattr(degree_search, "DivisionSearch", Own)
    plans: Any = degree_search._BestPlans(100)
    one: Any = SimpleNamespace(degrees="d", setting=SimpleNamespace(tokens=1), virtual_stages=2)
    known: Any = SimpleNamespace(step_seconds=8.0)
    plans.best["d", 1, True] = degree_search.DegreePlan("d", one.setting, (1,), known, None)  # type: ignore[arg-type]
    plans._keep = lambda plan: plans.best.update({("d", 1, True): plan})
    plans._bound = 50.0
    plans._interleaved = [(4.0, 1, "b", one), (2.0, 0, "a", one)]
    plans.search_divisions()
    before, behind = 8.0 * (1 - 1e-6), 6.0 * (1 - 1e-6)
    assert asked == [("a", before), ("a", before), ("b", before), ("b", behind), ("b", behind)]
    assert plans.plans[0].estimate.step_seconds == 6.0
    assert sorted(own[0] for own in plans._interleaved) == [5.75, 7.0]
    # From the bound of the others on nothing is gained.
    asked.clear()
    plans._bound = 5.75
    plans.search_divisions()
    assert asked == []
    plans._bound, bounds["b"] = 50.0, [6.0, 9.0]
    plans.search_divisions()
    assert asked == [("b", behind)]

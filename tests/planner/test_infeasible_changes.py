"""The changes that would make a plan fit, of searches whose answers are written down here: which are tried,
in which order they are said, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.optimizers import OPTIMIZERS
from pplan.cost_models.quantities import parse_bytes
from pplan.cost_models.topology import Device, Group, Topology
from pplan.planner import infeasible
from pplan.planner.infeasible import (
    HALVINGS,
    _changes,
    _details,
    _enough_memory,
    _hint,
    _in_words,
    _leave_out,
    _lighter_optimizers,
    _memory_text,
    _more_gpus,
    _of_searched,
    _other_runs,
    _with_memory,
    no_plan_fits,
)
from pplan.planner.pipeline_config import PipelineConfig
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.smallest_plan import list_limits, room

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
MakeProblem = Callable[..., Problem]
GIB = 2**30


@pytest.fixture
def make_problem(make_chain: MakeChain, make_topology: MakeTopology) -> MakeProblem:
    """A function of (gpus, memory, **options): six layers, a global batch of eight."""

    def make(gpus: int = 2, memory: int | None = 1000, **options: Any) -> Problem:
        own = PlanOptions(**{"mini_batch": 8, **options})
        return Problem(make_chain(3, 6, cuts=1.1), make_topology(gpus, memory=memory), own)

    return make


def plan(seconds: float) -> Any:
    return SimpleNamespace(step_seconds=seconds)


def stage(**more: Any) -> Any:
    own = {
        "config": PipelineConfig("1f1b", "by_stage", 4, 2),
        "recompute": "except_last",
        "replicas": 2,
        "stages": 3,
        "stage": 1,
        "start": 2,
        "end": 5,
        "memory_bytes": 3 * GIB,
        "ledger": {"weights": 2 * GIB, "optimizer": 0, "saved_inputs": GIB},
        "is_least": True,
    }
    return SimpleNamespace(**{**own, **more})


def test_memory_in_three_digits_is_enough_and_little_more() -> None:
    for size in (1.0, 2.5, 0.123456, 1234.5678, 80.0, 1e-4, 1e-7):
        enough = parse_bytes(_memory_text(size * GIB))
        assert size * GIB - 1 <= enough <= 1.01 * size * GIB + 1
    texts = [_memory_text(size) for size in (1.234 * GIB, 7 * GIB, 21.55 * 2**20, 1023.5 * 2**20, 700)]
    assert texts == ["1.24GiB", "7.00GiB", "21.6MiB", "1024MiB", "700B"]


@pytest.mark.parametrize("true", [3.3, 5.0, 9.9])
def test_the_memory_that_is_enough_is_found_by_halving(
    true: float, make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the 2 GiB that there are and the 10 that the plan without a limit needs."""
    tried = list[float]()

    def fits(_: Problem, text: str) -> bool:
        tried.append(parse_bytes(text) / GIB)
        return tried[-1] >= true

    problem = make_problem(memory=2 * GIB)
    monkeypatch.setattr(infeasible, "_fits", fits)
    monkeypatch.setattr(
        infeasible, "_solve_quickly", lambda own: plan(1.0) if own.space.limit([0]) == inf else 0
    )
    needs = [SimpleNamespace(memory_bytes=own * GIB) for own in (4, 9.995, 7)]
    monkeypatch.setattr(infeasible, "plan_stages", lambda *_: needs)
    words = _enough_memory(problem)
    assert words is not None
    enough = float(words.removeprefix("memory='").removesuffix("GiB' a device"))
    assert true <= enough <= true + 8 / 2**HALVINGS + 0.02
    assert len(tried) == 1 + HALVINGS
    assert tried[:2] == [10.0, 6.0]
    monkeypatch.setattr(infeasible, "_fits", lambda *_: False)
    assert _enough_memory(problem) is None
    monkeypatch.setattr(infeasible, "_solve_quickly", lambda _: None)
    assert _enough_memory(problem) is None
    monkeypatch.setattr(infeasible, "is_small_problem", lambda _: False)
    monkeypatch.setattr(infeasible, "_solve_quickly", lambda _: pytest.fail("too large to solve again"))
    assert _enough_memory(problem) is None


@pytest.mark.parametrize(
    ("gpus", "limit", "runtime", "needs", "expected"),
    [
        (2, 100, None, {3: 150, 4: 100, 5: 90}, 4),
        (2, 100, None, {3: 150, 4: 101, 9: 1}, None),  # four times as many at the most
        (2, 100, None, {8: 100}, 8),
        (2, 100, "torchgpipe", {6: 100}, 6),
        (2, 100, "torchgpipe", {7: 100, 8: 100}, None),  # more than layers have no stage
        (16, 100, None, {17: 100}, 17),
        (24, 100, None, {25: 100, 26: 100, 27: 100}, 27),  # by eighths of those that there are
        (24, 100, None, {25: 100, 28: 100, 33: 100}, 33),
    ],
)
def test_more_devices(
    gpus: int,
    limit: int,
    runtime: str | None,
    needs: dict[int, int],
    expected: int | None,
    make_problem: MakeProblem,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fewest on which the smallest plan has room, and one was solved."""
    sizes = set[int]()

    def smallest(wider: Problem, *, equal: bool) -> Any:
        assert equal
        sizes.add(wider.mini_batch)
        return SimpleNamespace(memory_bytes=needs[wider.gpus]) if wider.gpus in needs else None

    monkeypatch.setattr(infeasible, "find_smallest_plan", smallest)
    monkeypatch.setattr(infeasible, "_solve_quickly", lambda wider: plan(1.0) if wider.gpus != 5 else None)
    problem = make_problem(gpus, runtime=runtime, mini_batch=None)
    assert _more_gpus(problem, limit) == expected
    assert sizes == {problem.mini_batch}


def test_more_devices_of_two_kinds_are_not_tried(make_problem: MakeProblem) -> None:
    problem = make_problem(4)
    kinds = (Group(Device("a", 1000), 2), Group(Device("b", 500), 2))
    mixed = replace(problem, topology=replace(problem.topology, groups=kinds))
    assert _more_gpus(mixed, 10**9) is None
    assert list_limits(mixed) == [500, 1000]
    assert room(mixed) == "500 B to 1000 B a device"
    assert room(problem) == "1000 B a device"
    open_end = replace(
        problem, topology=replace(problem.topology, groups=(Group(Device("a", None), 2), kinds[1]))
    )
    assert list_limits(open_end) == [500, inf]
    assert room(open_end) == "500 B a device"


def test_options_that_are_left_to_the_search(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, the fastest first; together only where none is enough."""
    problem = make_problem(mini_batch=None, micro_batches=4, schedule="gpipe", recompute="never")
    steps: dict[str, float] = {"recompute": 3.0, "micro_batches": 1.0, "schedule": 2.0, "offload": 2.5}

    def solve(_: Problem, options: PlanOptions) -> Any:
        freed = {
            "recompute": options.recompute == "auto",
            "offload": options.recompute == "offload",
            "micro_batches": options.micro_batches is None,
            "schedule": options.schedule == "auto",
        }
        names = [name for name, own in freed.items() if own]
        assert options.mini_batch in (None, problem.mini_batch)
        if len(names) == 3:
            return plan(9.0)
        (name,) = names
        return plan(steps[name]) if name in steps else None

    monkeypatch.setattr(infeasible, "_solve_with", solve)
    monkeypatch.setattr(infeasible, "run_in_words", lambda own: f"{own.step_seconds:g} s")
    words = ["micro_batches='auto' (1 s)", "schedule='auto' (2 s)"]
    words += ["recompute='offload' (2.5 s)", "recompute='auto' (3 s)"]
    assert _other_runs(problem) == words
    del steps["micro_batches"]
    assert _other_runs(problem) == words[1:]
    split = replace(problem.options, schedule="zb-h1", recompute="never")  # which does not offload
    assert _other_runs(replace(problem, options=split)) == [words[1], words[3]]
    steps.clear()
    assert _other_runs(problem) == ["9 s (leave `micro_batches`, `schedule` and `recompute` at auto)"]
    monkeypatch.setattr(infeasible, "_solve_with", lambda *_: None)
    assert _other_runs(problem) == []


def test_lighter_optimizers_are_tried_from_the_heaviest_on(
    make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(optimizer="adam")
    tried = list[str]()

    def solve(_: Problem, options: PlanOptions) -> Any:
        tried.append(options.optimizer)
        return None if options.optimizer == "sgd" else plan(1.0)

    monkeypatch.setattr(infeasible, "_solve_with", solve)
    words = list(_lighter_optimizers(problem))
    sizes = [OPTIMIZERS[name].bytes_per_parameter(problem.precision.bytes) for name in tried]
    assert sizes == sorted(sizes, reverse=True)
    assert words == [name for name in tried if name != "sgd"]
    eight = 8.0  # of float32 Adam two states of four bytes
    assert max(sizes) < eight == OPTIMIZERS["adam"].bytes_per_parameter(problem.precision.bytes)
    assert {"sgd", "momentum"} <= set(tried)
    assert not {"adam", "adamw"} & set(tried)


def test_devices_of_at_least_so_much_memory(make_problem: MakeProblem) -> None:
    problem = make_problem(memory=1000, memory_limit=700)
    more = _with_memory(problem, 800.5)
    assert (more.options.memory_limit, more.topology.device(0).memory_bytes) == (801, 1000)
    most = _with_memory(problem, 2000.0)
    assert (most.options.memory_limit, most.topology.device(1).memory_bytes) == (2000, 2000)
    free = _with_memory(problem, None)
    assert (free.options.memory_limit, free.topology.device(0).memory_bytes) == (None, None)
    unknown = _with_memory(make_problem(memory=None), 5.0)
    assert (unknown.options.memory_limit, unknown.topology.device(0).memory_bytes) == (None, None)


def test_changes_the_cheapest_first(make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(make_problem(), sharers=4)
    monkeypatch.setattr(infeasible, "_other_runs", lambda _: ["runs"])
    monkeypatch.setattr(infeasible, "_lighter_optimizers", lambda _: iter(["sgd"]))
    monkeypatch.setattr(infeasible, "_more_gpus", lambda _, limit: 5 if limit == 1000 else None)
    monkeypatch.setattr(infeasible, "_fits", lambda *_: True)
    own = ["runs", "optimizer='sgd'", "gpus=20 mini_batch=8", "memory='3.00GiB' a device"]
    assert _changes(problem, stage()) == own
    monkeypatch.setattr(infeasible, "_fits", lambda *_: False)
    monkeypatch.setattr(infeasible, "_enough_memory", lambda _: "larger")
    assert _changes(problem, stage()) == own[:3]
    monkeypatch.setattr(infeasible, "_other_runs", lambda _: [])
    monkeypatch.setattr(infeasible, "_lighter_optimizers", lambda _: iter([]))
    monkeypatch.setattr(infeasible, "_more_gpus", lambda *_: None)
    assert _changes(problem, stage()) == ["larger"]
    monkeypatch.setattr(infeasible, "_enough_memory", lambda _: None)
    assert _changes(problem, stage()) == []


def test_hints(make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem()
    assert _hint(problem, ["a", "b"]) == "What would fit: a; or b."
    assert _hint(problem, []).startswith("No single change was found with which one would")
    pinned = make_problem(pins=(("layer1", 0),), max_stages=2)
    monkeypatch.setattr(infeasible, "_solve_with", lambda *_: None)
    helpless = "Leaving out options was not seen to help: check `mini_batch` and the machine."
    assert _hint(pinned, []) == f"With more memory none was found either. {helpless}"
    assert _leave_out(problem) == helpless
    monkeypatch.setattr(infeasible, "is_small_problem", lambda _: False)
    assert _hint(pinned, []).endswith("of so many devices not all were tried.")
    assert _leave_out(pinned) == "Leave out some of `pins`, `max_stages`."


def test_the_stage_that_is_too_large(make_problem: MakeProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    """In words and as JSON says it, with the bytes that are missing."""
    problem = make_problem(memory=GIB)
    monkeypatch.setattr(infeasible, "find_smallest_plan", lambda *_, **__: stage())
    monkeypatch.setattr(infeasible, "_changes", lambda *_: ["this"])
    error = no_plan_fits(problem)
    assert error.what == (
        "no plan fits into 1.00 GiB a device: at the least, stage 1 of 3 (layer2 to layer4, 2 replicas; "
        "4 x 2, 1f1b, recompute except last) needs 3.00 GiB (weights 2.00 GiB, saved inputs 1.00 GiB); "
        "2.00 GiB are missing"
    )
    assert error.hint == "What would fit: this."
    assert error.details == _details(stage(), GIB, "layer2", "layer4") | {"would_fit": ["this"]}
    assert error.details["missing_bytes"] == 2 * GIB
    assert error.details["limit_bytes"] == GIB
    assert error.details["stage"] == {
        "number": 1,
        "stages": 3,
        "first_layer": "layer2",
        "last_layer": "layer4",
        "replicas": 2,
        "memory_bytes": 3 * GIB,
    }
    mixed = (Group(Device("a", GIB), 1), Group(Device("b", 2 * GIB), 1))
    other = replace(problem, topology=replace(problem.topology, groups=mixed))
    monkeypatch.setattr(infeasible, "find_smallest_plan", lambda *_, **__: stage(replicas=1, is_least=False))
    what = no_plan_fits(other).what
    assert "into 1.00 GiB to 2.00 GiB a device: at the least with as many replicas of every stage, " in what
    assert "(layer2 to layer4; 4 x 2" in what
    assert what.endswith("2.00 GiB are missing on the smallest")
    monkeypatch.setattr(infeasible, "find_smallest_plan", lambda *_, **__: stage(memory_bytes=GIB))
    error = no_plan_fits(problem)
    assert error.what == "no plan was found that fits into 1.00 GiB a device; there is one"
    assert error.hint == "Give `time_limit` more."
    monkeypatch.setattr(infeasible, "find_smallest_plan", lambda *_, **__: None)
    assert no_plan_fits(problem).what.endswith("is allowed by these options, whatever the memory")


def test_of_which_plans_it_is_known(make_problem: MakeProblem) -> None:
    assert _of_searched(make_problem()) == ""
    assert _of_searched(make_problem(schedule="any")) == " of 1f1b or gpipe"
    synthesized = make_problem(schedule="synthesized")
    assert _of_searched(synthesized) == " of one stage a device, in any order,"
    assert _in_words(synthesized, stage()) == "4 x 2, one micro-batch at a time, recompute except last"
    again = make_problem(schedule="synthesized", recompute="always")
    assert _of_searched(again) == " of 1f1b or gpipe"

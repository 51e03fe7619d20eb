"""What is said of the plans that were looked at, word by word, and which plans those are, one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from pplan.planner import coverage as module
from pplan.planner.candidate import VIRTUAL_STAGES, PipelineConfig, Proposal
from pplan.planner.coverage import (
    _is_bounded,
    _list_runs,
    describe_coverage,
    describe_exact_search,
    describe_micro_batches,
    describe_search,
    is_searched,
    to_searched_devices,
)
from pplan.planner.plan_options import PlanOptions
from pplan.planner.search.placements import ANY

Patch = pytest.MonkeyPatch
CONFIG = PipelineConfig("1f1b", "never", 4, 2)
OPTIONS = set(PlanOptions.__dataclass_fields__) - {"runtime"}


@dataclass(frozen=True)
class Place:
    """Devices in an order; a stage may leave one of them free."""

    ranks: tuple[int, ...]
    name: str = "ranks"
    in_words: str = "in rank order"

    def starts_after(self, position: int) -> tuple[int, ...]:
        return (position, position + 1)


@dataclass(frozen=True)
class Family:
    """Plans of a configuration, on an order of the devices."""

    config: PipelineConfig
    placement: Any
    replicas: tuple[int, ...] = (1, 2)
    on_all: bool = False
    any_count: bool = False


def make(**more: Any) -> Any:
    """1F1B and GPipe on 4 devices, where nothing else is said; options by their names."""
    options = {name: more.pop(name) for name in list(more) if name in OPTIONS}
    known = {
        "options": PlanOptions(mini_batch=8, **options),
        "gpus": 4,
        "runtime": None,
        "chain": SimpleNamespace(tied=[SimpleNamespace(name=name) for name in "abcd"]),
        "untied_reason": "",
        "heuristic_schedules": (),
        "makes_orders": options.get("schedule") == "synthesized",
        "allowed_schedules": ("1f1b", "gpipe"),
        "schedules": ("1f1b", "gpipe"),
        "stage_counts": (1, 2, 3),
        "may_be_deeper": False,
        "any_count": True,
        "any_devices": False,
        "configs": [CONFIG, replace(CONFIG, micro_batches=8, micro_batch_size=1)],
        "mini_batch": 8,
        "placements": [Place((0, 1, 2, 3)), Place((3, 2, 1, 0), in_words="backwards")],
        "replica_sets": [(1, 2, 4)],
        "families": [Family(CONFIG, Place((0, 1, 2, 3)))],
        "space": None,
    }
    return SimpleNamespace(**(known | more))


RUNTIME = SimpleNamespace(replicas="equal")
ALONE = SimpleNamespace(replicas="none")


@pytest.fixture(autouse=True)
def small(monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "is_large", lambda *_: False)


def divided(problem: Any) -> list[str]:
    return describe_exact_search(problem).split(", ")


def test_words_of_an_exact_search() -> None:
    batches = describe_micro_batches(make())
    order = "consecutive devices in rank order or backwards"
    assert batches == "4, 8 micro-batches"
    expected = f"1 to 3 stages, 1, 2, 4 replicas each, 1f1b or gpipe, recompute never, {batches}, {order}"
    assert describe_exact_search(make()) == expected
    assert divided(make(stage_counts=(1,)))[0] == "1 stage"
    assert divided(make(replica_sets=[(1, 2, 3)]))[1] == "1 to 3 replicas each"
    assert describe_exact_search(make(gpus=1)) == f"1 to 3 stages, 1f1b or gpipe, recompute never, {batches}"
    assert divided(make(runtime=ALONE))[1] == "1f1b or gpipe"
    assert divided(make(runtime=RUNTIME))[1] == "equal replicas"
    assert divided(make(any_devices=True))[-1] == "any devices for each stage"
    assert divided(make(placements=[Place((0, 1))]))[-1] == "consecutive devices in rank order"
    assert divided(make(placements=[Place((0, 1)), Place((1, 0))]))[-1] == "consecutive devices in rank order"
    again = [replace(CONFIG, recompute=mode) for mode in ("by_stage", "except_last")]
    modes = next(own for own in divided(make(configs=again)) if own.startswith("recompute"))
    assert set(modes.removeprefix("recompute ").split(" or ")) == {"if out of memory", "except last"}
    other = [CONFIG, replace(CONFIG, schedule="zb-h1", recompute="always")]
    assert "recompute never" in divided(make(configs=other))
    zero = make(configs=other[1:], schedules=("zb-h1",))
    assert "recompute always" in divided(zero)
    assert order not in describe_exact_search(zero)


def test_words_of_a_large_problem() -> None:
    """Its bound is of any number of stages and replicas, and any order."""

    def relaxed(**more: Any) -> list[str]:
        return describe_exact_search(make(**more), relaxed=True).split(", ")

    assert relaxed(may_be_deeper=True)[:2] == ["any number of stages", "any number of replicas"]
    assert relaxed()[0] == "1 to 3 stages"
    assert relaxed(any_count=False, replica_sets=[(1, 2)])[1] == "1 to 2 replicas each"
    assert relaxed(any_count=False, runtime=RUNTIME)[1] == "equal replicas"
    assert relaxed()[-1] == "any order of the devices"
    assert "order" not in " ".join(relaxed(gpus=1))
    assert divided(make(may_be_deeper=True))[0] == "1 to 3 stages"


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((1,), "1 micro-batch"),
        ((4,), "4 micro-batches"),
        ((2, 4, 8), "2 to 8 equal micro-batches"),
        ((1, 2, 4), "1 to 4 equal micro-batches"),
        ((4, 8), "4, 8 micro-batches"),
        ((1, 2, 8), "1, 2, 8 micro-batches"),
    ],
)
def test_numbers_of_micro_batches(counts: tuple[int, ...], words: str) -> None:
    configs = [replace(CONFIG, micro_batches=count) for count in counts]
    assert describe_micro_batches(make(configs=[*configs, *configs])) == words


def any_plan(**more: Any) -> str:
    return describe_coverage(make(**more), SimpleNamespace(universal=True))  # type: ignore[arg-type]


def test_words_of_any_plan() -> None:
    start = f"all plans of 1f1b and gpipe with {describe_micro_batches(make())}: any "
    order = ", any order of the devices"
    assert any_plan() == f"{start}cuts, replicas and recomputation{order}"
    assert any_plan(gpus=1) == f"{start}cuts and recomputation"
    assert any_plan(runtime=RUNTIME) == f"{start}cuts and recomputation{order}, equal replicas"
    assert any_plan(runtime=ALONE) == f"{start}cuts and recomputation{order}, a device a stage"
    assert any_plan(runtime=ALONE, gpus=1) == f"{start}cuts and recomputation"
    assert any_plan(recompute="never") == f"{start}cuts and replicas{order}, recompute never"
    assert any_plan(recompute="never", gpus=1) == f"{start}cuts, recompute never"
    assert any_plan(max_stages=1).endswith(f"{order}, 1 stage")
    assert any_plan(max_stages=2).endswith(f"{order}, at most 2 stages")
    assert any_plan(use_all=True).endswith(f"{order}, on all devices")
    tied = "the layers that share a and b and 2 more on one stage (the runtime has no such sums)"
    assert any_plan(untied_reason="the runtime has no such sums").endswith(f"{order}, {tied}")
    two = SimpleNamespace(tied=[SimpleNamespace(name=name) for name in "ab"])
    assert any_plan(untied_reason="no", chain=two).endswith("the layers that share a and b on one stage (no)")
    assert any_plan(allowed_schedules=("zb-h1",)).startswith("all plans of zb-h1 with ")
    three = any_plan(allowed_schedules=("1f1b", "gpipe", "interleaved"))
    assert three.startswith("all plans of 1f1b, gpipe and interleaved with ")
    several = f"{VIRTUAL_STAGES[0]} to {VIRTUAL_STAGES[-1]} virtual stages where there are several"
    assert f"recomputation, {several}, on two devices or more, any order" in three
    orders = any_plan(schedule="synthesized", allowed_schedules=("interleaved",))
    assert orders.startswith("all plans of any synchronous order of actions, each layer on one stage, with")
    assert "virtual" not in orders


def test_words_of_both(monkeypatch: Patch) -> None:
    searched: Any = SimpleNamespace(universal=False)
    problem = make()
    assert describe_coverage(problem, searched) == describe_exact_search(problem) == describe_search(problem)
    others = make(heuristic_schedules=("zb-h1", "zb-v"))
    exact = describe_exact_search(others)
    assert describe_coverage(others, searched).startswith(f"{exact}; and all plans of zb-h1 and zb-v with ")
    assert describe_search(others) == f"{exact}; zb-h1, zb-v: cuts of their own"
    orders = make(heuristic_schedules=("zb-h1", "zb-v"), schedule="synthesized")
    assert describe_search(orders) == f"{exact}; zb-h1, zb-v and orders of their own: heuristic only"
    monkeypatch.setattr(module, "is_large", lambda *_: True)
    assert describe_coverage(make(may_be_deeper=True), searched).startswith("any number of stages, ")


def proposal(*devices: tuple[int, ...], config: PipelineConfig = CONFIG) -> Proposal:
    return Proposal(config, tuple(range(1, len(devices) + 1)), devices)


def test_which_plans_are_searched() -> None:
    """Of one of the families: its configuration, numbers of stages and replicas, on its runs of devices."""
    problem = make(families=[Family(CONFIG, Place((0, 1, 2, 3))), Family(CONFIG, Place((3, 2, 1, 0)))])
    for devices, answer in (
        (((0,), (1,)), True),
        (((0,), (2, 3)), True),
        (((1,), (2,)), True),
        (((2,), (3,)), False),  # two devices stay free before it
        (((3,), (2,)), True),
        (((0,), (3,)), False),
        (((0,), (2,), (3,)), True),
        (((0,), (1, 2, 3)), False),
        (((0,), (1,), (2,), (3,)), False),
    ):
        assert is_searched(problem, proposal(*devices)) == answer
    assert not is_searched(problem, proposal((0,), (1,), config=replace(CONFIG, micro_batches=8)))
    anywhere = make(families=[Family(CONFIG, Place((0, 1, 2, 3), name=ANY))])
    assert is_searched(anywhere, proposal((3,), (1,)))
    assert not is_searched(anywhere, proposal((3,), (0, 1, 2)))
    other = replace(CONFIG, schedule="zb-h1")
    assert not is_searched(
        make(families=[Family(other, Place((0, 1), name=ANY))]), proposal((0,), (1,), config=other)
    )


def test_runs_of_devices(monkeypatch: Patch) -> None:
    free: Any = Family(CONFIG, Place((5, 6, 7)))
    assert _list_runs(free, (1, 1)) == [((5,), (6,)), ((5,), (7,)), ((6,), (7,))]
    assert _list_runs(free, (2,)) == [((5, 6),), ((6, 7),)]
    assert _list_runs(free, (3, 1)) == []
    whole: Any = replace(free, on_all=True)
    assert _list_runs(whole, (1, 1)) == []
    assert _list_runs(whole, (1, 2)) == [((5,), (6, 7))]
    monkeypatch.setattr(module, "MOST_SHAPES", 2)
    assert _list_runs(free, (1, 1)) == [((5,), (6,)), ((5,), (7,))]


def test_what_the_bound_of_a_large_problem_is_of(monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "is_large", lambda *_: True)
    one, two, four = proposal((0, 1)), proposal((9,), (4, 5)), proposal((0,), (1,), (2,), (3,))
    for more, answers in (
        ({}, (True, True, False)),
        ({"may_be_deeper": True}, (True, True, True)),
        ({"may_be_deeper": True, "stage_counts": (2, 3)}, (False, True, True)),
        ({"families": [Family(CONFIG, None, (1,))]}, (False, False, False)),
        ({"families": [Family(CONFIG, None, (1,), any_count=True)]}, (True, True, False)),
        ({"families": [Family(replace(CONFIG, micro_batches=8), None)]}, (False, False, False)),
    ):
        problem = make(**more)
        assert tuple(_is_bounded(problem, own) for own in (one, two, four)) == answers
        assert tuple(is_searched(problem, own) for own in (one, two, four)) == answers


def test_devices_that_are_alike(monkeypatch: Patch) -> None:
    """The first searched ones of the same kind, even and odd ranks; else the plan as it is."""
    monkeypatch.setattr(
        module,
        "Symmetry",
        lambda _: SimpleNamespace(key=lambda own: [[r % 2 for r in ranks] for ranks in own]),
    )
    problem = make(topology=None)
    assert to_searched_devices(problem, proposal((0,), (1,))) == proposal((0,), (1,))
    assert to_searched_devices(problem, proposal((2,), (3,))) == proposal((0,), (1,))
    assert to_searched_devices(problem, proposal((3,), (0,))) == proposal((1,), (2,))
    alone = proposal((3,), (1,))
    assert to_searched_devices(problem, alone) == proposal((1,), (3,))
    other = proposal((0,), (2,), (1, 3))
    assert to_searched_devices(problem, other) == other
    assert to_searched_devices(make(gpus=1, topology=None), proposal((2,), (3,))) == proposal((2,), (3,))

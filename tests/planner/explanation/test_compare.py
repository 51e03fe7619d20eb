"""Plans side by side: every figure of a row, which bound a gap is of, and what cannot be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.quantities import format_seconds
from pplan.cost_models.topology import Topology
from pplan.planner.explanation.compare import _of_planner, compare_plans
from pplan.planner.explanation.explanation import _notes
from pplan.planner.joint_search import find_best_plan
from pplan.planner.planners import PLANNERS

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
Solve = Callable[..., Any]


@pytest.fixture
def two(make_chain: MakeChain, make_topology: MakeTopology, solved: Solve) -> tuple[Any, Any]:
    """The best plan of a problem on two devices, and that of the planner one-gpu."""
    chain, topology = make_chain(1, 4, cuts=1.1, traffic=0.1), make_topology(2)
    return solved(chain, topology, mini_batch=4), solved(chain, topology, mini_batch=4, planner="one-gpu")


def changed(plan: Any, **prediction: float) -> Any:
    return plan.model_copy(update={"prediction": plan.prediction.model_copy(update=prediction)})


def test_a_row_has_the_plans_own_figures(two: tuple[Any, Any]) -> None:
    best, alone = (own.plan for own in two)
    made = compare_plans([("a", best), ("b", alone)])
    assert [row.name for row in made.rows] == ["a", "b"]
    assert repr(made) == "<PlanComparison of a, b>"
    for row, plan in zip(made.rows, (best, alone), strict=True):
        assert row.plan is not None
        assert row.step_seconds == plan.prediction.step_seconds
        assert row.plan.samples_per_second == pytest.approx(4 / plan.prediction.step_seconds)
        assert row.bubble == plan.prediction.bubble
        assert row.memory_bytes == max(stage.memory_bytes for stage in plan.stages)
        assert row.plan.device_count == len({rank for stage in plan.stages for rank in stage.devices})
        assert (row.plan.balance, row.plan.schedule) == (plan.balance, plan.schedule)
        assert (row.plan.micro_batches, row.plan.micro_batch_size) == (
            plan.micro_batches,
            plan.micro_batch_size,
        )
        assert row.slower == pytest.approx(plan.prediction.step_seconds / best.prediction.step_seconds - 1)
        assert row.energy_joules is None
        # Of the search of all plans of the problem, which both belong to.
        assert row.gap == pytest.approx(
            plan.prediction.step_seconds / best.prediction.lower_bound_seconds - 1
        )
    assert made.first_slower == pytest.approx(
        best.prediction.step_seconds / alone.prediction.step_seconds - 1
    )
    assert made.notes == []
    assert made.other_methods == []


def test_the_first_is_slower_than_the_best_of_the_others(two: tuple[Any, Any]) -> None:
    best, alone = (own.plan for own in two)
    made = compare_plans([("b", alone), ("slow", changed(alone, step_seconds=1e6)), ("a", best)])
    assert made.first_slower == pytest.approx(
        alone.prediction.step_seconds / best.prediction.step_seconds - 1
    )
    assert compare_plans([("a", best)]).first_slower is None


def test_whose_bound_a_gap_is_of(two: tuple[Any, Any]) -> None:
    """That of another search for the same problem, where it is the better one and of such plans; a search
    among some of them proves nothing of others; and one above a plan's step is of other plans."""
    best = two[0].plan
    step = best.prediction.step_seconds
    weak, strong = (
        changed(best, step_seconds=2 * step, lower_bound_seconds=share * step) for share in (0.5, 0.8)
    )

    def gaps(*plans: Any) -> list[float | None]:
        return [row.gap for row in compare_plans([(str(n), plan) for n, plan in enumerate(plans)]).rows]

    assert gaps(weak, strong) == pytest.approx([2 / 0.8 - 1] * 2)
    assert gaps(weak) == pytest.approx([3.0])
    other = strong.model_copy(update={"mini_batch": 8})
    assert gaps(weak, other)[0] == pytest.approx(3.0)
    narrow = strong.model_copy(update={"options": replace(strong.options, max_stages=1)})
    assert gaps(weak, narrow)[0] == pytest.approx(3.0)
    longer = strong.model_copy(update={"options": replace(strong.options, time_limit=3.0, planner="even")})
    assert gaps(weak, longer)[0] == pytest.approx(2 / 0.8 - 1)
    high = changed(strong, step_seconds=4 * step, lower_bound_seconds=3 * step)
    assert gaps(weak, high) == pytest.approx([3.0, 1 / 3])
    interleaved = weak.model_copy(update={"schedule": "interleaved"})
    assert gaps(interleaved, strong)[0] == pytest.approx(3.0)
    nothing = changed(weak, lower_bound_seconds=0.0)
    assert gaps(nothing) == [None]
    assert gaps(changed(best, step_seconds=step, lower_bound_seconds=step)) == [0.0]


def test_what_cannot_be_compared_is_said(two: tuple[Any, Any]) -> None:
    best = two[0].plan
    of_profile = best.profile.model_copy(update={"sha256": "1" * 64})
    made = compare_plans(
        [
            ("a", best),
            ("model", best.model_copy(update={"model": "other", "profile": of_profile})),
            ("profile", best.model_copy(update={"profile": of_profile})),
            ("batch", best.model_copy(update={"mini_batch": 8})),
            ("machine", best.model_copy(update={"topology": "another"})),
            ("none", best.model_copy(update={"topology": ""})),
        ]
    )
    assert made.notes == [
        "model is for other, a for toy",
        "profile was made from another profile than a",
        "batch has global batch 8, a 4: compare samples/s",
        "machine is for another",
        *(["none is for an unknown machine"] if best.topology else []),
    ]


def test_what_the_planners_make_of_it(two: tuple[Any, Any]) -> None:
    """The fastest first, what has no plan last; other methods besides; energy where watts are known."""
    best, alone = two
    made = compare_plans([("mine", alone.plan)], best.question, {"toy": (100.0, 10.0)})
    mine, *rows = made.rows
    assert {row.name for row in rows} == {"best", *PLANNERS}
    steps = [row.step_seconds for row in rows if row.step_seconds is not None]
    assert steps == sorted(steps)
    assert all(row.reason for row in rows[len(steps) :])
    assert not any(row.reason for row in rows[: len(steps)])
    found = next(row for row in rows if row.name == "best")
    plan = best.plan
    assert found.plan is not None
    assert found.step_seconds == pytest.approx(plan.prediction.step_seconds)
    assert found.plan.samples_per_second == pytest.approx(4 / plan.prediction.step_seconds)
    assert (found.plan.balance, found.plan.device_count, found.memory_bytes) == (
        plan.balance,
        len({rank for stage in plan.stages for rank in stage.devices}),
        max(stage.memory_bytes for stage in plan.stages),
    )
    assert found.bubble == pytest.approx(plan.prediction.bubble)
    assert found.gap == pytest.approx(0.0, abs=1e-9)
    assert mine.gap == pytest.approx(alone.plan.prediction.step_seconds / plan.prediction.step_seconds - 1)
    step = alone.plan.prediction.step_seconds
    assert mine.energy_joules == pytest.approx(100.0 * step)  # of one device, that computes all along
    one = next(row for row in rows if row.name == "one-gpu")
    assert one.energy_joules == pytest.approx(mine.energy_joules)
    assert {row.name for row in made.other_methods} >= {"dp-all-reduce", "hetpipe-np"}
    assert made.first_slower == pytest.approx(step / min(steps) - 1)
    html = made._repr_html_()
    assert html.count("<tr") == 1 + len(made.rows)


def test_a_plan_of_another_machine_says_so(two: tuple[Any, Any]) -> None:
    """Its step is another one here; so it is where its own file says none; and devices that share layers."""
    best = two[0]
    slower = changed(best.plan, step_seconds=3.0 * best.plan.prediction.step_seconds)
    step = format_seconds(best.plan.prediction.step_seconds)
    for topology, words in (("dgx-h100", "dgx-h100"), ("", "another machine")):
        (note,) = _notes(best.question, slower.model_copy(update={"topology": topology}))
        assert note == (
            f"the plan takes {step} a step here, it says {format_seconds(slower.prediction.step_seconds)}: "
            f"it was made for {words}"
        )
    assert _notes(best.question, best.plan) == []
    unfit = replace(best.question, fits=False)
    assert _notes(unfit, best.plan) == ["the plan does not fit into the memory of its devices"]


def test_the_best_plan_has_no_estimate_of_a_planners(two: tuple[Any, Any]) -> None:
    """Where a planner proposed it, the estimate is in that planner's row."""
    context = two[0].question
    answer = find_best_plan(context.problem)
    assert answer.best is not None
    plan = replace(answer.best, proposal=replace(answer.best.proposal, estimate_seconds=2.0))
    best, own = (_of_planner(context, answer, name, plan, {}) for name in ("best", "pipedream"))
    assert (best.estimate_seconds, own.estimate_seconds) == (None, 2.0)
    assert best.step_seconds == own.step_seconds == plan.step_seconds

"""Schedules side by side, costs without a plan, and the drawings of plans and profiles."""

from __future__ import annotations

import warnings
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pplan
from pplan.cost_models.schedules import PUBLISHED
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

P, M = 4, 8
COSTS: dict[str, Any] = {
    "stages": P,
    "micro_batches": M,
    "forward_ms": 10,
    "backward_ms": 10,
    "weight_ms": 10,
}


def test_steps_are_those_of_the_closed_forms() -> None:
    """Of equal stages without transfers: 1F1B and GPipe (p-1)/(m+p-1); ZB-H1 with W = F = B a third."""
    work = M * 0.03
    expected = {
        "naive": P * work,
        "gpipe": (M + P - 1) * 0.03,
        "1f1b": (M + P - 1) * 0.03,
        "zb-h1": work + (P - 1) * 0.01,
        "zb-h2": work + (P - 1) * 0.01,
        "pipedream-2bw": (M + P - 1) * 0.03,
    }
    compared = pplan.compare_schedules(list(expected), **COSTS)
    steady = expected | {"zb-h2": work, "pipedream-2bw": work}
    rows = {row.schedule: row for row in compared.rows}
    for measure, shown in ((expected, "seconds"), (steady, "steady_seconds")):
        assert {name: getattr(row, shown) for name, row in rows.items()} == pytest.approx(measure)
    for measure, shown in ((expected, "bubble"), (steady, "steady_bubble")):
        idle = {name: 1 - work / seconds for name, seconds in measure.items()}
        assert {name: getattr(row, shown) for name, row in rows.items()} == pytest.approx(idle, abs=1e-9)
    needs = {name: row.update for name, row in rows.items() if row.update}
    assert needs == {"zb-h2": "no barrier", "pipedream-2bw": "asynchronous"}
    assert {row.schedule: row.in_flight for row in compared.rows}["gpipe"] == M
    seconds = [(row.steady_seconds or 0.0, row.seconds or 0.0) for row in compared.rows]
    assert seconds == sorted(seconds)
    for words in ("270 ms", "240 ms", "no barrier", "asynchronous"):
        assert words in compared._repr_html_()
    single = pplan.simulate_costs(schedule="zb-h1", **COSTS)
    assert single.step_seconds == pytest.approx(expected["zb-h1"])


def test_all_are_compared_and_say_why_they_cannot_run() -> None:
    odd = pplan.compare_schedules(**{**COSTS, "stages": 3, "micro_batches": 7})
    assert {row.schedule for row in odd.rows} == PUBLISHED == set(pplan.schedules()) & PUBLISHED
    reasons = {row.schedule: row.reason for row in odd.rows if row.seconds is None}
    assert "chimera" in reasons
    assert all(reasons.values())
    assert set(odd.steps) == PUBLISHED - set(reasons)


def test_of_a_plan_memory_that_does_not_fit_is_said(profile: Profile) -> None:
    made = pplan.import_plan("6,6", profile, mini_batch=16, micro_batches=16, memory_bytes=2**34)
    compared = pplan.compare_schedules(["1f1b", "gpipe"], made, profile)
    rows = {row.schedule: row for row in compared.rows}
    assert rows["1f1b"].seconds == pytest.approx(pplan.simulate(made, profile, schedule="1f1b").step_seconds)
    one, other = rows["1f1b"].memory_bytes, rows["gpipe"].memory_bytes
    assert one is not None
    assert other is not None
    assert one < other
    assert rows["gpipe"].fits
    small = pplan.compare_schedules(["1f1b", "gpipe"], made, profile, memory_bytes=(one + other) // 2)
    assert {row.schedule: row.fits for row in small.rows} == {"1f1b": True, "gpipe": False}
    assert "does not fit" in small._repr_html_()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"schedules": "1f1b"}, "schedules='1f1b': is no list"),
        ({"schedules": None}, "schedules=None"),
        ({"schedules": ["1f2b"]}, "schedules[0]"),
        ({"schedules": ["1f1b"], "schedule": "gpipe"}, "schedule='gpipe': one"),
        ({"schedules": ["1f1b"], "gpu": "h100", **COSTS}, "gpu='h100': is of a plan"),
        ({"schedules": ["1f1b"], **COSTS, "forward_ms": -1}, "forward_ms=-1"),
        (
            {"schedules": ["1f1b"], **COSTS, "forward_ms": [1, 2, 3]},
            "forward_ms=1,2,3: 3 values for 4 stages",
        ),
        (
            {"schedules": ["zb-h1"], "stages": 2, "forward_ms": 1, "backward_ms": 1},
            "`micro_batches` is missing",
        ),
    ],
)
def test_what_cannot_be(options: dict[str, Any], what: str) -> None:
    with pytest.raises(pplan.UsageError) as refused:
        pplan.compare_schedules(**options)
    assert refused.value.what.startswith(what)


def test_a_plan_without_its_profile_is_refused(plan: Plan, profile: Profile) -> None:
    with pytest.raises(pplan.UsageError, match="profile=None"):
        pplan.compare_schedules(["1f1b"], plan)
    with pytest.raises(pplan.UsageError, match="plan=None"):
        pplan.compare_schedules(["1f1b"], profile=profile)
    with pytest.raises(pplan.UsageError, match="forward_ms=1: is of costs"):
        pplan.compare_schedules(["1f1b"], plan, profile, forward_ms=1)


def boxes(axes: Any) -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of every box of a timeline, without those of idle time."""
    places = [
        path.get_extents().extents
        for collection in axes.collections
        for path in collection.get_paths()
        if collection.get_zorder() > 0 and hasattr(collection, "get_hatch") and len(path.vertices) > 2
    ]
    return sorted((left, right, top, bottom) for left, top, right, bottom in places)


@pytest.mark.parametrize("schedule", sorted(PUBLISHED))
def test_a_timeline_is_drawn_as_simulated(schedule: str) -> None:
    """Every action is a box at its stage from its start to its end, in milliseconds."""
    costs = {**COSTS, "forward_ms": (9, 10, 11, 10), "transfer_ms": 0.7}
    step = pplan.simulate_costs(schedule=schedule, **costs)
    (axes,) = step.plot().figure.axes
    wanted = sorted(
        (1e3 * span.start, 1e3 * span.end, span.stage - 0.4, span.stage + 0.4) for span in step.spans
    )
    assert np.asarray(boxes(axes)) == pytest.approx(np.asarray(wanted), abs=1e-6)
    numbers = {text.get_text() for text in axes.texts}
    assert numbers == {str(span.action.micro_batch) for span in step.spans}


def test_timelines_share_an_axis_and_name_their_steps() -> None:
    compared = pplan.compare_schedules(["naive", "1f1b", "zb-h1"], **COSTS)
    panels = compared.plot(title="").figure.axes
    assert [own.get_title(loc="left").split(":")[0] for own in panels] == ["zb-h1", "1f1b", "naive"]
    assert all(own.get_xlim() == pytest.approx((0.0, 960.0)) for own in panels)
    assert panels[-1].get_xlabel() == "time (ms)"
    assert compared.plot(title="").figure.get_suptitle() == ""


def test_a_figure_looks_as_asked() -> None:
    step = pplan.simulate_costs(schedule="1f1b", **COSTS)
    drawing = step.plot(title="$100_", size=(5, 2), font_size=10, greyscale=True)
    assert drawing.figure.get_suptitle() == "$100_"
    assert drawing.figure.get_size_inches() == pytest.approx((5, 2))
    (axes,) = drawing.figure.axes
    collections: list[Any] = [*axes.collections]
    colours = {tuple(colour[:3]) for collection in collections for colour in collection.get_facecolor()}
    assert all(red == green == blue for red, green, blue in colours)
    assert len(colours) == 3
    by_micro_batch: Any = step.plot(colour_by="micro-batch").figure.axes[0].collections
    assert len({tuple(colour) for own in by_micro_batch for colour in own.get_facecolor()}) == 2 * M + 1


@pytest.mark.parametrize(
    ("style", "what"),
    [
        ({"size": (5, 2, 1)}, "not two lengths"),
        ({"size": "5x0"}, "not two lengths"),
        ({"font_size": 1}, "not 3 to 40"),
        ({"color": "red"}, "color: is no option of plot"),
    ],
)
def test_a_look_that_cannot_be(style: dict[str, Any], what: str) -> None:
    with pytest.raises(pplan.UsageError, match=what):
        pplan.simulate_costs(schedule="1f1b", **COSTS).plot(**style)
    with pytest.raises(pplan.UsageError, match="timelines"):
        pplan.plot_timelines({})


def test_bars_are_as_long_as_what_they_stand_for(profile: Profile, plan: Plan) -> None:
    stages, layers = plan.stages, profile.layers
    for drawing, forward, amounts in (
        (plan.plot(), [own.forward_seconds for own in stages], [own.memory_bytes for own in stages]),
        (
            profile.plot(),
            [own.costs[-1].forward_seconds for own in layers],
            [own.parameter_bytes for own in layers],
        ),
    ):
        panels: Any = drawing.figure.axes
        times, memory = panels
        assert [bar.get_width() for bar in times.patches][::2] == pytest.approx(forward)
        assert [bar.get_width() for bar in memory.patches] == pytest.approx(amounts)


def test_hostile_names_and_many_layers_stay_a_drawing(profile: Profile) -> None:
    layers = [
        profile.layers[0].model_copy(
            update={"name": f"<script>alert({n})</script>$\\frac{{}}$\x00\x1b&\"'{'ü漢' * 90}"}
        )
        for n in range(300)
    ]
    drawing = profile.model_copy(update={"layers": layers, "edges": [], "tied": []}).plot()
    root = ET.fromstring(drawing._repr_svg_())
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
    assert "the first 200 of 300" in drawing._repr_svg_()


def test_a_drawing_shows_itself_and_is_written(profile: Profile, plan: Plan, here: Any) -> None:
    step = pplan.simulate_costs(schedule="1f1b", **COSTS).plot()
    compared = pplan.compare_schedules(["gpipe", "1f1b"], **COSTS)
    for drawing in (profile.plot(), plan.plot(), step, compared.plot()):
        assert repr(drawing) == f"<Drawing: {drawing.title}>"
        ET.fromstring(drawing._repr_svg_())
    step.save("step.svg")
    assert (here / "step.svg").read_text() == step._repr_svg_()
    assert "ScheduleComparison of 2" in repr(compared)
    assert [record["schedule"] for record in compared.to_records()] == ["gpipe", "1f1b"]
    assert "zb-h1" in pplan.schedules()._repr_html_()


def test_a_figure_of_one_stage_has_room(tmp_path: Path) -> None:
    drawing = pplan.simulate_costs(
        schedule="gpipe", stages=1, micro_batches=4, forward_ms=1, backward_ms=1
    ).plot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawing.save(tmp_path / "step.png")

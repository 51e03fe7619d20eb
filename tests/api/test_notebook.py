"""What profiles, plans, timelines and comparisons look like in a shell and in a notebook."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import html5lib
import pytest

import pplan
from pplan.cost_models.errors import FileError
from pplan.cost_models.quantities import format_seconds
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile


def rows(html: str) -> list[list[str]]:
    parser = html5lib.HTMLParser(namespaceHTMLElements=False, strict=True)
    table = parser.parseFragment(html).find("table")
    return [["".join(cell.itertext()) for cell in row] for row in table.findall("tbody/tr")]


def test_a_value_is_a_line(profile: Profile, plan: Plan) -> None:
    made = pplan.import_plan("6,6", profile, mini_batch=16, memory_bytes=2**34)
    values = [profile, plan, pplan.simulate(made, profile), pplan.compare(plan), pplan.report(plan)]
    names = ("Profile", "Plan", "SimulatedStep", "PlanComparison", "HtmlReport")
    for value, name in zip(values, names, strict=True):
        text = repr(value)
        assert str(value) == text
        assert text.startswith(f"<{name}")
        assert len(text) < 160
    assert repr(plan) == "<Plan of toy: 3 stages of 4-5-3 layers, 1f1b, 16 micro-batches x 4, 650 ms a step>"


def test_tables_of_a_notebook_have_the_figures(profile: Profile, plan: Plan) -> None:
    named = profile.model_copy(update={"model": "<b>toy</b>"})
    assert "<b>" not in named._repr_html_()
    layers = rows(profile._repr_html_())
    assert [row[0] for row in layers] == [layer.name for layer in profile.layers]
    stages = rows(plan._repr_html_())
    assert [row[1] for row in stages] == ["0-3", "4", "5"]
    assert stages[0][3] == format_seconds(plan.stages[0].forward_seconds)
    assert [row[0] for row in rows(pplan.compare(plan, plan)._repr_html_())] == ["plan 0", "plan 1"]


def test_a_timeline_is_a_drawing_a_trace_and_records(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pplan.import_plan("6,6", profile, mini_batch=16, memory_bytes=2**34)
    step = pplan.simulate(made, profile)
    assert [row[0] for row in rows(step._repr_html_())] == ["0", "1"]
    assert rows(step._repr_html_())[0][1] == format_seconds(step.stage_times[0].compute)
    trace = json.loads(step.to_trace())["traceEvents"]
    computing = [event for event in trace if event["ph"] == "X" and event["pid"] == 1]
    assert len(computing) == len(step.spans) == len(step.to_records())
    last = step.to_records()[-1]
    assert last["end_seconds"] == step.spans[-1].end
    frames: list[Any] = []
    pandas: Any = types.ModuleType("pandas")
    pandas.DataFrame = types.SimpleNamespace(from_records=frames.append)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    step.to_dataframe()
    assert frames == [step.to_records()]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(pplan.MachineError, match="needs pandas"):
        step.to_dataframe()


def test_a_drawing_replaces_no_file_unasked(tmp_path: Path, plan: Plan) -> None:
    file = tmp_path / "own.svg"
    file.write_text("<svg>mine</svg>")
    with pytest.raises(FileError, match=r"own\.svg"):
        plan.plot().save(file)
    assert file.read_text() == "<svg>mine</svg>"
    plan.plot().save(file, force=True)
    assert file.read_text() == plan.plot()._repr_svg_()
    (tmp_path / "own.pdf").write_text("mine")
    with pytest.raises(FileError, match="is a text"):
        plan.plot().save(tmp_path / "own.pdf", force=True)
    with pytest.raises(pplan.UsageError, match="ends in none"):
        plan.plot().save(tmp_path / "own.jpg")

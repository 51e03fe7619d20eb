"""The JSON Schemas of pplan's files, held against the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import pplan
from pplan.cli.schema_command import DOCUMENTS, document_schema
from pplan.cost_models.errors import FileError
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]


def validator(run: Run, kind: str) -> Any:
    schema = json.loads(run("schema", kind).out)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.slow
def test_files_are_of_their_schema_and_broken_ones_are_not(
    run: Run, here: Path, profile: Profile, plan: Plan
) -> None:
    path = here / "toy.profile.json"
    profile.save(path, force=False)
    assert run("solve", "--gpus", "2", "--mini-batch", "16", "--frontier", "--micro-batches", "4").status == 0
    files = {
        "profile": path.read_text(),
        "plan": Path("toy.plan.json").read_text(),
        "frontier": Path("toy.frontier.json").read_text(),
        "comparison": pplan.compare(plan).to_json(),
        "simulation": run("simulate", "--json", "--actions").out,
    }
    for kind, text in files.items():
        check = validator(run, kind)
        content = json.loads(text)
        assert list(check.iter_errors(content)) == []
        assert not check.is_valid(
            {key: value for key, value in content.items() if key != next(iter(DOCUMENTS))} | {"schema": "one"}
        )
    broken = json.loads(files["plan"])
    broken["stages"][0]["memory_bytes"] = -1
    assert not validator(run, "plan").is_valid(broken)


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_every_kind_has_a_schema(run: Run, kind: str) -> None:
    assert validator(run, kind).schema["title"]


def test_kinds_are_listed_and_others_refused(run: Run) -> None:
    assert run("schema").out.split() == list(DOCUMENTS)
    ran = run("schema", "plans")
    assert (ran.status, "there is no such kind" in ran.err) == (2, True)


@pytest.mark.parametrize("kind", ["profile", "plan", "frontier", "check", "calibration"])
def test_every_number_of_a_file_that_is_read_has_a_range(kind: str) -> None:
    """Those of `options` are checked where options are typed."""
    without = [at for at in numbers_without_range(document_schema(kind)) if "PlanOptions" not in at]
    assert without == []


def numbers_without_range(schema: Any, at: str = "") -> Iterator[str]:
    if isinstance(schema, list):
        schema = dict(enumerate(schema))
    if not isinstance(schema, dict):
        return
    if schema.get("type") in ("integer", "number"):
        ends = {key.removeprefix("exclusive").lower() for key in schema}
        if not {"minimum", "maximum"} <= ends:
            yield at
    for key, value in schema.items():
        yield from numbers_without_range(value, f"{at} {key}")


@pytest.mark.parametrize(
    "options",
    [
        {"time_limit": 1e308},
        {"max_stages": 10**30},
        {"memory_limit": -1},
        {"memory_limit": 10**300},
        {"pins": [["a", 10**30]]},
        {"mini_batch": 10**400},
        {"zero": 9},
    ],
)
def test_options_of_a_plan_have_ranges(options: dict[str, Any], plan: Plan) -> None:
    content = json.loads(plan.to_json())
    content["options"] |= options
    with pytest.raises(FileError, match="options"):
        Plan.parse(json.dumps(content), "a.plan.json")

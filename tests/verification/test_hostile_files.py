"""Broken and hostile files: an error of ours or a line that differs, never anything else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cost_models.errors import FileError, PplanError

STRANGE: list[Any] = [
    *(None, True, -1, 0, 10**6, 10**15, 10**30, 2**63, 1e-320, 1e308, -0.5, "", "x", "\ud800", "never"),
    *([], {}, [[]], [None], {"a": {}}, [0] * 1000, [10**12], "1f1b", "interleaved", "zb-v"),
]


@pytest.fixture(scope="module")
def solved(make_profile: Callable[..., Any], solve_files: Callable[..., Any]) -> Any:
    options = {"gpus": 4, "bandwidth": (1e9, 1e8), "latency": 1e-5, "gpus_per_node": 2}
    return solve_files(make_profile(7, 5, loss=True), mini_batch=8, **options)


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value, also of whole lists and objects."""
    own = [path] if path else []
    if isinstance(content, dict | list):
        keys = content if isinstance(content, dict) else range(len(content))
        own += [place for key in keys for place in places(content[key], (*path, key))]
    return own


def spoilt(text: str, rng: random.Random) -> str:
    """One to three values of it strange, or left out."""
    content = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(places(content))
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        if rng.random() < 0.2:
            del parent[path[-1]]
        else:
            parent[path[-1]] = rng.choice(STRANGE)
        if not places(content):
            break
    return json.dumps(content)


def write(folder: Path, plan: bytes | str, profile: bytes | str) -> Path:
    """The plan's file, with its profile next to it."""
    for name, content in (("toy.plan.json", plan), ("toy.profile.json", profile)):
        (folder / name).write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return folder / "toy.plan.json"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("file", ["plan", "profile"])
def test_spoilt_values(file: str, seed: int, solved: Any, tmp_path: Path) -> None:
    rng = random.Random(seed)
    seen = set[Any]()
    for _ in range(120):
        files = {"plan": json.dumps(solved.plan), "profile": solved.profile.decode()}
        files[file] = spoilt(files[file], rng)
        try:
            seen.add(pplan.lint(write(tmp_path, files["plan"], files["profile"])).agrees)
        except PplanError as error:
            seen.add((error.exit_status, len(str(error)) < 2000))
    assert (2, True) in seen
    assert seen <= {True, False, (2, True)}


def test_spoilt_bytes(solved: Any, tmp_path: Path) -> None:
    rng, text, seen = random.Random(0), json.dumps(solved.plan).encode(), set[int | bool]()
    for _ in range(150):
        content = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        if content == text:
            continue
        try:
            seen.add(pplan.lint(write(tmp_path, bytes(content), solved.profile)).agrees)
        except PplanError as error:
            seen.add(error.exit_status)
    assert seen <= {2, False}


@pytest.mark.parametrize(
    "machine", ["x", "[[device]]", 'device = [{name = "a", count = 99999999999}]', "a = " + "[" * 5000]
)
def test_no_machine(machine: str, solved: Any) -> None:
    with pytest.raises(FileError, match="machine"):
        solved.verify(solved.plan | {"machine": machine})


def test_other_layers_than_the_profile(solved: Any, tmp_path: Path) -> None:
    """A profile of fewer layers, and a machine of fewer devices, are lines that differ."""
    profile = json.loads(solved.profile)
    path = write(tmp_path, json.dumps(solved.plan), json.dumps(profile | {"layers": profile["layers"][:1]}))
    assert {"profile", "layers", "seconds of stages"} <= {line.name for line in pplan.lint(path).differing}
    plan = json.loads(json.dumps(solved.plan))
    plan["machine"] = plan["machine"].replace("count = 4", "count = 1")
    plan["stages"][-1]["devices"] = [3] * len(plan["stages"][-1]["devices"])
    assert "devices" in {line.name for line in solved.verify(plan).differing}


def test_without_a_profile(solved: Any, tmp_path: Path) -> None:
    """What needs it is not checked, and says so; the rest is."""
    path = write(tmp_path, json.dumps(solved.plan), solved.profile)
    (tmp_path / "toy.profile.json").unlink()
    report = pplan.lint(path)
    assert report.agrees
    for name in ("profile", "layers", "cuts", "seconds of stages"):
        line = report.line(name)
        assert (line.state, "no profile was given" in line.detail) == ("not checked", True)
    for name in ("devices", "options", "schedule", "memory of stages", "step", "bound", "file"):
        assert report.line(name).state == "ok"


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such plan file"):
        pplan.lint(tmp_path / "a.plan.json")
    with pytest.raises(FileError, match=str(tmp_path)):
        pplan.lint(tmp_path)

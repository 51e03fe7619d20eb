"""Broken and hostile files: an error of ours or a line that differs, never anything else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.cost_models.errors import FileError, PplanError
from pplan.verification.verify_files import Sources, verify_files, verify_sources

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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("file", ["plan", "profile"])
def test_spoilt_values(file: str, seed: int, solved: Any) -> None:
    rng = random.Random(seed)
    plan, profile = json.dumps(solved.plan), solved.profile.decode()
    seen = set[Any]()
    for _ in range(120):
        try:
            made = {"plan": plan, "profile": profile}
            made[file] = spoilt(made[file], rng)
            report = verify_sources(
                Sources(made["plan"].encode(), "plan", made["profile"].encode(), "profile")
            )
            seen.add(report.agrees)
        except PplanError as error:
            seen.add((error.exit_status, len(str(error)) < 2000))
    assert (2, True) in seen
    assert seen <= {True, False, (2, True)}


@pytest.mark.parametrize("seed", range(3))
def test_spoilt_bytes(seed: int, solved: Any) -> None:
    rng = random.Random(seed)
    text, seen = bytearray(json.dumps(solved.plan).encode()), set[int]()
    for _ in range(150):
        made = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            made[rng.randrange(len(made))] = rng.randrange(256)
        try:
            verify_sources(Sources(bytes(made), "plan", solved.profile, "profile"))
        except PplanError as error:
            seen.add(error.exit_status)
    assert seen == {2}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"prediction": 1}',
        b'{"schema": 1, "prediction": {}}',
        b'{"schema": 2, "prediction": {}}',
        b'{"schema": 1, "prediction": NaN}',
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"schema": 1, "prediction": ' + b"9" * 5000 + b"}",
    ],
)
def test_no_plan(content: bytes, solved: Any) -> None:
    with pytest.raises(FileError):
        verify_sources(Sources(content, "plan", solved.profile, "profile"))


@pytest.mark.parametrize(
    "machine",
    [
        "x",
        "[[device]]",
        'device = [{name = "a", count = 99999999999}]',
        '[[device]]\nname = "a"\ncount = 4\n',
        '[[device]]\nname = "a"\ncount = 4\n[[level]]\nname = "n"\nbandwidth = "0GB/s"',
        '[[device]]\nname = "a"\ncount = 4\n[[level]]\nname = "n"\nbandwidth = "1Gb/s"',
        '[[device]]\nname = "a"\ncount = 4\n[[level]]\nname = "n"\nbandwidth = "1GB/s"\ndevices_per_port = 3',
        '[[device]]\nname = "a"\ncount = 4\nspeed = 0.0\n[[level]]\nname = "n"\nbandwidth = "1GB/s"',
        '[[device]]\nname = "a"\ncount = 4\n[[level]]\nname = "n"\nsize = 2\nbandwidth = "1GB/s"',
        "a = " + "[" * 5000,
        "a = " + "9" * 5000,
    ],
)
def test_no_machine(machine: str, solved: Any) -> None:
    with pytest.raises(FileError, match="machine"):
        solved.verified(solved.plan | {"machine": machine})


def test_ten_million_devices(solved: Any, tmp_path: Path) -> None:
    """A list of so many is refused before anything is made of it, and a file of so many bytes unread."""
    plan = json.dumps(solved.plan)
    devices = json.dumps([0])[1:-1]
    long = plan.replace('"devices": [', f'"devices": [{(devices + ",") * 2_000_000}', 1)
    with pytest.raises(FileError, match="devices must be a list of"):
        verify_sources(Sources(long.encode(), "plan", solved.profile, "profile"))
    path = tmp_path / "large.plan.json"
    with path.open("wb") as file:
        file.truncate(64 * 2**20)
    with pytest.raises(FileError, match="more than 32 MiB"):
        verify_files(path)


@pytest.mark.parametrize(("key", "value"), [("micro_batch_size", 2**50), ("virtual_stages", 2**30)])
def test_numbers_that_would_take_all_memory(key: str, value: int, solved: Any) -> None:
    report = solved.verified(solved.plan | {key: value})
    assert not report.agrees


def test_more_actions_than_are_followed(solved: Any) -> None:
    with pytest.raises(FileError, match="micro_batches must be a whole number from 1 to"):
        solved.verified(solved.plan | {"micro_batches": 2**40})


def test_without_a_profile(solved: Any) -> None:
    """What needs it is not checked, and says so; the rest is."""
    report = verify_sources(Sources(json.dumps(solved.plan).encode(), "plan"))
    assert report.agrees
    for name in ("profile", "cuts", "seconds of stages", "memory of stages", "step", "bubble"):
        line = report.line(name)
        assert (line.state, "no profile was given" in line.detail) == ("not checked", True)
    for name in ("layer names", "layers", "devices", "micro-batches", "order of actions", "gap"):
        assert report.line(name).state == "ok"


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such plan file"):
        verify_files(tmp_path / "a.plan.json")
    with pytest.raises(FileError, match="cannot be read"):
        verify_files(tmp_path)

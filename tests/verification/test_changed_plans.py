"""Plans in which one value was changed: what matters is found, and nothing is taken without a word."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pplan.cost_models.errors import PplanError

Path = tuple[Any, ...]
WORDS_ONLY = {
    ("schema",),
    ("topology",),
    ("searched",),
    ("made_by",),
    ("notes",),
    ("warnings",),
    ("device_kind",),
    ("prediction", "bound_covers"),
    ("profile", "file"),
    ("prediction", "low_seconds"),
    ("prediction", "high_seconds"),
    ("prediction", "root_bound_seconds"),
    ("prediction", "exact"),
    ("options", "time_limit"),
    ("options", "robust"),
    ("options", "planner"),
    ("options", "use_all"),
    ("objective",),
}
"""What a plan says in words, draws at random, or proves by its search."""
BASELINES = ("one-gpu", "data-parallel")
"""Those that stand in the file whole."""


def leaves(content: Any, path: Path = ()) -> Iterator[Path]:
    """The places of all numbers, texts and flags."""
    if isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in pairs:
            yield from leaves(value, (*path, key))
    elif content is not None:
        yield path


def at(content: Any, path: Path) -> Any:
    for key in path:
        content = content[key]
    return content


def changed(content: Any, path: Path, value: Any) -> Any:
    """A copy with another value there."""
    made = copy.deepcopy(content)
    at(made, path[:-1])[path[-1]] = value
    return made


def other(value: Any) -> Any:
    """A value of the same type, a little off."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 7
    return value * (1 + 1e-6) + 1e-8 if isinstance(value, float) else value + "x"


def matters(plan: Any, path: Path) -> bool:
    if any(path[: len(words)] == words for words in WORDS_ONLY):
        return False
    if path[0] == "machine":
        return False  # its own test
    if path[0] == "baselines":
        row = plan["baselines"][path[1]]
        return path[2] == "step_seconds" and row["name"] in BASELINES
    return not (path[0] == "alternatives" and path[2] in ("reason", "exact"))


OPTIONS: dict[str, dict[str, Any]] = {
    "two levels": {
        "gpus": 4,
        "bandwidth": (2e9, 1e8),
        "latency": (1e-5, 1e-4),
        "gpus_per_node": 2,
        "mini_batch": 16,
        "memory_bytes": 500_000_000,
    },
    "a known GPU": {
        "gpus": 4,
        "gpu": "a100-40gb",
        "mini_batch": 16,
        "optimizer": "adamw",
        "zero": 1,
    },
    "interleaved": {
        "gpus": 2,
        "bandwidth": 1e9,
        "latency": 1e-5,
        "mini_batch": 8,
        "schedule": "interleaved",
        "micro_batches": 8,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_each_number_that_matters(
    name: str, make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    solved = solve_files(make_profile(3, 6, loss=True, cuts=1.0), **OPTIONS[name])
    assert solved.verified().agrees
    places = [path for path in leaves(solved.plan) if matters(solved.plan, path)]
    assert len(places) > 60
    unseen = []
    for path in places:
        try:
            report = solved.verified(changed(solved.plan, path, other(at(solved.plan, path))))
        except PplanError:
            continue
        if report.agrees:
            unseen.append(path)
    assert unseen == [], repr(unseen)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw-8bit"])
def test_the_optimizers_step(
    optimizer: str, zero: int, make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    options = OPTIONS["a known GPU"] | {"optimizer": optimizer, "zero": zero}
    solved = solve_files(make_profile(3, 6), **options)
    path = ("prediction", "optimizer_seconds")
    assert solved.verified().agrees
    assert not solved.verified(changed(solved.plan, path, 1.001 * at(solved.plan, path))).agrees


@pytest.mark.slow
@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        ("count = 4", "count = 5"),
        ("500000000B", "500000001B"),
        ("size = 2", "size = 4"),
        ('bandwidth = "2GB/s"', 'bandwidth = "2.1GB/s"'),
        ("10us", "11us"),
    ],
)
def test_the_machine(
    was: str, is_now: str, make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    """A pipeline without replicas on the first node alone does not see the network."""
    options = OPTIONS["two levels"] | {"runtime": "torchgpipe", "use_all": True}
    solved = solve_files(make_profile(3, 6, cuts=1.0), **options)
    machine = solved.plan["machine"]
    assert was in machine
    assert not solved.verified(changed(solved.plan, ("machine",), machine.replace(was, is_now))).agrees


@pytest.mark.slow
def test_the_profile(make_profile: Callable[..., Any], solve_files: Callable[..., Any]) -> None:
    """Every figure of every layer, with the hash mended."""
    import hashlib

    profile = make_profile(3, 4, cuts=1.0)
    solved = solve_files(profile, **OPTIONS["two levels"] | {"runtime": "torchgpipe", "recompute": "always"})
    size = solved.plan["micro_batch_size"]
    unseen = []
    for index, key in ((index, key) for index in range(4) for key in profile["layers"][0]["costs"][0]):
        column = [cost["micro_batch_size"] for cost in profile["layers"][0]["costs"]].index(size)
        path = ("layers", index, "costs", column, key)
        content = json.dumps(changed(profile, path, at(profile, path) * 2)).encode()
        plan = changed(solved.plan, ("profile", "sha256"), hashlib.sha256(content).hexdigest())
        try:
            if solved.verified(plan, content).agrees:
                unseen.append((index, key))
        except PplanError:
            continue
    # How much it varies; a tensor that nothing sends; what is not the largest; launches that are not late.
    hidden = {"spread", "output_bytes", "saved_input_bytes", "workspace_bytes"}
    assert {key for _, key in unseen} <= hidden | {"forward_host_seconds", "backward_host_seconds"}


def test_what_differs_is_named(make_profile: Callable[..., Any], solve_files: Callable[..., Any]) -> None:
    solved = solve_files(make_profile(3, 6), **OPTIONS["two levels"])
    step = solved.plan["prediction"]["step_seconds"]
    report = solved.verified(changed(solved.plan, ("prediction", "step_seconds"), step * 1.01))
    line = report.line("step")
    assert (line.state, line.detail, line.plan_value) == ("differs", "step_seconds", step * 1.01)
    assert line.expected_value == pytest.approx(step, rel=1e-9)
    assert report.line("memory of stages").state == "ok"
    assert not report.agrees
    assert json.loads(report.to_json())["agrees"] is False


def test_a_tenth_of_the_tolerance_is_no_difference(
    make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    solved = solve_files(make_profile(3, 6), **OPTIONS["two levels"])
    step = solved.plan["prediction"]["step_seconds"]
    for share, agrees in ((1e-10, True), (1e-8, False)):
        plan = changed(solved.plan, ("prediction", "step_seconds"), step * (1 + share))
        assert (solved.verified(plan).line("step").state == "ok") is agrees

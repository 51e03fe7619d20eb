"""Plans in which one value was changed: the verb or the oracle finds it, and the table says which."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pplan
from pplan.cost_models.errors import PplanError
from pplan.cost_models.text_files import KEY

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
"""What a plan says in words, draws at random, or proves by its search: the hash of the file alone shows a
change."""
ONE_STAGE = ("one-gpu", "data-parallel")
"""Baselines that stand in the file whole."""


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
        return path[2] == "step_seconds" and row["name"] in ONE_STAGE
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
def test_each_value_that_matters(
    name: str, make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    solved = solve_files(make_profile(3, 6, loss=True, cuts=1.0), **OPTIONS[name])
    solved.check()
    places = [path for path in leaves(solved.plan) if matters(solved.plan, path)]
    assert len(places) > 60
    unseen, by_verb = [], 0
    for path in places:
        plan = changed(solved.plan, path, other(at(solved.plan, path)))
        if is_found(solved, plan):
            by_verb += 1
        elif not solved.attack(plan):
            unseen.append(path)
    assert unseen == [], repr(unseen)
    assert by_verb > 0.7 * len(places)


def is_found(solved: Any, plan: Any) -> bool:
    """True if the verb finds a change, or refuses the file."""
    try:
        return not solved.verify(plan).agrees
    except PplanError:
        return True


VERB: dict[str, tuple[Path, Any]] = {
    "layers": (("stages", 1, "first_layer"), 0),
    "balance": (("balance", 0), 2),
    "layer names": (("layer_names", 0), "x"),
    "devices of two stages": (("stages", 1, "devices"), [0]),
    "batches": (("micro_batches",), 7),
    "an option": (("options", "mini_batch"), 7),
    "recomputation": (("stages", 0, "recompute"), "always"),
    "runtime": (("runtime",), "torchgpipe"),
    "seconds of a stage": (("stages", 0, "backward_seconds"), 1.0),
    "a memory term": (("stages", 0, "memory", "weights"), 7),
    "memory of a stage": (("stages", 0, "memory_bytes"), 7),
    "memory limit": (("stages", 0, "memory_limit_bytes"), 7),
    "samples per second": (("prediction", "samples_per_second"), 1.0),
    "step": (("prediction", "step_seconds"), 1.0),
    "gap": (("prediction", "gap"), 0.5),
    "exact, with a gap": (("prediction",), None),
    "profile": (("profile", "sha256"), "0"),
    "kind of device": (("profile", "device_name"), "x"),
    "throughput of an alternative": (("alternatives", 0, "samples_per_second"), 1.0),
    "a machine of fewer devices": (("machine",), "count = 1"),
}
"""Changes that the verb finds without the hash of the file."""
ORACLE: dict[str, tuple[Path, Any]] = {
    "bubble": (("prediction", "bubble"), 0.5),
    "uncertainty": (("prediction", "uncertainty"), 0.5),
    "step of an alternative": (("alternatives", 0, "step_seconds"), None),
    "memory of an alternative": (("alternatives", 0, "memory_bytes", 0), 7),
    "step of a baseline": (("baselines", 0, "step_seconds"), 7.0),
    "two memory terms": (("stages", 0, "memory"), None),
    "step and what follows": (("prediction",), None),
}
"""Changes that only the oracle finds: each is consistent with the rest of the file."""


@pytest.fixture(scope="module")
def two_stages(make_profile: Callable[..., Any], solve_files: Callable[..., Any]) -> Any:
    """A plan of two stages, which is changed."""
    links = {"bandwidth": 1e10, "latency": 1e-5, "memory_bytes": 10**9}
    limits = {"schedule": "1f1b", "max_stages": 2, "cut_after": ["layers.3"]}
    return solve_files(make_profile(3, 6, cuts=1.0), gpus=2, mini_batch=16, **links, **limits)


@pytest.mark.parametrize("name", [*VERB, *ORACLE])
def test_each_kind_of_change(name: str, two_stages: Any) -> None:
    solved = two_stages
    path, value = (VERB | ORACLE)[name]
    plan = changed(solved.plan, path, value)
    if name == "a machine of fewer devices":
        plan["machine"] = solved.plan["machine"].replace("count = 2", "count = 1")
    if name == "step of an alternative":
        row = plan["alternatives"][0]
        row["step_seconds"] = 2 * solved.plan["alternatives"][0]["step_seconds"]
        row["samples_per_second"] = plan["mini_batch"] / row["step_seconds"]
    if name == "two memory terms":
        terms = dict(solved.plan["stages"][0]["memory"])
        plan["stages"][0]["memory"] = terms | {
            "weights": terms["weights"] + 100,
            "gradients": terms["gradients"] - 100,
        }
    if path == ("prediction",):
        step = 1.001 * solved.plan["prediction"]["step_seconds"]
        bound = solved.plan["prediction"]["lower_bound_seconds"]
        figures = {"step_seconds": step, "samples_per_second": plan["mini_batch"] / step}
        gap = {"gap": step / bound - 1, "exact": name == "exact, with a gap"}
        plan["prediction"] = solved.plan["prediction"] | figures | gap
    assert plan != solved.plan
    assert is_found(solved, plan) == (name in VERB)
    assert name in VERB or solved.attack(plan)


def test_the_hash_of_the_file(make_profile: Callable[..., Any], solve_files: Callable[..., Any]) -> None:
    """It shows every change; without it, the line is not checked."""
    solved = solve_files(make_profile(3, 4), gpus=2, bandwidth=1e9, mini_batch=8)
    assert solved.verify().line("file").state == "ok"
    hashed = copy.deepcopy(solved.plan["made_by"])
    assert hashed[KEY]
    assert solved.verify(solved.plan).line("file").state == "not checked"
    (solved.folder / "toy.plan.json").write_text(json.dumps(changed(solved.plan, ("notes",), ["x"])))
    report = pplan.lint(solved.folder / "toy.plan.json")
    assert [line.name for line in report.differing] == ["file"]


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw-8bit"])
def test_the_optimizers_step(
    optimizer: str, zero: int, make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    options = OPTIONS["a known GPU"] | {"optimizer": optimizer, "zero": zero}
    solved = solve_files(make_profile(3, 6), **options)
    path = ("prediction", "optimizer_seconds")
    found = solved.attack(changed(solved.plan, path, 1.001 * at(solved.plan, path)))
    assert [finding.what for finding in found] == ["optimizer_seconds"]


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
    plan = changed(solved.plan, ("machine",), machine.replace(was, is_now))
    assert is_found(solved, plan) or solved.attack(plan)


@pytest.mark.slow
def test_the_profile(make_profile: Callable[..., Any], solve_files: Callable[..., Any]) -> None:
    """Every figure of every layer."""
    profile = make_profile(3, 4, cuts=1.0)
    solved = solve_files(profile, **OPTIONS["two levels"] | {"runtime": "torchgpipe", "recompute": "always"})
    size = solved.plan["micro_batch_size"]
    unseen = []
    keys = [key for key in profile["layers"][0]["costs"][0] if key != "micro_batch_size"]
    for index, key in ((index, key) for index in range(4) for key in keys):
        column = [cost["micro_batch_size"] for cost in profile["layers"][0]["costs"]].index(size)
        path = ("layers", index, "costs", column, key)
        content = json.dumps(changed(profile, path, at(profile, path) * 2)).encode()
        if not solved.attack(profile=content):
            unseen.append((index, key))
    # How much it varies; a tensor that nothing sends; what is not the largest; launches that are not late.
    hidden = {"spread", "output_bytes", "saved_input_bytes", "workspace_bytes"}
    assert {key for _, key in unseen} <= hidden | {"forward_host_seconds", "backward_host_seconds"}
    (solved.folder / "toy.profile.json").write_bytes(content)
    line = solved.verify().line("profile")
    assert (line.state, line.expected_value) == ("differs", hashlib.sha256(content).hexdigest())


def test_a_tenth_of_the_tolerance_is_no_difference(
    make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    solved = solve_files(make_profile(3, 6), **OPTIONS["two levels"])
    step = solved.plan["prediction"]["step_seconds"]
    for share, agrees in ((1e-10, True), (1e-8, False)):
        plan = changed(solved.plan, ("prediction", "step_seconds"), step * (1 + share))
        assert ("step_seconds" not in {finding.what for finding in solved.attack(plan)}) is agrees
        assert is_found(solved, plan) is not agrees

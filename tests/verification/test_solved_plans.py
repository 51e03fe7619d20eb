"""Plans that `pplan.solve` makes of generated profiles: neither the verb nor the oracle finds anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import pplan

Options = dict[str, Any]
ONE_LEVEL: Options = {"gpus": 4, "bandwidth": 1e9, "latency": 1e-5, "mini_batch": 16}
TWO_LEVELS: Options = ONE_LEVEL | {"bandwidth": (2e9, 1e8), "latency": (1e-5, 1e-4), "gpus_per_node": 2}
KINDS = """
[[device]]
name = "T4"
count = 2
speed = 0.5
[[device]]
name = "toy"
count = 2
profile = "own.profile.json"
[[level]]
name = "node"
size = 2
bandwidth = "2GB/s"
latency = "10us"
[[level]]
name = "network"
bandwidth = "0.2GB/s"
latency = "50us"
"""
FAR = """
[[device]]
name = "toy"
count = 3
[[level]]
name = "node"
size = 2
bandwidth = "1GB/s"
[[level]]
name = "network"
bandwidth = "inf"
"""
"""Two devices of different nodes exchange faster than two of one."""
SLOW_PORT = """
[[device]]
name = "toy"
count = 4
[[level]]
name = "node"
size = 2
bandwidth = "100GB/s"
[[level]]
name = "network"
bandwidth = "5GB/s"
devices_per_port = 2
"""
CASES: dict[str, tuple[Options, Options]] = {
    "two levels": ({"loss": True}, TWO_LEVELS),
    "adamw, no room": (
        {"traffic": 0.1},
        TWO_LEVELS | {"optimizer": "adamw", "memory_bytes": 130_000_000},
    ),
    "adamw-8bit, bf16": ({"dtype": "bfloat16"}, ONE_LEVEL | {"optimizer": "adamw-8bit"}),
    "one size": ({"sizes": (4,)}, ONE_LEVEL | {"micro_batches": 4}),
    "extrapolated": ({"sizes": (2, 4)}, ONE_LEVEL | {"micro_batches": 2, "mini_batch": 24}),
    "kinds": ({}, {"gpus": 4, "mini_batch": 16, "topology": KINDS}),
    "kinds, one process": (
        {"host": 2},
        {"gpus": 4, "mini_batch": 16, "topology": KINDS, "runtime": "fairscale"},
    ),
    "wishes": (
        {"cuts": 1.0},
        ONE_LEVEL | {"max_stages": 3, "cut_after": ["layers.2"], "pins": [("layers.6", 1)], "use_all": True},
    ),
    "kept together": ({"cuts": 1.0}, ONE_LEVEL | {"keep_together": ["layers.[0-3]"]}),
    "even": ({}, ONE_LEVEL | {"planner": "even"}),
    "data-parallel": ({}, TWO_LEVELS | {"planner": "data-parallel"}),
    "replicas that are not the first": (
        {"sizes": (3,)},
        {"gpus": 3, "mini_batch": 5, "topology": FAR, "zero": 3, "recompute": "always"},
    ),
    "ports of ZeRO-3": (
        {"sizes": (2, 4)},
        {
            "gpus": 4,
            "mini_batch": 8,
            "topology": SLOW_PORT,
            "zero": 3,
            "use_all": True,
            "schedule": "autopipe",
        }
        | {"max_stages": 1, "micro_batches": 1, "optimizer": "sgd"},
    ),
    "ports of ZeRO-2, both ways": (
        {"sizes": (2, 4)},
        {"gpus": 4, "mini_batch": 8, "topology": SLOW_PORT, "zero": 2, "schedule": "chimera"},
    ),
    "least memory": ({}, ONE_LEVEL | {"objective": "memory"}),
    "throughput": ({"cuts": 1.0}, ONE_LEVEL | {"objective": "throughput"}),
    "cost": ({}, ONE_LEVEL | {"objective": "cost", "price": 2.0}),
}
CASES |= {
    f"{schedule}, {'parts' if parts else 'whole'}": (
        {"parts": parts, "cuts": 1.0, "loss": True},
        ONE_LEVEL | {"schedule": schedule, "recompute": recompute, "micro_batches": 8},
    )
    for schedule, parts, recompute in (
        ("naive", False, "auto"),
        ("gpipe", False, "except_last"),
        ("gpipe", False, "always"),
        ("1f1b", False, "always"),
        ("dapple", False, "auto"),
        ("interleaved", False, "always"),
        ("looped-bfs", False, "auto"),
        ("chimera", False, "auto"),
        ("zb-h1", False, "auto"),
        ("zb-h1", True, "always"),
        ("zb-v", True, "auto"),
        ("dualpipe-v", True, "auto"),
        ("dualpipe-v", False, "always"),
        ("avgpipe", False, "auto"),
        ("autopipe", False, "always"),
    )
}
CASES |= {
    f"for {runtime}": ({"host": 1.0}, TWO_LEVELS | {"runtime": runtime})
    for runtime in ("torchgpipe", "deepspeed", "torch", "huggingface", "megatron", "torchtitan")
}
TIED: Options = {"cuts": 1.0, "tied": ((0, 7), (1, 3), (2, 4, 6))}
FAST: Options = ONE_LEVEL | {"bandwidth": 2e10, "micro_batches": 16}
CASES |= {
    "tied": (TIED, FAST),
    "tied, two levels": (TIED, TWO_LEVELS | {"bandwidth": (2e10, 1e10), "micro_batches": 8}),
    "tied, adamw, no room": (TIED, FAST | {"optimizer": "adamw", "memory_bytes": 330_000_000}),
    "tied, zero 1": (
        TIED | {"dtype": "bfloat16"},
        FAST | {"precision": "mixed", "zero": 1, "micro_batches": 8},
    ),
    "tied, zero 2": (TIED, FAST | {"zero": 2}),
    "tied, throughput": (TIED, FAST | {"objective": "throughput", "max_stages": 3}),
}
CASES |= {
    f"tied, {schedule}": (TIED, FAST | {"schedule": schedule, "micro_batches": 8})
    for schedule in ("gpipe", "interleaved", "chimera", "zb-v")
}
CASES |= {
    f"tied, for {runtime}": (TIED | {"host": 1.0}, FAST | {"runtime": runtime})
    for runtime in ("torchgpipe", "deepspeed", "megatron")
}


@pytest.fixture(autouse=True)
def plans_are_attacked() -> None:
    """Not all: every test here does it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_agrees(name: str, make_profile: Callable[..., Any], solve_files: Callable[..., Any]) -> None:
    of_profile, options = CASES[name]
    solved = solve_files(make_profile(len(name), 8, **of_profile), **options)
    solved.check()
    schedule = solved.plan["schedule"]
    late = schedule.startswith("pipedream") or schedule in ("xpipe", "wpipe")
    unchecked = {line.name for line in solved.verify().unchecked if not line.name.startswith("baseline")}
    assert unchecked == ({"schedule", "step"} if late else set())
    assert "schedule" not in options or options["schedule"] == schedule


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("wpipe", {"gpus": 2, "mini_batch": 8, "optimizer": "momentum", "memory_bytes": 260_000_000}),
        ("xpipe", {"gpus": 3, "mini_batch": 2, "optimizer": "adam", "micro_batches": 2}),
    ],
)
def test_late_plans_agree(
    schedule: str, options: Options, make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    """Predicted weights, and two versions of one part of a device, are counted a second time."""
    links = {"bandwidth": 2e9, "latency": 1e-5, "objective": "throughput"}
    solved = solve_files(make_profile(3, 8, cuts=1.0), **links, **options)
    assert solved.plan["schedule"] == schedule
    assert all(stage["memory"]["weight_versions"] > 0 for stage in solved.plan["stages"])
    solved.check()


def test_a_given_partition(make_profile: Callable[..., Any], solve_files: Callable[..., Any]) -> None:
    """Another tool's cuts: nothing was searched, and it may not fit."""
    made = solve_files(make_profile(5, 8, cuts=1.0), **ONE_LEVEL)
    made.check()
    plan = pplan.import_plan("3,5", made.folder / "toy.profile.json", gpus=2, memory_bytes=10_000_000)
    content = json.loads(plan.to_json())
    assert any("does not fit" in note for note in plan.warnings)
    assert made.attack(content) == []
    assert made.verify(content).differing == []


@pytest.mark.parametrize("options", [{}, {"runtime": "torch"}])
def test_first_layers_that_run_again(
    options: Options, make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    """Their seconds, launches and bytes are counted a second time; other numbers of layers have others."""
    wishes = FAST | {"use_all": True, "schedule": "1f1b"} | options
    profile = make_profile(3, 12, cuts=1.0, host=1.0)
    for layer in profile["layers"]:
        layer |= {name: layer[name] // 50 for name in ("parameter_bytes", "trainable_bytes")}
    whole = solve_files(profile, **wishes)
    whole.check()
    most = max(stage["memory_bytes"] for stage in whole.plan["stages"])
    solved = solve_files(profile, **wishes, memory_bytes=round(0.7 * most), recompute="first_layers")
    solved.check()
    words = [stage["recompute"] or "" for stage in solved.plan["stages"]]
    number = next(index for index, word in enumerate(words) if word.startswith("first_"))
    first = int(words[number].removeprefix("first_"))
    for word in (f"first_{first + 1}", "first_12", "never"):
        plan = json.loads(json.dumps(solved.plan))
        plan["stages"][number]["recompute"] = word
        assert solved.attack(plan)
    plan["stages"][number]["recompute"] = "first_0"
    with pytest.raises(pplan.FileError, match="recompute"):
        solved.verify(plan)


@pytest.mark.parametrize("options", [{}, {"runtime": "torch"}, {"schedule": "gpipe"}])
def test_stages_that_offload(
    options: Options, make_profile: Callable[..., Any], solve_files: Callable[..., Any]
) -> None:
    """Their copies and what is left on the device, and on the host, by the layers' bytes."""
    wishes = FAST | {"use_all": True, "schedule": "1f1b", "host_bandwidth": 1e12} | options
    profile = make_profile(3, 12, cuts=1.0, host=1.0)
    for layer in profile["layers"]:
        layer |= {name: layer[name] // 50 for name in ("parameter_bytes", "trainable_bytes")}
    whole = solve_files(profile, **wishes)
    most = max(stage["memory_bytes"] for stage in whole.plan["stages"])
    solved = solve_files(profile, **wishes, memory_bytes=round(0.6 * most), recompute="offload")
    solved.check()
    words = [stage["recompute"] for stage in solved.plan["stages"]]
    number = words.index("offload")
    assert solved.plan["stages"][number]["host_bytes"] > 0
    of_stage: list[Options] = [{"recompute": word} for word in ("always", "never")]
    for change in (*of_stage, {"host_bytes": 7}, {"host_bytes": None}):
        plan = json.loads(json.dumps(solved.plan))
        plan["stages"][number] |= change
        assert solved.attack(plan)
    of_plan: list[Options] = [{"host_bandwidth": 2e9}, {"host_bandwidth": None}, {"host_memory_bytes": 1}]
    for change in of_plan:
        plan = json.loads(json.dumps(solved.plan))
        plan["options"] |= change
        assert solved.attack(plan)

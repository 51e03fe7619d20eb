"""The command lines that read a file, and a grammar of all others from the options that typer knows."""

from __future__ import annotations

import random
from typing import Any

from pplan.cli.usage import list_verbs
from pplan.cli.verbs import root
from pplan.cost_models.runtime import RUNTIMES
from pplan.cost_models.schedules import SCHEDULES

from .mutation import WORDS
from .seeds import (
    CHECK,
    CONFIGS,
    DEFAULTS_FILE,
    EXPORTS,
    FRONTIER,
    MACHINE,
    PARTITIONS,
    PLAIN,
    PLANS,
    PROFILES,
    SCHEDULE,
)

Command = list[str]
QUICK = ["--time-limit", "1s"]
OTHER = "1f1b.plan.json"
FILES = (
    *PROFILES,
    *PLANS,
    *EXPORTS,
    *PARTITIONS,
    "machine.toml",
    "short.toml",
    "kernels.csv",
    "degrees.json",
    "table.csv",
    "table.json",
    "graph.txt",
    SCHEDULE,
    CHECK,
    FRONTIER,
    "/dev/zero",
)


def readers(file: str) -> list[Command]:
    """What reads it; first the verb that decides whether it is one of its kind."""
    if file in PROFILES:
        return _of_profile(file)
    if file in PLANS:
        return _of_plan(file)
    if file in EXPORTS or file in PARTITIONS:
        own = ["import", file, "--profile", PLAIN]
        return [
            [*own, "-o", "made.plan.json"],
            [*own, *MACHINE, "--json", "-o", "made.plan.json"],
            [*own, "--virtual-stages", "2", "-o", "made.plan.json"],
            ["show", file],
        ]
    if file.endswith(".toml") and file != DEFAULTS_FILE:
        solve = ["solve", PLAIN, "--topology", file, *QUICK, "-o", "made.plan.json"]
        return [
            ["machine", "show", file],
            ["machine", "show", file, "--json"],
            ["machine", "show", file, "--toml"],
            ["machine", "show", file, "--gpus", "8"],
            solve,
            ["simulate", OTHER, "--topology", file, "--json"],
            ["import", "4,3", "--profile", PLAIN, "--topology", file, "-o", "made.plan.json"],
        ]
    if file in CONFIGS:
        own = ["solve", file, "--gpu", "h100", "-o", "made.plan.json"]
        return [
            [*own, "--gpus", "8"],
            [*own, "--gpus", "8", "--json", "--mini-batch", "64", "--sequence", "1024"],
            [*own, "--gpus", "4", "--ep", "1,2", "--tp", "1,2"],
            [*own, "--gpus", "8", "--zero", "0,3", "--recompute", "selective", "--cp", "1,2"],
            [*own, "--gpus", "8", "--pp", "2,4", "--virtual-stages", "2,3", "--force"],
        ]
    if file == "kernels.csv":
        own = [
            "solve",
            "mixture.json",
            "--gpus",
            "2",
            "--gpu",
            "h100",
            "--mini-batch",
            "8",
            "--kernels",
            file,
        ]
        return [
            [*own, "--pp", "1"],
            [*own, "--pp", "2", "--json"],
            ["solve", file, "--gpus", "2"],
            ["show", file],
        ]
    if file == SCHEDULE:
        return [
            ["simulate", "--list", "--schedule", file],
            ["simulate", "--list", "--schedule", file, "--text", "--stages", "3", "--micro-batches", "5"],
            ["simulate", "--list", "--schedule", file, "--virtual-stages", "2"],
            ["simulate", OTHER, "--schedule", file, "--json", "--actions"],
            ["simulate", "--schedule", file, "--stages", "2", "--micro-batches", "6"],
            ["solve", PLAIN, *MACHINE, *QUICK, "--schedule", file, "-o", "made.plan.json"],
        ]
    if file == DEFAULTS_FILE:
        return [
            ["config"],
            ["config", "--json"],
            ["solve", PLAIN, "--gpus", "2", *QUICK, "-o", "made.plan.json"],
            ["lint", "EttL", "--model", "config.json"],
            ["simulate", "--list", "--schedule", "gpipe"],
        ]
    if file in (CHECK, FRONTIER):
        option = "--check" if file == CHECK else "--frontier"
        own = ["report", "plain.plan.json", option, file, "-o", "made.html"]
        return [own, ["show", file], ["report", file]]
    if file == "degrees.json":
        exports = [["export", name, file, "-o", "made.sh"] for name in ("megatron", "torchtitan", "torch")]
        return [["show", file], ["show", file, "--json"], ["lint", file], ["solve", file], *exports]
    return [
        ["import", file, "-o", "made.profile.json"],
        ["import", file, "--json", "-o", "made.profile.json"],
        ["import", file, "--granularity", "fine", "-o", "made.profile.json"],
        [
            "import",
            file,
            "--format",
            file.rpartition(".")[2].replace("txt", "pipedream"),
            "-o",
            "made.profile.json",
        ],
        ["import", file, "--micro-batch-size", "16777216", "-o", "made.profile.json"],
    ]


def after(file: str) -> list[Command]:
    """What reads the file that its reader made."""
    if file in (*EXPORTS, *PARTITIONS):
        return _of_plan("made.plan.json")
    others = (*CONFIGS, "kernels.csv", "degrees.json", SCHEDULE, CHECK, FRONTIER, DEFAULTS_FILE)
    return [] if file.endswith(".toml") or file in others else _of_profile("made.profile.json")


def _of_profile(file: str) -> list[Command]:
    solve = ["solve", file, *QUICK, "-o", "made.plan.json"]
    return [
        ["show", file],
        ["show", file, "--json"],
        [*solve, "--gpus", "2"],
        [*solve, *MACHINE, "--details", "--optimizer", "adam"],
        [*solve, *MACHINE, "--json", "--objective", "memory:5%"],
        [*solve, *MACHINE, "--objective", "throughput", "--precision", "bf16"],
        [*solve, *MACHINE, "--objective", "cost", "--price", "2.5"],
        [*solve, *MACHINE, "--frontier", "--points", "4"],
        [*solve, *MACHINE, "--robust", "--recompute", "auto"],
        [*solve, "--gpus", "4", "--schedule", "zb-v", "--memory", "1GiB"],
        [*solve, "--gpus", "4", "--planner", "pipedream"],
        [*solve, "--gpus", "4", "--planner", "alpa"],
        [*solve, "--sweep", "gpus=1..4", "--csv", "made.csv", "--jobs", "1"],
        ["import", "3,4", "--profile", file, "-o", "made.plan.json"],
        ["import", "Et*2|t*2L", "--profile", file, *MACHINE, "-o", "made.plan.json"],
        *(command for plan in (OTHER, "tied.plan.json") for command in _of_both(plan, file)),
    ]


def _of_both(plan: str, profile: str) -> list[Command]:
    given = [plan, "--profile", profile]
    return [
        ["explain", *given],
        ["explain", *given, "--current", "4,3", "--json"],
        ["simulate", *given, "--json", "--actions"],
        ["simulate", *given, "--schedule", "gpipe", "--stages", "3"],
        ["compare", plan, "--planners", "--profile", profile],
        ["lint", plan, "--profile", profile],
        ["export", "torch", *given, "--script", "made.py", "-o", "made.json"],
    ]


def _of_plan(file: str) -> list[Command]:
    return [
        ["show", file],
        ["show", file, "--json"],
        ["explain", file],
        ["explain", file, "--json"],
        ["explain", file, "--current", "4,3"],
        ["report", file, "-o", "made.html"],
        ["report", file, "--profile", PLAIN, "--explain", "-o", "made.html"],
        ["compare", file],
        ["compare", file, OTHER, "--json"],
        ["compare", OTHER, file, "--fail-above", "10%"],
        ["compare", file, "--planners"],
        ["simulate", file],
        ["simulate", file, "--json", "--actions"],
        ["simulate", file, "--schedule", "gpipe", "--micro-batches", "8"],
        ["simulate", file, "--trace", "made.trace.json", "--svg", "made.svg"],
        ["lint", file],
        ["lint", file, "--profile", PLAIN, "--json"],
        *(["export", name, file, "-o", f"made.{name}.json"] for name in RUNTIMES),
        ["export", "torch", file, "--script", "made.py", "-o", "made.json"],
        ["export", "megatron", file, "--script", "made.sh", "-o", "made.json"],
        ["import", file, "--profile", PLAIN, "-o", "made.plan.json"],
    ]


GOOD: dict[str, tuple[str, ...]] = {
    "FILE": (*FILES, "missing.json", ".", "made.json"),
    "NAME|FILE": (*SCHEDULES, SCHEDULE),
    "1f1b|gpipe|...|FILE|auto": (*SCHEDULES, SCHEDULE, "auto", "synthesized"),
    "CONFIG": (*CONFIGS, "missing.json"),
    "PLAN": (*PLANS, "missing.json"),
    "PROFILE": (*PROFILES, "missing.json"),
    "N": ("1", "2", "4", "8", "64", "1000000"),
    "NAME": (*RUNTIMES, *SCHEDULES, "pipedream", "alpa", "best", "a100-40gb", "t4", "dgx-a100"),
    "300GB/s[,25GB/s]": ("300GB/s", "300GB/s,25GB/s", "inf", "1e-300B/s", "1e300GB/s", "1B/s", "5e-324B/s"),
    "5us[,20us]": ("5us", "5us,20us", "0", "1e300s", "5e-324s", "1h"),
    "16GiB": ("16GiB", "1B", "1e300GiB", "9999999TiB"),
    "NAME|FILE.toml": ("machine.toml", "short.toml", "dgx-h100", "p3.16xlarge"),
    "B": ("1", "16", "1024", "1099511627776", "9" * 18),
    "M|auto": ("1", "8", "auto", "1048576"),
    "M": ("1", "8", "1048576", "99999999"),
    "MS[,MS...]": ("1", "1,2,3", "0", "1e300", "1e-300", "0,0"),
    "LAYER": ("transformer.h.1", "transformer.*", "x"),
    "LAYER=stageN": ("transformer.h.1=stage1", "lm_head=stage9999999999999999999", "x=stage0", "lm_head=1"),
    "PATTERN": ("transformer.h.*", "*", "[", "(a+)+$"),
    "KEY=V,V|A..B": (
        "gpus=1,2",
        "mini-batch=8..32",
        "gpus=100000..1000000000000",
        "memory=1GiB,2GiB",
        "bandwidth=1GB/s",
    ),
    "PARTITION": (
        *PARTITIONS,
        *EXPORTS,
        "3,4",
        "0,3,7",
        "Et*2|t*2L",
        "9" * 400,
        "1," * 500 + "1",
        "(" * 60 + "1",
    ),
    "N,N,...": ("4,3", "1,1,1,1,1,1,1", "7", "0,7", "9999999999999999999,1"),
    "30s": ("1s", "0", "0.1s", "1e300s"),
    "RUNTIME": tuple(RUNTIMES),
    "10%": ("10%", "0", "-1", "1e300%", "nan"),
    "step-time|throughput|memory[:5%]|cost": (
        "memory",
        "memory:5%",
        "cost",
        "throughput",
        "memory:1e300%",
        "memory:-1%",
    ),
    "2.5|A100=2.5,T4=0.35": ("2.5", "0", "1e300", "1e-300", "NVIDIA A100-SXM4-40GB=1", "x=1,x=2"),
    "R": ("1", "2", "3", "1000000"),
    "V": ("1", "2", "3", "1000000"),
}
"""Values of options and arguments, by the form that their help shows."""
VERBS = (
    "solve",
    "export",
    "import",
    "show",
    "explain",
    "compare",
    "simulate",
    "lint",
    "machine list",
    "machine show",
    "report",
    "config",
    "schema",
    "machine doctor",
)
"""Those that measure nothing."""


def random_command(rng: random.Random) -> Command:
    """Any verb with a few of its options, mostly with values of their form."""
    verb = rng.choice(VERBS)
    command = dict(list_verbs(root))[verb]
    options = [own for own in command.params if _is_option(own) and own.name != "help"]
    arguments = [own for own in command.params if not _is_option(own)]
    words = [_value_of(own, rng) for own in arguments if own.required or rng.random() < 0.9]
    for own in rng.sample(options, min(len(options), rng.choice((0, 1, 1, 2, 2, 3, 4, 6)))):
        words.append(own.opts[-1])
        if not getattr(own, "is_flag", False):
            words.append(_value_of(own, rng))
    sweeps = verb == "solve" and "--sweep" in words
    if verb == "solve" and "--time-limit" not in words:
        # A sweep takes it for each of up to 40 points.
        words += ["--time-limit", "0.1s"] if sweeps else QUICK
    if sweeps and "--jobs" not in words:
        words += ["--jobs", "1"]
    if rng.random() < 0.05:
        rng.shuffle(words)
    return [*verb.split(), *words]


def _is_option(own: Any) -> bool:
    return bool(own.param_type_name == "option")


def _value_of(own: Any, rng: random.Random) -> str:
    form = own.metavar or own.name.upper()
    if rng.random() < 0.12:
        return rng.choice([word for word in WORDS if "\x00" not in word])
    known = GOOD.get(form) or GOOD.get(form.strip("[]."))
    if known is None:
        known = tuple(form.split("|")) if "|" in form else (form, *GOOD["N"])
    return rng.choice(known)

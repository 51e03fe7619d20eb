"""Fields of options, as the library's messages name them, in the words of the command line.

The library says `micro_batches=3: ...` and "omit `robust`"; a user of the command line typed --micro-batches
3. This is the one place that turns one into the other: in errors, and in notes and warnings that are printed.
"""

from __future__ import annotations

import re

FIELDS: dict[str, str] = {
    name: "--" + name.replace("_", "-")
    for name in [
        "accumulate",
        "backward_ms",
        "emulate",
        "forward_ms",
        "transfer_ms",
        "weight_ms",
        "backend",
        "bandwidth",
        "calibrate",
        "calibration",
        "channels_last",
        "compile",
        "config",
        "csv",
        "current",
        "cut_after",
        "data_parallel",
        "device",
        "devices",
        "dtype",
        "fail_above",
        "format",
        "force",
        "frontier",
        "gpu",
        "gpus",
        "gpus_per_node",
        "gradient_dtype",
        "granularity",
        "jobs",
        "json",
        "keep_together",
        "latency",
        "layers",
        "link",
        "loss",
        "max_stages",
        "micro_batch_size",
        "micro_batches",
        "mini_batch",
        "model",
        "module",
        "nodes",
        "objective",
        "optimizer",
        "output",
        "parallelism",
        "planner",
        "points",
        "precision",
        "price",
        "profile",
        "profile_file",
        "recompute",
        "replicas",
        "resume",
        "robust",
        "runtime",
        "schedule",
        "script",
        "seconds_of",
        "sequence",
        "sizes",
        "stages",
        "steps",
        "sweep",
        "tf32",
        "time_limit",
        "timeout",
        "topology",
        "training",
        "trace",
        "use_all",
        "virtual_stages",
        "warm_up",
        "zero",
        "amp",
        "budget",
        "repeats",
        "cache",
        "seed",
        "input",
        "inputs",
        "what_if",
        "memory_step",
    ]
} | {
    "memory_bytes": "--memory",
    "memory": "--memory",
    "pins": "--pin",
    "pin": "--pin",
    "settings": "--set",
    "even": "--no-even",
}
"""By the name of a field, the option that sets it."""

_NAMES = "|".join(sorted(FIELDS, key=len, reverse=True))
_VALUE = r"""\('[^']*', \d+\)|'[^']*'|"[^"]*"|[^\s,;:()\[\]{}"'`]+(?<![.])"""
_GIVEN = re.compile(rf"(?<![\w.\-`/{{])({_NAMES})=({_VALUE})|`({_NAMES})(?:=({_VALUE}))?`")


def as_options(text: str) -> str:
    """The text with each `field=value` and each field in backquotes as an option of the command line."""
    return _GIVEN.sub(_option, text)


def _option(found: re.Match[str]) -> str:
    name, value = found[1] or found[3], found[2] or found[4]
    option = FIELDS[name]
    if value in (None, "True") or (value == "False" and option.startswith("--no-")):
        return option
    if name == "pins" and value.startswith("("):
        layer, _, stage = value[1:-1].rpartition(", ")
        return f"{option} {layer[1:-1]}=stage{stage}"
    value = value.strip("'\"")
    if name in ("memory", "memory_bytes") and value.isdigit() and int(value) % 2**20 == 0:
        value = f"{int(value) // 2**30}GiB" if int(value) % 2**30 == 0 else f"{int(value) // 2**20}MiB"
    if name == "recompute":
        value = value.replace("_", "-")
    return f"{option} {value}"

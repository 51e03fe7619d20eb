"""Fields of options, as the library's messages name them, in the words of the command line.

The library says `micro_batches=3: ...` and "omit `robust`"; a user of the command line typed --micro-batches
3. This is the one place that turns one into the other: in errors, and in notes and warnings that are printed.
"""

from __future__ import annotations

import ast
import re
import shlex

FIELDS: dict[str, str] = {
    name: "--" + name.replace("_", "-")
    for name in [
        "backward_ms",
        "emulate",
        "even",
        "forward_ms",
        "transfer_ms",
        "weight_ms",
        "backend",
        "bandwidth",
        "calibrate",
        "calibration",
        "channels_last",
        "compile",
        "csv",
        "current",
        "cut_after",
        "device",
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
        "loss",
        "max_stages",
        "micro_batch_size",
        "micro_batches",
        "mini_batch",
        "model",
        "objective",
        "optimizer",
        "output",
        "planner",
        "points",
        "precision",
        "price",
        "profile",
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
        "trace",
        "use_all",
        "virtual_stages",
        "zero",
        "amp",
        "budget",
        "repeats",
        "cache",
        "seed",
        "input",
        "classes",
        "heads",
        "hidden",
        "micro_batch_sizes",
        "vocabulary",
    ]
} | {
    "budget_seconds": "--budget",
    "input_shape": "--input",
    "memory": "--memory",
    "memory_bytes": "--memory",
    "pin": "--pin",
    "pins": "--pin",
    "settings": "--set",
    "timeout_seconds": "--timeout",
}
"""By the name of a field, the option that sets it."""

_NAMES = "|".join(sorted(FIELDS, key=len, reverse=True))
_VALUE = r"""\([^()]*\)|\{[^{}]*\}|'[^']*'|"[^"]*"|[^\s,;:()\[\]{}"'`]+(?<![.])"""
_GIVEN = re.compile(rf"(?<![\w.\-`/{{])({_NAMES})=({_VALUE})|`({_NAMES})(?:=({_VALUE}))?`")
_SETTING = re.compile(rf"(?:, )?(?<![\w.\-`/{{])settings(?:=(\{{[^{{}}]*\}})|\['(\w+)'\](?:=({_VALUE}))?)")
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_QUOTES = "'\""
_CALL = re.compile(r"\bpplan\.([a-z_]+)\(([^()]*)\)")


def as_options(text: str) -> str:
    """The text with each `field=value` and each field in backquotes as an option of the command line, and
    each `pplan.solve(field=value)` as its command."""
    return _GIVEN.sub(_option, _SETTING.sub(_settings, _CALL.sub(_command, text)))


def _command(found: re.Match[str]) -> str:
    given = [_argument(each) for each in re.split(r",\s*", found[2]) if each not in ("", "...")]
    return " ".join(["pplan", found[1].replace("_", "-"), *given])


def _argument(given: str) -> str:
    """An argument of a call as the shell takes it."""
    known = re.fullmatch(rf"({_NAMES})=({_VALUE})", given)
    if known is None:
        return shlex.quote(given.strip(_QUOTES))
    return _typed(known[1], known[2], quote=True)


def _option(found: re.Match[str]) -> str:
    name, value = found[1] or found[3], found[2] or found[4]
    return FIELDS[name] if value is None else _typed(name, value)


def _typed(name: str, value: str, *, quote: bool = False) -> str:
    """A field's option with its value as it is typed; `quote`: as the shell takes it."""
    option = FIELDS[name]
    if value == "True":
        return option
    if value == "False":
        return option.replace("--", "--no-", 1)
    if name == "pins" and value.startswith("("):
        layer, _, stage = value[1:-1].rpartition(", ")
        value = f"{layer[1:-1]}=stage{stage}"
    elif value.startswith("("):
        parts = [part.strip().strip(_QUOTES) for part in value[1:-1].split(",") if part.strip()]
        sides = "x" if name == "input_shape" else ","
        value = sides.join(map(_with_unit, parts) if name == "sizes" else parts)
    else:
        value = value.strip(_QUOTES)
    if name in ("memory", "memory_bytes"):
        value = _with_unit(value)
    if name == "recompute":
        value = value.replace("_", "-")
    return f"{option} {shlex.quote(value) if quote else value}"


def _with_unit(value: str) -> str:
    """A number of bytes as a user types it."""
    if not value.isdigit() or int(value) == 0:
        return value
    unit = next((unit for unit, size in _UNITS.items() if int(value) % size == 0), None)
    return value if unit is None else f"{int(value) // _UNITS[unit]}{unit}"


def _settings(found: re.Match[str]) -> str:
    """A dict of settings, or one of them, each as the option that is given for it."""
    before = " " if found[0].startswith(",") else ""
    if found[2]:
        value = f"={found[3].strip(_QUOTES)}" if found[3] else ""
        return f"{before}{FIELDS['settings']} {found[2]}{value}"
    try:
        pairs = ast.literal_eval(found[1]).items()
    except (ValueError, SyntaxError, AttributeError):
        return found[0]
    return before + " ".join(f"{FIELDS['settings']} {shlex.quote(f'{key}={value}')}" for key, value in pairs)

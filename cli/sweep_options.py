"""`--sweep gpus=2,4 --sweep mini-batch=64..1024`: from the texts that were typed to a grid."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cost_models import arguments
from ..cost_models.arguments import (
    Option,
    Options,
    list_declarations,
    option,
    options_class,
    read_whole_number,
)
from ..cost_models.errors import UsageError
from ..cost_models.machines import MachineOptions
from ..planner.objectives.objective import ObjectiveOptions
from ..planner.plan_options import PlanOptions
from .option_parameters import option_flag

_PANEL = "Many problems"


def _keys() -> dict[str, tuple[str, Option]]:
    """The options that can be swept, by name: those that hold one value of several."""
    return {
        option_flag(name, option).removeprefix("--"): (name, option)
        for model in (MachineOptions, PlanOptions, ObjectiveOptions)
        for name, option in list_declarations(model).items()
        if option.help and option.form and not option.repeats
    }


KEYS = _keys()


def read_grid(texts: Sequence[str], name: str) -> dict[str, list[Any]]:
    """The values by the arguments of `solve`, in the order of the options. Raises UsageError."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        field, option = _key(f"{name} {text}", key.strip())
        if not equals or not values.strip():
            raise UsageError(f"{name} {text}: has no values", f"Write {name} {key}=2,4,8, say.")
        if field in grid:
            raise UsageError(f"{name} {text}: {key} is swept twice", f"Give all its values in one {name}.")
        parts = [part.strip() for part in values.split(",")]
        grid[field] = [
            value for part in parts for value in _values(f"{name} {text}", f"{name} {key}", option, part)
        ]
    return grid


def _key(text: str, name: str) -> tuple[str, Option]:
    if name not in KEYS:
        matches = difflib.get_close_matches(name, KEYS, n=1)
        guess = f"Did you mean {matches[0]}? " if matches else ""
        raise UsageError(f"{text}: {name!r} cannot be swept", f"{guess}Keys: {', '.join(KEYS)}.")
    return KEYS[name]


def _values(text: str, name: str, option: Option, part: str) -> list[Any]:
    first, dots, last = part.partition("..")
    if not dots:
        if not part:
            raise UsageError(f"{text}: a value is missing", "Write values between the commas.")
        return [option.value(part, name)]
    if not option.is_count:
        raise UsageError(f"{text}: has no ranges", "List its values, with commas between them.")
    low, high = read_whole_number(1)(first.strip(), name), read_whole_number(1)(last.strip(), name)
    powers = [2**power for power in range(high.bit_length()) if low <= 2**power <= high]
    if not powers:
        raise UsageError(
            f"{text}: no power of two lies from {low} to {high}",
            "Write the smaller number first, as in 64..1024, or list the values.",
        )
    return powers


@options_class
class GridOptions(Options):
    """The grid of problems: `sweep`, values by the arguments of `solve`; `csv`: the file for the rows."""

    sweep: Mapping[str, list[Any]] = option(
        None,
        lambda _, value: value or {},
        "Solve for every value, A..B by powers of two; several make a grid. Keys: gpus, mini-batch, memory "
        "and the other options of one value.",
        "KEY=V,V|A..B",
        panel=_PANEL,
        repeats=True,
        read=read_grid,
    )
    csv: Path | None = option(
        None,
        arguments.optional_path,
        "Of `sweep`: the rows as CSV, too.",
        "FILE",
        panel=_PANEL,
    )

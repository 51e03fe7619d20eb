"""Tables of figures and words, and what a caller gets who leaves an argument out, against golden files.

What stands in a table is what plans are made of: GPUs, links, machines, runtimes, optimizers, families of
models, ranges of quantities. `make golden` rewrites the files: read the diff.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import ModuleType

import pytest

import pplan.cost_models
import pplan.planner
from pplan.cost_models import quantities
from pplan.cost_models.machines.catalogue import MACHINES
from pplan.cost_models.machines.presets import PRESETS
from pplan.cost_models.machines.rooflines import ROOFLINES
from pplan.cost_models.optimizers import OPTIMIZERS
from pplan.cost_models.option_fields import Options, list_declarations
from pplan.cost_models.runtime import RUNTIMES
from pplan.cost_models.transformer.model_families import FAMILIES

Golden = Callable[[str, str], None]
AsText = Callable[[object], str]


def modules() -> Iterator[ModuleType]:
    for package in (pplan.cost_models, pplan.planner):
        for own in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(own.name)


def public() -> Iterator[tuple[str, object]]:
    """Functions, classes and their methods, by name, of the module that defines them."""
    for module in modules():
        for name, own in vars(module).items():
            if getattr(own, "__module__", "") != module.__name__ or name.startswith("_"):
                continue
            yield f"{module.__name__.removeprefix('pplan.')}.{name}", own
            if inspect.isclass(own):
                for method, function in vars(own).items():
                    if inspect.isfunction(function) and (not method.startswith("_")):
                        yield f"{module.__name__.removeprefix('pplan.')}.{name}.{method}", function


def defaults(own: object) -> dict[str, object]:
    """Numbers and flags that stand for arguments, or fields, that are left out."""
    if is_dataclass(own) and isinstance(own, type):
        found: dict[str, object] = {
            each.name: each.default for each in fields(own) if each.default is not MISSING
        }
    elif isinstance(own, type):
        found = dict(getattr(own, "_field_defaults", {}))
    elif inspect.isfunction(own):
        parameters = inspect.signature(own).parameters.values()
        found = {
            each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty
        }
    else:
        found = {}
    return {name: value for name, value in found.items() if value is not None and value != ""}


def test_defaults(golden: Golden, as_text: AsText) -> None:
    rows = {name: own for name, each in public() if (own := defaults(each))}
    golden("tables/defaults.txt", as_text(rows))


def test_options(golden: Golden, as_text: AsText) -> None:
    """Each option as it is declared."""
    rows: dict[str, object] = {}
    for name, own in public():
        if isinstance(own, type) and issubclass(own, Options) and own is not Options:
            for field, declared in list_declarations(own).items():
                shown = (
                    *(declared.form, declared.panel, declared.words, declared.least, declared.flag),
                    *(declared.repeats, declared.default_text, declared.aliases),
                )
                rows[f"{name.rpartition('.')[2]}.{field}"] = [str(each) for each in shown]
    golden("tables/options.txt", as_text(rows))


def test_figures(golden: Golden, as_text: AsText) -> None:
    """Of GPUs, links, machines, runtimes and optimizers, with their sources."""
    tables = {"presets": PRESETS, "machines": MACHINES, "rooflines": ROOFLINES, "optimizers": OPTIMIZERS}
    for name, table in {**tables, "runtimes": RUNTIMES, "families": FAMILIES}.items():
        golden(f"tables/{name}.txt", as_text(table))


RANGES = {
    "seconds, measured or given": (0, "MOST_SECONDS"),
    "predicted seconds of a step": ("LEAST_PREDICTED_SECONDS", "MOST_PREDICTED_SECONDS"),
    "bytes of one figure, memory of a device": (0, "MOST_BYTES"),
    "bytes of a sum: of a stage, say": (0, "MOST_TOTAL_BYTES"),
    "bytes per second of a link": ("LEAST_RATE", "MOST_RATE"),
    "speed of a device, relative to the profiled one": ("LEAST_SPEED", "MOST_SPEED"),
    "times as long as usual, of a device that is slow at times": (1, "MOST_SLOWDOWN"),
    "samples of a measured micro-batch": (1, "MOST_SAMPLES"),
    "global batch, and micro-batches of a plan": (1, "MOST_MINI_BATCH"),
    "micro-batches of a step in a file": (1, "MOST_MICRO_BATCHES"),
    "actions of a step that are simulated or written out": (None, "MOST_ACTIONS"),
    "dollars of a device hour": ("LEAST_PRICE", "MOST_PRICE"),
    "layers": (1, "MOST_LAYERS"),
    "devices": (1, "MOST_DEVICES"),
}


def read_figure(text: str) -> float | None:
    """`2^63 - 1`, `1e18, or inf`, `above 1`, `131,072`."""
    match = re.search(r"(\d[\d,]*(?:e-?\d+)?)(?:\^(\d+))?( - 1)?", text)
    if match is None:
        return None
    number = match[1].replace(",", "")
    value = float(number) if match[2] is None else int(number) ** int(match[2])
    return value - (1 if match[3] else 0)


@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_those_of_the_docs(name: str) -> None:
    text = (Path(__file__).parents[2] / "docs/file-formats.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    for cell, bound in zip(row.split("|")[2:4], RANGES[name], strict=True):
        value = getattr(quantities, bound) if isinstance(bound, str) else bound
        assert read_figure(cell) == value

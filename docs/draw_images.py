"""Draw the figures of docs/images: the example of getting-started.md, schedules, rows of benchmarks/scale.py.

`python docs/draw_images.py` writes them; a test compares their words.
"""

from __future__ import annotations

import csv
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pplan
from pplan.cost_models.figures import Bar, Drawing, FigureOptions, Panel, draw_bars
from pplan.cost_models.quantities import format_seconds
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

DOCS = Path(__file__).parent
SCHEDULES = ["1f1b", "interleaved", "zb-h1"]
COSTS = {"stages": 4, "micro_batches": 8, "forward_ms": 10, "backward_ms": 10, "weight_ms": 10}
KINDS = {"1": ("one kind of GPU", "#4c8fd6"), "2": ("two kinds, half of them half as fast", "#c4622d")}
TIGHT = ("one kind, memory binds", "#3a7d44")
LOOSE_MEMORY = "80GiB"
"""Memory of a GPU in the cases where it does not bind."""


def drawings() -> dict[str, Drawing]:
    """The figures by the names of their files."""
    profile = _example_profile()
    plan = _plan(profile)
    return {
        "costs.svg": profile.plot(title="The layers of the example"),
        "plan.svg": plan.plot(title="The plan of the example: 3 stages on 4 GPUs"),
        "simulator.svg": pplan.simulate(plan, profile).plot(title="A step of the example, 431 ms"),
        "bound.svg": _steps("The bound, the plan and the baselines", _rivals(plan)),
        "schedules.svg": pplan.compare_schedules(SCHEDULES, **COSTS).plot(title="Four equal stages"),
        "scale.svg": _scale(DOCS / "scale.csv"),
    }


def _example_profile() -> Profile:
    page = (DOCS / "getting-started.md").read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt.csv"
        path.write_text(re.findall(r"```csv\n(.*?)```", page, flags=re.DOTALL)[0])
        return pplan.import_profile(path, micro_batch_size=4)


def _plan(profile: Profile) -> Plan:
    return pplan.solve(
        profile,
        gpus=4,
        gpu="a100-40gb",
        memory_bytes=6 * 2**30,
        mini_batch=64,
        micro_batches=16,
        optimizer="adam",
    )


def _rivals(plan: Plan) -> Iterator[tuple[str, float]]:
    yield "proven bound", plan.prediction.lower_bound_seconds
    yield "the plan", plan.prediction.step_seconds
    for base in plan.baselines:
        if base.step_seconds is not None:
            yield base.name, base.step_seconds


def _steps(title: str, steps: Iterator[tuple[str, float]]) -> Drawing:
    bars = [Bar(label, (("computing", seconds),), format_seconds(seconds)) for label, seconds in steps]
    return draw_bars(title, [Panel("Step time", bars)], FigureOptions())


def _scale(path: Path) -> Drawing:
    """Draw the rows that `benchmarks/scale.py --csv` writes, over layers x GPUs on logarithmic axes."""
    from matplotlib.figure import Figure

    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure((7, 7), layout="constrained")
    measures = (
        ("processor time (s)", "seconds", 1.0),
        ("memory (GiB)", "gib", 1.0),
        ("gap to the proven bound (%)", "gap", 100.0),
    )
    panels = figure.subplots(3, 1, sharex=True)
    for axes, (title, name, factor) in zip(panels, measures, strict=True):
        for label, colour in (*KINDS.values(), TIGHT):
            drawn = [row for row in rows if _kind(row) == (label, colour)]
            axes.scatter(
                [int(row["layers"]) * int(row["gpus"]) for row in drawn],
                [max(factor * float(row[name]), 0.05) for row in drawn],
                s=[30 if int(row["layers"]) >= 1_000 else 10 for row in drawn],
                color=colour,
                alpha=0.75,
                label=label,
            )
        axes.set(xscale="log", yscale="log", ylabel=title)
        axes.grid(color="#e4e4e4")
        axes.set_axisbelow(True)
    panels[0].legend(frameon=False, fontsize=8)
    panels[-1].set_xlabel("layers x GPUs (large dots: 1,000 layers and more)")
    return Drawing("Time, memory and gap over layers x GPUs", figure, FigureOptions())


def _kind(row: dict[str, str]) -> tuple[str, str]:
    return KINDS[row["kinds"]] if row["memory"] == LOOSE_MEMORY else TIGHT


if __name__ == "__main__":
    for name, drawing in drawings().items():
        drawing.save(DOCS / "images" / name, force=True)

"""The drawings of how-it-works.md and tutorial-schedules.md, from the example of getting-started.md; and that
of lab/benchmarks.md, from the rows of benchmarks/scale.py.

`python docs/draw_images.py` writes them to docs/images; a test compares.
"""

from __future__ import annotations

import re
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pplan
from pplan.cost_models.drawing import Bar, Drawing, Panel, draw_bars
from pplan.cost_models.quantities import format_seconds
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

DOCS = Path(__file__).parent
SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved", "chimera", "zb-h1", "zb-h2", "zb-v", "pipedream-2bw"]


def drawings() -> dict[str, str]:
    """The SVG texts by the names of their files."""
    profile = _example_profile()
    plan = _plan(profile)
    compared = pplan.compare_schedules(
        SCHEDULES, stages=4, micro_batches=8, forward_ms=10, backward_ms=10, weight_ms=10
    )
    drawn = {
        "costs": profile.plot(),
        "simulator": pplan.simulate(plan, profile).plot(),
        "bound": _steps("The bound, the plan and what others would do", _rivals(plan)),
        "search": _steps("The fastest plan of so many stages", _by_stages(plan, profile)),
        "schedules": compared.plot(),
        "scale": runpy.run_path(str(DOCS / "draw_scale.py"))["draw_scale"](DOCS / "scale.csv"),
    }
    return {f"{name}.svg": drawing.svg for name, drawing in drawn.items()}


def _example_profile() -> Profile:
    page = (DOCS / "getting-started.md").read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt.csv"
        path.write_text(re.findall(r"```csv\n(.*?)```", page, flags=re.DOTALL)[0])
        return pplan.import_profile(path, micro_batch_size=4)


def _plan(profile: Profile, max_stages: int | None = None) -> Plan:
    return pplan.solve(
        profile,
        gpus=4,
        gpu="a100-40gb",
        memory_bytes=6 * 2**30,
        mini_batch=64,
        micro_batches=16,
        optimizer="adam",
        max_stages=max_stages,
    )


def _rivals(plan: Plan) -> Iterator[tuple[str, float]]:
    yield "proven bound", plan.prediction.lower_bound_seconds
    yield "the plan", plan.prediction.step_seconds
    for base in plan.baselines:
        if base.step_seconds is not None:
            yield base.name, base.step_seconds


def _by_stages(plan: Plan, profile: Profile) -> Iterator[tuple[str, float]]:
    """With two stages at the most, the plan's own number, and the best other number."""
    two, other = _plan(profile, max_stages=2), pplan.explain(plan, profile).other_stages
    yield _describe(two.balance), two.prediction.step_seconds
    yield _describe(plan.balance), plan.prediction.step_seconds
    if other is not None and other.plan is not None:
        yield _describe(other.plan.balance), other.plan.step_seconds


def _describe(balance: list[int]) -> str:
    return f"{len(balance)} stages: {'-'.join(map(str, balance))} layers"


def _steps(title: str, steps: Iterator[tuple[str, float]]) -> Drawing:
    bars = [Bar(label, (("computing", seconds),), format_seconds(seconds)) for label, seconds in steps]
    return draw_bars(title, [Panel("Seconds of a step", bars)])


if __name__ == "__main__":
    for name, svg in drawings().items():
        (DOCS / "images" / name).write_text(svg)

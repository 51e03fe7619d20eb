"""The recipes of CONTRIBUTING for a schedule, a planner and a runtime, followed with toys in a copy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "pplan": "pplan",
    **{name: f"pplan/{name}" for name in ("cost_models", "planner", "profiler", "runtimes", "cli")},
}
SCHEDULE = '''def toy_order(stages: int, micro_batches: int) -> Program:
    """All forwards, then all backwards from the first micro-batch to the last."""
    order = [Action(kind, number) for kind in ("F", "B") for number in range(micro_batches)]
    return linear_program([order] * stages)


'''
ENTRY = """    Schedule(
        "toy-order",
        toy_order,
        source="a toy",
        needs="memory for all micro-batches",
        bubble="(p-1)/(m+p-1)",
        in_flight_formula="m",
    ),
"""
PLANNER = '''"""The first layer alone, all others behind it."""

from collections.abc import Iterator

from ..candidate import Proposal, linear_pipeline
from .base import Planner, linear_configs


def _toy(problem) -> Iterator[Proposal]:
    for config in linear_configs(problem):
        yield linear_pipeline(config, [1, len(problem.space.chain)])


PLANNERS = (Planner("toy-planner", _toy),)
'''
EXPORT = """class ToyExport(PipeExport):
    kind: ClassVar[str] = "toy"
    runtime: Literal["toy"]


"""
ADDITIONS = {
    "cost_models/schedules.py": [
        ("def gpipe(", SCHEDULE + "def gpipe("),
        ("_ALL = (\n", "_ALL = (\n" + ENTRY),
    ],
    "planner/planners/__init__.py": [
        ('    "gpipe": "rules",\n', '    "gpipe": "rules",\n    "toy-planner": "toy_planner",\n'),
    ],
    "cost_models/runtime.py": [
        ('_one_process_gpipe("fairscale"),', '_one_process_gpipe("fairscale"), _one_process_gpipe("toy"),')
    ],
    "runtimes/documents.py": [
        ("class DeepspeedExport(", EXPORT + "class DeepspeedExport("),
    ],
}
"""By file, what the recipes say to enter: a line and the same with the toy."""
NEW_FILES = {"planner/planners/toy_planner.py": PLANNER}
COSTS = "name,forward_seconds,backward_seconds,activation_bytes,parameter_bytes\n" + "".join(
    f"layer{number},0.1,0.2,1000,1000\n" for number in range(4)
)
RUNS = """
import sys
from pplan.cli.app import main

for line in sys.stdin.read().splitlines():
    print("$", line)
    assert main(line.split()) == 0, line
"""
COMMANDS = """
import costs.csv
simulate --list
simulate --schedule toy-order --stages 2 --micro-batches 2 --forward-ms 1,1 --backward-ms 2,2
solve --gpus 2 --mini-batch 8 --schedule toy-order -o order.plan.json
lint order.plan.json
solve --gpus 2 --mini-batch 8 --planner toy-planner --runtime toy -o cut.plan.json
lint cut.plan.json
solve --gpus 2 --mini-batch 8 -o best.plan.json
export toy cut.plan.json --device cpu
import costs.toy.json --profile costs.profile.json -o read.plan.json
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the copy with the toys ran the commands; their output is in `out.txt`."""
    folder, copy = tmp_path_factory.mktemp("toys"), tmp_path_factory.mktemp("copy")
    for source, target in ROOMS.items():
        shutil.copytree(ROOT / source, copy / target, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in NEW_FILES.items():
        (copy / "pplan" / name).write_text(text)
    for name, pairs in ADDITIONS.items():
        text = (copy / "pplan" / name).read_text()
        for line, entry in pairs:
            assert text.count(line) == 1, f"{name}: {line!r}"
            text = text.replace(line, entry)
        (copy / "pplan" / name).write_text(text)
    (folder / "costs.csv").write_text(COSTS)
    environment = os.environ | {"PYTHONPATH": str(copy), "COLUMNS": "200"}
    command = [sys.executable, "-W", "error", "-c", RUNS]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input=COMMANDS.strip(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    (folder / "out.txt").write_text(done.stdout)
    return folder


def read(folder: Path, name: str) -> dict[str, object]:
    content = json.loads((folder / name).read_text())
    assert isinstance(content, dict)
    return content


@pytest.mark.slow
def test_a_schedule_is_listed_simulated_planned_and_verified(folder: Path) -> None:
    out = (folder / "out.txt").read_text()
    assert out.count("toy-order") > 3
    assert read(folder, "order.plan.json")["schedule"] == "toy-order"
    for _, _, report in (part.partition("$ lint ") for part in out.split("\n$ ")):
        assert " 0 differ" in report or not report


@pytest.mark.slow
def test_a_planner_plans(folder: Path) -> None:
    assert read(folder, "cut.plan.json")["balance"] == [1, 3]


@pytest.mark.slow
def test_a_runtime_is_exported_to_and_read_back(folder: Path) -> None:
    document = read(folder, "costs.toy.json")
    assert (document["runtime"], document["balance"]) == ("toy", [1, 3])
    assert "from pplan.runtimes.toy import build" in (folder / "out.txt").read_text()
    assert read(folder, "read.plan.json")["balance"] == [1, 3]

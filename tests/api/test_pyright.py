"""The public API as pyright sees it in an editable install: names, types, mistakes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import pplan

profile = pplan.import_profile("gpt.csv", micro_batch_size=4)
plan = pplan.solve(profile, gpus=4, mini_batch=64)
comparison = pplan.compare_schedules(["1f1b"], plan, profile)
reveal_type(plan.plot())
reveal_type(comparison.rows[0].seconds)
reveal_type(pplan.simulate(plan, profile).to_records())
reveal_type(pplan.export("torchgpipe", plan))
pplan.solve(profile, gpus=4, schedule=3)
pplan.simulate_costs(schedule="1f1b")
"""
SEEN = [
    'Type of "plan.plot()" is "Drawing"',
    'Type of "comparison.rows[0].seconds" is "float | None"',
    'Type of "pplan.simulate(plan, profile).to_records()" is "list[dict[str, Any]]"',
    'Type of "pplan.export("torchgpipe", plan)" is "ExportDocument"',
]


@pytest.mark.slow
def test_types_and_mistakes_are_seen(tmp_path: Path) -> None:
    """As `pip install -e . --config-settings editable_mode=strict` installs it."""
    pytest.importorskip("pyright")
    (tmp_path / "use.py").write_text(SCRIPT)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [install(tmp_path)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    ran = subprocess.run([*command, "use.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    said = json.loads(ran.stdout[ran.stdout.index("{") :])["generalDiagnostics"]
    assert [one["message"] for one in said if one["severity"] == "information"] == SEEN
    wrong, missing = [one["message"] for one in said if one["severity"] == "error"]
    assert 'parameter "schedule" of type "str"' in wrong
    assert all(name in missing for name in ("forward_ms", "backward_ms", "micro_batches"))


def install(folder: Path) -> str:
    """The path that the editable install of a copy puts on Python's."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        if name.split("/")[0] not in ("tests", "benchmarks", "docs", "typings") and (ROOT / name).is_file():
            target = folder / "copy" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    build = "from setuptools import build_meta as m; m.build_editable('..', {'editable_mode': 'strict'})"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "copy", capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".pth"))
        return archive.read(path).decode().strip()

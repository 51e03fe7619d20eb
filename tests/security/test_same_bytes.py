"""The same input gives the same bytes: whatever the language, time zone, hash seed, number of cores and order
of keys."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fuzzing.seeds import MACHINE, PLAIN, TABLE, profile

DRIVER = """
import contextlib, io, json, sys, os
from pathlib import Path
from pplan.cli.app import main
if os.environ.get("ONE_CORE"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
outputs = []
for command in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = main(command)
    outputs.append([command, status, out.getvalue()])
Path("outputs.json").write_text(json.dumps(outputs))
"""
PLAN = "made.plan.json"
COMMANDS = [
    ["solve", PLAIN, *MACHINE, "--gpus-per-node", "2", "--optimizer", "adam", "--details", "-o", PLAN],
    ["solve", PLAIN, "--sweep", "gpus=1,2,4", "--jobs", "2", "--csv", "made.csv"],
    ["show", PLAIN],
    ["show", PLAN],
    ["compare", PLAN, "--planners"],
    ["simulate", PLAN, "--json", "--actions", "--plot", "made.svg", "--trace", "made.trace.json"],
    ["report", PLAN, "-o", "made.html"],
    ["lint", PLAN],
    ["export", "torch", PLAN, "-o", "made.torch.json", "--script", "made.py"],
    ["import", "table.csv", "-o", "made.profile.json"],
    ["solve", "config.json", "--gpus", "8", "--gpu", "h100", "--pp", "2"],
    ["machine", "show", "dgx-a100"],
    ["simulate", "--list"],
]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
}
ONE = {"LC_ALL": "C", "TZ": "UTC", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "ONE_CORE": "1"}
OTHER = {"LC_ALL": "C.UTF-8", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "4242", "OMP_NUM_THREADS": "2"}
_OF_THE_RUN = re.compile(
    r'\\*"(time|command|content_sha256|sha256)\\*": \\*"[^"]*"|\d{4}-\d\d-\d\dT[\d:.+Z-]+|SHA-256 [0-9a-f]+'
)
"""When and from which bytes a file was made: the order of a profile's keys is in its hash."""


def reversed_keys(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: reversed_keys(value) for key, value in reversed(content.items())}
    return [reversed_keys(value) for value in content] if isinstance(content, list) else content


def made(folder: Path, environment: dict[str, str], content: dict[str, Any]) -> dict[str, str]:
    """What the commands print and write."""
    folder.mkdir()
    (folder / PLAIN).write_text(json.dumps(content))
    (folder / "table.csv").write_text(TABLE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    inputs = {path.name for path in folder.iterdir()}
    subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(COMMANDS)],
        cwd=folder,
        env=os.environ | {"COLUMNS": "100"} | environment,
        timeout=300,
        check=True,
    )
    outputs = json.loads((folder / "outputs.json").read_text())
    assert [(command, status) for command, status, _ in outputs if status] == []
    texts = {path.name: path.read_text() for path in folder.iterdir() if path.name not in inputs}
    del texts["outputs.json"]
    texts |= {" ".join(command): out for command, _, out in outputs}
    return {name: _OF_THE_RUN.sub("", text) for name, text in texts.items()}


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    content = profile() | {"tied": []}
    one = made(tmp_path / "one", ONE, content)
    other = made(tmp_path / "other", OTHER, reversed_keys(content))
    assert len(one) > 20
    assert set(one) == set(other)
    for name, text in one.items():
        assert text == other[name], name

"""What a process of a check says of its failure, and what killed checks leave.

`benchmarks/faults.py` lets real processes fail, each rank in turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from faults import make_job

from pplan.cost_models.errors import MachineError
from pplan.runtimes.checking import launching
from pplan.runtimes.checking.launching import run_in_processes
from pplan.runtimes.checking.processes.journal import describe_failure


def test_what_a_layer_raises_in_a_stage() -> None:
    """torch.distributed.pipelining raises another error because of it, of many lines."""
    layer = RuntimeError("the layer is wrong")
    stage = RuntimeError("\n                [Stage 1] failed to run forward:\n                args: ()")
    stage.__cause__ = layer
    assert describe_failure(stage) == describe_failure(layer)
    stage.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried")
    assert describe_failure(stage)["what"].startswith("does not fit in memory: OutOfMemoryError: CUDA")


def test_the_folder_of_a_check_that_was_killed_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next check; those of checks that run, and what is of another form, stay."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone, runs = tmp_path / f"pplan-check-{ended.pid}-x", tmp_path / f"pplan-check-{os.getpid()}-x"
    other, file = tmp_path / "pplan-check-mine-x", tmp_path / f"pplan-check-{ended.pid}-y"
    for folder in (gone, runs, other):
        (folder / "logs").mkdir(parents=True)
    file.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launching, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(MachineError, match="died before it began: exit status 1"):
        run_in_processes(make_job(2, 1, 4.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([runs.name, other.name, file.name])

"""A profile that is killed or interrupted, in a process of its own, and continued."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.profiler.profile_file import Profile

ForkedPython = Callable[..., Any]
ZOO = """
import os, time
from pathlib import Path
import torch
from torch import nn


class Waits(nn.Module):
    '''Stops in the pass after so many, and says so.'''

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, given):
        journals = Path(os.environ["PPLAN_CACHE"]).glob("*.journal")
        passes = sum(path.read_bytes().count(b'"pass"') for path in journals)
        stop = Path("stop_after")
        if stop.exists() and passes >= int(stop.read_text()):
            Path("stopped").touch()
            while True:
                time.sleep(0.01)
        return given * self.weight


def make():
    return nn.Sequential(nn.Linear(4, 4), Waits(), nn.Linear(4, 4)), torch.ones(2, 4)
"""
STOP_AFTER = 13
"""Passes: three rounds of three at size 1, and at size 2 one round and a pass."""
LIMIT = 120
"""Seconds in which a child stops, or ends: far more than it needs."""
MAIN = """
import sys
from pplan.cli.app import main
from pplan.profiler import cache, size_sweep

# Passes of a few microseconds vary too much to add up, and for the budget to be enough to be certain of them.
cache.misses_whole = lambda _: False
rounds, one_more = iter(range(20)), size_sweep.WholeSweep.one_more_round
size_sweep.WholeSweep.one_more_round = lambda sweep: next(rounds, None) is not None and one_more(sweep)
sys.exit(main())
"""
PROFILE = ("profile", "zoo:make", "--device", "cpu", "--micro-batch-sizes", "1,2", "--budget", "10s")


@pytest.fixture
def zoo(here: Path) -> Path:
    (here / "zoo.py").write_text(ZOO)
    return here


def profiling(forked: ForkedPython, zoo: Path, name: str, *options: str, **environment: str) -> Any:
    return forked(zoo / name, zoo, "-c", MAIN, *PROFILE, *options, **environment)


def stopped(forked: ForkedPython, zoo: Path) -> Any:
    """A child that is in the middle of a pass, and stays there."""
    (zoo / "stop_after").write_text(str(STOP_AFTER))
    child = profiling(forked, zoo, "stopped_child")
    end = time.monotonic() + LIMIT
    while not (zoo / "stopped").exists():
        if not child.process.is_alive() or time.monotonic() > end:
            pytest.fail(f"ended early, or did not begin: {child.wait(0).stderr}")
        time.sleep(0.01)
    (zoo / "stop_after").unlink()
    return child


@pytest.mark.slow
def test_killed_in_a_pass_it_goes_on_behind_the_pass_before(
    zoo: Path, own_cache: Path, forked_python: ForkedPython
) -> None:
    child = stopped(forked_python, zoo)
    os.kill(child.process.pid, signal.SIGKILL)
    assert child.wait(LIMIT).returncode == -signal.SIGKILL
    assert not (zoo / "zoo_make.profile.json").exists()
    ran = profiling(forked_python, zoo, "resumed", "--resume").wait(LIMIT)
    assert ran.returncode == 0, ran.stderr
    told = f"Continuing an interrupted profile: {STOP_AFTER} passes of it are kept"
    assert told in ran.stderr.splitlines()
    profile = Profile.load(next(zoo.glob("*.profile.json")))
    assert f"continued: {STOP_AFTER} of its passes are those of an interrupted run" in profile.notes
    assert profile.micro_batch_sizes == [1, 2]
    assert [file.suffix for file in own_cache.iterdir()] == [".json"]


@pytest.mark.slow
def test_ctrl_c_writes_what_there_is(zoo: Path, own_cache: Path, forked_python: ForkedPython) -> None:
    child = stopped(forked_python, zoo)
    os.kill(child.process.pid, signal.SIGINT)
    ended = child.wait(LIMIT)
    out, err = ended.stdout, ended.stderr
    assert ended.returncode == 130, err
    assert err.splitlines()[-1] == "pplan: interrupted"
    (file,) = zoo.glob("*.profile.json")
    assert f"Wrote {file.name}" in err.splitlines()
    profile = Profile.load(file)
    assert [whole.micro_batch_size for whole in profile.whole] == [1, 2]
    assert any(note.startswith("interrupted after ") and "`resume`" in note for note in profile.notes)
    assert "interrupted after" in out
    assert [entry.suffix for entry in own_cache.iterdir()] == [".journal"]

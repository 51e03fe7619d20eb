"""A profile that is killed or interrupted, in a process of its own, and continued."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pplan.profiler.profile_file import Profile

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
        if passes >= int(os.environ.get("STOP_AFTER", "1000000")):
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
from pplan.profiler import profile_cache

# Passes of a few microseconds vary too much to add up.
profile_cache.misses_whole = lambda _: False
sys.exit(main())
"""
PROFILE = ("profile", "zoo:make", "--device", "cpu", "--micro-batch-sizes", "1,2", "--budget", "10s")


@pytest.fixture
def zoo(here: Path) -> Path:
    (here / "zoo.py").write_text(ZOO)
    return here


def stopped(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[str]:
    """A child that is in the middle of a pass, and stays there."""
    monkeypatch.setenv("STOP_AFTER", str(STOP_AFTER))
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, *PROFILE],
        cwd=zoo,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + LIMIT
    while not (zoo / "stopped").exists():
        if child.poll() is not None:
            pytest.fail(f"ended early: {child.communicate()[1]}")
        if time.monotonic() > end:
            child.kill()
            pytest.fail(f"did not begin: {child.communicate()[1]}")
        time.sleep(0.01)
    monkeypatch.delenv("STOP_AFTER")
    return child


def ended(child: subprocess.Popen[str]) -> tuple[str, str]:
    """What it printed; one that does not end is killed."""
    try:
        return child.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.communicate()


def resumed(zoo: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN, *PROFILE, "--resume"]
    return subprocess.run(command, cwd=zoo, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.mark.slow
def test_killed_in_a_pass_it_goes_on_behind_the_pass_before(
    zoo: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = stopped(zoo, monkeypatch)
    child.kill()
    ended(child)
    assert child.returncode == -signal.SIGKILL
    assert not (zoo / "zoo_make.profile.json").exists()
    ran = resumed(zoo)
    assert ran.returncode == 0, ran.stderr
    told = f"Continuing an interrupted profile: {STOP_AFTER} passes of it are kept"
    assert told in ran.stderr.splitlines()
    profile = Profile.load(next(zoo.glob("*.profile.json")))
    assert f"continued: {STOP_AFTER} of its passes are those of an interrupted run" in profile.notes
    assert profile.micro_batch_sizes == [1, 2]
    assert [file.suffix for file in own_cache.iterdir()] == [".json"]


@pytest.mark.slow
def test_ctrl_c_writes_what_there_is(zoo: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = stopped(zoo, monkeypatch)
    child.send_signal(signal.SIGINT)
    out, err = ended(child)
    assert child.returncode == 130, err
    assert err.splitlines()[-1] == "pplan: interrupted"
    (file,) = zoo.glob("*.profile.json")
    assert f"Wrote {file.name}" in err.splitlines()
    profile = Profile.load(file)
    assert [whole.micro_batch_size for whole in profile.whole] == [1, 2]
    assert any(note.startswith("interrupted after ") and "`resume`" in note for note in profile.notes)
    assert "interrupted after" in out
    assert [entry.suffix for entry in own_cache.iterdir()] == [".journal"]

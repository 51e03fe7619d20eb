"""A process of the user's own torchrun that hangs says so itself; one that waits for another does not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from faults import make_job

from pplan.profiler.torchrun_env import TorchrunEnv
from pplan.runtimes.checking.launching import is_stopped
from pplan.runtimes.checking.processes import journal as hang_watch
from pplan.runtimes.checking.processes import worker
from pplan.runtimes.checking.processes.journal import HangWatch, RankJournal, Siblings
from pplan.runtimes.checking.records import Job

HANGS = """
    import sys, time
    from pplan.runtimes.checking.processes.journal import HangWatch
    from pplan.runtimes.checking.processes.journal import RankJournal

    def stuck_in_the_model():
        time.sleep(100)

    journal = RankJournal(None, 1)
    with HangWatch(journal, 1.0):
        for step in range(12):
            journal.begin(f"step {step} (plan)")
            time.sleep(0.1)
        stuck_in_the_model()
"""


def test_it_says_where_it_stands_and_ends(tmp_path: Path, forked_python: Callable[..., Any]) -> None:
    """The steps before it, each shorter than the time but not all together, are no hang."""
    (tmp_path / "hangs.py").write_text(dedent(HANGS))
    ended = forked_python(tmp_path / "output", tmp_path, "hangs.py").wait(60)
    assert ended.returncode == 2
    what, hint = ended.stderr.splitlines()
    assert what == "pplan: check: rank 1 hangs while step 11 (plan): nothing went on for 1 s"
    assert hint.startswith("  It stands at ")
    assert hint.endswith("hangs.py:7, in stuck_in_the_model.")


@pytest.mark.parametrize(
    "where",
    [
        "/torch/distributed/distributed_c10d.py:2000, in recv",
        "/torch/cuda/__init__.py:900, in synchronize",
        "/models/mine.py:3, in wait",
    ],
)
def test_one_that_waits_for_another_stays(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    asked = threading.Event()

    def frames(*_: object) -> list[str]:
        asked.set()
        return [where]

    monkeypatch.setattr(hang_watch, "_frames", frames)
    monkeypatch.setattr(HangWatch, "_end", lambda *_: pytest.fail("it was ended"))
    journal = RankJournal(None, 0)
    journal.begin("step 1 (plan)")
    with HangWatch(journal, 0.05):
        assert asked.wait(30)
        time.sleep(0.05)


def test_a_slow_start_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that import torch, all at once."""
    monkeypatch.setattr(hang_watch, "_frames", lambda *_: pytest.fail("it was looked at"))
    with HangWatch(RankJournal(None, 0), 0.02):
        time.sleep(0.2)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
def test_one_that_is_stopped_is_told_by_the_first_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three, here the children of this process, the first and the last are stopped."""
    with contextlib.ExitStack() as stack:
        pids = []
        for rank in range(3):
            child = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(3600)"], env=os.environ | {"RANK": str(rank)}
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            pids.append(child.pid)
        monkeypatch.setattr(os, "getppid", os.getpid)
        assert [hang_watch._find_stopped(rank) for rank in range(3)] == [None] * 3
        for rank, told in ((2, [(2, pids[2]), None]), (0, [None, (0, pids[0])])):
            os.kill(pids[rank], signal.SIGSTOP)
            while not is_stopped(pids[rank]):
                time.sleep(0.01)
            assert [hang_watch._find_stopped(rank) for rank in range(2)] == told


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    """Three children of this process, as torchrun would start them. A line on their input kills them."""
    code = "import os; how = input(); os.kill(os.getpid(), 9) if how == 'kill' else os._exit(int(how))"
    with contextlib.ExitStack() as stack:
        children = []
        for rank in range(3):
            child = subprocess.Popen(
                [sys.executable, "-c", code],
                env=os.environ | {"RANK": str(rank)},
                stdin=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            while hang_watch._rank(child.pid) is None:  # it is still a copy of this process
                time.sleep(0.01)
        monkeypatch.setattr(os, "getppid", os.getpid)
        yield children


def die(child: subprocess.Popen[str], how: str) -> None:
    """Has a child die, without collecting it."""
    assert child.stdin is not None
    child.stdin.write(f"{how}\n")
    child.stdin.flush()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
def test_the_process_that_a_signal_killed_is_the_one_that_was_lost(
    ranks: list[subprocess.Popen[str]],
) -> None:
    """Rank 1 of 4 on this node; another has ended because it lost the same."""
    siblings, first, second = Siblings(3), Siblings(0), Siblings(1)
    assert siblings.find_dead(0.0) is None
    die(ranks[0], "2")
    assert siblings.find_dead(60.0) == (0, 2)
    die(ranks[1], "kill")
    assert siblings.find_dead(60.0) == (1, -9)
    assert not siblings.is_first_without(1)
    ranks[1].wait()
    assert siblings.find_dead(60.0) == (1, None)
    assert first.is_first_without(1)
    assert second.is_first_without(0)
    assert not second.is_first_without(2)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
@pytest.mark.parametrize(
    ("how", "error", "end"),
    [
        ("kill", "Connection reset by peer", "killed by SIGKILL (signal 9)"),
        ("kill", "other words of torch", "killed by SIGKILL (signal 9)"),
        ("7", "Connection reset by peer", "exit status 7"),
        ("", "Connection reset by peer", "Connection reset"),
    ],
)
def test_under_torchrun_the_error_names_the_rank_that_died(
    ranks: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch, how: str, error: str, end: str
) -> None:
    def lose(_: Job, __: TorchrunEnv, journal: RankJournal) -> None:
        journal.begin("step 3 (plan)")
        if how:
            die(ranks[2], how)
        raise RuntimeError(error)

    monkeypatch.setattr(worker, "run_job", lose)
    monkeypatch.setattr(worker, "DEATH_SECONDS", 60.0 if how else 0.0)
    process = TorchrunEnv(rank=0, world_size=3, local_rank=0, local_world_size=3, node=0)
    with pytest.raises(worker.LostRankError) as caught:
        worker.run_in_torchrun(make_job(3, 1, 60.0), process)
    lost = "rank 2 died, rank 0 lost it" if how else "rank 0 lost another"
    assert caught.value.what.startswith(f"check: {lost} while step 3 (plan): ")
    assert end in caught.value.what
    assert ("out of memory" in caught.value.hint) == (how == "kill")
    assert caught.value.tells

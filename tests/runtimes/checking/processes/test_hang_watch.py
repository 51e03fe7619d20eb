"""A process of the user's own torchrun that hangs says so itself; one that waits for another does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from faults import make_job

from pplan.profiler.torchrun_env import TorchrunEnv
from pplan.runtimes.checking.processes import journal as journal_file
from pplan.runtimes.checking.processes import worker
from pplan.runtimes.checking.processes.journal import RankJournal, hang_watch
from pplan.runtimes.checking.records import Job

HANGS = """
    import sys, time
    from pplan.runtimes.checking.processes.journal import hang_watch
    from pplan.runtimes.checking.processes.journal import RankJournal

    def stuck_in_the_model():
        time.sleep(100)

    journal = RankJournal(None, 1)
    with hang_watch(journal, 1.0):
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

    monkeypatch.setattr(journal_file, "_frames", frames)
    monkeypatch.setattr(journal_file, "_end", lambda *_: pytest.fail("it was ended"))
    journal = RankJournal(None, 0)
    journal.begin("step 1 (plan)")
    with hang_watch(journal, 0.05):
        assert asked.wait(30)
        time.sleep(0.05)


def test_a_slow_start_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that import torch, all at once."""
    monkeypatch.setattr(journal_file, "_frames", lambda *_: pytest.fail("it was looked at"))
    with hang_watch(RankJournal(None, 0), 0.02):
        time.sleep(0.2)


@pytest.mark.parametrize("first", ["main", "worker"])
def test_the_thread_that_computes(first: str) -> None:
    """Where torchgpipe's main thread waits for one of its workers."""
    threads = {
        "worker": """Thread 0x7f01 (most recent call first):
  File "/models/mine.py", line 12 in forward
  File "/torchgpipe/worker.py", line 85 in worker""",
        "main": """Current thread 0x7f03 (most recent call first):
  File "/python/threading.py", line 320 in wait
  File "/python/queue.py", line 171 in get
  File "/torchgpipe/pipeline.py", line 200 in compute""",
    }
    watching = """Thread 0x7f02 (most recent call first):
  File "/pplan/failure.py", line 90 in watch"""
    order = sorted(threads, key=lambda name: name != first)
    dump = "\n\n".join([watching, *(threads[name] for name in order)])
    assert journal_file.busy_frames(dump)[0] == "/models/mine.py:12, in forward"
    assert journal_file.busy_frames(threads["main"])[0] == "/python/threading.py:320, in wait"
    assert journal_file.busy_frames("") == []


@pytest.mark.parametrize("error", ["Connection reset by peer", "a fault of its own"])
def test_under_torchrun_the_error_says_what_was_done(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """torchrun names the rank that died first."""

    def lose(_: Job, __: TorchrunEnv, journal: RankJournal) -> None:
        journal.begin("step 3 (plan)")
        raise RuntimeError(error)

    monkeypatch.setattr(worker, "run_job", lose)
    process = TorchrunEnv(rank=0, world_size=3, local_rank=0, local_world_size=3, node=0)
    is_lost = error.startswith("Connection")
    with pytest.raises(worker.RankError) as caught:
        worker.run_in_torchrun(make_job(3, 1, 60.0), process)
    lost = "rank 0 lost another" if is_lost else "rank 0"
    assert caught.value.what.startswith(f"check: {lost} while step 3 (plan): RuntimeError: {error}")
    assert ("what torchrun says of them" in caught.value.hint) == is_lost

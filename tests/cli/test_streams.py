"""What is said while somebody waits: on a terminal alone, and gone when the work is done."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Callable

import pytest
import rich.progress

from pplan.cli import profile_command, streams
from pplan.profiler.size_sweep import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_for_how_long_and_how_long_more(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(streams, "SILENCE", 0.01)
    monkeypatch.setattr(streams, "PACE", 0.01)
    streams.begin()
    with streams.waiting("Searching", 30.0):
        while screen.getvalue().count("Searching") < 2:
            time.sleep(0.01)
    said = screen.getvalue()
    told = re.search(r"Searching: (\d+) s, at most about (\d+) s more", said)
    assert told is not None
    assert 28 <= int(told[1]) + int(told[2]) <= 31
    assert said.endswith("\r\x1b[2K")


def test_what_is_left_follows_from_the_share_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    wait = streams.Waiting("Solving 4 problems")
    now[0] += 30
    assert str(wait) == "Solving 4 problems: 30 s"
    wait.tell_share(0.25)
    assert str(wait) == "Solving 4 problems: 30 s, about 1 min 30 s more"
    now[0] += 20
    assert str(wait) == "Solving 4 problems: 50 s, about 1 min 10 s more"
    wait.tell_left(5, "Step 3\x1b[2J")
    assert str(wait) == "Step 3\\x1b[2J: 50 s, about 5 s more"
    now[0] += 9
    assert str(wait).endswith("about 0 s more")


def test_the_best_plan_so_far_stands_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    wait = streams.Waiting("Searching", 30.0)
    wait.tell_best(0.5)
    wait.tell_best(0.25)
    assert str(wait) == "Searching (best so far 250 ms a step): 0 s, at most about 30 s more"


def test_a_remark_does_not_stand_behind_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(streams, "SILENCE", 0.01)
    streams.begin()
    with streams.waiting("Searching"):
        while "Searching" not in screen.getvalue():
            time.sleep(0.01)
        streams.remark("Wrote a file")
    assert "\r\x1b[2KWrote a file\n" in screen.getvalue()


def test_work_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    streams.begin()
    with pytest.raises(ValueError, match="failed"), streams.waiting("Searching"):
        raise ValueError("failed")
    assert screen.getvalue() == ""


@pytest.mark.parametrize("watched", [False, True])
def test_a_pipe_and_quiet_are_told_nothing(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal() if watched else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(streams, "SILENCE", 0.0)
    streams.begin()
    if watched:
        streams.be_quiet()
    with streams.waiting("Searching"):
        time.sleep(0.05)
    streams.begin()
    assert screen.getvalue() == ""


def test_a_count_is_drawn_when_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    streams.begin()
    with streams.counting("Measuring kernels") as count:
        assert screen.getvalue() == ""
        count(3, 17)
        assert screen.getvalue().endswith("Measuring kernels: 3 of 17")
    assert screen.getvalue().endswith("\r\x1b[2K")
    monkeypatch.setattr(sys, "stderr", silent := io.StringIO())
    with streams.counting("Measuring kernels") as count:
        count(3, 17)
    assert silent.getvalue() == ""


def test_the_clock_moves_until_passes_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model is loaded nobody tells anything: a thread draws, and stops before what counts."""
    monkeypatch.setattr(profile_command, "is_interactive", lambda: True)
    monkeypatch.setattr(profile_command, "PACE", 0.01)
    drawn, threads = threading.Event(), threading.active_count()
    monkeypatch.setattr(rich.progress.Progress, "refresh", lambda _: drawn.set())
    for is_timed in (True, False):
        with profile_command._progress(is_timed=is_timed) as tell:
            assert tell is not None
            for layer in (None, "block"):
                drawn.clear()
                assert drawn.wait(30)
                tell(Progress("tracing" if layer is None else "measuring", 1, layer, 0.1))
            if is_timed:
                wait_until(lambda: threading.active_count() == threads)
            else:
                drawn.clear()
                assert drawn.wait(30)
    assert threading.active_count() == threads


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)

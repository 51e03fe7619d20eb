"""What is said while somebody waits: on a terminal alone, and gone when the work is done."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from pplan.cli import streams


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
    assert re.search(r"Searching: \d+ s, at most about (30|29|28) s more", said)
    assert said.endswith("\r\x1b[2K")


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

"""Tests that interrupt a child end where the tests were started with SIGINT ignored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HANDLER = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_a_child_can_be_interrupted() -> None:
    done = subprocess.run([sys.executable, "-c", HANDLER], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.slow
def test_a_child_of_tests_in_the_background_can_be_interrupted() -> None:
    """The test above, by a pytest that is started as `sh -c 'pytest &'` starts it."""
    own = f"{Path(__file__)}::{test_a_child_can_be_interrupted.__name__}"
    code = (
        "import signal, sys, pytest\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, own]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

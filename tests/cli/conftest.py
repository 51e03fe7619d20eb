"""What the command line's tests share: a run of `main` in an empty folder, documents."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from pplan.cli.app import main


@dataclass(frozen=True)
class Ran:
    """What a command line did."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Standard error by line."""
        return self.err.splitlines()


class Terminal(Console):
    """A console of so many columns, and what was printed on it."""

    def __init__(self, width: int) -> None:
        self._printed = io.StringIO()
        super().__init__(
            file=self._printed, width=width, markup=False, highlight=False, emoji=False, color_system=None
        )

    @property
    def text(self) -> str:
        return self._printed.getvalue()


@pytest.fixture
def terminal() -> type[Terminal]:
    """Makes a console of that width, which keeps what is printed on it as `text`."""
    return Terminal


@pytest.fixture
def run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Runs pplan's own `main` with these arguments, as the console script does."""
    del here

    def run_main(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["pplan", *arguments])
        capsys.readouterr()
        status = main()
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return run_main

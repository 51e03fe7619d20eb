"""Consoles of a given width for the tests of the command line."""

from __future__ import annotations

import io

import pytest
from rich.console import Console


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

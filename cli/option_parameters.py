"""Options of the command line from the fields that declare them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from ..cost_models.option_fields import Options, declared
from .options import whole_number, word


def parameter(model: type[Options], field: str) -> Any:
    """The option of typer for a field of `model`: its name, help, panel, and what reads its text. What is
    typed in another way than it is held (`auto`, `30s`) comes as the text."""
    own = declared(model)[field]
    flag = own.flag or "--" + field.replace("_", "-")
    parser: Callable[[str], Any] | None = None
    if own.words:
        parser = word(flag, own.words)
    elif own.least is not None and not own.typed:
        parser = whole_number(flag, at_least=own.least)
    return typer.Option(flag, metavar=own.form, help=own.help, rich_help_panel=own.panel, parser=parser)

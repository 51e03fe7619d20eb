"""What wrote a file: versions, the command and the time."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from ..cost_models.document import MadeBy


def made_by(known: MadeBy, *, command: str = "", measured: MadeBy | None = None) -> MadeBy:
    """`known` with its gaps filled: this pplan, this Python, now, and `command`.

    The versions of torch, CUDA and the driver are those the figures were `measured` with.
    """
    measured = measured or known
    return MadeBy(
        pplan=known.pplan or installed("pplan") or "",
        command=command or known.command,
        time=known.time or datetime.now(UTC).isoformat(timespec="seconds"),
        python=known.python or platform.python_version(),
        torch=known.torch or measured.torch,
        cuda=known.cuda or measured.cuda,
        driver=known.driver or measured.driver,
    )


def installed(package: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None

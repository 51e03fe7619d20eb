"""What wrote a file: versions, the command and the time."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from ..cost_models.document import MadeBy


def made_by(origin: MadeBy, *, command: str = "", measured: MadeBy | None = None) -> MadeBy:
    """`origin` with its gaps filled: this pplan, this Python, now, and `command`.

    The versions of torch, CUDA and the driver are those the figures were `measured` with.
    """
    measured = measured or origin
    return MadeBy(
        pplan=origin.pplan or installed("pplan") or "",
        command=command or origin.command,
        time=origin.time or datetime.now(UTC).isoformat(timespec="seconds"),
        python=origin.python or platform.python_version(),
        torch=origin.torch or measured.torch,
        cuda=origin.cuda or measured.cuda,
        driver=origin.driver or measured.driver,
    )


def installed(package: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None

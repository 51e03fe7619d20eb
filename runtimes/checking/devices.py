"""The GPUs and cores of this machine."""

from __future__ import annotations

import os
from pathlib import Path

_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Without any of them there is no GPU, and no need to wait for torch."""


def gpus() -> int:
    """That torch finds here."""
    if not any(Path(name).exists() for name in _DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cores() -> int:
    """Of the processor, that this process may use."""
    own = getattr(os, "sched_getaffinity", None)
    return len(own(0)) if own is not None else os.cpu_count() or 1

"""Random inputs, wherever torch makes tensors by default."""

from __future__ import annotations

import pytest
import torch

from pplan.profiler.user_model import noise


@pytest.mark.parametrize("default", ["cuda", "meta", "cpu"])
def test_noise_is_drawn_on_the_cpu_whatever_the_default_device_is(default: str) -> None:
    """A generator of the CPU draws on no other device; no GPU is needed to see it."""
    with torch.device(default):
        drawn = noise((3,), 5)
    assert drawn.device.type == "cpu"
    assert torch.equal(drawn, noise((3,), 5))

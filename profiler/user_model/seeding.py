"""Random numbers that are the same at every run, and leave the caller's as they were."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ...cost_models.errors import UsageError

_SEEDS = 2**63


def check_seed(seed: int) -> int:
    """Raises UsageError where torch, or the file of a profile, could not hold it."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) < _SEEDS:
        raise UsageError(f"seed {seed!r}: must be a whole number from 0 to 2**63 - 1", "As in seed=0.")
    return int(seed)


def normal_like(tensor: Tensor, seed: int) -> Tensor:
    """Unit normal values of its shape and dtype, drawn where it is; on meta there is nothing to draw."""
    if tensor.device.type == "meta":
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    generator = torch.Generator(tensor.device).manual_seed(seed)
    return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype, device=tensor.device)


def whole_numbers(shape: Sequence[int], below: int, device: torch.device, seed: int) -> Tensor:
    """Of 0 to `below` - 1, drawn on `device`; on meta there is nothing to draw."""
    if device.type == "meta":
        return torch.empty(tuple(shape), dtype=torch.long, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(below, tuple(shape), generator=generator, device=device)


@contextlib.contextmanager
def fixed_seed(seed: int) -> Iterator[None]:
    """Inside, torch, `random` and numpy draw from `seed`; afterwards the caller's random state is as it was.

    CUDA's, too, where CUDA has been initialised by now: whoever computes there enters the device first.
    """
    numbers, python = sys.modules.get("numpy"), random.getstate()
    arrays = numbers.random.get_state() if numbers else None
    try:
        with torch.random.fork_rng(devices=_cuda_devices()):
            reseed(seed)
            yield
    finally:
        random.setstate(python)
        if numbers and arrays is not None:
            numbers.random.set_state(arrays)


def reseed(seed: int) -> None:
    """For good: torch on all devices, `random`, and numpy where it is loaded. See `fixed_seed`."""
    torch.default_generator.manual_seed(seed)
    if _cuda_devices():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextlib.contextmanager
def repeatable_seeds() -> Iterator[None]:
    """Inside, torch.seed(), which takes its seed from the system, takes it from torch's random state."""

    def seed() -> int:
        number = int(torch.randint(2**62, (), device="cpu"))
        torch.manual_seed(number)
        return number

    with mock.patch.object(torch, "seed", seed):
        yield


def random_states() -> dict[str, Any]:
    """By who draws, a value that is another after a draw."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes(), "random": random.getstate()}
    for index in _cuda_devices():
        states[f"torch on cuda:{index}"] = torch.cuda.get_rng_state(index).numpy().tobytes()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


def _cuda_devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


def noise(shape: Sequence[int], seed: int, samples: int = 2) -> Tensor:
    """Random samples of this shape, the same for the same seed; the caller's random state is left alone, and
    so is the default device: they are on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((samples, *shape), generator=generator, device="cpu")

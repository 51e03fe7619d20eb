"""A clock that only the layers move, layers that take the time they are told to, and a small known model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pplan.profiler.size_run import no_collection


class FakeClock:
    """Device and host seconds, moved by `advance` only; copies of a model keep the same clock."""

    def __init__(self, *, has_host: bool = False) -> None:
        self.has_host = has_host
        self.device = 0.0
        self.host = 0.0
        self.settled = 0
        self.held_back: list[float] = []

    def __deepcopy__(self, memo: object) -> FakeClock:
        return self

    def advance(self, device: float, host: float) -> None:
        self.device += device
        self.host += host

    def stamp(self) -> tuple[float, float]:
        return self.device, self.host

    def calibrate(self) -> None:
        pass

    def hold_back(self, seconds: float) -> None:
        self.held_back.append(seconds)

    def settle(self) -> None:
        self.settled += 1

    def seconds(self, start: tuple[float, float], end: tuple[float, float]) -> float:
        return end[0] - start[0]

    def host_seconds(self, start: tuple[float, float], end: tuple[float, float]) -> float:
        return end[1] - start[1]

    def now(self) -> float:
        return self.device


class Takes(nn.Module):
    """Multiplies by a weight, and takes `forward_of(batch)` and `backward_of(batch)` seconds for it."""

    def __init__(
        self, clock: FakeClock, forward_of: Callable[[int], float], backward_of: Callable[[int], float]
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock, self.forward_of, self.backward_of = clock, forward_of, backward_of

    def forward(self, given: Tensor) -> Tensor:
        seconds = self.forward_of(len(given))
        self.clock.advance(seconds, seconds / 4)
        output: Tensor = _Multiply.apply(given, self.weight, self)
        return output


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, layer: Takes) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.layer = layer
        return given * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        given, weight = ctx.saved_tensors
        seconds = ctx.layer.backward_of(len(given))
        ctx.layer.clock.advance(seconds, seconds / 4)
        return gradient * weight, (gradient * given).sum().reshape(1), None


class Spends(torch.autograd.Function):
    """The same value; takes `seconds` in backward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, clock: FakeClock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.advance(ctx.seconds, ctx.seconds / 4)
        return gradient, None, None


class Parted(nn.Module):
    """Multiplies by a weight, and takes so many seconds for forward and for each gradient."""

    def __init__(self, clock: FakeClock, forward: float, inputs: float, weights: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0))
        self.clock, self.seconds = clock, (forward, inputs, weights)

    def forward(self, given: Tensor) -> Tensor:
        forward, inputs, weights = self.seconds
        self.clock.advance(forward, forward / 4)
        # Without a gradient of its own the input is no operation's: then there is no time for it either.
        given = Spends.apply(given, self.clock, inputs) if given.requires_grad else given
        result: Tensor = given * Spends.apply(self.weight, self.clock, weights)
        return result


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of one small operation that wait for each other are slow where other processes run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    """As while measuring: garbage of an earlier pass, freed in a later one, would count as less memory."""
    with no_collection():
        yield


@pytest.fixture(scope="session")
def small_vgg() -> Callable[[], nn.Module]:
    """Makes a VGG-11 of torchvision's, with 64 units where its classifier has 4096 and takes 500 MB."""

    def make() -> nn.Module:
        from torchvision.models import vgg

        with torch.device("meta"):
            model: nn.Module = vgg.vgg11()
        model.features = vgg.make_layers(vgg.cfgs["A"])
        for name, given, out in (("0", 512 * 7 * 7, 64), ("3", 64, 64), ("6", 64, 5)):
            setattr(model.classifier, name, nn.Linear(given, out))
        return model

    return make


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def device_clock() -> FakeClock:
    """As on CUDA: the host's time is another one."""
    return FakeClock(has_host=True)


@pytest.fixture
def takes() -> Callable[..., Takes]:
    """`takes(clock, forward, backward)`: a layer of so many seconds a sample."""

    def make(clock: FakeClock, forward: float, backward: float) -> Takes:
        return Takes(clock, lambda batch: forward * batch, lambda batch: backward * batch)

    return make


@pytest.fixture
def parted() -> Callable[..., Parted]:
    """`parted(clock, forward, inputs, weights)`: a layer of so many seconds, whatever the batch."""
    return Parted


@pytest.fixture
def convolutions() -> Callable[[], nn.Sequential]:
    """A small model of two-dimensional and flat layers, one of them in place; for inputs of 3 x 10 x 10."""
    return lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.Sigmoid(),
        nn.Conv2d(4, 4, 1),
        nn.Flatten(),
        nn.Linear(4 * 9, 7),
        nn.Tanh(),
        nn.Linear(7, 2),
    )

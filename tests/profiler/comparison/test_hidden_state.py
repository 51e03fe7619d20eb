"""Layers that read what another keeps in Python: the tensor is handed on, or the model is refused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import ModelError
from pplan.profiler.comparison import SideBySide, find_reader
from pplan.profiler.layers import as_sequential, build_chain
from pplan.profiler.tracing import ELEMENTS
from pplan.profiler.user_model import ModelInput

X = torch.linspace(-1, 1, 24).reshape(3, 8)


class Keeps(nn.Module):
    """Leaves what it is handed in a place that others know."""

    def __init__(self, store: dict[str, Tensor]) -> None:
        super().__init__()
        self.store = store

    def forward(self, x: Tensor) -> Any:
        self.store["skip"] = x
        return x * 2


class Adds(Keeps):
    def forward(self, x: Tensor) -> Any:
        return x + self.store["skip"]


class Masks(Keeps):
    """No gradient leads from here to what it reads."""

    def forward(self, x: Tensor) -> Any:
        return x * (self.store["skip"] > 0).float()


class ReadsNeighbour(nn.Module):
    def __init__(self, neighbour: ReadsNeighbour | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.neighbour = (neighbour,)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        self.kept = torch.tanh(self.linear(x))
        (other,) = self.neighbour
        return self.kept if other is None else self.kept + other.kept


def through_a_dict(reader: type[Keeps]) -> nn.Sequential:
    store: dict[str, Tensor] = {}
    return nn.Sequential(nn.Linear(8, 8), Keeps(store), nn.Linear(8, 8), reader(store), nn.Linear(8, 2))


def through_an_attribute() -> nn.Sequential:
    first = ReadsNeighbour()
    return nn.Sequential(first, nn.Linear(8, 8), ReadsNeighbour(first), nn.Linear(8, 2))


def through_a_closure() -> nn.Sequential:
    kept: list[Tensor] = []

    class Puts(nn.Module):
        def forward(self, x: Tensor) -> Any:
            kept[:] = [x]
            return x * 2

    class Gets(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + kept[0]

    return nn.Sequential(nn.Linear(8, 8), Puts(), nn.Linear(8, 8), Gets(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    "make",
    [lambda: through_a_dict(Adds), lambda: through_a_dict(Masks), through_an_attribute, through_a_closure],
    ids=["dict", "without gradient", "attribute", "closure"],
)
def test_the_tensor_crosses_the_cuts(make: Callable[[], nn.Sequential]) -> None:
    model = make()
    chain = build_chain(model, X, granularity="fine", verify=True)
    assert chain.tool != ELEMENTS
    assert max(layer.crossing for layer in chain.layers) == 2
    value: Any = X
    # Copies of their own, as stages in processes of their own have them.
    for layer in [copy.deepcopy(layer) for layer in as_sequential(chain)]:
        value = layer(value)
    assert torch.equal(value, model(X))


class DecidesAndAdds(Adds):
    """Cannot be traced."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) if float(x.sum()) < 1e9 else x


@pytest.mark.slow
def test_what_cannot_be_handed_on_is_refused() -> None:
    with pytest.raises(ModelError, match="layer 3 reads what another layer keeps in Python"):
        build_chain(through_a_dict(DecidesAndAdds), X, verify=True)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        self.calls: Tensor
        self.calls += 1
        return self.linear(x) * self.calls.clone()


def test_buffers_are_no_hidden_state() -> None:
    shared = Counts()
    chain = build_chain(nn.Sequential(shared, nn.Tanh(), shared, Counts()), X, verify=True)
    assert (chain.tool, len(chain)) == (ELEMENTS, 4)


def with_a_lock(model: nn.Module) -> nn.Sequential:
    """Its two layers; the second holds what cannot be copied, and says nothing about what it reads."""
    first, second = model.children()
    second.lock = threading.Lock()  # type: ignore[assignment]
    return nn.Sequential(first, second)


def test_what_cannot_be_copied_is_looked_at_itself() -> None:
    first = ReadsNeighbour()
    for second, reader in ((Counts(), ""), (ReadsNeighbour(first), "second")):
        side = SideBySide(nn.Sequential(first, second), ModelInput.of(X), "model", with_a_lock)
        assert find_reader(side, ["first", "second"]) == reader


class Rounds(nn.Module):
    """Adds more each time that any copy of it is called, also to what is zero."""

    def __init__(self, step: float, calls: list[int]) -> None:
        super().__init__()
        self.step, self.calls = step, calls

    def __deepcopy__(self, memo: object) -> Rounds:
        return Rounds(self.step, self.calls)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return x.relu() + self.step * len(self.calls)


@pytest.mark.parametrize(("step", "reader"), [(1e-7, ""), (1e-2, "second")])
def test_rounding_of_what_is_nearly_zero_is_no_hidden_state(step: float, reader: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Rounds(step, []))
    side = SideBySide(model, ModelInput.of(X), "model", lambda copied: nn.Sequential(*copied.children()))
    assert find_reader(side, ["first", "second"]) == reader

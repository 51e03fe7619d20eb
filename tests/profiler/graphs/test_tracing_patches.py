"""A function with a backward of its own keeps it, or the model is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pplan.cost_models.errors import ModelError
from pplan.profiler.layers import build_chain, sequential
from pplan.profiler.measure import profile_model
from pplan.profiler.profile_options import ProfileOptions


class Rounded(torch.autograd.Function):
    """Straight through: its derivative is taken for one, where that of rounding is zero."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, times: int) -> Tensor:
        return x.round() * times

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _rounded(x: Tensor, times: int) -> Tensor:
    rounded: Tensor = Rounded.apply(x, times)
    return rounded


class Quantized(nn.Module):
    def __init__(self, *, asks_size: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.asks_size = asks_size

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = _rounded(self.first(x), 1)
        if self.asks_size and hidden.shape[0] > 1000:
            hidden = hidden + 1
        last: Tensor = self.last(_rounded(self.second(hidden), 2))
        return last


@pytest.mark.parametrize("granularity", ["block", "fine"])
@pytest.mark.parametrize("way", ["itself", "deepcopy", "pickle"])
def test_gradients_are_those_of_the_functions_own_backward(granularity: str, way: str) -> None:
    torch.manual_seed(0)  # with some weights everything is rounded to zero
    model, x = Quantized(), torch.randn(3, 4)
    layers = sequential(model, torch.randn(2, 4), granularity=granularity)
    assert layers.layer_names == ("first", "Rounded_0", "second", "Rounded_1", "last")
    made = {"itself": lambda: layers, "deepcopy": lambda: copy.deepcopy(layers)}
    run: nn.Module = made.get(way, lambda: pickle.loads(pickle.dumps(layers)))()  # type: ignore[no-untyped-call]

    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(run(x).square().sum(), list(run.parameters()))
    assert all(gradient.any() for gradient in expected)
    assert all(map(torch.equal, found, expected))


def test_what_only_torch_export_can_trace_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Rounded has a backward of its own.*test_tracing_patches.py"):
        build_chain(Quantized(asks_size=True), torch.randn(2, 4))


class Averaged(nn.Module):
    """Assigns buffers, which torch.fx leaves out without a word."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        last: Tensor = self.last((x - self.mean).relu())
        return last


def test_buffers_that_forward_assigns_are_written() -> None:
    model = Averaged()
    other = copy.deepcopy(model)
    layers = sequential(model, torch.randn(2, 4))
    assert layers.layer_names == ("first", "sub", "relu", "last")
    for samples in (2, 5):
        x = torch.randn(samples, 4)
        assert torch.equal(layers(x), other(x))
    assert int(other.calls) == 2
    assert all(map(torch.equal, model.buffers(), other.buffers()))


def test_layers_that_check_a_size_are_loaded_from_a_file() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(9, 4), nn.Embedding(9, 4)

        def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
            x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
            return torch.tanh(x * scale[:, None, None])

    ids, scale = torch.randint(9, (2, 5)), torch.ones(2)
    layers = sequential(Positions(), (ids, scale), granularity="fine")
    loaded = pickle.loads(pickle.dumps(layers))
    assert any("check_sizes" in layer.code for layer in layers if isinstance(layer, torch.fx.GraphModule))
    assert torch.equal(loaded((ids, scale)), layers((ids, scale)))
    with pytest.raises(ModelError, match="were made for 5"):
        loaded((ids[:, :4], scale))


class Recomputing(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.recomputes = recomputes

    def forward(self, given: Tensor) -> Tensor:
        value = self.first(given).relu()
        if self.recomputes:
            return checkpoint(self.second, value, use_reentrant=False)  # type: ignore[no-any-return]
        result: Tensor = self.second(value)
        return result


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_checkpoint_that_tracing_looks_through_is_told(recomputes: bool) -> None:
    model, given = Recomputing(recomputes), torch.randn(2, 4)
    assert build_chain(model, given).drops_checkpoints is recomputes
    profile = profile_model((model, given), ProfileOptions(device="meta", micro_batch_sizes=[2]))
    assert any("torch.utils.checkpoint" in note for note in profile.notes) is recomputes


def test_inside_a_layer_that_is_taken_whole_it_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Recomputing(True))
    assert not build_chain(model, torch.randn(2, 4)).drops_checkpoints

"""Copies of a model: on the meta device without touching the weights, and what stops a copy."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pplan.cost_models.errors import ModelError
from pplan.profiler import tracing, trial
from pplan.profiler.layers import build_chain
from pplan.profiler.user_model import _is_json, copy_model, copy_to_host, copy_to_meta


class Kept(nn.Parameter):
    """May not be copied with its values."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("copied with its values")


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[0].weight = model[2].weight = Kept(torch.ones(4, 4))
    model[2].bias.requires_grad_(False)
    return model


def test_a_meta_copy_is_torchs_but_copies_no_values() -> None:
    model = tied()
    twin = copy_to_meta(model, "tied")
    assert [*twin.state_dict()] == [*model.state_dict()]
    states = [made.state_dict(keep_vars=True).values() for made in (twin, model)]
    pairs = list(zip(*states, strict=True))
    assert len(pairs) == 9
    for ours, theirs in pairs:
        assert ours.is_meta
        assert not theirs.is_meta
        assert type(ours) is type(theirs)
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        assert ours.requires_grad == theirs.requires_grad
    assert twin[0].weight is twin[2].weight  # type: ignore[index]
    with pytest.raises(ModelError, match="tied cannot be copied: AssertionError: copied with its values"):
        copy_model(model, "tied")


def test_cuts_are_found_without_a_copy_of_the_weights() -> None:
    layers = build_chain(tied(), torch.ones(2, 4)).layers
    assert [layer.cut_reason for layer in layers] == [None] * 3
    assert layers[2].module.weight is layers[0].module.weight


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_no_memory_for_a_copy_is_no_fault_of_the_model(error: Exception) -> None:
    class Large(nn.Module):
        def __deepcopy__(self, memo: Any) -> Any:
            raise error

    with pytest.raises(type(error)):
        copy_model(Large(), "large")


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(given)) + torch.ones(4)


@pytest.mark.parametrize("granularity", ["block", "fine"])
def test_the_copies_that_were_traced_and_tried_do_not_stay(
    monkeypatch: pytest.MonkeyPatch, granularity: str
) -> None:
    weights: list[weakref.ref[nn.Parameter]] = []

    def recording(model: nn.Module, name: str) -> nn.Module:
        copy = copy_to_meta(model, name)
        weights.append(weakref.ref(copy.get_parameter("linear.weight")))
        return copy

    for place in (tracing, trial):
        monkeypatch.setattr(place, "copy_to_meta", recording)
    model, given = Body(), torch.ones(2, 4)
    chain = build_chain(model, given, granularity=granularity)
    gc.collect()
    assert [reference() for reference in weights] == [None, None]
    value = given
    for layer in chain.layers:
        value = layer.module(value)
    assert torch.equal(value, model(given))


def test_a_host_copy_is_on_the_cpu_and_made_of_twins() -> None:
    model = tied()
    twin = copy_to_host(model, "tied")
    assert isinstance(twin[0].weight, Kept)  # type: ignore[index]
    for ours, theirs in zip(twin.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()
    assert twin[0].weight is twin[2].weight  # type: ignore[index]
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]


def test_settings_that_json_cannot_say_are_left_out() -> None:
    assert [_is_json(value) for value in (1, 0.5, None, [1, {"a": "b"}])] == [True] * 4
    assert [_is_json(value) for value in (float("inf"), float("nan"), [float("-inf")], {1: 2}, object())] == [
        False
    ] * 5

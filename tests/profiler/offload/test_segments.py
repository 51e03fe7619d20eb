"""Segments: planned as brute force over every way to part the layers; measured as the whole model is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import MachineError
from pplan.profiler.measure import profile_model
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_options import ProfileOptions
from pplan.profiler.segments import LayerNeeds, plan_segments

RESERVE = 1.05


def needed(layers: Sequence[LayerNeeds], first: int, end: int, input_bytes: int) -> float:
    """As the docstring says it, from nothing but the layers."""
    held = {key: size for layer in layers[first:end] for key, size in layer.storages.items()}
    peak = max(
        sum(layer.saved for layer in layers[first : i + 1]) + layers[i].workspace for i in range(first, end)
    )
    given = layers[first - 1].output if first else input_bytes
    return float(round(RESERVE * (sum(held.values()) + given + layers[end - 1].output + peak)))


def random_layers(seed: int) -> list[LayerNeeds]:
    rng = np.random.default_rng(seed)
    return [
        LayerNeeds(
            f"layer{i}",
            # The last key is shared by all layers that have it.
            {2 * i: int(rng.integers(1, 100)), **({99: 50} if rng.random() < 0.3 else {})},
            *(int(value) for value in rng.integers(0, 60, 3)),
        )
        for i in range(int(rng.integers(1, 9)))
    ]


@pytest.mark.parametrize("seed", range(60))
def test_fewest_segments(seed: int) -> None:
    layers = random_layers(seed)
    count = len(layers)
    free = int(np.random.default_rng(seed + 1000).integers(250, 700))
    alone = [needed(layers, i, i + 1, 7) for i in range(count)]
    if max(alone) > free:
        first = next(i for i in range(count) if alone[i] > free)
        with pytest.raises(MachineError, match=f"layer layer{first} does not fit on cuda:0 even alone"):
            plan_segments(layers, 7, free, "cuda:0")
        return
    segments = plan_segments(layers, 7, free, "cuda:0")
    assert [i for segment in segments for i in segment] == list(range(count))
    assert all(needed(layers, part.start, part.stop, 7) <= free for part in segments)
    fewest = min(
        cuts + 1
        for cuts in range(count)
        for chosen in combinations(range(1, count), cuts)
        if all(needed(layers, a, b, 7) <= free for a, b in pairwise((0, *chosen, count)))
    )
    assert len(segments) == fewest


def test_both_outcomes_and_several_segments_are_tried() -> None:
    seen = set()
    for seed in range(60):
        layers = random_layers(seed)
        free = int(np.random.default_rng(seed + 1000).integers(250, 700))
        try:
            seen.add(min(len(plan_segments(layers, 7, free)), 3))
        except MachineError:
            seen.add(0)
    assert seen == {0, 1, 2, 3}


def test_a_layer_that_does_not_fit_is_named_with_its_bytes() -> None:
    layers = [LayerNeeds("small", {1: 10}, 1, 1, 1), LayerNeeds("head", {2: 2**31}, 0, 0, 0)]
    with pytest.raises(MachineError, match=r"layer head .*needs 2\.10 GiB, 1\.00 GiB are free") as caught:
        plan_segments(layers, 1, 2**30)
    assert "`micro_batch_sizes`" in caught.value.hint


WIDTH = 32


def row(count: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def tied() -> nn.Module:
    model = row()
    model[5].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = row()
    model[:4].requires_grad_(False)
    return model


class Skips(nn.Module):
    """Two tensors cross: one of them whole numbers, without a gradient; the other is overwritten behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = row(3), row(3)

    def forward(self, given: Tensor) -> Tensor:
        hidden = self.first(given).relu()
        mask = (hidden > 0).long()
        for layer in self.last:
            hidden = layer(hidden).mul_(2)
        result: Tensor = hidden + mask
        return result


class Twice(nn.Module):
    """Runs its first layer again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(WIDTH, WIDTH), row(4)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.first(self.rest(self.first(given)))
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.rest = row(8)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.rest(self.first(given.unsqueeze(1))[0].squeeze(1))
        return result


def profiled(model: nn.Module, memory_bytes: int | None, **options: Any) -> Profile:
    given = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
    wanted = ProfileOptions(micro_batch_sizes=[3], **options)
    return profile_model((model, given), wanted, rounds=1, parts=False, memory_bytes=memory_bytes)


@pytest.mark.parametrize("loss", ["none", "cross-entropy"])
@pytest.mark.parametrize("build", [row, tied, frozen, Skips, Twice, Recurrent])
def test_the_bytes_are_those_of_the_whole(build: Any, loss: str) -> None:
    model = build()
    fits = int(1.6 * sum(parameter.nbytes for parameter in model.parameters()))
    found, expected = profiled(model, fits, loss=loss), profiled(model, None, loss=loss)
    assert "measured in 2 segments" in found.notes[0] or "measured in 3 segments" in found.notes[0]
    same = ("saved_bytes", "saved_input_bytes", "output_bytes")
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert (ours.name, ours.parameter_bytes) == (theirs.name, theirs.parameter_bytes)
        for name in same:
            assert getattr(ours.costs[0], name) == getattr(theirs.costs[0], name), (ours.name, name)
        assert ours.costs[0].forward_seconds > 0
    assert (found.loss is None) == (loss == "none")
    if found.loss is not None and expected.loss is not None:
        last, whole = found.loss.costs[0], expected.loss.costs[0]
        assert (last.saved_bytes, last.output_bytes) == (whole.saved_bytes, whole.output_bytes)
        # The whole holds its input, which frozen layers do not save.
        assert 0 <= whole.workspace_bytes - last.workspace_bytes <= (build is frozen) * 3 * WIDTH * 4


def test_recurrent_weights_are_put_together_once_they_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    callers: list[str] = []

    def flatten(_: nn.Module) -> None:
        callers.append(sys._getframe(1).f_globals["__name__"])

    model = Recurrent()
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", flatten)
    profiled(model, int(1.6 * sum(parameter.nbytes for parameter in model.parameters())))
    # Torch itself calls it where a module is moved whole.
    assert any(caller.startswith("pplan.") for caller in callers)


def loss_on_the_cpu(output: Tensor) -> Tensor:
    """As a user's that makes its targets where it likes: it does not run on the meta device."""
    return (output * torch.ones(output.shape, device="cpu")).sum()


def test_a_loss_that_does_not_run_on_meta_is_planned_without() -> None:
    model = row()
    fits = int(1.6 * sum(parameter.nbytes for parameter in model.parameters()))
    found = profiled(model, fits, loss=f"{__name__}:loss_on_the_cpu")
    assert found.loss is not None
    assert found.loss.costs[0].saved_bytes > 0

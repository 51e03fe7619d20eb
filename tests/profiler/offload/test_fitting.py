"""Planning of segments against brute force over every way to part the layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import MachineError
from pplan.profiler.layer import Layer
from pplan.profiler.layers import build_chain
from pplan.profiler.losses import Loss, load_loss
from pplan.profiler.meta_device import kernels_as_on_a_gpu
from pplan.profiler.segments import LayerNeeds, count_needs, layer_needs, plan_segments
from pplan.profiler.user_model import copy_to_meta

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


def layer_of(name: str, module: nn.Module) -> Layer:
    return Layer(
        name, type(module).__name__, module, name, tuple(module.parameters()), tuple(module.buffers()), None
    )


def test_needs_of_layers_count_gradients_and_know_tied_weights() -> None:
    first, norm, last = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    norm.bias.requires_grad_(False)
    needs = layer_needs(
        [layer_of("0", first), layer_of("1", norm), layer_of("2", last)], [1, 2, 3], [4, 5, 6], [7, 8, 9]
    )
    assert [sum(layer.storages.values()) for layer in needs] == [128, 32 + 16 + 16 + 16 + 8, 128]
    assert needs[0].storages == needs[2].storages
    assert [(layer.saved, layer.workspace, layer.output) for layer in needs] == [
        (1, 4, 7),
        (2, 5, 8),
        (3, 6, 9),
    ]


def test_needs_counted_on_meta_are_those_of_the_model_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2), nn.BatchNorm1d(2))
    given = torch.ones(3, 4)
    meta = copy_to_meta(model, "model")
    on_meta = count_needs(meta, build_chain(meta, given.to("meta")).layers, given.to("meta"))
    real = count_needs(model, build_chain(model, given).layers, given)
    assert [sum(layer.storages.values()) for layer in on_meta] == [256, 0, 2 * 72, 4 * 8 + 2 * 8 + 8]
    for mine, theirs in zip(on_meta, real, strict=True):
        assert sum(mine.storages.values()) == sum(theirs.storages.values())
        assert (mine.name, mine.saved, mine.output) == (theirs.name, theirs.saved, theirs.output)
        assert mine.workspace == theirs.workspace > 0
    assert all(parameter.device.type == "meta" for parameter in meta.parameters())


class Attention(nn.Module):
    """With dropout, which the CPU's fused attention does not do: it keeps the matrix of 64 x 64 there."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, given: Tensor) -> Tensor:
        heads = self.project(given).unsqueeze(1)
        attended: Tensor = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return attended.squeeze(1)


def test_attention_is_counted_as_the_device_computes_it() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Attention())
        given = torch.empty(2, 64, 16)
    layers, matrix = build_chain(model, given).layers, 2 * 64 * 64 * 4
    (on_cpu,) = count_needs(model, layers, given)
    (on_gpu,) = count_needs(model, layers, given, kernels=partial(kernels_as_on_a_gpu, flash=True))
    assert on_cpu.saved > matrix > on_gpu.saved


def test_the_loss_and_what_autocast_converts_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 50, bias=False))
    given = torch.ones(3, 4)
    layers, loss = build_chain(model, given).layers, load_loss("cross-entropy")
    bare, full = count_needs(model, layers, given), count_needs(model, layers, given, loss, amp=True)
    assert [sum(layer.storages.values()) for layer in bare] == [256, 3200]
    assert [sum(layer.storages.values()) for layer in full] == [256 + 64, 3200 + 800]
    assert full[0].saved == bare[0].saved
    # The log-softmax, which the loss saves; and two gradients of its size while it goes back.
    assert full[1].saved >= bare[1].saved + 3 * 50 * 4
    assert full[1].saved + full[1].workspace >= bare[1].saved + 3 * (3 * 50 * 4)


def test_a_loss_that_does_not_run_on_meta_is_left_out() -> None:
    meta = nn.Sequential(nn.Linear(4, 8)).to("meta")
    given = torch.ones(3, 4, device="meta")
    layers = build_chain(meta, given).layers
    here = Loss("mine", lambda output: float(output.sum()))
    assert count_needs(meta, layers, given, here) == count_needs(meta, layers, given)

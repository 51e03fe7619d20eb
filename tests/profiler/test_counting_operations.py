"""FLOPs and bytes against counts by hand, published ones, and torch's own counter on a real pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pplan.profiler.clocks import CpuClock
from pplan.profiler.estimate import EqualLayers, as_on_a_gpu, count_operations, count_structure
from pplan.profiler.layers import build_chain
from pplan.profiler.losses import load_loss
from pplan.profiler.models import from_module
from pplan.profiler.modes import MeasurementTarget
from pplan.profiler.operations import LayerOperations, Operation
from pplan.profiler.user_model import copy_to_meta

KERNELS = partial(as_on_a_gpu, flash=True)


def operations(
    model: nn.Module, example: Tensor, size: int, loss: str = "none", *, again: bool = True
) -> list[LayerOperations]:
    loaded = from_module(model, example)
    copy = copy_to_meta(model, "model")
    chain = build_chain(copy, loaded.example_input_for(size))
    subject = MeasurementTarget(
        replace(loaded, module=copy),
        chain,
        torch.device("meta"),
        torch.float32,
        CpuClock(),
        0,
        loss=load_loss(loss),
    )
    each_itself = EqualLayers(subject, tuple(range(len(chain))))
    beside_bytes: list[LayerOperations] | None = None
    if again:
        results, _, _ = count_structure(each_itself, [size], KERNELS, operations=True)
        beside_bytes = list(results[0].operations or ())
    alone = count_operations(each_itself, size, KERNELS)
    assert beside_bytes in (None, alone)
    return alone


def flops(layers: list[LayerOperations], way: str) -> int:
    return sum(one.flops for layer in layers for one in getattr(layer, way))


def test_three_layers_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    layers = operations(model, torch.ones(1, 4), 3, "mse")
    assert len(layers) == 4
    # Weight 8x4, bias 8, input 3x4, output 3x8.
    assert layers[0].forward == [Operation(2 * 3 * 4 * 8, 4 * (32 + 8 + 12 + 24), "float32")]
    assert layers[1].forward == [Operation(0, 4 * (24 + 24), "float32")]
    # The weight's gradient alone: no gradient of the model's input. It, the bias' sum, and two additions.
    assert [one.flops for one in layers[0].backward] == [2 * 3 * 4 * 8, 0, 0, 0]
    assert layers[0].backward[0].bytes == 4 * (24 + 12 + 32)
    assert sorted(one.bytes for one in layers[0].backward[1:]) == sorted(
        [4 * (24 + 8), 4 * 3 * 32, 4 * 3 * 8]
    )
    # Of the last layer both gradients.
    assert flops(layers[2:3], "backward") == 2 * flops(layers[2:3], "forward") == 2 * (2 * 3 * 8 * 2)
    assert layers[3].forward
    assert layers[3].backward
    assert flops(layers[3:], "forward") == 0


def test_published_flops_of_vgg19() -> None:
    """19.6 billion multiply-adds at 224x224 (Simonyan and Zisserman; He et al., 2015, Table 1)."""
    with torch.device("meta"):
        model = torchvision.models.vgg19()
    layers = operations(model, torch.empty(1, 3, 224, 224, device="meta"), 2)
    assert flops(layers, "forward") == pytest.approx(2 * 2 * 19.632e9, rel=1e-3)
    first = flops(layers[:1], "forward")
    assert flops(layers, "backward") == 2 * flops(layers, "forward") - first


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 48)

    def forward(self, given: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.into(given).chunk(3, -1)
        )
        result: Tensor = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return result.transpose(1, 2).flatten(-2)


def test_attention_is_the_fused_one() -> None:
    layers = operations(nn.Sequential(nn.Linear(16, 16), Attends()), torch.ones(1, 10, 16), 3)
    # Of a causal mask half is left out.
    product = 2 * 3 * 2 * 10 * 10 * 8 // 2
    linear = 2 * 3 * 10 * 16 * 48
    assert flops(layers[-1:], "forward") == linear + 2 * product
    # The attention matrix is made again, and then four gradients of products.
    assert flops(layers[-1:], "backward") == 2 * linear + 5 * product


def test_torchs_own_counter_on_a_pass_on_the_cpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )
    given = torch.ones(4, 3, 6, 6)
    layers = operations(model, given, 4)
    with FlopCounterMode(display=False) as forward:
        made = model(given)
    with FlopCounterMode(display=False) as backward:
        made.sum().backward()
    assert flops(layers, "forward") == forward.get_total_flops() > 0
    assert flops(layers, "backward") == backward.get_total_flops() > 0
    assert [one.is_convolution for one in layers[0].forward] == [True]


class Experts(nn.Module):
    """Four experts' products of 16 x 32 numbers, each of some of the rows."""

    def __init__(self, name: str) -> None:
        super().__init__()
        dtype = torch.bfloat16 if name == "aten._grouped_mm" else torch.float32
        self.weight = nn.Parameter(torch.zeros(4, 16, 32, dtype=dtype))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1).to(self.weight.dtype)
        ends = torch.full((4,), len(x), dtype=torch.int32, device=x.device)
        if self.name == "aten._grouped_mm":
            return F.grouped_mm(x, self.weight, offs=ends)
        mixed: Tensor = torch.ops.transformers.grouped_mm_fallback(x, self.weight, offs=ends)
        return mixed


@pytest.mark.parametrize("name", ["aten._grouped_mm", "transformers.grouped_mm_fallback"])
def test_experts_have_the_products_of_their_rows(name: str) -> None:
    """Forward, of the input's gradient, and of the weights'."""
    if name != "aten._grouped_mm":
        pytest.importorskip("transformers.integrations.moe")
    layers = operations(nn.Sequential(nn.Linear(16, 16), Experts(name)), torch.zeros(1, 5, 16), 2)
    product = 2 * (2 * 5) * 16 * 32
    assert (flops(layers[1:2], "forward"), flops(layers[1:2], "backward")) == (product, 2 * product)


def test_views_are_free_and_tables_are_read_by_rows() -> None:
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Flatten(), nn.Linear(20, 2))
    layers = operations(model, torch.zeros(1, 5, dtype=torch.int64), 2)
    of_table = [one for layer in layers for one in layer.forward if one.flops == 0]
    # Indices, rows read and rows written: not the 16000 bytes of the table, and nothing of the flattening.
    assert [one.bytes for one in of_table] == [2 * 5 * 8 + 2 * (2 * 5 * 4 * 4)]


def test_batch_norm_reads_its_input_twice() -> None:
    """For the statistics and to normalize; in backward the gradient too."""
    layers = operations(nn.Sequential(nn.BatchNorm2d(4), nn.Flatten()), torch.ones(1, 4, 8, 8), 3)
    one = 4 * 3 * 4 * 8 * 8
    [forward] = [each for each in layers[0].forward if each.bytes > one]
    assert 0 <= forward.bytes - 3 * one < 200


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_convolution_is_converted_where_it_does_not_lie_channels_last(channels_last: bool) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1, bias=False), nn.Conv2d(8, 4, 1, bias=False))
    given = torch.ones(1, 4, 6, 6)
    if channels_last:
        model, given = (
            model.to(memory_format=torch.channels_last),
            given.to(memory_format=torch.channels_last),
        )
    forward, backward = ([one for one in way if one.is_convolution] for way in _ways(model, given))
    moved = [4 * (3 * 36 * (4 + 8) + 32)] * 3
    assert [one.bytes for one in (*forward, *backward)] == moved
    # Gradients of the input and of the weight are a kernel each, of as many FLOPs as forward.
    assert [one.flops for one in (*forward, *backward)] == [2 * 3 * 36 * 32] * 3
    twice = [0] * 3 if channels_last else [2 * bytes for bytes in moved]
    assert [one.conversion_bytes for one in (*forward, *backward)] == twice


def _ways(model: nn.Module, given: Tensor) -> tuple[list[Operation], list[Operation]]:
    last = operations(model, given, 3)[1]
    return last.forward, last.backward

"""Bytes counted on the meta device against those of passes on the CPU, layer by layer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2
from torchvision.models.vision_transformer import VisionTransformer

from pplan.profiler.clocks import CpuClock
from pplan.profiler.estimate import EqualLayers, as_on_the_cpu, count_structure
from pplan.profiler.layers import build_chain
from pplan.profiler.models import from_module
from pplan.profiler.modes import MeasurementTarget, Modes
from pplan.profiler.size_run import SizeRun
from pplan.profiler.timed_passes import SizeResult
from pplan.profiler.user_model import copy_model, copy_to_meta

SIZE = 2
Bytes = dict[str, tuple[int, ...]]


@pytest.fixture(autouse=True)
def tensors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What operators allocate for themselves on the CPU is not seen on meta."""
    monkeypatch.delattr(torch.autograd, "_enable_profiler_legacy")


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes longer than such passes, and finds nothing that they count."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def subject_of(
    model: nn.Module, example: object, device: str, dtype: torch.dtype, modes: Modes, granularity: str
) -> MeasurementTarget:
    loaded = from_module(model, example)
    copy = copy_to_meta(model, "model") if device == "meta" else copy_model(model, "model")
    copy = modes.converted(copy.to(dtype))
    chain = build_chain(copy, loaded.example_input_for(SIZE).to(dtype=dtype), granularity=granularity)
    place = torch.device(device)
    return MeasurementTarget(replace(loaded, module=copy), chain, place, dtype, CpuClock(), 0, modes=modes)


def bytes_of(subject: MeasurementTarget, result: SizeResult, *, workspace: bool) -> Bytes:
    counted = result.counted
    columns: list[Sequence[int]] = [counted.saved_bytes, counted.saved_input_bytes, counted.output_bytes]
    if workspace:
        assert counted.memory is not None
        columns += [counted.memory.forward, counted.memory.backward]
    rows = list(zip(*columns, strict=True))
    return {layer.name: row for layer, row in zip(subject.chain.layers, rows, strict=True)}


def each_itself(subject: MeasurementTarget) -> EqualLayers:
    return EqualLayers(subject, tuple(range(len(subject.chain))))


def both(
    model: nn.Module,
    example: object,
    *,
    dtype: torch.dtype = torch.float32,
    modes: Modes | None = None,
    workspace: bool = True,
    granularity: str = "block",
) -> tuple[Bytes, Bytes]:
    """Of the model on meta, and on the CPU."""
    settings = (dtype, modes or Modes(), granularity)
    subject = subject_of(model, example, "meta", *settings)
    (result,), _, _ = count_structure(each_itself(subject), [SIZE])
    on_meta = bytes_of(subject, result, workspace=workspace)
    subject = subject_of(model, example, "cpu", *settings)
    run = SizeRun(subject, SIZE)
    run.count(lambda _layer: None)
    on_cpu = bytes_of(subject, run.result, workspace=workspace)
    assert sum(row[0] for row in on_cpu.values()) > 0
    return on_meta, on_cpu


def images(side: int = 32) -> Tensor:
    return torch.randn(2, 3, side, side)


def vit(**settings: Any) -> nn.Module:
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32, "num_classes": 5}
    model: nn.Module = VisionTransformer(image_size=32, patch_size=8, **sizes, **settings)
    return model


def swin(**settings: Any) -> nn.Module:
    model: nn.Module = SwinTransformer([2, 2], 8, [2, 2], [2, 2], [4, 4], num_classes=5, **settings)
    return model


def convnext() -> nn.Module:
    widths = (16, 32, 64, 128, None)
    settings = [CNBlockConfig(given, out, 2) for given, out in pairwise(widths) if given]
    model: nn.Module = ConvNeXt(settings, stochastic_depth_prob=0.1, num_classes=5)
    return model


def torchvisions(name: str) -> nn.Module:
    model: nn.Module = torchvision.models.get_model(name, num_classes=5)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (lambda: torchvisions("resnet18"), 64),
    "convnext": (convnext, 32),
    "vit": (vit, 32),
    "vit with dropout": (lambda: vit(dropout=0.1, attention_dropout=0.1), 32),
    "swin": (swin, 32),
    "swin_v2": (lambda: swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2), 32),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vgg(dtype: torch.dtype, small_vgg: Callable[[], nn.Module]) -> None:
    on_meta, on_cpu = both(small_vgg(), images(), dtype=dtype)
    assert on_meta == on_cpu


def every_other_twice(names: Iterable[str]) -> Iterator[tuple[str, torch.dtype]]:
    """In float32, and every other one in bfloat16 too."""
    for index, name in enumerate(names):
        yield name, torch.float32
        if index % 2:
            yield name, torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [*every_other_twice(MODELS)])
def test_models(name: str, dtype: torch.dtype) -> None:
    make, side = MODELS[name]
    on_meta, on_cpu = both(make(), images(side), dtype=dtype)
    assert on_meta == on_cpu


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "convnext"])
@pytest.mark.parametrize("training", [True, False])
def test_in_channels_last_and_in_evaluation(name: str, training: bool) -> None:
    make, side = MODELS[name]
    on_meta, on_cpu = both(make().train(training), images(side), modes=Modes(channels_last=True))
    assert on_meta == on_cpu


class Attends(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True, **settings)
        self.norm = nn.LayerNorm(16)

    def forward(self, given: Tensor, padding: Tensor | None = None) -> Tensor:
        given = self.first(given)
        attended, _ = self.attention(given, given, given, key_padding_mask=padding, need_weights=False)
        result: Tensor = self.norm(given + attended)
        return result


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_block_of_attention(padded: bool, dropout: float) -> None:
    given = torch.randn(2, 10, 16)
    padding = (torch.arange(10) > 6).expand(2, 10)
    on_meta, on_cpu = both(Attends(dropout=dropout), (given, padding) if padded else given)
    assert on_meta == on_cpu


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_torchs_own_encoder(dropout: float) -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True)
    on_meta, on_cpu = both(nn.TransformerEncoder(layer, 2), torch.randn(2, 10, 16))
    assert on_meta == on_cpu


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [*every_other_twice(["gpt2", "bert", "llama", "t5"])])
def test_language_models(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    from pplan.profiler.transformers_models import load_transformers

    sizes = {"layers": 1, "hidden": 16, "heads": 2, "vocabulary": 50, "sequence": 12}
    made = load_transformers(name, sizes, seed=0)
    on_meta, on_cpu = both(made.module.train(), made.example, dtype=dtype, granularity=made.granularity)
    assert len(on_cpu) > 2
    assert on_meta == on_cpu


class Mixed(nn.Module):
    """Activations in bfloat16, norms in float32."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), norm, nn.Conv2d(8, 3, 3)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(given).to(torch.bfloat16)).float())
        return result


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(8),
    "batch without weights": lambda: nn.BatchNorm2d(8, affine=False, track_running_stats=False),
    "group": lambda: nn.GroupNorm(2, 8),
    "layer": lambda: nn.LayerNorm(16),
    "layer without weights": lambda: nn.LayerNorm(16, elementwise_affine=False),
    "instance": lambda: nn.InstanceNorm2d(8),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_norms_of_mixed_dtypes(name: str, training: bool, channels_last: bool) -> None:
    modes = Modes(channels_last=channels_last)
    # What backward needs for itself differs by a conversion or two.
    on_meta, on_cpu = both(Mixed(NORMS[name]()).train(training), images(16), modes=modes, workspace=False)
    assert on_meta == on_cpu


class Then(nn.Module):
    """A convolution, and a function of what it made."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.scale = (
            nn.Conv2d(3, 8, 3, padding=1),
            function,
            nn.Parameter(torch.ones(1)),
        )

    def forward(self, given: Tensor) -> Tensor:
        return self.function(self.first(given)) * self.scale


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "max pooling": lambda x: F.max_pool2d(x, 3, 2, 1),
    "upsampling": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "gelu": F.gelu,
    "softmax": lambda x: F.softmax(x, 1),
    "unfold": lambda x: F.unfold(x, 3),
    "fold": lambda x: F.fold(F.unfold(x, 3), (16, 16), 3),
    "depthwise": lambda x: F.conv2d(x, x.new_ones(8, 1, 3, 3), groups=8),
    "transposed": lambda x: F.conv_transpose2d(x, x.new_ones(8, 4, 2, 2), stride=2),
    "volume": lambda x: F.conv3d(x[:, :, None], x.new_ones(4, 8, 1, 3, 3)),
    "sequence": lambda x: F.conv1d(x.flatten(2), x.new_ones(4, 8, 3)),
    "flat": lambda x: x.flatten(1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("channels_last", [True, False])
def test_functions(name: str, channels_last: bool) -> None:
    on_meta, on_cpu = both(Then(FUNCTIONS[name]), images(16), modes=Modes(channels_last=channels_last))
    assert on_meta == on_cpu


@pytest.mark.parametrize("channels_last", [True, False])
def test_gradients_of_a_convolution_are_laid_out_as_on_the_cpu(channels_last: bool) -> None:
    """Backward copies what is not laid out as the operation before wants it."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    found = []
    for device in ("cpu", "meta"):
        given = torch.ones(2, 3, 8, 8, device=device).to(memory_format=layout).requires_grad_()
        weight = torch.ones(4, 3, 3, 3, device=device).to(memory_format=layout).requires_grad_()
        with as_on_the_cpu():
            output = F.conv2d(given, weight)
            gradients = torch.autograd.grad(output, (given, weight), torch.ones_like(output))
        found.append([tensor.stride() for tensor in (output, *gradients)])
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 0])
def test_bags_of_embeddings(mode: str, padding: int | None) -> None:
    bags = nn.EmbeddingBag(10, 8, mode=mode, padding_idx=padding)
    on_meta, on_cpu = both(nn.Sequential(bags, nn.Linear(8, 3)), torch.randint(0, 10, (2, 5)))
    assert on_meta == on_cpu


def test_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(16, 4, batch_first=True)

        def forward(self, given: Tensor) -> Tensor:
            result: Tensor = self.recurrent(given)[0]
            return result

    model, settings = nn.Sequential(nn.Linear(16, 16), Last()), ("meta", torch.float32, Modes(), "block")
    recurrent = "1: on a real device recurrent layers save other bytes than are counted here"
    subject = subject_of(model, torch.randn(2, 5, 16), *settings)
    assert count_structure(each_itself(subject), [SIZE])[-1] == [recurrent]
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    subject = subject_of(Attends(), torch.randn(2, 10, 16), *settings)
    *_, notes = count_structure(each_itself(subject), [SIZE])
    missing = f"torch {torch.__version__} has no torch._fused_sdp_choice"
    assert notes == [f"attention is counted with its whole matrix, which is more: {missing}"]

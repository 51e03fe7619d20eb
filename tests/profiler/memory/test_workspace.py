"""Workspace and peaks counted by hand, and the peak of a step predicted from its layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from pplan.cost_models.memory import workspace_before_loss
from pplan.profiler.layer import Layer
from pplan.profiler.layers import build_chain
from pplan.profiler.losses import load_loss
from pplan.profiler.measure import profile_model
from pplan.profiler.memory import (
    CpuAllocations,
    LiveBytes,
    LossWorkspace,
    Meter,
    StepMemory,
    Workspace,
    build_meter,
    lasting,
    peak_of_step,
)
from pplan.profiler.passes import CompositeWatcher, OutputGradients, SavedBytes, backward, run_layers
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_options import ProfileOptions
from tests.stage_bytes import stage_workspace


def measured(
    model: nn.Module,
    layers: tuple[Layer, ...],
    given: Tensor,
    *,
    apart: bool = False,
    meter: Meter | None = None,
) -> tuple[StepMemory, int]:
    """The layers' bytes, and the peak of the untouched model's step; of tensors alone, unless a meter is
    given."""
    meter, gradients = meter or LiveBytes(given.device, lasting(model)), OutputGradients(0)
    with meter:
        watcher = SavedBytes(model, len(layers))
        with watcher.hooks():
            run_layers(layers, given.clone(), gradients, watcher)
    with meter:
        again = given.clone()
        workspace, counting = Workspace(model, len(layers), meter, [again]), SavedBytes(model, len(layers))
        if apart:
            run_layers(layers, again, gradients, workspace)
        else:
            with counting.hooks():
                run_layers(layers, again, gradients, CompositeWatcher(counting, workspace))
    memory = workspace.memory(watcher.counted.saved_bytes)
    peak = peak_of_step(lambda: backward(*gradients.of(model(again))), meter)
    return memory, peak


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_three_layers_byte_for_byte(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False)).to(device)
    given = torch.ones(2, 4, device=device)
    memory, peak = measured(model, build_chain(model, given).layers, given)
    # The input; ReLU's result, which is the last layer's input.
    assert memory.saved == (32, 64, 0)
    # 192 of weights and as much of gradients; the gradient that backward starts from, and the input that the
    # test keeps besides the one that the pass works on.
    assert (memory.static, memory.other) == (384 + 16 + 32, 16 + 32)
    # Outputs: the first is saved by nobody, and still there while ReLU makes the second, which is.
    assert memory.forward == (64, 64, 16)
    # The gradients at an output and at an input, or of a weight, besides; and the model's output itself.
    assert memory.backward == (16 + 64 + 128, 16 + 64 + 64, 16 + 64 + 64)
    assert memory.workspace == (208, 144, 144)
    assert memory.predicted_peak == 432 + max(32 + 208, 96 + 144, 96 + 144)
    assert peak == memory.predicted_peak


class FakeMeter:
    """The peaks of its intervals are those of a list; so much is held between them."""

    def __init__(self, peaks: Sequence[int], held: int) -> None:
        self.peaks, self.held, self.marks = peaks, held, 0

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...

    def mark(self) -> int:
        self.marks += 1
        return self.marks - 1

    def peak_in(self, interval: int) -> int:
        return self.peaks[interval]

    def held_after(self, interval: int) -> int:  # noqa: ARG002
        return self.held

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors)


def test_peaks_are_taken_above_what_is_kept_by_then() -> None:
    meter = FakeMeter([999, 999, 180, 999, 190, 999, 160, 999, 260, 230], held=110)
    model = nn.Linear(2, 5, bias=False)
    watcher = Workspace(model, 3, meter, [torch.ones(1)])
    assert watcher.static_bytes == 106
    for index in range(3):
        watcher.before(index, None)
        watcher.after(index, None)
    watcher.backward_starts()
    watcher.gradient(0, torch.ones(1))  # Layer 1 is frozen: both belong to layer 2.
    watcher.backward_ends()
    memory = watcher.memory([50, 0, 20])
    assert (memory.static, memory.other) == (106, 66)
    # Kept: 156, 156, 176; the third layer's forward stays below that.
    assert memory.forward == (24, 34, 0)
    assert memory.backward == (74, 0, 84)
    assert memory.workspace == (74, 34, 84)
    assert memory.predicted_peak == 106 + max(50 + 74, 50 + 34, 70 + 84)
    assert meter.marks == 10


def test_several_gradients_of_one_layer_belong_to_the_next() -> None:
    """Where several tensors cross, each may tell."""
    meter = FakeMeter([99, 99, 1, 99, 1, 99, 1, 99, 10, 30, 20, 5], held=0)
    watcher = Workspace(nn.Identity(), 3, meter)
    for index in range(3):
        watcher.before(index, None)
        watcher.after(index, None)
    watcher.backward_starts()
    watcher.gradient(1, torch.ones(1))  # 10: of layer 2
    watcher.gradient(1, torch.ones(1))  # 30: of layer 1
    watcher.gradient(0, torch.ones(1))  # 20: of layer 1
    watcher.backward_ends()
    assert watcher.memory([0, 0, 0]).backward == (5, 30, 10)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU())

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.inner(given) + given
        return result


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        Residual(),
        nn.MaxPool2d(2),
        nn.Dropout(0.4),
        nn.Flatten(),
        nn.Linear(100, 7),
        nn.Softmax(1),
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("size", [1, 8])
def test_the_peak_of_a_step_follows_from_its_layers(device: str, size: int) -> None:
    model = convolutions().to(device)
    given = torch.ones(size, 3, 10, 10, device=device)
    memory, peak = measured(model, build_chain(model, given).layers, given)
    assert peak == memory.predicted_peak
    assert max(memory.workspace) > 0


def test_the_cpu_counts_what_meta_does_and_one_pass_what_two_do() -> None:
    found = []
    for device, apart in [("cpu", False), ("cpu", True), ("meta", False)]:
        model = convolutions().to(device)
        given = torch.ones(2, 3, 10, 10, device=device)
        found.append(measured(model, build_chain(model, given).layers, given, apart=apart))
    assert found[0] == found[1] == found[2]


def test_an_early_peak_is_no_late_one() -> None:
    """A large temporary before much is saved: adding it to all that is saved would be far too much."""

    class Wide(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            result: Tensor = (given.detach().repeat(1, 40)).sum() * 0 + given
            return result

    later = (nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(50))
    model = nn.Sequential(nn.Linear(10, 10), Wide(), *later)
    given = torch.ones(100, 10)
    memory, peak = measured(model, build_chain(model, given).layers, given)
    assert memory.workspace[1] >= 100 * 400 * 4
    assert peak == memory.predicted_peak
    assert memory.static + sum(memory.saved) + max(memory.workspace) > 1.2 * peak


def test_the_peak_holds_what_operators_allocate_for_themselves() -> None:
    """Of a model of convolutions the parts say what the allocator says of the whole, and more than its
    tensors do."""
    model, given = convolutions(), torch.ones(8, 3, 10, 10)
    layers = build_chain(model, given).layers
    tensors_only, _ = measured(model, layers, given)
    memory, peak = measured(model, layers, given, meter=CpuAllocations(lasting(model)))
    # The input of that step was there before the meter was entered.
    assert memory.predicted_peak == pytest.approx(peak + given.nbytes, rel=0.01)
    assert memory.predicted_peak > tensors_only.predicted_peak - given.nbytes
    assert max(memory.workspace) > max(tensors_only.workspace)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "vit_b_16"])
def test_known_models_on_meta(name: str) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
    given = torch.empty(4, 3, 224, 224, device="meta")
    memory, peak = measured(model, build_chain(model, given).layers, given)
    assert memory.predicted_peak == pytest.approx(peak, rel=0.01)


def test_frozen_layers_need_nothing_in_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    given = torch.ones(2, 4)
    memory, peak = measured(model, build_chain(model, given).layers, given)
    assert memory.backward[:2] == (0, 0)
    assert peak == memory.predicted_peak


@pytest.mark.gpu
def test_on_a_device() -> None:
    model = convolutions().cuda()
    given = torch.randn(64, 3, 10, 10, device="cuda")
    memory, peak = measured(model, build_chain(model, given).layers, given)
    assert min(memory.workspace) >= 0
    assert memory.predicted_peak == pytest.approx(peak, rel=0.05)


def half_precision_step(size: int, name: str) -> tuple[Profile, int]:
    """A model of few weights and a wide output: its profile with the loss, and the peak of a real step."""
    model = nn.Sequential(nn.Embedding(2000, 8), nn.Linear(8, 2000))
    given = torch.randint(2000, (size, 16))
    profile = profile_model(
        (model, given),
        ProfileOptions(micro_batch_sizes=[size], device="cpu", loss=name, amp="bf16"),
        rounds=1,
        parts=False,
    )
    loss = load_loss(name)
    assert loss is not None

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            made = loss.without_targets().of(model(given))
        torch.autograd.backward([made])

    step()
    return profile, peak_of_step(step, build_meter(given.device, model)) + given.nbytes


@pytest.mark.parametrize("name", ["cross-entropy", "mse"])
def test_the_ledger_of_the_last_stage_holds_the_peak_with_the_loss(name: str) -> None:
    profile, peak = half_precision_step(8, name)
    chain = profile.chain()
    saved, workspace = chain.saved_bytes[:, 0].tolist(), chain.workspace_bytes[:, 0].tolist()
    static = 2 * float(chain.parameter_bytes.sum())
    predicted = static + sum(saved) + stage_workspace(saved, workspace)
    assert predicted == pytest.approx(peak, rel=0.01)
    # Without the loss' own the peak was missed by far.
    own = [layer.costs[0].workspace_bytes for layer in profile.layers]
    assert profile.loss is not None
    of_loss = profile.loss.costs[0]
    assert of_loss.workspace_bytes == max(
        of_loss.forward_workspace_bytes or 0, of_loss.backward_workspace_bytes or 0
    )
    assert of_loss.workspace_bytes > own[-1] - of_loss.saved_bytes
    assert static + sum(saved) + own[-1] - of_loss.saved_bytes < 0.9 * peak


def test_the_loss_workspace_is_above_all_that_is_saved() -> None:
    meter = FakeMeter([99, 99, 3, 99, 90, 99, 8, 70], held=10)
    watcher = Workspace(nn.Identity(), 1, meter)
    for index in range(2):
        watcher.before(index, None)
        watcher.after(index, None)
    watcher.backward_starts()
    watcher.gradient(0, torch.ones(1))
    watcher.backward_ends()
    assert watcher.loss([20], 30) == LossWorkspace(forward=90 - 60, backward=0)
    assert watcher.loss([0], 0).larger == 80


def test_the_last_layers_workspace_with_the_loss() -> None:
    """Never both: the layer's own peak is over when the loss saves."""
    assert workspace_before_loss(100, 30, 50) == 70
    assert workspace_before_loss(100, 30, 90) == 90
    assert workspace_before_loss(10, 30, 0) == 0

"""What a stage saves on the host: gradients of plain autograd, each storage copied once, and given back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.functional import gelu

from pplan.profiler.torch_private import storage_key
from pplan.runtimes.pipelining import stage as offloading
from pplan.runtimes.pipelining.stage import SavedOnHost, StageModule


class Block(nn.Module):
    """Residual, with views of one storage, a mask, and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(self.norm(x)).chunk(3, -1)
        turned = torch.fft.ifft(torch.fft.fft(gelu(a) * b).conj()).real
        own: Tensor = x + self.drop(self.down(turned * c.relu()))
        return own


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "blocks": lambda: (nn.Sequential(Block(), Block()), torch.randn(4, 5, 8)),
    "images": lambda: (
        nn.Sequential(
            *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(54, 5)),
        ),
        torch.randn(4, 3, 12, 12),
    ),
    "mlp": lambda: (
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
        torch.randn(4, 8, requires_grad=True),
    ),
}


def weights(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """The copies on the host, as they are made."""
    own, allocate = list[weakref.ref[Tensor]](), offloading.allocate_on_host

    def watched(size: int, *, pinned: bool) -> Tensor:
        made = allocate(size, pinned=pinned)
        own.append(weakref.ref(made))
        return made

    monkeypatch.setattr(offloading, "allocate_on_host", watched)
    return own


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Of the storages that autograd saves, each once, but those of weights and of the input."""
    kept, alive = {storage_key(own) for own in [x, *weights(model)]}, dict[int, Any]()

    def pack(tensor: Tensor) -> Tensor:
        plain = not (tensor.is_conj() or tensor.is_neg())
        if plain and storage_key(tensor) not in kept:
            alive[storage_key(tensor)] = tensor.untyped_storage()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(storage.nbytes() for storage in alive.values())


def run(model: nn.Module, x: Tensor, context: Any) -> tuple[list[Tensor], Tensor | None]:
    """The gradients of a forward inside of the context."""
    torch.manual_seed(3)
    model.zero_grad()
    x.grad = None
    with context:
        output = model(x)
    output.square().sum().backward()
    return [own.grad.clone() for own in model.parameters() if own.grad is not None], x.grad


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_plain_autograd_and_each_storage_is_copied_once(
    name: str, copied: list[weakref.ref[Tensor]]
) -> None:
    torch.manual_seed(1)
    model, x = MODELS[name]()
    plain = run(model, x, torch.enable_grad())
    offloaded = run(model, x, SavedOnHost(x.device, [x, *weights(model)]))
    assert all(torch.equal(a, b) for a, b in zip(plain[0], offloaded[0], strict=True))
    assert (plain[1] is None) == (offloaded[1] is None)
    copied.clear()
    with SavedOnHost(x.device, [x, *weights(model)]):
        output = model(x)
    held = [own() for own in copied]
    assert sum(own.numel() for own in held if own is not None) == saved_bytes(model, x)
    del held
    output.sum().backward()
    del output
    gc.collect()
    assert [own() for own in copied] == [None] * len(copied)  # all are given back


def test_save_on_cpu_copies_weights_and_what_is_saved_twice() -> None:
    """What makes it no hook for this."""
    model, x = MODELS["mlp"]()
    sizes, packed = list[int](), save_on_cpu().pack_hook
    with saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or packed(t), lambda p: p[1]):  # type: ignore[func-returns-value]
        model(x)
    hidden, weight = 4 * 16 * 4, 16 * 8 * 4
    assert sorted(sizes) == sorted([x.nbytes, weight, hidden, hidden, weight])


def test_values_are_those_at_the_time_of_saving() -> None:
    """A buffer that a later micro-batch overwrites, and an operation in place."""

    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = x * self.scale.clone() * self.scale
            return output

    layer = Scaled()
    module = StageModule(nn.Sequential(layer), written=["0.scale"], offloads=True, is_last=True)
    x = torch.ones(2, 3, requires_grad=True)
    output = module(x)
    with torch.no_grad():
        layer.scale += 5
    output.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(2, 3))


def test_nothing_is_copied_without_a_backward(copied: list[weakref.ref[Tensor]]) -> None:
    model, x = MODELS["images"]()
    module = StageModule(nn.Sequential(model), offloads=True, is_last=True)
    with torch.no_grad():
        module(x)
    assert not copied
    module(x)
    assert copied

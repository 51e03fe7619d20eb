"""Autocast on the meta device against torch's own on the CPU: the same bytes in the same dtypes are saved."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from pplan.profiler.estimate import as_on_the_cpu
from pplan.profiler.modes import AutocastOnMeta


class Blocks(nn.Module):
    """Attention, as torch has it and by hand, norms, and a residual that joins two dtypes. Without softmax,
    which on CUDA alone is made in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(*[self.norm(x)] * 3, need_weights=False)[0]
        scores = torch.tanh(x @ x.transpose(1, 2))
        x = torch.cat([x, scores @ x], dim=1)
        made: Tensor = self.head(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return made


class Exported(nn.Module):
    """Calls as torch.export writes them, of queries and keys in float32, as rotary positions leave them, and
    of values in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.head = nn.Linear(32, 32), nn.Linear(32, 17)

    def forward(self, x: Tensor) -> Tensor:
        aten = torch.ops.aten
        mixed = aten.scaled_dot_product_attention.default(x, x, self.values(x), is_causal=True)
        scores: Tensor = self.head(aten.matmul.default(x, aten.transpose.int(mixed, 1, 2)) @ x)
        return scores


def saved(model: nn.Module, given: Tensor) -> tuple[Counter[torch.dtype], set[torch.dtype]]:
    """Bytes that a step saves besides weights, by dtype, and the dtypes of the gradients."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor.detach()

    on_meta = given.device.type == "meta"
    context = AutocastOnMeta(torch.bfloat16) if on_meta else torch.autocast("cpu", torch.bfloat16)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, as_on_the_cpu() if on_meta else nullcontext():
        with context:
            output = model(given)
            target = torch.zeros(output.shape[:-1], dtype=torch.long, device=given.device)
            loss = nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
    found: Counter[torch.dtype] = Counter()
    for key, tensor in kept.items():
        if key not in own:
            found[tensor.dtype] += tensor.untyped_storage().nbytes()
    return found, {p.grad.dtype for p in model.parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["resnet18", "transformer", "mlp", "exported"])
def test_the_same_is_saved_as_on_the_cpu(name: str) -> None:
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            if name == "resnet18":
                model, given = models.resnet18(), torch.zeros(2, 3, 64, 64)
            elif name == "transformer":
                model, given = Blocks(), torch.zeros(3, 8, dtype=torch.long)
            elif name == "exported":
                model, given = Exported(), torch.zeros(3, 8, 32)
            else:
                model = nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.BatchNorm1d(50), nn.Linear(50, 10))
                given = torch.zeros(4, 30)
        found.append(saved(model, given))
    assert found[0] == found[1]
    assert found[0][0][torch.bfloat16] > 0
    assert found[0][1] == {torch.float32}


def test_weights_are_converted_once_a_context() -> None:
    with torch.device("meta"):
        layer, given = nn.Linear(3, 3), torch.zeros(2, 3)
    context = AutocastOnMeta(torch.float16)
    copies = []
    for _ in range(2):
        with context:
            layer(layer(given))
            copies.append([copy for _, copy in context._copies.values()])
        assert not context._copies
    assert [len(own) for own in copies] == [2, 2]
    assert copies[0][0] is not copies[1][0]

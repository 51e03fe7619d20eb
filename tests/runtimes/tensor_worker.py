"""A process of test_tensor_parallel.py and test_tensor_parallel_profile.py: trains a small Llama, or plain
blocks, in a pipeline whose stages share matrices, and plainly; or profiles both with shared matrices."""

from __future__ import annotations

import copy
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import pplan
from pplan.profiler.layers import sequential
from pplan.profiler.models import load_model
from pplan.runtimes.documents import TorchExport
from pplan.runtimes.torch_pipelining import build

LLAMA = {
    "num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "vocab_size": 40, "head_dim": 4, "max_position_embeddings": 16,
}  # fmt: skip
STEPS, TOKENS = 3, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return mixed


def make(kind: str) -> tuple[nn.Module, Any, Any]:
    """Model, an example of its input, and its tensor-parallel plan."""
    torch.manual_seed(3)
    if kind == "blocks":
        layers = nn.Sequential(nn.Embedding(40, 16), *(Block() for _ in range(3)), nn.Linear(16, 40))
        return layers.double(), torch.zeros(2, TOKENS, dtype=torch.long), {"up": "colwise", "down": "rowwise"}
    loaded = load_model("hf:llama", settings=LLAMA, seed=3)
    module: Any = loaded.module
    example = loaded.example.layer_input
    plan = module.config.base_model_tp_plan
    return sequential(module.double(), example, verify=False), example, plan


def loss_of(output: Any, labels: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output["logits"]
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(model: nn.Module, ids: Tensor, labels: Tensor, micro_batches: int) -> list[list[float]]:
    """The plain layers, one after another; the gradients of the last step stay."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses: list[list[float]] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append([])
        for own, target in zip(ids.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            loss = loss_of(model(own), target)
            (loss / micro_batches).backward()  # type: ignore[no-untyped-call]
            losses[-1].append(loss.item())
        optimizer.step()
    return losses


def main(folder: Path, rank: int, world: int, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meeting", timedelta(seconds=60), rank=rank, world_size=world
    )
    result = profile(rank) if kind == "profile" else train_both(folder, rank, kind)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def profile(rank: int) -> dict[str, Any]:
    """The layers of both models, each of which both processes have a part of."""
    os.environ["RANK"] = str(rank)
    blocks = nn.Sequential(Block(), Block(), nn.Linear(16, 4))
    profiles = {
        "blocks": pplan.profile(
            blocks,
            torch.zeros(1, 8, 16),
            tensor_parallel=2,
            tensor_plan={"up": "colwise", "down": "rowwise"},
            micro_batch_sizes=(1, 2),
            budget_seconds=0.2,
        ),
        "llama": pplan.profile(
            "hf:llama",
            settings=LLAMA | {"num_hidden_layers": 2},
            tensor_parallel=2,
            micro_batch_sizes=(1, 2),
            budget_seconds=0.2,
        ),
    }
    return {name: json.loads(own.to_json()) for name, own in profiles.items()}


def train_both(folder: Path, rank: int, kind: str) -> dict[str, Any]:
    """Losses of the pipeline and of the plain model, and how far apart their gradients and weights are."""
    document = TorchExport.load(folder / "small.torch.json")
    layers, example, plan = make(kind)
    plain = copy.deepcopy(layers)
    if rank % 2:  # those of the first that share count
        for parameter in layers.parameters():
            nn.init.normal_(parameter)
    torch.manual_seed(5)
    tokens = TOKENS if kind == "blocks" else example.shape[1]
    ids, labels = torch.randint(40, (2, document.mini_batch, tokens))
    replicate: Any = "fsdp" if document.replicas > 1 else None
    process = build(
        document,
        layers,
        example_input=example,
        loss_fn=loss_of,
        device="cpu",
        tensor_parallel=plan,
        replicate=replicate,
    )
    optimizer = torch.optim.Adam(process.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = process.step(
            process.share(ids) if process.is_first else None,
            process.share(labels) if process.is_last else None,
        )
        losses.append([loss.item() for loss in found])
        optimizer.step()

    plain_losses = train(plain, ids, labels, document.micro_batches)
    expected, off, split = dict(plain.named_parameters()), 0.0, 0
    for name, own in [each for module in process.modules.values() for each in module.named_parameters()]:
        for mine, theirs in ((own.grad, expected[name].grad), (own, expected[name])):
            assert mine is not None
            assert theirs is not None
            whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
            off = max(off, (whole - theirs).abs().max().item())
        parts = 2 * document.replicas
        split += isinstance(own, DTensor) and own.to_local().numel() * parts == own.numel()
    return {"losses": losses, "plain_losses": plain_losses, "off": off, "split": split}


if __name__ == "__main__":
    main(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[1])

"""One process of test_deepspeed.py: trains a small model as an exported file says, and plainly."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pplan.runtimes.deepspeed import DeepspeedExport, build

STEPS = 2


def small_model() -> nn.Sequential:
    """Ten layers in the manner of VGG. In-place layers follow a convolution."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 10),
    )


def small_batch(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(samples, 3, 8, 8), torch.randint(10, (samples,))


def share(document: DeepspeedExport, rank: int) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a rank: its replica's part of each."""
    images, labels = small_batch(document.mini_batch)
    replica, size = rank % document.replicas, document.micro_batch_size // document.replicas
    starts = range(replica * size, document.mini_batch, document.micro_batch_size)
    return [(images[i : i + size], labels[i : i + size]) for i in starts]


def train_plainly(samples: int) -> dict[str, Any]:
    """The same steps of the whole model on whole mini-batches, with the exported optimizer's settings."""
    model, (images, labels) = small_model(), small_batch(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "parameters": values_of(model)}


def values_of(model: nn.Module) -> dict[str, Any]:
    return {name: value.detach().tolist() for name, value in model.named_parameters()}


def main(path: Path, output: Path) -> None:
    document = DeepspeedExport.load(path)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    model = build(document, small_model(), cross_entropy)
    engine, *_ = deepspeed.initialize(
        model=model, config=document.config, model_parameters=model.parameters()
    )
    fed: list[int] = []
    model.forward_funcs[0].register_forward_hook(lambda _module, inputs, _output: fed.append(len(inputs[0])))
    losses = [engine.train_batch(iter(share(document, rank))).item() for _ in range(STEPS)]
    result = {
        "losses": losses,
        "fed": fed,
        "layers": len(model.forward_funcs),
        "parameters": values_of(model),
        "plain": train_plainly(document.mini_batch),
    }
    (output / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

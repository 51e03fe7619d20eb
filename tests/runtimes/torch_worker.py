"""One of four processes of test_torch_pipelining.py: trains small models as files say, and plainly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import pplan
from pplan.runtimes.documents import TorchExport
from pplan.runtimes.pipelining.process import PipelineProcess
from pplan.runtimes.torch_pipelining import build

RANKS = 4
STEPS = 2
LEARNING_RATE = 0.1


def vgg_like() -> nn.Sequential:
    """Ten layers; layers 1, 4 and 8 overwrite what they are handed."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 12),
        nn.ReLU(inplace=True),
        nn.Linear(12, 5),
    )


def frozen() -> nn.Sequential:
    """The same, trained from layer 4 on."""
    model = vgg_like()
    model[:4].requires_grad_(False)
    return model


class LooksAtValues(nn.Module):
    """What no shape can be told of without values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) > 0 else 2 * x


def stubborn() -> nn.Sequential:
    """Six layers. Layer 3 overwrites what it is handed."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), LooksAtValues())
    return model.extend([nn.ReLU(inplace=True), nn.BatchNorm1d(6), nn.Linear(6, 5)])


class Masking(nn.Module):
    """Hands on what gets no gradient, too: a mask, indices, a part of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        part = x[:, :6]
        return self.linear(x), part > 0, part.argsort(-1), part


class Masked(nn.Module):
    """Looks at values first, as DETR does."""

    def forward(self, handed: tuple[Tensor, ...]) -> Tensor:
        x, mask, order, part = handed
        if not torch.isfinite(x.detach()).all():
            raise ValueError("not finite")
        return torch.where(mask, x, part).gather(-1, order)


def masking() -> nn.Sequential:
    """Five layers. The cut behind layer 1 is crossed by a mask, that behind layer 2 is not."""
    return nn.Sequential(nn.Flatten(), Masking(), Masked(), nn.Linear(6, 6), nn.Linear(6, 5))


class ResNetLike(nn.Module):
    """Cut finely: two tensors cross the cuts of a block. Its batch norms count the batches they see."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first_norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.middle, self.second_norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.last, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        trunk = self.relu(self.first_norm(self.stem(images)))
        branch = self.last(self.relu(self.second_norm(self.middle(trunk))))
        logits: Tensor = self.head(self.pool(branch + trunk).flatten(1))
        return logits


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed: Tensor = x + self.out(scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return mixed


class TransformerLike(nn.Module):
    """Two inputs, one of which all samples share; a mask crosses the cuts; the output is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(4))
        self.head = nn.Linear(6, 5)

    def forward(self, ids: Tensor, positions: Tensor) -> dict[str, Any]:
        mask = (ids != 0)[:, None, :]
        x = self.embedding(ids) + positions
        for block in self.blocks:
            x = block(x, mask)
        return {"logits": self.head(x.mean(1)), "aside": None}


class TiedLike(nn.Module):
    """The embedding's weight is the head's, too; a block comes twice, and a third layer takes its weight."""

    def __init__(self) -> None:
        super().__init__()
        linear = nn.Linear(6, 6)
        self.embedding, self.block = nn.Embedding(11, 6), nn.Sequential(linear, nn.Tanh())
        self.norm, self.again = nn.LayerNorm(6), nn.Linear(6, 6)
        self.again.weight = linear.weight
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block(self.norm(self.block(self.embedding(ids))))
        logits: Tensor = self.head(self.again(x)).mean(1)
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vgg": vgg_like,
    "frozen": frozen,
    "stubborn": stubborn,
    "masking": masking,
    "resnet": ResNetLike,
    "transformer": TransformerLike,
    "tied": TiedLike,
}


def made(kind: str, replica: int = 0) -> nn.Module:
    """Replicas begin with other values, and are to go on with the first one's."""
    torch.manual_seed(1 + replica)
    return MODELS[kind]().double()


def batch(kind: str, samples: int) -> tuple[Any, Tensor]:
    torch.manual_seed(2)
    labels = torch.randint(5, (samples,))
    if kind == "tied":
        return torch.randint(11, (samples, 7)), labels
    if kind == "transformer":
        ids = torch.randint(11, (samples, 7))
        ids[:, 0] = 1
        return (ids, torch.randn(7, 6).double()), labels
    return torch.randn(samples, 3, 8, 8).double(), labels


def loss_of(output: Any, labels: Tensor) -> Tensor:
    return cross_entropy(output["logits"] if isinstance(output, dict) else output, labels)


def parts(kind: str, document: TorchExport) -> Iterator[tuple[Any, Tensor]]:
    """What a replica's stage sees at a time: batch norm knows of no more."""
    (given, labels), of_one = batch(kind, document.mini_batch), document.micro_batch_size // document.replicas
    for start in range(0, document.mini_batch, of_one):
        rows = slice(start, start + of_one)
        yield ((given[0][rows], given[1]) if isinstance(given, tuple) else given[rows]), labels[rows]


def train_plainly(
    kind: str, document: TorchExport, layers: nn.Module, model: nn.Module, *, sums: bool
) -> list[list[float]]:
    """The loss of every part of every step of the untouched model, whose layers `layers` are. `sums`: of the
    sum of the losses, and of all steps' gradients together."""
    optimizer = torch.optim.SGD(layers.parameters(), lr=LEARNING_RATE)
    losses: list[list[float]] = []
    for _ in range(STEPS):
        if not sums:
            optimizer.zero_grad()
        losses.append([])
        for given, labels in parts(kind, document):
            loss = loss_of(model(*given) if isinstance(given, tuple) else model(given), labels)
            count = document.replicas * (1 if sums else document.micro_batches)
            (loss / count).backward()  # type: ignore[no-untyped-call]
            losses[-1].append(loss.item())
        optimizer.step()
    return losses


TRAINED: dict[tuple[object, ...], tuple[nn.Module, list[list[float]]]] = {}
"""By what plain training depends on."""


def trained_plainly(kind: str, document: TorchExport, *, sums: bool) -> tuple[nn.Module, list[list[float]]]:
    """The layers of the untouched model, and its losses; cases that differ in the schedule share them."""
    key = (kind, document.mini_batch, document.micro_batches, document.replicas, document.granularity, sums)
    if key not in TRAINED:
        model, (example, _) = made(kind), batch(kind, 3)
        own = isinstance(model, nn.Sequential)
        granularity = document.granularity
        layers = model if own else pplan.sequential(model, example, granularity=granularity, verify=False)
        TRAINED[key] = layers, train_plainly(kind, document, layers, model, sums=sums)
    return TRAINED[key]


def train(kind: str, document: TorchExport, process: PipelineProcess, *, sums: bool) -> list[list[float]]:
    given, labels = batch(kind, document.mini_batch)
    own = process.share(given)
    parameters = process.parameters()
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE) if parameters else None
    losses = []
    for _ in range(STEPS):
        for parameter in parameters if not sums else ():
            parameter.grad = None
        target = process.share(labels) if process.is_last else None
        found = process.step(own if process.is_first else None, target)
        losses.append([loss.item() for loss in found])
        if optimizer is not None:
            optimizer.step()
    return losses


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_copy(copied: nn.Parameter, plain: Iterable[nn.Parameter]) -> Iterator[float]:
    """How far the gradient and the value of a copy are from those of the plain model's parameter that it is
    the closest to."""
    likes = [own for own in plain if own.shape == copied.shape]
    near = min(likes, key=lambda own: (whole(copied.detach()) - own).abs().max().item())
    yield (whole(copied.grad) - whole(near.grad)).abs().max().item()
    yield (whole(copied.detach()) - near).abs().max().item()


def run(case: dict[str, Any], mesh: DeviceMesh | None) -> dict[str, Any]:
    kind, document = case["model"], TorchExport.load(Path(case["file"]))
    example, _ = batch(kind, 3)
    process = build(
        document,
        made(kind, dist.get_rank() % document.replicas),
        example_input=example,
        loss_fn=loss_of,
        device="cpu",
        mesh=mesh,
        replicate=case["replicate"],
        sum_losses=case["sums"],
    )
    losses = train(kind, document, process, sums=case["sums"])
    layers, plain_losses = trained_plainly(kind, document, sums=case["sums"])
    plain = {name: value for name, value in layers.named_parameters() if value.requires_grad}
    gradients, values, buffers, copies = {}, {}, {}, list[float]()
    for module in process.wrapped.values():
        for name, parameter in module.named_parameters():
            short = name.removeprefix("module.").removeprefix("layers.")
            if short not in plain:
                copies += check_copy(parameter, plain.values()) if kind == "tied" else []
                continue
            gradients[short] = (whole(parameter.grad) - whole(plain[short].grad)).abs().max().item()
            values[short] = (whole(parameter.detach()) - plain[short]).abs().max().item()
        plain_buffers = dict(layers.named_buffers())
        for name, buffer in module.named_buffers():
            short = name.removeprefix("module.").removeprefix("layers.")
            buffers[short] = (buffer - plain_buffers[short]).abs().max().item()
    return {
        "losses": losses,
        "plain_losses": plain_losses,
        "gradients": gradients,
        "values": values,
        "buffers": buffers,
        "copies": copies,
        "names": sorted(plain),
        "largest_gradient": max(whole(p.grad).abs().max().item() for p in plain.values()),
        "stages": {stage: len(module) for stage, module in process.modules.items()},
        "schedule": type(process.schedule).__name__,
        "wrapped": sorted({type(module).__name__ for module in process.wrapped.values()}),
        "replica": process.coordinates.replica,
    }


def main(folder: Path, rank: int) -> None:
    """Cases of four processes are run by all, those of two by each pair in turn, of which a mesh tells."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, timedelta(seconds=60), rank=rank, world_size=RANKS)
    stages = init_device_mesh("cpu", (RANKS // 2, 2), mesh_dim_names=("pair", "pp"))["pp"]
    replicas = init_device_mesh("cpu", (RANKS // 2, 1, 2), mesh_dim_names=("pair", "pp", "dp"))["pp", "dp"]
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        mine = case["ranks"] == RANKS or number % 2 == rank // 2
        # Groups of processes that share a weight are made by all processes of a job.
        if not mine and case["model"] != "tied":
            continue
        mesh = None if case["ranks"] == RANKS else stages if case["replicas"] == 1 else replicas
        result = run(case, mesh)
        if not mine:
            continue
        (folder / f"{case['name']}.{rank % case['ranks']}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

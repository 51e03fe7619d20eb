"""A process of test_training.py: trains small models by `pplan.runtimes.training`, and plainly."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pplan.runtimes.pipelining.training import Training
from pplan.runtimes.training import build

STEPS = 3
CLASSES = 5


class Vision(nn.Module):
    """Two residual blocks; the second ReLU overwrites what it is handed."""

    def __init__(self, norm: Callable[[int], nn.Module] = lambda _: nn.Identity(), drop: float = 0.0) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), norm(6)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(drop)
        self.middle, self.second = nn.Conv2d(6, 6, 3, padding=1), norm(6)
        self.head = nn.Linear(6, CLASSES)
        self.unused = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.drop(self.relu(self.norm(self.stem(images))))
        x = x + self.second(self.middle(x))
        logits: Tensor = self.head(self.relu(x).mean((2, 3)))
        return logits


class Text(nn.Module):
    """The head's weight is the embedding's; a mask crosses the cuts; inputs and the output are dicts."""

    def __init__(self, returns_loss: bool = False) -> None:
        super().__init__()
        self.returns_loss = returns_loss
        self.embedding = nn.Embedding(11, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, extra: dict[str, Tensor], labels: Tensor | None = None) -> dict[str, Any]:
        x = (self.embedding(ids) + extra["positions"]) * extra["mask"][..., None]
        x = x + torch.tanh(self.first(x))
        x = x + torch.tanh(self.second(x))
        output = {"logits": self.head(x)}
        if labels is not None:
            output["loss"] = cross_entropy(output["logits"].flatten(0, 1), labels.flatten())
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vision": Vision,
    "norm": partial(Vision, nn.BatchNorm2d),
    "dropout": partial(Vision, drop=0.5),
    "text": Text,
    "own loss": Text,
}


class Batch(NamedTuple):
    input: Any
    target: Any


def made(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[kind]().to(dtype)


def batch(kind: str, samples: int, step: int, dtype: torch.dtype) -> Batch:
    """The words of the first samples have no labels."""
    random = torch.Generator().manual_seed(step)
    if kind not in ("text", "own loss"):
        images = torch.randn(samples, 3, 6, 6, generator=random, dtype=torch.float64).to(dtype)
        return Batch(images, torch.randint(CLASSES, (samples,), generator=random))
    ids = torch.randint(11, (samples, 4), generator=random)
    mask = torch.randint(2, (samples, 4), generator=random).to(dtype)
    positions = torch.randn(4, 6, generator=random, dtype=torch.float64).to(dtype)
    labels = torch.randint(11, (samples, 4), generator=random)
    inputs = {"ids": ids, "extra": {"mask": mask, "positions": positions}}
    if kind == "own loss":
        return Batch(inputs | {"labels": labels}, None)
    labels[: samples // 2, 1:] = -100
    labels[: samples // 4] = -100
    return Batch(inputs, {"labels": labels})


def loss_of(output: Any, target: Any, reduction: str) -> Tensor:
    if isinstance(output, dict):
        return cross_entropy(output["logits"].flatten(0, 1), target["labels"].flatten(), reduction=reduction)
    return cross_entropy(output, target, reduction=reduction)


def call(model: nn.Module, given: Any) -> Any:
    return model(**given) if isinstance(given, dict) else model(given)


def divisor_of(case: dict[str, Any], target: Any) -> Any:
    """The valid labels of a batch, where the loss is a sum."""
    if case["reduction"] == "mean":
        return None
    return (target["labels"] != -100).sum() if isinstance(target, dict) else len(target)


class Results:
    """What is compared, by name."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"losses": [], "norms": []}

    def add_state(self, what: str, tensors: Mapping[str, Tensor | None]) -> None:
        for name, tensor in tensors.items():
            if tensor is not None:
                self.values[f"{what} {name}"] = tensor.detach().double().flatten().tolist()


def optimizer_of(case: dict[str, Any]) -> Any:
    return partial(torch.optim.AdamW, lr=0.01) if case["adam"] else partial(torch.optim.SGD, lr=0.1)


def autocast(case: dict[str, Any]) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if case["autocast"] else contextlib.nullcontext()


def train_plainly(case: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The plain model, in one process, on whole batches."""
    kind, results = case["model"], Results()
    model = made(kind, dtype)
    optimizer = optimizer_of(case)(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=case["scale"]) if case["scale"] else None
    for step in range(case["first"] + STEPS):
        given, target = batch(kind, case["samples"][step % STEPS], step, dtype)
        optimizer.zero_grad()
        with autocast(case):
            output = call(model, given)
            if target is None:
                loss = output["loss"]
            else:
                loss = loss_of(output, target, case["reduction"]) / (divisor_of(case, target) or 1)
        (loss if scaler is None else scaler.scale(loss)).backward()
        results.values["losses"].append(loss.item())
        if scaler is not None:
            scaler.unscale_(optimizer)
        parameters = [own for own in model.parameters() if own.grad is not None]
        results.values["norms"].append(nn.utils.clip_grad_norm_(parameters, case["clip"]).item())
        if step == case["first"] + STEPS - 1:
            results.add_state("gradient", {name: own.grad for name, own in model.named_parameters()})
        optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        scheduler.step()
    results.values["losses"] = results.values["losses"][case["first"] :]
    results.values["norms"] = results.values["norms"][case["first"] :]
    results.add_state("state", model.state_dict())
    model.eval()
    given, target = batch(kind, case["evaluated"], 9, dtype)
    with torch.no_grad(), autocast(case):
        output = call(model, given)
        if target is not None:
            loss = loss_of(output, target, case["reduction"]) / (divisor_of(case, target) or 1)
            results.values["eval"] = loss.item()
            output = output["logits"] if isinstance(output, dict) else output
            results.add_state("output", {"": output})
        else:
            results.values["eval"] = output["loss"].item()
    return results.values


def start(case: dict[str, Any], dtype: torch.dtype) -> Training:
    kind = case["model"]
    example, _ = batch(kind, 3, 0, dtype)
    model = made(kind, dtype)
    state = {name: own.clone() for name, own in model.state_dict().items()}
    if case["reloads"]:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    with autocast(case):
        training = build(
            case["file"],
            model,
            None if kind == "own loss" else partial(loss_of, reduction=case["reduction"]),
            example,
            optimizer=optimizer_of(case),
            loss_reduction=case["reduction"],
            device="cpu",
            sync_batch_norm=case["sync"],
        )
    if case["reloads"]:
        training.load_state_dict(state)
    return training


def train(case: dict[str, Any], training: Training, dtype: torch.dtype) -> dict[str, Any]:
    """The same by the plan."""
    kind, results = case["model"], Results()
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=case["scale"]) if case["scale"] else None
    if case["first"]:
        progress = training.load(case["checkpoint"])
        assert progress.get("step", STEPS) == case["first"]  # the plain model's has none
        scheduler.last_epoch = STEPS
    for step in range(case["first"], case["first"] + STEPS):
        given, target = batch(kind, case["samples"][step % STEPS], step, dtype)
        loss = training.step(given, target, divisor=divisor_of(case, target), scaler=scaler)
        results.values["losses"].append(loss.item())
        if scaler is not None:
            scaler.unscale_(training.optimizer)
        results.values["norms"].append(training.clip_grad_norm_(case["clip"]).item())
        if step == case["first"] + STEPS - 1:
            gradients = {
                name: getattr(own.grad, "full_tensor", lambda grad=own.grad: grad)()
                for name, own in training.named_parameters()
            }
            results.add_state("gradient", gradients)
        training.optimizer.step() if scaler is None else scaler.step(training.optimizer)
        if scaler is not None:
            scaler.update()
        scheduler.step()
    if case["checkpoint"] and not case["first"]:
        for _ in range(2):  # the second replaces the first
            training.save(case["checkpoint"], step=STEPS, scheduler=scheduler.state_dict())
    results.add_state("state", training.state_dict())
    given, target = batch(kind, case["evaluated"], 9, dtype)
    results.values["eval"] = training.eval(given, target, divisor=divisor_of(case, target)).item()
    if target is not None:
        output = training.eval(given)
        assert (output is not None) == training.is_last
        if output is not None:
            results.add_state("output", {"": output["logits"] if isinstance(output, dict) else output})
    return results.values


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    for case in json.loads((folder / "cases.json").read_text()):
        dtype = getattr(torch, case["dtype"])
        try:
            training = start(case, dtype)
            training._starts_distributed = False
            content: dict[str, Any] = {"planned": train(case, training, dtype)}
            training.close()
        except Exception:
            content = {"error": traceback.format_exc()}
        if rank == 0:
            content["plain"] = train_plainly(case, dtype)
        (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(content))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    import os

    main(Path(sys.argv[1]), int(os.environ.get("RANK", "0")))

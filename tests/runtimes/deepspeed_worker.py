"""One of two processes of test_deepspeed.py: trains small models as exported files say, and plainly."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

import pplan
from pplan.runtimes.deepspeed import build, start
from pplan.runtimes.documents import DeepspeedExport
from pplan.runtimes.pipelining.plan_layers import find_tied_weights

STEPS = 2
MODELS = runpy.run_path(str(Path(__file__).with_name("torch_worker.py")))
"""The models, batches and losses of test_torch_pipelining.py."""


def single(given: Any) -> Any:
    """In float32: DeepSpeed averages no gradients of float64."""
    if isinstance(given, tuple):
        return tuple(map(single, given))
    return given.float() if given.is_floating_point() else given


def made(kind: str, replica: int = 0) -> nn.Module:
    model: nn.Module = MODELS["made"](kind, replica)
    return model.float()


def parts_of(kind: str, document: DeepspeedExport) -> list[tuple[Any, torch.Tensor]]:
    """Input and labels of what a replica's stage sees at a time."""
    return [single(part) for part in MODELS["parts"](kind, document)]


def train_plainly(kind: str, document: DeepspeedExport, layers: nn.Module, model: nn.Module) -> list[float]:
    """The same steps of the untouched model, whose layers `layers` are, part by part as replicas see it."""
    learning_rate = document.config["optimizer"]["params"]["lr"]
    optimizer = torch.optim.SGD(layers.parameters(), lr=learning_rate)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = parts_of(kind, document)
        total = 0.0
        for given, labels in parts:
            output = model(*given) if isinstance(given, tuple) else model(given)
            loss = MODELS["loss_of"](output, labels) / len(parts)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def run(case: dict[str, Any]) -> dict[str, Any]:
    kind, document = case["model"], DeepspeedExport.load(Path(case["file"]))
    replica = torch.distributed.get_rank() % document.replicas
    example, _ = single(MODELS["batch"](kind, 3))
    model = made(kind, replica)
    stage = build(document, model, MODELS["loss_of"], example)
    engine, *_ = deepspeed.initialize(
        model=stage, config=document.config, model_parameters=stage.parameters()
    )
    fed: list[int] = []
    stage.forward_funcs[0].register_forward_hook(
        lambda _module, inputs, _: fed.append(
            len(inputs[0][0] if isinstance(inputs[0], tuple) else inputs[0])
        )
    )
    own = parts_of(kind, document)[replica :: document.replicas]
    losses = [engine.train_batch(iter(own)).item() for _ in range(STEPS)]
    plain = made(kind)
    if isinstance(plain, nn.Sequential):
        layers = plain
    else:
        layers = pplan.sequential(plain, example, granularity=document.granularity)
    start = {name: value.detach().clone() for name, value in layers.named_parameters()}
    plain_losses = train_plainly(kind, document, layers, plain)
    expected = dict(layers.named_parameters())
    names = {id(value): name for name, value in expected.items()}
    shared = [names[id(own.parameter)] for own in find_tied_weights(layers, document.parts)]
    off, moved = {}, {}
    for said, value in stage.named_parameters():
        is_tied = said.startswith("tied_modules.tied_")
        name = shared[int(said.split(".")[1].removeprefix("tied_"))] if is_tied else said
        off[name] = (value.detach() - expected[name].detach()).abs().max().item()
        moved[name] = (value.detach() - start[name]).abs().max().item()
    return {
        "losses": losses,
        "plain_losses": plain_losses,
        "fed": fed,
        "layers": len(stage.forward_funcs),
        "off": off,
        "moved": moved,
        "names": sorted(start),
        "shared": shared,
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    start("cpu")
    rank = torch.distributed.get_rank()
    for case in json.loads((folder / "cases.json").read_text()):
        (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(run(case)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

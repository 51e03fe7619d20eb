"""A process of test_tied_training.py: trains a small GPT-2 or T5 as a file says, and plainly."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pplan.profiler.layers import sequential
from pplan.profiler.models import load_model
from pplan.profiler.user_model import LoadedModel, ModelInput
from pplan.runtimes.documents import TorchExport
from pplan.runtimes.torch_pipelining import build

SETTINGS: dict[str, dict[str, object]] = {
    "hf:gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 12},
    "hf:t5": {
        "dropout_rate": 0.0,
        "num_layers": 2,
        "d_model": 16,
        "num_heads": 2,
        "d_kv": 8,
        "d_ff": 32,
        "vocab_size": 40,
        "sequence": 6,
    },
}
TIED = {"hf:gpt2": "transformer.wte.weight", "hf:t5": "shared.weight"}
STEPS = 3


def loss_of(output: Any, labels: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output["logits"]
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(loaded: LoadedModel, samples: int) -> tuple[ModelInput, Tensor]:
    """Words, and the labels of the last of the model's texts."""
    torch.manual_seed(5)
    words = loaded.example.mapped(lambda own: torch.randint(40, (samples, own.shape[1])))
    return words, torch.randint(40, words.tensors[-1].shape)


def small(name: str) -> LoadedModel:
    loaded = load_model(name, settings=SETTINGS[name], seed=3)
    for part in loaded.module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    loaded.module.double()
    return loaded


def train_plainly(name: str, document: TorchExport) -> tuple[nn.Module, list[list[float]], dict[str, Tensor]]:
    """The untouched model; of the last step its gradients."""
    loaded = small(name)
    model, (words, labels) = loaded.module, batch(loaded, document.mini_batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses: list[list[float]] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append([])
        for part in range(document.micro_batches):
            rows = slice(part * document.micro_batch_size, (part + 1) * document.micro_batch_size)
            part_of_words = words.mapped(lambda own: own[rows])  # noqa: B023
            loss = loss_of(part_of_words.call(model), labels[rows])
            (loss / document.micro_batches).backward()  # type: ignore[no-untyped-call]
            losses[-1].append(loss.item())
        gradients = {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}
        optimizer.step()
    return model, losses, gradients


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meeting", timedelta(seconds=60), rank=rank, world_size=world
    )
    document = TorchExport.load(folder / "tied.torch.json")
    model_name = (folder / "model.txt").read_text()
    loaded = small(model_name)
    words, labels = batch(loaded, document.mini_batch)
    example = loaded.example.layer_input
    layers = sequential(loaded.module, loaded.example, granularity=document.granularity, verify=False)
    names = {id(own): name for name, own in loaded.module.named_parameters()}
    name_in_model = {name: names[id(own)] for name, own in layers.named_parameters()}
    if rank:
        with torch.no_grad():  # those of the first stage with the weight count
            loaded.module.get_parameter(TIED[model_name]).add_(1.0)
    process = build(document, layers, example_input=example, loss_fn=loss_of, device="cpu")
    optimizer = torch.optim.Adam(process.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        for parameter in process.parameters():
            parameter.grad = None
        found = process.step(
            words.layer_input if process.is_first else None, labels if process.is_last else None
        )
        losses.append([loss.item() for loss in found])
        optimizer.step()
    model, plain_losses, plain = train_plainly(model_name, document)
    values = dict(model.named_parameters())
    off: dict[str, float] = {}
    copies: dict[str, list[float]] = {}
    for stage, module in process.modules.items():
        first = document.parts[stage]
        for name, own in module.named_parameters():
            key = name_in_model.get(name, TIED[model_name])
            assert own.grad is not None
            off[f"{first}:{name}"] = max(
                (own.grad - plain[key]).abs().max().item(), (own.detach() - values[key]).abs().max().item()
            )
            if key == TIED[model_name]:
                copies[f"{first}:{name}"] = own.detach().flatten().tolist()
    result = {"losses": losses, "plain_losses": plain_losses, "off": off, "copies": copies}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

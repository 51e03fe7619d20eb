"""Stages that share buffers and tables train as the plain model does: two and three processes, cut between
blocks that read the same buffers. This file is also what the processes run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pplan.cost_models.errors import MachineError
from pplan.planner.plan_file import Plan
from pplan.profiler.layers import sequential
from pplan.profiler.measure import profile_model
from pplan.profiler.profile_options import ProfileOptions
from pplan.runtimes.documents import TorchExport
from pplan.runtimes.exports import export
from pplan.runtimes.pipelining.plan_layers import find_tied_weights, split_stage
from pplan.runtimes.torch_pipelining import build

MakePlan = Callable[..., Plan]
RunProcesses = Callable[..., None]
WIDTH, LENGTH, WORDS, STEPS = 8, 6, 20, 3


class Rotary(nn.Module):
    """One of it for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.0 / torch.arange(1.0, WIDTH + 1), persistent=False)

    def forward(self, given: Tensor) -> Tensor:
        places = torch.arange(given.shape[1], device=given.device)
        return given * torch.outer(places, self.get_buffer("frequencies")).cos()


class Block(nn.Module):
    """`scale` is registered by all blocks, `mask` is handed to them, and `bias` is trained."""

    def __init__(self, rotary: Rotary, scale: Tensor) -> None:
        super().__init__()
        self.norm, self.rotary = nn.LayerNorm(WIDTH), rotary
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", scale)

    def forward(self, given: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(given)).chunk(3, dim=-1)
        weights = self.rotary(query) @ self.rotary(key).transpose(1, 2) * self.get_buffer("scale")
        return given + self.out((weights + mask + bias).softmax(-1) @ value)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Hands a mask of a buffer and a trained table to all blocks."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        rotary, scale = Rotary(), torch.tensor(WIDTH**-0.5)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(rotary, scale) for _ in range(blocks))
        self.table = nn.Parameter(torch.randn(LENGTH, LENGTH))
        self.register_buffer("hidden", torch.full((LENGTH, LENGTH), -1e9).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        value, bias = self.embed(ids), self.table.tanh()
        mask = self.get_buffer("hidden")[: ids.shape[1], : ids.shape[1]]
        for block in self.blocks:
            value = block(value, mask, bias)
        return self.head(value)  # type: ignore[no-any-return]


def model_of(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return Transformer().double()


def batch(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randint(WORDS, (samples, LENGTH)), torch.randint(WORDS, (samples, LENGTH))


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), labels.flatten())


NAMES = ["embed", *(f"blocks.{i}" for i in range(4)), "head"]


def plan_of(make_plan: MakePlan, balance: list[int], schedule: str) -> Plan:
    profile = profile_model((model_of(), batch(2)[0]), ProfileOptions(device="meta", micro_batch_sizes=[2]))
    assert [layer.name for layer in profile.layers] == NAMES
    assert all(layer.cut_after for layer in profile.layers[:-1])
    shared = {own.tensor: own.layers for own in profile.shared_buffers}
    assert shared["hidden"] == NAMES[1:5]
    assert sorted(len(layers) for layers in shared.values()) == [4, 4]
    return make_plan(
        balance,
        schedule=schedule,
        micro_batches=4,
        micro_batch_size=2,
        layer_names=NAMES,
        profile={"file": "own.profile.json", "sha256": "0", "granularity": profile.granularity},
    )


@pytest.mark.slow
@pytest.mark.parametrize(("balance", "schedule"), [([3, 3], "1f1b"), ([2, 2, 2], "zb-h1")])
def test_stages_with_copies_of_buffers_train_as_the_model(
    balance: list[int], schedule: str, make_plan: MakePlan, run_processes: RunProcesses, tmp_path: Path
) -> None:
    document, _ = export("torch", plan_of(make_plan, balance, schedule))
    document.save(tmp_path / "own.torch.json", force=False)
    run_processes(tmp_path, len(balance), __file__)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(balance))]
    assert ranks[-1]["losses"] == pytest.approx(ranks[0]["plain"], abs=1e-9)
    assert ranks[0]["plain"][-1] < ranks[0]["plain"][0]
    # Every parameter of the model was compared, by what it was after training.
    assert sum(rank["compared"] for rank in ranks) == len(list(model_of().parameters()))
    assert max(rank["off"] for rank in ranks) < 1e-9


@pytest.mark.slow
def test_a_stage_registers_the_buffers_that_it_reads() -> None:
    layers = sequential(model_of(), batch(2)[0])
    parts = (0, 3, 6)
    stages = [split_stage(layers, parts, stage, find_tied_weights(layers, parts)).layers for stage in (0, 1)]
    given, _ = batch(2)
    expected = layers(given)
    for stage, others in zip(stages, reversed(stages), strict=True):
        stage.to("meta")
        assert not any(own.is_meta for own in others.buffers()) or stage is stages[1]
    assert all(own.is_meta for stage in stages for own in stage.buffers())
    again = sequential(model_of(), given)
    first, second = (split_stage(again, parts, stage, ()).layers for stage in (0, 1))
    assert torch.equal(second(first(given)), expected)


@pytest.mark.slow
def test_processes_with_other_values_of_a_buffer_are_refused(
    make_plan: MakePlan, forked_python: Callable[..., Any], tmp_path: Path
) -> None:
    document, _ = export("torch", plan_of(make_plan, [3, 3], "1f1b"))
    document.save(tmp_path / "own.torch.json", force=False)
    started = [
        forked_python(tmp_path / f"output.{rank}", tmp_path, __file__, tmp_path, str(rank), "2", "differ")
        for rank in range(2)
    ]
    for process in started:
        ended = process.wait(240)
        assert ended.returncode == 1
        assert "different values of a buffer" in ended.stderr


def test_a_plain_sequential_whose_elements_share_a_buffer(make_plan: MakePlan) -> None:
    """It is made into layers that know what is only read, and is then as far as any model."""
    table = torch.rand(3)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    for layer in (model[0], model[2]):
        layer.register_buffer("table", table)
    plan = make_plan([2, 2], schedule="1f1b")
    with pytest.raises(MachineError, match=r"torch\.distributed is not initialized"):
        build(plan, model, example_input=torch.randn(2, 3), loss_fn=nn.functional.mse_loss, device="cpu")


def train_plainly(document: TorchExport) -> tuple[nn.Module, list[float]]:
    model, (ids, labels) = model_of(), batch(document.mini_batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(ids), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
    return model, losses


def main(folder: Path, rank: int, world: int, *, differ: bool) -> None:
    """A process: trains as the file says, and plainly."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", timedelta(seconds=60), world, rank)
    document = TorchExport.load(folder / "own.torch.json")
    model, (ids, labels) = model_of(), batch(document.mini_batch)
    if differ and rank:
        model.get_buffer("hidden").mul_(2)
    layers = sequential(model, ids[:2], granularity=document.granularity)
    process = build(document, layers, example_input=ids[:2], loss_fn=loss_of, device="cpu")
    optimizer = torch.optim.Adam(process.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = process.step(ids if process.is_first else None, labels if process.is_last else None)
        losses.append(sum(loss.item() for loss in found) / max(1, len(found)))
        optimizer.step()
    plain, plain_losses = train_plainly(document)
    by_layer = dict(sequential(plain, ids[:2], granularity=document.granularity).named_parameters())
    pairs = [
        (own, by_layer[name])
        for module in process.modules.values()
        for name, own in module.named_parameters()
    ]
    off = max((own - other).abs().max().item() for own, other in pairs)
    told = {"losses": losses, "plain": plain_losses, "off": off, "compared": len(pairs)}
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), differ="differ" in sys.argv[4:])

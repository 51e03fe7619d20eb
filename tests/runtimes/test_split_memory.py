"""What PyTorch's pipelining holds, with backwards in two parts and whole ones, against the plan's ledger.

Each process of a pipeline runs here by itself, in the backend that sends nothing ("fake"): what it computes
is nonsense, what it allocates is not. Counted are the storages of live tensors during a step.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

import pplan
from pplan.cost_models.memory import count_first_layers
from pplan.planner.plan_file import Plan
from pplan.profiler.memory import LiveBytes, lasting
from pplan.runtimes.pipelining import stage as offloading
from pplan.runtimes.torch_pipelining import build

SAMPLES, WIDTH = 4, 16
OFTEN_OVER = 0.35
"""Share by which the ledger may be above what was counted, as for stages of one small layer: workspace counts
once more. It is never below."""


class Block(nn.Module):
    """A residual one, as of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(gelu(self.up(self.norm(x))))
        return x + hidden


def language_model() -> tuple[nn.Sequential, Tensor, Tensor]:
    tokens = torch.randint(0, 40, (SAMPLES, 16))
    blocks = [Block() for _ in range(5)]
    return nn.Sequential(nn.Embedding(40, WIDTH), *blocks, nn.Linear(WIDTH, 40)), tokens, tokens


def images() -> tuple[nn.Sequential, Tensor, Tensor]:
    """Without dropout, whose mask takes 4 bytes an element on the CPU that runs it, and 1 on the GPU that the
    profile is of."""
    rows: list[nn.Module] = []
    for channels in (3, 6, 6):
        rows += [nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Sigmoid()]
    model = nn.Sequential(*rows, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 10))
    return model, torch.randn(SAMPLES, 3, 12, 12), torch.randint(0, 10, (SAMPLES,))


MODELS = {"language model": language_model, "images": images}


def loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


@contextmanager
def alone(rank: int, processes: int) -> Iterator[None]:
    """One process of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()


class HostBytes:
    """Of the tensors that stand for the host's memory: bytes now, and at the most."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.storages = set[int]()

    def allocate(self, size: int, *, pinned: bool) -> Tensor:
        assert not pinned
        with _disable_current_modes():  # else it is noted before it is known
            own = torch.empty(size, dtype=torch.uint8)
        storage = own.untyped_storage()
        self.now += size
        self.most = max(self.most, self.now)
        self.storages.add(id(storage))
        weakref.finalize(storage, self._free, id(storage), size)
        return own

    def _free(self, key: int, size: int) -> None:
        self.now -= size
        self.storages.discard(key)


class DeviceBytes(LiveBytes):  # type: ignore[no-untyped-call] # torch's base class
    """Without those of the host, which is a processor's memory, too."""

    host = HostBytes()

    def _note(self, tensor: Tensor) -> None:
        if self._is_here(tensor) and id(tensor.untyped_storage()) not in self.host.storages:
            super()._note(tensor)


@contextmanager
def on_hosts() -> Iterator[HostBytes]:
    """What stages offload is counted apart."""
    allocate, DeviceBytes.host = offloading.allocate_on_host, HostBytes()
    offloading.allocate_on_host = DeviceBytes.host.allocate
    try:
        yield DeviceBytes.host
    finally:
        offloading.allocate_on_host = allocate


def counted_peak(plan: Plan, model: nn.Module, inputs: Tensor, target: Tensor) -> int:
    """Of this process in its second step, the global batch left out."""
    process = build(plan, model, example_input=inputs, loss_fn=loss, device="cpu")
    batch, targets = (torch.cat([own] * plan.micro_batches) for own in (inputs, target))

    def step() -> None:
        process.step(batch if process.is_first else None, targets if process.is_last else None)

    step()
    gc.collect()
    buffers = []
    for stage in process.stages:
        for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            # With PyTorch 2.11 what the first stage receives has none.
            several = (getattr(one, "buffer", None) for one in received)
            buffers += [buffer for buffer in several if buffer is not None]
    for buffer in buffers:
        buffer.grad = None
    kept = [tensor for module in process.wrapped.values() for tensor in lasting(module)]
    meter = DeviceBytes("cpu", [*kept, *buffers, batch, targets])
    with meter:
        meter.mark()
        step()
        interval = meter.mark()
    return meter.peak_in(interval) - batch.nbytes - targets.nbytes


@pytest.mark.parametrize(
    ("name", "schedule", "gpus"),
    [
        ("language model", "zb-h1", 3),
        pytest.param("language model", "zb-v", 2, marks=pytest.mark.slow),
        pytest.param("images", "zb-h1", 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_process_needs_more_than_its_ledger(name: str, schedule: str, gpus: int) -> None:
    model, inputs, target = MODELS[name]()
    profile = pplan.profile(model, inputs, device="analytic:h100", micro_batch_sizes=[SAMPLES])
    plan = pplan.solve(
        profile, gpus=gpus, schedule=schedule, mini_batch=6 * SAMPLES, micro_batches=6, optimizer="sgd"
    )
    assert (plan.schedule, len(plan.stages[0].devices)) == (schedule, 1)
    assert any(stage.memory["pending_gradients"] for stage in plan.stages)
    for rank in range(gpus):
        with alone(rank, gpus):
            peak = counted_peak(plan, model, inputs, target)
        memory = next(stage.memory for stage in plan.stages if rank in stage.devices)
        ledger = sum(memory.values()) - sum(memory[one] for one in ("reserve", "context", "optimizer_step"))
        assert peak <= ledger <= (1 + OFTEN_OVER) * peak


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("language model", {"schedule": "1f1b", "gpus": 3, "cuts": (1, 4)}),
        pytest.param("images", {"schedule": "1f1b", "gpus": 3, "cuts": (1, 4)}, marks=pytest.mark.slow),
        pytest.param(
            "language model", {"schedule": "gpipe", "gpus": 2, "cuts": (3,)}, marks=pytest.mark.slow
        ),
        pytest.param("language model", {"schedule": "interleaved", "gpus": 2}, marks=pytest.mark.slow),
        pytest.param(
            "language model",
            {"schedule": "1f1b", "gpus": 2, "cuts": (3,), "recompute": "always"},
            marks=pytest.mark.slow,
        ),
        ("language model", {"schedule": "1f1b", "gpus": 2, "cuts": (3,), "recompute": "first_layers"}),
        pytest.param(
            "images",
            {"schedule": "gpipe", "gpus": 2, "cuts": (5,), "recompute": "first_layers"},
            marks=pytest.mark.slow,
        ),
        ("language model", {"schedule": "1f1b", "gpus": 2, "cuts": (3,), "recompute": "offload"}),
        pytest.param(
            "images",
            {"schedule": "gpipe", "gpus": 2, "cuts": (5,), "recompute": "offload"},
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_buffers_of_many_micro_batches(name: str, options: dict[str, Any]) -> None:
    """Without its buffers the ledger of the images was a seventh of what was counted."""
    model, inputs, target = MODELS[name]()
    profile = pplan.profile(model, inputs, device="analytic:h100", micro_batch_sizes=[SAMPLES])
    ends = [profile.layers[index].name for index in options.pop("cuts", ())]
    batch: Any = {"mini_batch": 24 * SAMPLES, "micro_batches": 24, "optimizer": "sgd"}
    batch |= {"runtime": "torch", "cut_after": ends, "use_all": True}
    if options.get("recompute") == "offload":
        options["host_bandwidth"] = 1e15
    if options.get("recompute") in ("first_layers", "offload"):
        usual = pplan.solve(profile, **batch, **options)
        fullest = max(usual.stages, key=lambda stage: stage.memory_bytes)
        batch["memory_limit"] = fullest.memory_bytes - 0.2 * (
            fullest.memory_bytes - fullest.memory["context"]
        )
    plan = pplan.solve(profile, **batch, **options)
    assert max(plan.replicas) == 1
    words = [stage.recompute or "" for stage in plan.stages]
    assert any(count_first_layers(word) or word == "offload" for word in words) == ("memory_limit" in batch)
    for rank in range(options["gpus"]):
        with alone(rank, options["gpus"]), on_hosts() as host:
            peak = counted_peak(plan, model, inputs, target)
        stage = next(stage for stage in plan.stages if rank in stage.devices)
        memory = stage.memory
        # Statistics of batch norms go to the host, too, and are not counted; an input that the stage saves
        # stays on the device, and is.
        assert host.most <= 1.01 * (stage.host_bytes or 0) <= 1.3 * host.most
        ledger = sum(memory.values()) - sum(
            memory.get(one, 0) for one in ("reserve", "context", "optimizer_step")
        )
        # Of GPipe outputs and gradients of inputs count, of all micro-batches: these come as those go.
        over = 1.0 if (plan.schedule, stage.recompute) == ("gpipe", "offload") else OFTEN_OVER
        # What the schedule keeps of a micro-batch's targets and loss is not counted.
        assert peak <= 1.01 * ledger <= (1 + over) * peak

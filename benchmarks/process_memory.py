"""The peak that the ledger predicts, against that of a fresh process which trains the model on the CPU.

The process imports PyTorch, notes its resident memory, builds the model and takes three steps of two
micro-batches with one of torch.optim's optimizers, by their defaults. Its peak is the kernel's: VmHWM of
/proc/self/status, above what it had before, without what files mapped into memory (code of the libraries)
grew by. glibc keeps blocks below a threshold of up to 32 MiB, which it moves while it runs, when they are
freed; so the process runs twice: with that threshold held at 64 KiB (MALLOC_MMAP_THRESHOLD_), which gives
blocks back at once, and as it is by default. There a thread asks glibc (mallinfo2) every few milliseconds
how many bytes it has given out: what the peak is above the most of these is the allocator's and not the
program's. Nothing of pplan counts there.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torchvision  # noqa: F401  before the memory is read
from measured_models import built
from torch import nn
from torch.nn import functional as F

from pplan.cost_models.memory import ledger, total
from pplan.cost_models.precision import training_precision
from pplan.planner.stage_table import StageTable
from pplan.profiler.measure import profile_model
from pplan.profiler.profile_options import ProfileOptions

TRAINED = (
    *("resnet18", "vgg11", "densenet121", "mobilenet_v3_large", "efficientnet_b0", "convnext_tiny"),
    *("vit_b_16", "transformer"),
)
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
STEPS, MICRO_BATCHES = 3, 2
EVERY_SECONDS = 0.005
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Row:
    """Bytes of a model in training: of the ledger without its reserve, of the process that gives back what it
    frees, and of the process by default; `in_use`: the most that glibc had given out then."""

    name: str
    size: int
    optimizer: str
    predicted: float
    measured: int
    by_default: int
    in_use: int


def row_of(name: str, size: int, optimizer: str) -> Row:
    """One line of the table."""
    measured, _ = _in_a_process(name, size, optimizer, GIVES_BACK)
    return Row(
        name,
        size,
        optimizer,
        predicted(name, size, optimizer),
        measured,
        *_in_a_process(name, size, optimizer, {}),
    )


def predicted(name: str, size: int, optimizer: str) -> float:
    """The ledger of one stage of all layers with a micro-batch in flight, without the reserve."""
    options = ProfileOptions(device="cpu", micro_batch_sizes=[size], loss="cross-entropy", cache=False)
    profile = profile_model(built(name), options, rounds=1, parts=False)
    table = StageTable.of(profile.chain(), size)
    terms = ledger(
        table.bytes_between(0, table.blocks),
        in_flight=1,
        recompute="never",
        optimizer=optimizer,
        precision=training_precision(profile.dtype, device=profile.device).bytes,
    )
    return float(total(terms) - terms["reserve"])


def _in_a_process(name: str, size: int, optimizer: str, more: dict[str, str]) -> tuple[int, int]:
    command = [sys.executable, str(Path(__file__)), name, str(size), optimizer]
    environment = {**os.environ, **more}
    made = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    peak, in_use = json.loads(made.stdout.splitlines()[-1])
    return peak, in_use


def train(name: str, size: int, optimizer: str) -> tuple[int, int]:
    """In this process; its peak above what it had before, in bytes, and the most that glibc gave out."""
    # What the libraries load and allocate at their first use: torch.optim imports torch._dynamo.
    tiny = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    _train(tiny, torch.ones(1, 3, 8, 8), optimizer)
    before = _status()
    with HeapWatch() as watch:
        loaded = built(name)
        _train(loaded.module.train(), loaded.example_input_for(size).tensors[0], optimizer)
    after = _status()
    code = after["RssFile"] - before["RssFile"]
    return after["VmHWM"] - before["VmRSS"] - code, watch.most


class HeapWatch(threading.Thread):
    """Asks glibc, until it is left, how many bytes are given out; `most`: above those at the beginning."""

    class _Info(ctypes.Structure):
        _fields_ = tuple(
            (name, ctypes.c_size_t)
            for name in (
                *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
                *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
            )
        )

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._done = threading.Event()
        self._ask = ctypes.CDLL(None).mallinfo2
        self._ask.restype = self._Info
        self._before = self._in_use()

    def run(self) -> None:
        while not self._done.wait(EVERY_SECONDS):
            self.most = max(self.most, self._in_use() - self._before)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def _in_use(self) -> int:
        """Of the heap, and in blocks of their own."""
        info = self._ask()
        return int(info.uordblks) + int(info.hblkhd)


def _train(model: nn.Module, given: torch.Tensor, optimizer: str) -> None:
    stepping = OPTIMIZERS[optimizer](model.parameters(), lr=1e-4)
    for _ in range(STEPS):
        stepping.zero_grad()
        for _ in range(MICRO_BATCHES):
            scores = model(given).flatten(0, -2)
            loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
            torch.autograd.backward(loss)
            del scores, loss
        stepping.step()


def _status() -> dict[str, int]:
    """Bytes by the kernel's names."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if line[0][:2] == "Vm" or "Rss" in line[0]
    }


def print_processes(names: Sequence[str], size: int, optimizers: Sequence[str]) -> None:
    """The table."""
    threads = torch.get_num_threads()
    print(
        f"torch {torch.__version__}, {threads} threads, float32, micro-batch of {size}; MiB of 2^20 bytes\n"
    )
    titles = f"{'ledger':>8} {'process':>8} {'ratio':>6} {'default':>8} {'in use':>8} {'ratio':>6}"
    print(f"{'model':<19} {'optimizer':<9} {titles}")
    for name in names:
        for optimizer in optimizers:
            row = row_of(name, size, optimizer)
            print(
                f"{name:<19} {optimizer:<9} {row.predicted / 2**20:>8.1f} {row.measured / 2**20:>8.1f} "
                f"{row.predicted / row.measured:>6.3f} {row.by_default / 2**20:>8.1f} "
                f"{row.in_use / 2**20:>8.1f} {row.predicted / row.in_use:>6.3f}",
                flush=True,
            )


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], int(sys.argv[2]), sys.argv[3])))

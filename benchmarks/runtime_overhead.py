"""What a runtime's own Python takes of the host: python benchmarks/runtime_overhead.py [--rounds 20]

Trains a pipeline whose every stage is one multiplication of eight numbers, on CPU, and the same layers for as
many micro-batches without a runtime. What the processor time of the first is longer, by pass (a forward or a
backward of one micro-batch on one stage), is the runtime's own: its queues, streams, tables of buffers,
sends. It is a figure of this host's Python: on another it takes longer or shorter, as launches do.

torchgpipe and FairScale run all stages in one process, without recomputation and with their default, all
micro-batches but the last. DeepSpeed runs a stage in each of as many processes, which are started here; of
them the thread counts that launches, with its part of the transfers by gloo.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

MICRO_BATCHES = 16


class Scale(nn.Module):
    """Multiplies by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def processor_seconds(
    step: Callable[[], None], rounds: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Of all threads, or as the clock says, the median of `rounds` steps after five that warm up."""
    seconds = list[float]()
    for number in range(rounds + 5):
        begin = clock()
        step()
        if number >= 5:
            seconds.append(clock() - begin)
    return median(seconds)


def plain_step(stages: int, again: int = 0) -> Callable[[], None]:
    """The layers' forward and backward of every micro-batch, `again` of them with another forward, without a
    runtime."""
    model = nn.Sequential(*(Scale() for _ in range(stages)))
    samples = torch.ones(MICRO_BATCHES, 8)

    def step() -> None:
        for number, one in enumerate(torch.split(samples, 1)):
            if number < again:
                with torch.no_grad():
                    model(one)
            model(one).sum().backward()

    return step


def one_process_step(runtime: str, stages: int, checkpoint: str) -> Callable[[], None]:
    """A step of torchgpipe or FairScale; `checkpoint`: the micro-batches that it runs again."""
    model = nn.Sequential(*(Scale() for _ in range(stages)))
    balance, devices = [1] * stages, ["cpu"] * stages
    from fairscale.nn import Pipe
    from torchgpipe import GPipe

    make: type[nn.Module] = GPipe if runtime == "torchgpipe" else Pipe
    pipe = make(model, balance, devices=devices, chunks=MICRO_BATCHES, checkpoint=checkpoint)
    samples = torch.ones(MICRO_BATCHES, 8)

    def step() -> None:
        pipe(samples).sum().backward()

    return step


def _sum(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def deepspeed_rank(rounds: int) -> None:
    """One process of DeepSpeed's: prints its processor seconds by pass, less those of its layer."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    stages = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    layers = [Scale() for _ in range(stages)]
    module = PipelineModule(layers, num_stages=stages, partition_method="uniform", loss_fn=_sum)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1e-3),
        config={
            "train_batch_size": MICRO_BATCHES,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "steps_per_print": 10**9,
        },
    )

    def step() -> None:
        engine.train_batch(data_iter=iter([(torch.ones(1, 8), torch.ones(1, 8))] * MICRO_BATCHES))

    own = processor_seconds(step, rounds, time.thread_time) - processor_seconds(plain_step(1), rounds)
    print(f"own {own / MICRO_BATCHES / 2:.9f}", flush=True)


def deepspeed_pass(stages: int, rounds: int) -> float:
    """Processor seconds by pass of DeepSpeed's own, the mean of its processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(stages)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    ran = subprocess.run(
        [*command, __file__, "--rank", "--rounds", str(rounds)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    own = [float(seconds) for seconds in re.findall(r"own (\d\.\d{9})", ran.stdout)]
    if len(own) != stages:
        raise SystemExit(f"DeepSpeed: {len(own)} of {stages} processes ended well.\n{ran.stderr[-2000:]}")
    return sum(own) / stages


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rank:
        return deepspeed_rank(given.rounds)
    print("| stages | runtime | run again | own milliseconds by pass |\n| ---: | --- | --- | ---: |")
    for stages in given.stages:
        for checkpoint, again in (("never", 0), ("except_last", MICRO_BATCHES - 1)):
            plain = processor_seconds(plain_step(stages, again), given.rounds)
            for runtime in ("torchgpipe", "fairscale"):
                step = one_process_step(runtime, stages, checkpoint)
                own = (processor_seconds(step, given.rounds) - plain) / (2 * stages * MICRO_BATCHES)
                print(f"| {stages} | {runtime} | {checkpoint} | {1e3 * own:.3f} |", flush=True)
        own = deepspeed_pass(stages, given.rounds)
        print(f"| {stages} | deepspeed | never | {1e3 * own:.3f} |", flush=True)
    return None


if __name__ == "__main__":
    main()

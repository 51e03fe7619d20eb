"""The two parts of a backward, as pplan measures them by layer and as PyTorch runs them for a stage:
python benchmarks/backward_parts.py [--blocks 96] [--stages 4] [--width 64] [--batch 2]

Equal residual blocks on the processor, in equal stages. Prints milliseconds of every stage: of PyTorch's
pipelining (`stage_backward_input`, `stage_backward_weight`, on detached inputs of the stage), and the sums of
pplan's seconds over its layers. Seconds are those of the thread, the least of all rounds.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from time import thread_time

import numpy as np
import torch
from torch import Tensor, nn

from pplan.profiler.clocks import CpuClock
from pplan.profiler.layers import Layer
from pplan.profiler.passes import OutputGradients
from pplan.profiler.timed_passes import run_parts
from pplan.profiler.torch_private import backward_parts


class ThreadClock(CpuClock):
    """Seconds in which this thread ran: other processes take none of them."""

    def stamp(self) -> float:
        return thread_time()


class Residual(nn.Module):
    """A block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = inputs + self.b(torch.tanh(self.a(inputs)))
        return result


def of_stage(blocks: Sequence[nn.Module], inputs: Tensor) -> tuple[float, float, float]:
    """Seconds of both parts as PyTorch runs them, and of the backward in one."""
    run_input, run_weight = backward_parts()
    stage, leaf = nn.Sequential(*blocks), inputs.detach().requires_grad_()
    output = stage(leaf)
    gradient = torch.randn_like(output)
    moments = [thread_time()]
    _, groups = run_input([output], [gradient], [leaf], stage.parameters())
    moments.append(thread_time())
    run_weight(stage.parameters(), groups)
    moments.append(thread_time())
    output = stage(inputs.detach().requires_grad_())
    begin = thread_time()
    output.backward(gradient)
    return moments[1] - moments[0], moments[2] - moments[1], thread_time() - begin


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("blocks", 96), ("stages", 4), ("width", 64), ("batch", 2), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    blocks = [Residual(options.width) for _ in range(options.blocks)]
    layers = [
        Layer(str(index), "Residual", block, None, tuple(block.parameters()), (), None)
        for index, block in enumerate(blocks)
    ]
    size, inputs = options.blocks // options.stages, torch.randn(options.batch, options.width)
    firsts = range(0, size * options.stages, size)
    by_torch, by_layer = [], []
    gc.disable()
    for _ in range(options.rounds):
        by_torch.append([of_stage(blocks[first : first + size], inputs) for first in firsts])
        times = run_parts(layers, inputs.clone().requires_grad_(), OutputGradients(0), ThreadClock())
        by_layer.append((times.input, times.weight))
        gc.collect()
    stages, rows = np.array(by_torch).min(axis=0), np.array(by_layer)
    sums = rows[..., : size * options.stages].reshape(len(rows), 2, -1, size).sum(axis=-1).min(axis=0)
    print(f"{'stage':>5}{'B torch':>10}{'B pplan':>10}{'W torch':>10}{'W pplan':>10}{'whole':>10}  ms")
    for index, (first, second, whole) in enumerate(1e3 * stages):
        ours = 1e3 * sums[:, index]
        print(f"{index:>5}{first:>10.2f}{ours[0]:>10.2f}{second:>10.2f}{ours[1]:>10.2f}{whole:>10.2f}")
    weight = 1e6 * np.median(rows[:, 1], axis=0)
    print(f"weight part of the second block {weight[1]:.0f} us, of the last but one {weight[-2]:.0f} us")


if __name__ == "__main__":
    main()

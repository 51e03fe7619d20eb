"""What pplan's memory ledger and its profile say, against live bytes.

    python benchmarks/memory.py [--models vgg19 mlp] [--size 2] [--device cpu]

prints the ledger's weights, gradients, master weights, optimizer state and activations of whole models in
training, against the bytes of live storages during a real step with torch's optimizers
(counted_training.py): float32, bfloat16 weights with float32 masters, and autocast; SGD and AdamW; with and
without recomputation. On the meta device, or on the CPU. Ends with status 1 where a row is off by over 1 %.

    python benchmarks/memory.py --peak [--device cuda] [--models vgg19 transformer] [--sizes 1 8]

prints the peak of a whole step predicted from its layers' bytes, against the peak measured. On the CPU and on
CUDA both are what `pplan profile` stores: the peak of forward and backward of the untouched model, gradients
existing, by torch.cuda.max_memory_allocated or by the storages of live tensors; and what the layers' bytes
make of it. On meta, where a profile has no whole pass, live tensors are counted here, and the prediction is
the ledger that `pplan solve` uses: one stage of all layers with one micro-batch in flight, without the
reserve.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from measured_models import MODELS, built
from training_rows import TRAINED, print_training

from pplan.cost_models.memory import StageBytes, ledger, stage_workspace, total
from pplan.profiler.chain.layers import LayerChain, build_chain
from pplan.profiler.measure import profile_model
from pplan.profiler.memory.live_bytes import build_meter
from pplan.profiler.memory.workspace import StepMemory, peak_of_step
from pplan.profiler.offload.fitting import count_pass
from pplan.profiler.passes.timing import OutputGradients, backward
from pplan.profiler.profile_options import ProfileOptions


@dataclass(frozen=True)
class Row:
    """Bytes, at a micro-batch size."""

    size: int
    predicted: float
    measured: int

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1


def profiled_rows(name: str, sizes: Sequence[int], device: torch.device) -> list[Row]:
    """The model's lines of the table, from its profile."""
    profile = profile_model(
        built(name),
        ProfileOptions(device=str(device), micro_batch_sizes=sizes, loss="none"),
        rounds=1,
        parts=False,
    )
    return [
        Row(whole.micro_batch_size, whole.predicted_peak_bytes or 0, whole.peak_bytes)
        for whole in profile.whole
        if whole.peak_bytes
    ]


def counted_row(name: str, size: int) -> Row:
    """One line of the table, on the meta device."""
    device = torch.device("meta")
    with device:
        loaded = built(name)
    model, given = loaded.module, loaded.example_input_for(size).to(device).tensors[0]
    chain, gradients, meter = build_chain(model, given), OutputGradients(0), build_meter(device, model)
    with meter:
        # The first makes the gradients, and what the libraries allocate once.
        count_pass(model, chain.layers, given, gradients, meter)
        _, memory = count_pass(model, chain.layers, given, gradients, meter)
        measured = peak_of_step(lambda: backward(*gradients.of(model(given))), meter)
    return Row(size, _predicted(chain, memory), measured)


def _predicted(chain: LayerChain, memory: StepMemory) -> float:
    stage = StageBytes(
        parameters=sum(layer.parameter_bytes for layer in chain.layers),
        trainable=sum(layer.trainable_bytes for layer in chain.layers),
        buffers=sum(layer.buffer_bytes for layer in chain.layers),
        saved=sum(memory.saved),
        saved_input=0.0,
        input=0.0,
        received=0.0,
        sent=0.0,
        workspace=stage_workspace(memory.saved, memory.workspace),
    )
    terms = ledger(stage, in_flight=1, recompute="never", optimizer="sgd")
    return float(total(terms) - terms["reserve"]) + memory.other


def main() -> None:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peak", action="store_true", help="of a step, without optimizer")
    parser.add_argument("--device", default="meta", choices=["cpu", "meta", "cuda"])
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--size", type=int, default=2, help="samples of a micro-batch")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 4, 16], help="with --peak")
    options = parser.parse_args()
    if options.peak:
        print_peaks(options)
    elif not print_training(options.models or TRAINED, options.size, torch.device(options.device)):
        sys.exit(1)


def print_peaks(options: argparse.Namespace) -> None:
    """Of whole steps without an optimizer."""
    device = torch.device(options.device)
    print(f"torch {torch.__version__}, {options.device}, float32, training mode; MiB of 2^20 bytes\n")
    print(f"{'model':<14} {'size':>5} {'predicted MiB':>14} {'measured MiB':>13} {'error':>7}")
    for name in options.models or MODELS:
        if device.type == "meta":
            rows = [counted_row(name, size) for size in options.sizes]
        else:
            rows = profiled_rows(name, options.sizes, device)
        for row in rows:
            predicted, measured = row.predicted / 2**20, row.measured / 2**20
            print(
                f"{name:<14} {row.size:>5} {predicted:>14.1f} {measured:>13.1f} {row.error:>+7.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()

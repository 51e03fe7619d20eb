"""What pplan's memory ledger and its profile say, against live bytes.

    python benchmarks/memory.py [--models vgg19 mlp] [--size 2] [--device cpu]

prints the ledger's weights, gradients, master weights, optimizer state and activations of whole models in
training, against the bytes of live storages during a real step with torch's optimizers
(counted_training.py): float32, bfloat16 weights with float32 masters, and autocast; SGD and AdamW; with and
without recomputation. On the meta device, or on the CPU. Ends with status 1 where a row is off by over 1 %.

    python benchmarks/memory.py --process [--models resnet18 transformer] [--size 4] [--optimizers adamw]

prints the peak of a training step that the ledger predicts from a profile of the CPU, against that of a fresh
process that trains the model, by the kernel's figures (process_memory.py).
"""

from __future__ import annotations

import argparse
import sys

import torch
from process_memory import OPTIMIZERS, print_processes
from process_memory import TRAINED as IN_PROCESSES
from training_rows import TRAINED, print_training


def main() -> None:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--process", action="store_true", help="against a process that trains on the CPU")
    parser.add_argument("--device", default="meta", choices=["cpu", "meta"])
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--size", type=int, help="samples of a micro-batch")
    parser.add_argument("--optimizers", nargs="+", default=["adamw"], choices=list(OPTIMIZERS))
    options = parser.parse_args()
    if options.process:
        print_processes(options.models or IN_PROCESSES, options.size or 4, options.optimizers)
    elif not print_training(options.models or TRAINED, options.size or 2, torch.device(options.device)):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""What a process of a check says of its failure, and what killed checks leave.

`benchmarks/faults.py` lets real processes fail, each rank in turn.
"""

from __future__ import annotations

import torch

from pplan.runtimes.checking.processes.journal import describe_failure


def test_what_a_layer_raises_in_a_stage() -> None:
    """torch.distributed.pipelining raises another error because of it, of many lines."""
    layer = RuntimeError("the layer is wrong")
    stage = RuntimeError("\n                [Stage 1] failed to run forward:\n                args: ()")
    stage.__cause__ = layer
    assert describe_failure(stage) == describe_failure(layer)
    stage.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried")
    assert describe_failure(stage)["what"].startswith("does not fit in memory: OutOfMemoryError: CUDA")

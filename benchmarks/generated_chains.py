"""Chains of any length for the planner's benchmarks: layers of a large network, uneven on purpose."""

from __future__ import annotations

import numpy as np

from pplan.cost_models.layer import Chain

SIZES = (1, 2, 4, 8, 16)


def generated_chain(layers: int, seed: int = 0) -> Chain:
    """Layers of about 1 ms a sample forward (some twice, some half of it), 2 ms backward, 20 MB of weights,
    4 MB a sample of what they hand on and 30 MB of what they keep; all sizes cost a fixed start besides."""
    rng = np.random.default_rng(seed)
    sizes = np.array(SIZES, dtype=np.float64)

    def line(each: float, start: float = 0.0) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        own = each * 2.0 ** rng.uniform(-1, 1, (layers, 1))
        return own * sizes + start

    weights = 20e6 * 2.0 ** rng.uniform(-1, 1, layers)
    return Chain(
        names=tuple(f"layers.{index}" for index in range(layers)),
        sizes=SIZES,
        parameter_bytes=weights,
        trainable_bytes=weights,
        buffer_bytes=np.zeros(layers),
        cut_after=np.append(np.ones(layers - 1, dtype=np.bool_), False),
        input_bytes_per_sample=4e6,
        forward_seconds=line(1e-3, 2e-4),
        backward_seconds=line(2e-3, 4e-4),
        output_bytes=line(4e6),
        saved_bytes=line(30e6),
        saved_input_bytes=line(4e6),
        workspace_bytes=line(10e6),
        forward_host_seconds=np.full((layers, len(SIZES)), 1e-4),
        backward_host_seconds=np.full((layers, len(SIZES)), 2e-4),
    )

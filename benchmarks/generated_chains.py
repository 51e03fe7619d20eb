"""Profiles of any length for the planner's benchmarks: layers of a large network, uneven on purpose."""

from __future__ import annotations

import numpy as np

from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_records import LayerMeasurement, ProfiledLayer

SIZES = (1, 2, 4, 8, 16)


def generated_profile(layers: int, seed: int = 0, *, most: int | None = None) -> Profile:
    """Layers of about 1 ms a sample forward (some twice, some half of it), 2 ms backward, 20 MB of weights,
    4 MB a sample of what they hand on and 30 MB of what they keep; all sizes cost a fixed start besides. As
    of an A100 of 80 GB. `most`: more layers than so many take as much as so many do, each a part."""
    rng = np.random.default_rng(seed)
    sizes = np.array(SIZES, dtype=np.float64)
    part = 1.0 if most is None else min(1.0, most / layers)

    def line(each: float, start: float = 0.0) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        own = each * 2.0 ** rng.uniform(-1, 1, (layers, 1))
        return part * (own * sizes + start)

    weights = part * 20e6 * 2.0 ** rng.uniform(-1, 1, layers)
    forward, backward = line(1e-3, 2e-4), line(2e-3, 4e-4)
    output, saved, saved_input, workspace = line(4e6), line(30e6), line(4e6), line(10e6)

    def costs(layer: int) -> list[LayerMeasurement]:
        return [
            LayerMeasurement(
                micro_batch_size=size,
                forward_seconds=float(forward[layer, at]),
                backward_seconds=float(backward[layer, at]),
                output_bytes=round(output[layer, at]),
                saved_bytes=round(saved[layer, at]),
                saved_input_bytes=round(saved_input[layer, at]),
                workspace_bytes=round(workspace[layer, at]),
                forward_host_seconds=part * 1e-4,
                backward_host_seconds=part * 2e-4,
            )
            for at, size in enumerate(SIZES)
        ]

    return Profile(
        model="generated",
        device="cuda",
        device_name="NVIDIA A100-SXM4-80GB",
        input_bytes_per_sample=4_000_000,
        layers=[
            ProfiledLayer(name=f"layers.{layer}", parameter_bytes=round(weights[layer]), costs=costs(layer))
            for layer in range(layers)
        ],
    )

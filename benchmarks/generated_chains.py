"""Profiles for the planner's benchmarks: chains of any length with uneven layers, and a short table."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import pplan
from pplan.profiler.profile_file import LayerMeasurement, Profile, ProfiledLayer

SIZES = (1, 2, 4, 8, 16)
BLOCKS = "".join(f"layers.{number},4.0,8.0,8388608,234881024,201408512\n" for number in range(6))
TABLE = f"""name,forward_ms,backward_ms,activation_bytes,saved_bytes,parameter_bytes
embed_tokens,0.2,0.5,8388608,65536,412090368
{BLOCKS}norm,0.1,0.2,8388608,8388608,8192
lm_head,6.1,12.2,206045184,206045184,412090368
"""
"""A language model of six blocks, as a user types it."""


def imported_profile() -> Profile:
    """Profile of the nine layers of TABLE, of 4 samples."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpt.csv"
        path.write_text(TABLE)
        return pplan.import_profile(path, micro_batch_size=4)


def generated_profile(layers: int, seed: int = 0, *, most: int | None = None, spread: float = 1.0) -> Profile:
    """Generate a chain for an A100 of 80 GB.

    A layer takes about 1 ms a sample forward and 2 ms backward, with a fixed start, and has 20 MB of weights,
    an output of 4 MB a sample and 30 MB of saved activations.

    Args:
        layers: Length of the chain.
        seed: Seed of the random numbers.
        most: Longer chains cost together what a chain of this length costs.
        spread: Costs vary by a factor of 2 to this power, up and down.
    """
    rng = np.random.default_rng(seed)
    sizes = np.array(SIZES, dtype=np.float64)
    part = 1.0 if most is None else min(1.0, most / layers)

    def line(each: float, start: float = 0.0) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        own = each * 2.0 ** rng.uniform(-spread, spread, (layers, 1))
        return part * (own * sizes + start)

    weights = part * 20e6 * 2.0 ** rng.uniform(-spread, spread, layers)
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

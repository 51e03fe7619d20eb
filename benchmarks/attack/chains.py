"""Random chains of a few layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pplan.cost_models.layer import Chain, TiedWeight

Floats = npt.NDArray[np.float64]
SIZES = ((1, 2, 4), (1, 4), (2,), (1, 2, 3), (2, 4, 8))


def random_chain(rng: np.random.Generator, layers: int, gpus: int) -> Chain:
    """Layers of some character: all alike, uneven, whole numbers (with many ties), with one heavy layer, or
    with costs that hardly grow with the samples, as where the launches take longest."""
    sizes = SIZES[int(rng.integers(len(SIZES)))] if gpus <= 16 else (1, 2, 4, 48)
    samples = np.array(sizes, dtype=np.float64)
    character = str(rng.choice(["uneven", "alike", "whole", "heavy", "launches"]))
    traffic = float(rng.choice([0.02, 0.3, 1.0, 3.0]))

    def line(slope: float, start: float = 0.0) -> Floats:
        each: Floats = slope * _shape(rng, character, layers) * samples
        return each + start * rng.random((layers, 1))

    starts = {"launches": (0.05, 1.0), "whole": (1.0, 0.0), "alike": (1.0, 0.0)}.get(character, (1.0, 0.3))
    forward, backward = line(starts[0], starts[1]), line(2 * starts[0], 2 * starts[1])
    parameters = 100 * _shape(rng, character, layers)[:, 0]
    split = backward * rng.uniform(0.3, 0.7, (layers, 1)) if rng.random() < 0.4 else None
    return Chain(
        names=tuple(f"layer{index}" for index in range(layers)),
        sizes=sizes,
        parameter_bytes=parameters,
        trainable_bytes=parameters * (rng.random(layers) < 0.9),
        buffer_bytes=rng.random(layers),
        cut_after=np.append(rng.random(layers - 1) < rng.choice([0.6, 0.9, 1.0]), False),
        input_bytes_per_sample=5.0,
        forward_seconds=forward,
        backward_seconds=backward,
        output_bytes=traffic * line(50),
        saved_bytes=line(100),
        saved_input_bytes=line(20),
        workspace_bytes=line(5),
        forward_host_seconds=np.repeat(0.4 * rng.random((layers, 1)), len(sizes), axis=1),
        backward_host_seconds=np.repeat(0.6 * rng.random((layers, 1)), len(sizes), axis=1),
        backward_input_seconds=split,
        backward_weight_seconds=None if split is None else (backward - split) * rng.uniform(0.8, 1.2),
        accumulation_seconds=_accumulation(rng.spawn(1)[0], backward, split),
        scales_with_samples=len(sizes) == 1 and bool(rng.random() < 0.5),
    )


def _accumulation(rng: np.random.Generator, backward: Floats, split: Floats | None) -> Floats | None:
    """None, or of some layers up to all of the weights' gradient, as long for many samples as for few."""
    if rng.random() < 0.4:
        return None
    weight = (backward / 2 if split is None else 0.8 * (backward - split)).min(axis=1, keepdims=True)
    share = rng.choice([0.0, 0.5, 1.0], weight.shape) * rng.choice([0.3, 1.0])
    made: Floats = (share * weight)[:, 0]
    return made


def _shape(rng: np.random.Generator, character: str, layers: int) -> Floats:
    """(layers, 1): how the layers differ."""
    if character == "alike":
        return np.ones((layers, 1))
    if character == "whole":
        return rng.integers(1, 4, (layers, 1)).astype(np.float64)
    values: Floats = rng.random((layers, 1))
    if character in ("heavy", "launches"):
        values[int(rng.integers(layers))] *= rng.choice([5, 20])
    return values


def slower_by_layer(rng: np.random.Generator, chain: Chain) -> Chain:
    """The same layers on another kind of device, each slower or faster by a factor of its own."""
    factor = rng.uniform(0.3, 3, (len(chain), 1))
    adding = chain.accumulation_seconds
    own = replace(
        chain,
        forward_seconds=chain.forward_seconds * factor,
        backward_seconds=chain.backward_seconds * factor,
        accumulation_seconds=None if adding is None else adding * factor[:, 0],
    )
    if chain.backward_input_seconds is None or chain.backward_weight_seconds is None:
        return own
    return replace(
        own,
        backward_input_seconds=chain.backward_input_seconds * factor,
        backward_weight_seconds=chain.backward_weight_seconds * factor,
    )


def tie(rng: np.random.Generator, chain: Chain) -> Chain:
    """The chain with one or two weights that several of its layers use, large or small beside the others."""
    parameters, trainable = chain.parameter_bytes.copy(), chain.trainable_bytes.copy()
    tied = []
    for number in range(int(rng.choice([1, 1, 2]))):
        users = int(rng.choice([2, 2, 2, 3]))
        ends = rng.random() < 0.4
        drawn = [0, len(chain) - 1] if ends else rng.choice(len(chain), users, replace=False).tolist()
        layers = tuple(sorted(int(layer) for layer in drawn))
        bytes = float(rng.choice([20.0, 100.0, 500.0]))
        own = bytes if rng.random() < 0.9 else 0.0
        parameters[layers[0]] += bytes
        trainable[layers[0]] += own
        tied.append(TiedWeight(f"weight{number}", bytes, own, layers))
    ordered = tuple(sorted(tied, key=lambda weight: weight.layers[0]))
    return replace(chain, parameter_bytes=parameters, trainable_bytes=trainable, tied=ordered)


def one_that_scales(layers: int, scaling: int, sizes: tuple[int, ...]) -> Chain:
    """Layers that take a second at any size, but for one that takes a second a sample."""
    seconds = np.ones((layers, len(sizes)))
    seconds[scaling] = sizes
    nothing = np.zeros((layers, len(sizes)))
    return Chain(
        names=tuple(f"layer{index}" for index in range(layers)),
        sizes=sizes,
        parameter_bytes=np.ones(layers),
        trainable_bytes=np.ones(layers),
        buffer_bytes=np.zeros(layers),
        cut_after=np.append(np.ones(layers - 1, dtype=np.bool_), False),
        input_bytes_per_sample=0.0,
        forward_seconds=seconds / 2,
        backward_seconds=seconds / 2,
        output_bytes=nothing,
        saved_bytes=nothing,
        saved_input_bytes=nothing,
        workspace_bytes=nothing,
        forward_host_seconds=nothing,
        backward_host_seconds=nothing,
    )

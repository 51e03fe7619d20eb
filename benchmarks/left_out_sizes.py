"""How well sizes between measured ones are told: python benchmarks/left_out_sizes.py [MODEL ...]

Measures every size, leaves each inner one out in turn, and prints by how much curves through its two
neighbours miss the sum of the layers there:

    line    the straight line: a fixed part and one for each sample
    power   seconds in proportion to a power of the size: the line of the logarithms
    lower   the lower of both: of seconds that grow faster than the samples, the power. `Chain.at` takes it,
            up to the square of the size
    rate    seconds a sample, on a line over the logarithm of the size

It counts the processor time of one thread, of which other work on the machine takes less than of the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from measured_models import built

from pplan.profiler.clocks import CpuClock
from pplan.profiler.measure import profile_model
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_options import ProfileOptions

Floats = npt.NDArray[np.float64]
Curve = Callable[[float, float, Floats, Floats], Floats]
"""From the size over the smaller neighbour's, the larger's over the smaller's, and the seconds of both."""
MODELS = ("resnet18", "vgg11", "mobilenet_v2", "densenet121", "transformer")
SHORTEST = 1e-12


class ProcessorClock(CpuClock):
    """Seconds for which the thread computes."""

    def stamp(self) -> float:
        return time.thread_time()


def line(size: float, larger: float, low: Floats, high: Floats) -> Floats:
    return low + (high - low) * (size - 1) / (larger - 1)


def power(size: float, larger: float, low: Floats, high: Floats) -> Floats:
    share = np.log(size) / np.log(larger)
    return np.asarray(np.maximum(low, SHORTEST) ** (1 - share) * np.maximum(high, SHORTEST) ** share)


def rate(size: float, larger: float, low: Floats, high: Floats) -> Floats:
    share = np.log(size) / np.log(larger)
    return np.asarray(size * (low * (1 - share) + high / larger * share))


def lower(size: float, larger: float, low: Floats, high: Floats) -> Floats:
    return np.minimum(line(size, larger, low, high), power(size, larger, low, high))


CURVES: dict[str, Curve] = {"line": line, "power": power, "lower": lower, "rate": rate}


def errors(profile: Profile, name: str) -> dict[int, dict[str, float]]:
    """By inner size and curve, by how much the sum of the layers is off."""
    chain, found = profile.chain(), {}
    seconds: Floats = getattr(chain, name)
    for index, size in list(enumerate(chain.sizes))[1:-1]:
        before, after = chain.sizes[index - 1], chain.sizes[index + 1]
        args = size / before, after / before, seconds[:, index - 1], seconds[:, index + 1]
        measured = float(seconds[:, index].sum())
        found[size] = {own: float(curve(*args).sum()) / measured - 1 for own, curve in CURVES.items()}
    return found


def measured(model: str, sizes: Sequence[int], rounds: int, folder: Path | None) -> Profile:
    """A profile of the model; of a folder, so that several curves are held against the same measurements."""
    file = folder / f"{model}.profile.json" if folder else None
    if file is not None and file.exists():
        return Profile.load(file)
    settings = ProfileOptions(device="cpu", micro_batch_sizes=sizes, cache=False)
    profile = profile_model(built(model), settings, rounds=rounds, parts=False, clock=ProcessorClock())
    if file is not None:
        file.write_text(profile.to_json())
    return profile


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="of profiles: taken from there, else put there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':<14}{'pass':>10}{'size':>6}" + "".join(f"{name:>9}" for name in CURVES))
    rows = []
    for model in options.models:
        profile = measured(model, options.sizes, options.rounds, options.folder)
        for way in ("forward", "backward"):
            for size, own in errors(profile, f"{way}_seconds").items():
                rows.append(list(own.values()))
                print(f"{model:<14}{way:>10}{size:>6}" + "".join(f"{off:>+9.1%}" for off in own.values()))
    for said, figures in (
        ("mean", np.mean(rows, axis=0)),
        ("mean, without signs", np.abs(rows).mean(axis=0)),
    ):
        print(f"{said:<30}" + "".join(f"{off:>+9.1%}" for off in figures))


if __name__ == "__main__":
    main()

"""The shares of a GPU's limits that layers reach: python benchmarks/gpu_curves.py FOLDER [--gpu h100]

Reads the profiles that `python benchmarks/gpu.py --profiles FOLDER` keeps, fits the two curves of an estimate
(profiler/estimate.py) to the layers of four of the models, at all sizes, and prints the seconds of the
other models, estimated over measured, with the default curves and with the fitted ones.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from gpu import CASES, profile_file
from measured_models import built

from pplan.profiler import measure
from pplan.profiler.estimate import (
    AnalyticTarget,
    Curves,
    OperationWork,
    Vector,
    fit_efficiency,
    measured_works,
    parse_analytic_device,
)
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_options import ProfileOptions
from pplan.profiler.structure import EqualLayers

FITTED = ("vgg19", "resnet50 bf16", "transformer", "hf:gpt2")
Works = tuple[list[OperationWork], Vector]


class _Counted(Exception):
    """Ends an estimate when its operations are counted."""


def works_of(name: str, measured: Profile, target: AnalyticTarget) -> Works:
    """Of each layer's forward and backward, size after size, and their measured seconds."""
    found: list[Works] = []

    def count(blocks: EqualLayers, *_rest: Any) -> None:
        found.append(measured_works(blocks, measured, target.roofline))
        raise _Counted

    _, how = CASES[name]
    options = ProfileOptions(micro_batch_sizes=list(measured.micro_batch_sizes), **how)  # type: ignore[arg-type]
    with patch.object(measure, "estimate", count), suppress(_Counted):
        measure.profile_model(built(name.split()[0]), options, estimate_for=target)
    return found[0]


def print_errors(works: dict[str, Works], sizes: int, curves: Curves, launch: float) -> None:
    """A row for each model, and all errors in one line."""
    errors = []
    for name, (each, seconds) in works.items():
        estimated = np.array([work.seconds(curves, launch) for work in each]).reshape(sizes, -1).sum(axis=1)
        ratios = estimated / seconds.reshape(sizes, -1).sum(axis=1)
        errors += list(np.abs(ratios - 1))
        print(f"  {name:<18}" + " ".join(f"{ratio:5.2f}" for ratio in ratios))
    print(f"  median error {np.median(errors):.1%}, worst {max(errors):.1%}")


def main() -> None:
    """Prints the curves and the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="h100")
    options = parser.parse_args()
    target = parse_analytic_device(f"analytic:{options.gpu}")
    assert target is not None
    profiles = {name: Profile.load(options.folder / profile_file(name)) for name in CASES}
    works = {name: works_of(name, profile, target) for name, profile in profiles.items()}
    launch = target.roofline.launch.value
    fitted = fit_efficiency(
        [work for name in FITTED for work in works[name][0]],
        np.concatenate([works[name][1] for name in FITTED]),
        launch,
    )
    tested = {name: works[name] for name in CASES if name not in FITTED}
    sizes = len(next(iter(profiles.values())).micro_batch_sizes)
    for title, curves in (("default", Curves()), ("fitted", fitted)):
        print(f"{title}: {curves}")
        print_errors(tested, sizes, curves, launch)


if __name__ == "__main__":
    main()

"""What first layers that run again gain over whole stages: python benchmarks/recompute.py
[--profiles FOLDER] [--devices N ...] [MODEL ...]

The twelve models of `schedules.py` (estimates for an A100, see gap_models.py) as pipelines of 1F1B or GPipe
on 4 and 8 devices over NVLink, with twice as many micro-batches of eight samples as devices, in shares of the
memory that the fastest plan takes where there is enough. `whole`: stages recompute wholly or not at all
(`recompute="auto"`); `first`: `recompute="first_layers"`. Both searches are exact where no star says
otherwise. Some four minutes of processor time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from math import exp, inf, log
from pathlib import Path
from statistics import mean, median

from gap_models import MODELS, profile_of
from verified import verified

import pplan
from pplan import InfeasibleError, Plan, Profile

DEVICES = (4, 8)
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
HEAD = f"{'model':<14}{'devices':>8}{'memory':>8}{'whole':>12}{'first':>12}{'gain':>8}{'s':>7}  again"


def solve(profile: Profile, devices: int, memory: float | None, recompute: str) -> Plan | None:
    """None where no plan fits."""
    try:
        plan = pplan.solve(
            profile,
            gpus=devices,
            gpu="a100-80gb",
            gpus_per_node=devices,
            bandwidth=300e9,
            latency=10e-6,
            optimizer="adam",
            mini_batch=16 * devices,
            micro_batches=2 * devices,
            use_all=True,
            recompute=recompute,
            memory_limit=memory,
        )
    except InfeasibleError:
        return None
    verified(plan, profile)
    return plan


def _cell(plan: Plan | None) -> str:
    if plan is None:
        return "none fits"
    return f"{1e3 * plan.prediction.step_seconds:.1f} ms{'' if plan.prediction.exact else ' *'}"


def _words(plan: Plan) -> str:
    return " ".join((stage.recompute or plan.recompute).removeprefix("first_") for stage in plan.stages)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--profiles", type=Path, metavar="FOLDER")
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES, metavar="N")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(MODELS)}")
    print(HEAD)
    gains, only_first = list[float](), 0
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models or MODELS:
            profile = profile_of(name, options.profiles or Path(folder))
            for devices in options.devices:
                free = solve(profile, devices, None, "auto")
                most = inf if free is None else max(stage.memory_bytes for stage in free.stages)
                for share in SHARES:
                    start = time.process_time()
                    plans = [solve(profile, devices, share * most, word) for word in ("auto", "first_layers")]
                    whole, first = plans
                    gain = ""
                    if whole is not None and first is not None:
                        gains.append(whole.prediction.step_seconds / first.prediction.step_seconds - 1)
                        gain = f"{gains[-1]:.2%}"
                    only_first += whole is None and first is not None
                    print(
                        f"{name:<14}{devices:>8}{share:>8.2f}{_cell(whole):>12}{_cell(first):>12}{gain:>8}"
                        f"{time.process_time() - start:>7.1f}  {'' if first is None else _words(first)}",
                        flush=True,
                    )
    print()
    print(
        f"{len(gains)} cases with both: geometric mean {exp(mean(log(1 + gain) for gain in gains)) - 1:.2%}, "
        f"median {median(gains):.2%}, most {max(gains):.2%}, none in {sum(gain < 1e-9 for gain in gains)}; "
        f"{only_first} fit with first layers alone"
    )


if __name__ == "__main__":
    main()

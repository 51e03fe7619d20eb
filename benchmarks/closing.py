"""How well the layers add up to the whole model: python benchmarks/closing.py [MODEL ...] [--device cuda]

Prints the closing ratio (sum of the layers over the untouched model, measured in the same run) of every
micro-batch size, and that of the backward measured in two parts. Run it alone on a quiet machine.
"""

from __future__ import annotations

import argparse

from measured_models import MODELS, built

from pplan.profiler.measure import profile_model
from pplan.profiler.profile_options import ProfileOptions

COLUMNS = ("size", "whole s", "forward", "backward", "both", "parts", "spread", "rounds")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--device")
    parser.add_argument("--sizes", type=int, nargs="+", help="micro-batch sizes; else powers of two")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS")
    options = parser.parse_args()
    print(f"{'model':<14}" + "".join(f"{column:>9}" for column in COLUMNS))
    for name in options.models:
        profile = profile_model(
            built(name),
            ProfileOptions(
                device=options.device, micro_batch_sizes=options.sizes, budget_seconds=options.budget
            ),
        )
        for whole in profile.whole:
            seconds = whole.forward_seconds + whole.backward_seconds
            ratios = (whole.forward_closing_ratio, whole.backward_closing_ratio, whole.closing_ratio)
            print(
                f"{name:<14}{whole.micro_batch_size:>9}{seconds:>9.4f}"
                + "".join(f"{ratio or 0.0:>9.3f}" for ratio in (*ratios, whole.backward_parts_ratio))
                + f"{whole.spread or 0.0:>9.1%}{whole.rounds or 0:>9}",
                flush=True,
            )
        for note in profile.notes:
            print(f"  {note}")
        print(f"  on {profile.device_name or profile.device}, {profile.threads} threads, {profile.dtype}")


if __name__ == "__main__":
    main()

"""How well the layers add up to the whole model: python benchmarks/closing.py [MODEL ...] [--device cuda]

Prints the closing ratio (sum of the layers over the untouched model, measured in the same run) of every
micro-batch size. Run it alone on a quiet machine.
"""

from __future__ import annotations

import argparse

import pplan


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["vgg19"])
    parser.add_argument("--device")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS")
    options = parser.parse_args()
    print(
        f"{'model':<14} {'size':>5} {'whole s':>9} {'forward':>8} {'backward':>9} {'both':>7} {'rounds':>7}"
    )
    for name in options.models:
        profile = pplan.profile(name, device=options.device, budget_seconds=options.budget)
        for whole in profile.whole:
            seconds = whole.forward_seconds + whole.backward_seconds
            forward, backward = whole.forward_closing_ratio or 0.0, whole.backward_closing_ratio or 0.0
            print(
                f"{name:<14} {whole.micro_batch_size:>5} {seconds:>9.4f} {forward:>8.3f} {backward:>9.3f} "
                f"{whole.closing_ratio:>7.3f} {whole.rounds or 0:>7}",
                flush=True,
            )
        print(f"  on {profile.device_name or profile.device}, {profile.threads} threads, {profile.dtype}")


if __name__ == "__main__":
    main()

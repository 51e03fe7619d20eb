"""What the time limit comes to on large problems: python benchmarks/time_limit.py [--quick] [--csv FILE]

Generated chains (generated_chains.py) on DGX A100 servers, of one kind of GPU or half of them half as fast,
solved with everything that stands in a plan file; of the last two cases with `--schedule synthesized`. Each
case runs in a process of its own: seconds of processor time of the solving, the most memory of the process,
and how far the plan is from the bound that is proven by then. No more than 1.2 times the limit and a second
is allowed. `--quick`: only limits of up to 5 s.
"""

from __future__ import annotations

from large_cases import LargeCase, run

CASES = [
    LargeCase(200, 64, 1, "16GiB", 1.0, 16),
    LargeCase(200, 64, 1, "16GiB", 5.0, 16),
    LargeCase(24, 72, 1, "6GiB", 10.0, 16),
    LargeCase(24, 256, 1, "6GiB", 30.0, 16),
    LargeCase(24, 256, 2, "6GiB", 30.0, 16),
    LargeCase(9, 1_024, 1, "80GiB", 5.0, 16),
    LargeCase(1_000, 1_024, 2, "80GiB", 10.0, 16),
    LargeCase(9, 4_096, 1, "8GiB", 5.0, 16),
    LargeCase(9, 16_384, 1, "80GiB", 1.0, 16),
    LargeCase(9, 16_384, 2, "8GiB", 5.0, 16),
    LargeCase(48, 16, 1, "16GiB", 5.0, 4, micro_batches=64, schedule="synthesized"),
    LargeCase(48, 16, 1, "8GiB", 10.0, 4, micro_batches=64, schedule="synthesized"),
]


if __name__ == "__main__":
    run(__file__, __doc__, CASES, [case for case in CASES if case.limit <= 5])

"""Problems and what must be reached on each: python benchmarks/problems.py [NAME ...] [--limit X]

VGG-19; and chains (generated_chains.py) on one kind of GPU or two, with memory that binds (A to E, K, M, N),
many more devices than layers (H, I, L) or many layers (F, G, J, M). The optimizer is Adam. Each problem is
solved in a process of its own: seconds of processor time of the solving (without imports), memory of the
process, step, proven bound, gap, aim, and whether the aim is met. Takes about five minutes of processor time;
`--quick` leaves out limits above 8 s. Cuts, replicas, micro-batches and schedule are the planner's choice,
except for J (4,096 micro-batches).
"""

from __future__ import annotations

from large_cases import TABLE, LargeCase, run

CASES = [
    LargeCase(
        46, 8, 1, "80GiB", 5, 32, machine="a100-80gb", profile="vgg19", name="VGG-19", aim=0, aim_seconds=1
    ),
    LargeCase(16, 8, 1, "1900MiB", 5, 8, name="A", aim=0, aim_seconds=2),
    LargeCase(24, 16, 1, "1900MiB", 5, 8, name="B", aim=0, aim_seconds=3),
    LargeCase(32, 16, 1, "2300MiB", 5, 8, name="C", aim=0, aim_seconds=3),
    LargeCase(50, 64, 1, "3GiB", 8, 16, name="D", aim=0.02),
    LargeCase(50, 64, 1, "80GB", 8, 16, name="D-loose", aim=0, aim_seconds=3),
    LargeCase(100, 128, 1, "4GiB", 8, 16, name="E", aim=0.02, machine="pods"),
    LargeCase(200, 64, 1, "12GB", 15, 16, name="K", aim=0.02),
    LargeCase(1_000, 128, 1, "4GiB", 20, 16, most=100, name="M", aim=0.05, machine="pods"),
    LargeCase(9, 1_024, 1, "40GB", 5, 8, name="H", aim=0, machine="a100-40gb", profile=TABLE),
    LargeCase(9, 16_384, 1, "40GB", 30, 8, name="I", aim=0.02, machine="a100-40gb", profile=TABLE),
    LargeCase(1_000, 1_024, 1, "80GiB", 20, 256, most=100, name="F", aim=2e-5, machine="pods"),
    LargeCase(1_000, 1_024, 2, "80GiB", 20, 256, most=100, name="G", aim=0.0277, machine="pods"),
    LargeCase(10, 1_024, 2, "80GiB", 20, 256, name="L", aim=0.0182, machine="pods"),
    LargeCase(50, 64, 2, "3GiB", 20, 16, name="N", aim=0.1, machine="pods"),
    LargeCase(10_000, 16_384, 1, "80GiB", 40, 256, 4_096, 100, name="J", aim=0.0086, machine="pods"),
]
"""The aims of F, G, L and J are the gaps of version 0.2.0."""


if __name__ == "__main__":
    run(__file__, __doc__, CASES, [case for case in CASES if case.limit <= 8])

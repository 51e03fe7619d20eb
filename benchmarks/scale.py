"""Time, memory and gap over layers x devices: python benchmarks/scale.py [--quick] [--csv FILE]

Generated chains (generated_chains.py) on machines of three levels of links: 8 GPUs a node, 32 nodes a pod,
pods; one kind of GPU, or half of them with half the speed. In most cases memory does not bind: 80 GiB a GPU,
a global batch of 256 samples a GPU, and more than 100 layers cost together what 100 do, as operators of a
model of 2 billion parameters. In four cases it binds: few GiB a GPU and 16 samples a GPU. The two cases of
10,000 layers have 4,096 micro-batches, the others any number. Each case runs in a process of its own with a
time limit of 20 s: seconds of processor time of the solving, the most memory of the process, and how far the
plan is from the proven bound. Takes about seven minutes of processor time; `--quick` leaves out what has over
1,024 devices. `--csv docs/scale.csv` writes what `docs/draw_images.py` draws.
"""

from __future__ import annotations

from large_cases import LargeCase, run

TIGHT = (
    (50, 64, "3GiB", None),
    (100, 128, "4GiB", None),
    (200, 64, "12GB", None),
    (1_000, 128, "4GiB", 100),
)
"""Layers, GPUs, a memory of a GPU that binds, and `most` of `LargeCase`."""
CASES = [
    *(
        LargeCase(layers, gpus, kinds, "80GiB", 20.0, 256, most=100, machine="pods")
        for gpus in (64, 1_024, 16_384)
        for layers in (10, 1_000)
        for kinds in (1, 2)
    ),
    *(LargeCase(10_000, 16_384, kinds, "80GiB", 20.0, 256, 4_096, 100, machine="pods") for kinds in (1, 2)),
    *(
        LargeCase(layers, gpus, 1, memory, 20.0, 16, most=most, machine="pods")
        for layers, gpus, memory, most in TIGHT
    ),
]


if __name__ == "__main__":
    run(__file__, __doc__, CASES, [case for case in CASES if case.gpus <= 1_024])
